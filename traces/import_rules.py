"""From a stranger's row to a DecodeRun: values checked, stops read by a stated rule, caps settled.

An importer yields :class:`ForeignRow`; :func:`settle` turns all rows of an import into decode runs
at once, because a cap can only be judged by the longest run under it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any, NamedTuple

from contracts.errors import InvalidInput, unknown_name
from contracts.runs import DecodeRun, FinishReason, make_request_key, sha256_text
from traces.run_columns import ESTIMATED_COUNTS

NEAR_CAP = 0.98
STOP_RULE = (
    "A recorded stop reason or truncation flag decides. Without one, a run shorter than "
    f"{NEAR_CAP:g} of its cap is read as ended by the model, any other as cut. A cap that no row "
    "states, or that a longer run of the same model contradicts, is unknown: then the end is "
    "unknown too, and max_new_tokens holds the longest run seen under that cap."
)

_WHOLE = frozenset(
    "repeat batch_size concurrency seed max_new_tokens prompt_tokens output_tokens "
    "thinking_tokens".split()
)
_NUMBER = frozenset(["temperature", "wall_s"])
_FLAG = frozenset(["batch_invariant", "event_observed", "truncated"])
_TYPED = _WHOLE | _NUMBER | _FLAG  # every other field is a text
_ABSENT = frozenset(["progress", "progress_stride", "hidden_ref"])
FIELDS = frozenset(f.name for f in dataclass_fields(DecodeRun)) - _ABSENT | {
    "truncated"
}  # what a column map may name

_DEFAULTS: dict[str, Any] = {
    "model_revision": "unknown",
    "tokenizer_sha256": "unknown",
    "chat_template_sha256": "unknown",
    "engine": "unknown",
    "engine_version": "unknown",
    "kernel": "unknown",
    "batch_invariant": False,
    "dtype": "unknown",
    "device": "unknown",
    "batch_size": 1,
    "concurrency": 1,
    "seed": 0,
    "how_counted": "reported",
    "licence": "unknown",
}
_REASONS: dict[str, FinishReason] = {
    **dict.fromkeys(
        "stop eos eos_token end_turn stop_sequence stop_str tool_calls tool_use function_call "
        "complete completed".split(),
        "stop",
    ),
    **dict.fromkeys(
        "length max_tokens max_output_tokens max_length model_length truncated".split(), "length"
    ),
    "loop": "loop",
    **dict.fromkeys("abort aborted cancel cancelled canceled content_filter".split(), "abort"),
    **dict.fromkeys("error failed".split(), "error"),
}
_TRUE, _FALSE = frozenset(["true", "1", "yes"]), frozenset(["false", "0", "no"])


class ForeignRow(NamedTuple):
    """One generation as some other tool logged it: where it stands, and values by field name."""

    where: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did: rows read, kept, left out (by reason), and what the rules decided."""

    format: str
    sources: tuple[str, ...]
    rows_read: int
    rows_kept: int
    skipped: dict[str, int]
    decided: dict[str, int]
    rule: str = STOP_RULE


@dataclass(slots=True)
class Tally:
    """The running counts of an import: rows left out, and what the rules decided."""

    skipped: Counter[str] = field(default_factory=Counter)
    decided: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """How lengths are counted where a log holds text only; ``label`` goes into how_counted."""

    count: Callable[[str], int]
    label: str


def _quarter(text: str) -> int:
    return max(1, round(len(text) / 4)) if text else 0


CHARS_PER_4 = TokenCounter(_quarter, "chars/4")


def check_field(name: str) -> None:
    """Raise UnknownName unless ``name`` is a field an import may set."""
    if name not in FIELDS:
        raise unknown_name("run-log field", name, FIELDS)


def settle(
    rows: Iterable[ForeignRow], constants: Mapping[str, object], tally: Tally
) -> list[DecodeRun]:
    """Return the decode runs of ``rows``; ``constants`` fill or override fields of every row.

    Raises InvalidInput naming place, field and value for a value that breaks its bound, and for a
    field that has neither value nor default.
    """
    for name in constants:
        check_field(name)
    kept = []
    for where, values in rows:
        row = _typed(where, {**values, **constants})
        if row["output_tokens"] is None or row["output_tokens"] == 0:
            tally.skipped["no output tokens"] += 1
            continue
        if row["output_tokens"] < 0:
            raise InvalidInput(
                f"{where}: output_tokens is {row['output_tokens']}; it must be at least 1"
            )
        kept.append((where, row))
    longest: dict[tuple[str | None, int | None], int] = {}
    for _, row in kept:
        cap_key = row["model"], row["max_new_tokens"]
        longest[cap_key] = max(longest.get(cap_key, 0), row["output_tokens"])
    repeats: Counter[str] = Counter()
    return [
        _decode_run(where, row, longest[row["model"], row["max_new_tokens"]], repeats, tally)
        for where, row in kept
    ]


def _typed(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(FIELDS)
    for name, value in values.items():
        row[name] = None if value is None or value == "" else _convert(where, name, value)
    return row


def _convert(where: str, name: str, value: Any) -> Any:
    if name not in _TYPED:
        return value if isinstance(value, str) else str(value)
    if name in _FLAG:
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in _TRUE | _FALSE:
            return word in _TRUE
        raise InvalidInput(f"{where}: {name} is {value!r:.80}; it must be true or false")
    if isinstance(value, float) and math.isnan(value):
        return None  # pandas writes an absent number as NaN
    try:
        number = value if isinstance(value, int) else float(value)
    except (TypeError, ValueError):
        number = None
    bits = 63 if name == "seed" else 31
    if number is None or isinstance(value, bool) or not -(2**bits) < number < 2**bits:
        raise InvalidInput(f"{where}: {name} is {value!r:.80}; it must be a number below 2**{bits}")
    if name in _NUMBER:
        return float(number)
    if number != int(number):
        raise InvalidInput(f"{where}: {name} is {value!r:.80}; it must be a whole number")
    return int(number)


def _decode_run(
    where: str, row: dict[str, Any], longest: int, repeats: Counter[str], tally: Tally
) -> DecodeRun:
    cap = row["max_new_tokens"]
    cap_known = cap is not None and longest <= cap
    if not cap_known:
        tally.decided["cap absent" if cap is None else "cap contradicted by a longer run"] += 1
    reason, observed = _end_of(row, cap if cap_known else None, tally)
    row.update(
        max_new_tokens=cap if cap_known else longest, finish_reason=reason, event_observed=observed
    )
    _fill_identity(where, row, tally)
    thinking = row["thinking_tokens"]
    if thinking is not None and thinking > row["output_tokens"]:
        tally.decided["thinking_tokens above output_tokens: left empty"] += 1
        row["thinking_tokens"] = None
    for name in ("model", "prompt_tokens", "temperature"):
        if row[name] is None:
            raise InvalidInput(
                f"{where}: {name} is absent; map a column with --map {name}=COLUMN, or state it "
                f"for all rows with --set {name}=VALUE (it is written into the manifest)"
            )
    if row["repeat"] is None:
        row["repeat"] = repeats[row["request_key"]]
        repeats[row["request_key"]] += 1
    if row["run_id"] is None:
        row["run_id"] = f"{row['request_key']}-{row['repeat']}"
    for name, default in _DEFAULTS.items():
        row[name] = default if row[name] is None else row[name]
    del row["truncated"]
    return DecodeRun(**row)


def _end_of(row: dict[str, Any], cap: int | None, tally: Tally) -> tuple[FinishReason, bool | None]:
    """Return (finish_reason, event_observed) of a row under its settled cap (None: unknown)."""
    word = (row["finish_reason"] or "unknown").strip().lower()
    reason = _REASONS.get(word, "unknown")
    if word != "unknown" and reason == "unknown":
        tally.decided["stop reason not understood, read as unknown"] += 1
    if row["event_observed"] is not None and reason == "unknown":
        return "unknown", bool(row["event_observed"])
    if reason == "unknown" and row["truncated"] is not None:
        if not row["truncated"]:
            tally.decided["unknown stop read as ended: not truncated"] += 1
            return "unknown", True
        reason = "length"
    if reason == "stop":
        return "stop", True
    if reason == "length":
        estimated = (row["how_counted"] or "").startswith(ESTIMATED_COUNTS)
        if row["output_tokens"] == cap or (cap is not None and estimated):
            return "length", False
        tally.decided["cut, but not at its cap: read as abort"] += 1
        return "abort", False
    if reason != "unknown":
        return reason, False
    if cap is None:
        tally.decided["unknown stop, cap unknown: end unknown"] += 1
        return "unknown", None
    ended = row["output_tokens"] < NEAR_CAP * cap
    tally.decided[
        f"unknown stop read as ended: below {NEAR_CAP:g} of the cap"
        if ended
        else f"unknown stop read as cut: at or above {NEAR_CAP:g} of the cap"
    ] += 1
    return "unknown", ended


def _fill_identity(where: str, row: dict[str, Any], tally: Tally) -> None:
    """Name prompt and request from whatever of prompt, prompt_id and request_key the row has."""
    row["benchmark"] = row["benchmark"] or "imported"
    row["family"] = row["family"] or row["benchmark"]
    if row["prompt_id"] is None:
        row["prompt_id"] = row["request_key"] or (
            sha256_text(row["prompt"])[:16] if row["prompt"] else row["run_id"]
        )
    if row["prompt_id"] is None:
        raise InvalidInput(
            f"{where} names no prompt: map prompt, prompt_id or request_key, else repeats of one "
            "request cannot be told from other requests"
        )
    if row["prompt_sha256"] is None:
        if row["prompt"] is None:
            tally.decided["prompt text absent: prompt_sha256 is a hash of benchmark and id"] += 1
        own = row["prompt"] or f"{row['benchmark']}\x1f{row['prompt_id']}"
        row["prompt_sha256"] = sha256_text(own)
    if row["request_key"] is None:
        row["request_key"] = make_request_key(
            model=row["model"] or "",
            prompt_sha256=row["prompt_sha256"],
            chat_template_sha256=row["chat_template_sha256"] or "unknown",
            temperature=row["temperature"] or 0.0,
            max_new_tokens=row["max_new_tokens"],
            dtype=row["dtype"] or "unknown",
        )
    if row["text"] is not None and row["text_sha256"] is None:
        row["text_sha256"] = sha256_text(row["text"])
