"""DecodeRun: one generation of one prompt, the row of a run log."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

FinishReason = Literal["stop", "length", "loop", "abort", "error", "unknown"]
FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)


class ProgressRecord(NamedTuple):
    """What a run showed over its last ``progress_stride`` tokens; defined in contracts.progress."""

    mean_entropy: float
    mean_logprob: float
    newline_rate: float
    hesitation_rate: float
    repetition: float
    in_thinking: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """One decode run (DESIGN §3). Lengths are in tokens, times in seconds.

    ``request_key`` names the request: prompt, template and decoding set-up; rows that share it are
    repeats. ``event_observed`` is stored, not derived: True when the model itself ended the run,
    False when something cut it (right-censored at ``output_tokens``), None when nobody knows.
    ``progress[j]`` describes output tokens ``[j * stride, (j + 1) * stride)``.
    """

    run_id: str
    request_key: str
    repeat: int
    prompt_id: str
    prompt_sha256: str
    benchmark: str
    family: str
    model: str
    model_revision: str
    tokenizer_sha256: str
    chat_template_sha256: str
    engine: str
    engine_version: str
    kernel: str
    batch_invariant: bool
    dtype: str
    device: str
    batch_size: int
    concurrency: int
    temperature: float
    seed: int
    max_new_tokens: int
    prompt_tokens: int
    output_tokens: int
    how_counted: str
    finish_reason: FinishReason
    event_observed: bool | None
    licence: str
    thinking_tokens: int | None = None
    wall_s: float | None = None
    prompt: str | None = None
    text: str | None = None
    text_sha256: str | None = None
    progress_stride: int | None = None
    progress: tuple[ProgressRecord, ...] | None = None
    hidden_ref: str | None = None

    @property
    def has_known_length(self) -> bool:
        """Whether the served length is known: the run ended, or it reached its cap."""
        return self.event_observed is True or self.output_tokens >= self.max_new_tokens


def by_request(runs: Iterable[DecodeRun]) -> dict[str, list[DecodeRun]]:
    """Return the repeats of each request by its key, in the order of ``runs``."""
    groups: dict[str, list[DecodeRun]] = defaultdict(list)
    for run in runs:
        groups[run.request_key].append(run)
    return dict(groups)


def sha256_text(text: str) -> str:
    """Return the hexadecimal SHA-256 of ``text`` in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def make_request_key(
    *,
    model: str,
    prompt_sha256: str,
    chat_template_sha256: str,
    temperature: float,
    max_new_tokens: int,
    dtype: str,
) -> str:
    """Return the key that repeats of one request share; the batch it ran in is not part of it."""
    parts = (
        model,
        prompt_sha256,
        chat_template_sha256,
        repr(float(temperature)),
        str(max_new_tokens),
        dtype,
    )
    return sha256_text("\x1f".join(parts))[:32]
