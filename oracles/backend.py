"""What a thing that decodes prompts is to the collector: facts about itself, and outcomes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contracts.runs import FinishReason, ProgressRecord

HalfArray = NDArray[np.float16]
GENERATED_IDS = "generated ids, end-of-sequence token included"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What every run log says about the model and the engine; fields as in DecodeRun."""

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


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How one prompt is decoded. A ``progress_stride`` of 0 keeps no progress signals."""

    max_new_tokens: int
    progress_stride: int = 8
    hidden_layers: tuple[int, ...] = ()
    stop_loops: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished run. ``concurrency`` is the number of runs in flight when it was admitted,
    itself included; ``hidden`` is (output_tokens // stride, layers, hidden size): row j is the
    state that wrote token (j + 1) * stride."""

    prompt_tokens: int
    output_tokens: int
    thinking_tokens: int | None
    finish_reason: FinishReason
    text: str
    wall_s: float | None
    concurrency: int
    how_counted: str = GENERATED_IDS
    progress: tuple[ProgressRecord, ...] | None = None
    hidden: HalfArray | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Refused:
    """A prompt that the engine, once asked, will not answer as it stands, and why; others go on."""

    reason: str


# (index of a prompt, what became of it); closing it stops the engine
Outcomes = Generator[tuple[int, Generation | Refused], None, None]


class Backend(Protocol):
    """An engine. ``flows`` says how it fills: False means one batch to its end, so a plan cuts
    batches; True means that a finished run makes room for the next, so a plan gives it all."""

    @property
    def facts(self) -> EngineFacts:
        """What the rows say of it."""

    @property
    def flows(self) -> bool:
        """Whether prompts join while others decode."""

    def check(self, settings: DecodeSettings) -> None:
        """Raise InvalidInput for settings that this engine cannot honour."""

    def refuses(self, prompt: str, max_new_tokens: int) -> str | None:
        """Say, before anything decodes, why ``prompt`` cannot be answered; None when it can, or
        when only asking will tell."""

    def run(self, prompts: Sequence[str], size: int, settings: DecodeSettings) -> Outcomes:
        """Yield (index of a prompt, outcome) once for each, in the order they end; at most ``size``
        decode at a time. Raises CollectionStopped when nothing more can be had now."""
