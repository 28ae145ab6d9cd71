"""The rules a run log keeps: ranges, uniqueness, censoring, one set-up per request.

Checked batch by batch with numpy; only the columns that identify a run are held for the whole log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import IntArray
from contracts.runs import FINISH_REASONS, DecodeRun, ProgressRecord
from traces.run_columns import ESTIMATED_COUNTS
from traces.runlog import BoolArray, RunLog, iter_tables
from traces.tables import BATCH_ROWS, read_manifest

_ROUNDING = 1e-6  # float32 storage may move a value that sits on its bound


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """What a log that keeps the rules holds; ``warnings`` are allowed but worth a look."""

    rows: int
    num_requests: int
    num_prompts: int
    ended: int
    censored: int
    unknown_end: int
    finish_reasons: dict[str, int]
    warnings: dict[str, int] = field(default_factory=dict)


class _Rule(NamedTuple):
    field: str
    broken: BoolArray
    bound: str


class _Part(NamedTuple):
    """One batch of a log and where it came from."""

    file: str
    first_row: int
    log: RunLog


def validate_runs(
    source: Path | RunLog | Iterable[DecodeRun], *, exact_caps: bool = True
) -> ValidationReport:
    """Check every rule; raises InvalidInput naming file, row, field, value and bound.

    A run cut at its cap must be as long as the cap, unless its ``how_counted`` says that the count
    is an estimate (``chars/…``, ``retokenised…``) or ``exact_caps`` is False; such runs are
    warnings. A run longer than its cap is an error unless nobody knows how it ended.
    """
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    identities: list[_Identity] = []
    parts: list[tuple[str, int]] = []
    for part in _parts(source):
        for rule in _rules(part.log, exact_caps):
            _raise_first(part, rule)
        _count_warnings(part.log, counts)
        codes, names = part.log.codes("finish_reason")
        reasons.update(dict(zip(names, np.bincount(codes).tolist(), strict=True)))
        counts["ended"] += int(part.log.event_observed.sum())
        counts["unknown_end"] += int((~part.log.event_known).sum())
        identities.append(_identity(part.log))
        parts.append((part.file, part.first_row))
    if not identities:
        raise InvalidInput("the run log holds 0 runs: there is nothing to check")
    whole = _Whole(parts, identities)
    _check_unique(whole)
    _check_one_setup(whole)
    rows = len(whole.codes["run_id"])
    ended, unknown = counts.pop("ended"), counts.pop("unknown_end")
    return ValidationReport(
        rows=rows,
        num_requests=len(whole.names["request_key"]),
        num_prompts=len(whole.names["prompt_sha256"]),
        ended=ended,
        censored=rows - ended - unknown,
        unknown_end=unknown,
        finish_reasons=dict(sorted(reasons.items())),
        warnings=dict(sorted((name, n) for name, n in counts.items() if n)),
    )


def _parts(source: Path | RunLog | Iterable[DecodeRun]) -> Iterator[_Part]:
    if isinstance(source, Path):
        for path, row, table in iter_tables(source):
            if row == 0:
                read_manifest(path)
            yield _Part(str(path), row, RunLog(table))
    elif isinstance(source, RunLog):
        yield _Part("the run log", 0, source)
    else:
        runs, row = iter(source), 0
        while chunk := list(islice(runs, BATCH_ROWS)):
            yield _Part("the runs", row, RunLog.from_runs(chunk))
            row += len(chunk)


def _raise_first(part: _Part, rule: _Rule) -> None:
    rows = np.flatnonzero(rule.broken)
    if rows.size:
        value = part.log.table[rule.field][int(rows[0])].as_py()
        raise InvalidInput(
            f"{part.file} row {part.first_row + int(rows[0])}: {rule.field} is {value!r:.80}; "
            f"it {rule.bound} ({rows.size} such rows in this batch)"
        )


def _rules(log: RunLog, exact_caps: bool) -> Iterator[_Rule]:
    yield from _range_rules(log)
    yield from _censoring_rules(log, exact_caps)
    yield from _progress_rules(log)


def _range_rules(log: RunLog) -> Iterator[_Rule]:
    for name in ("output_tokens", "prompt_tokens", "max_new_tokens", "batch_size", "concurrency"):
        yield _Rule(name, log.ints(name) < 1, "must be at least 1")
    yield _Rule("repeat", log.repeat < 0, "must be at least 0")
    length = log.output_tokens
    too_long = (length > log.max_new_tokens) & log.event_known
    yield _Rule("output_tokens", too_long, "must not pass max_new_tokens of its row")
    for name in ("temperature", "wall_s"):
        values = log.floats(name)
        absent = np.asarray(log.table[name].is_null().to_numpy(), dtype=bool)
        broken = ~absent & ~((values >= 0.0) & np.isfinite(values))
        yield _Rule(name, broken, "must be finite and at least 0")
    thinking = log.floats("thinking_tokens")
    yield _Rule("thinking_tokens", thinking < 0, "must be at least 0")
    over = (thinking > length) & ~_estimated(log)
    yield _Rule("thinking_tokens", over, "must not pass output_tokens of its row")
    for name in ("run_id", "request_key", "prompt_id", "prompt_sha256", "model"):
        codes, names = log.codes(name)
        if "" in names:
            yield _Rule(name, codes == names.index(""), "must not be empty")


def _censoring_rules(log: RunLog, exact_caps: bool) -> Iterator[_Rule]:
    codes, names = log.codes("finish_reason")
    allowed = np.array([name in FINISH_REASONS for name in names])
    yield _Rule("finish_reason", ~allowed[codes], f"must be one of {', '.join(FINISH_REASONS)}")
    reason = np.array(names)[codes]
    known, ended = log.event_known, log.event_observed
    yield _Rule(
        "event_observed",
        (reason == "stop") & ~ended,
        "must be true when finish_reason is stop: the model ended the run",
    )
    yield _Rule(
        "event_observed",
        (reason == "length") & (ended | ~known),
        "must be false when finish_reason is length: the cap cut the run",
    )
    cut = np.isin(reason, ("loop", "abort", "error"))
    yield _Rule(
        "event_observed", cut & ended, "must not be true when finish_reason is loop, abort or error"
    )
    if exact_caps:
        off = (reason == "length") & (log.output_tokens != log.max_new_tokens) & ~_estimated(log)
        yield _Rule(
            "output_tokens",
            off,
            "must equal max_new_tokens when finish_reason is length; a run cut short of its cap is "
            "'abort', and --approximate-caps lets estimated counts through",
        )


def _progress_rules(log: RunLog) -> Iterator[_Rule]:
    stride = log.floats("progress_stride")
    yield _Rule("progress_stride", stride < 1, "must be at least 1")
    counts, values = log.progress()
    has = counts >= 0
    yield _Rule("progress_stride", has & np.isnan(stride), "must be given where progress is")
    due = log.output_tokens // np.where(np.isnan(stride), 1, stride)
    yield _Rule("progress", has & (counts != due), "must hold output_tokens // stride records")
    entropy, logprob, *rates = values.T
    owner = np.repeat(np.arange(len(log)), np.maximum(counts, 0))
    checks = [
        ~(entropy >= -_ROUNDING) | np.isinf(entropy),
        ~(logprob <= _ROUNDING) | np.isinf(logprob),
        *(~((rate >= -_ROUNDING) & (rate <= 1.0 + _ROUNDING)) for rate in rates),
    ]
    bounds = ("at least 0", "at most 0", *("in [0, 1]" for _ in rates))
    for name, broken, bound in zip(ProgressRecord._fields, checks, bounds, strict=True):
        rows = np.zeros(len(log), dtype=bool)
        rows[owner[broken]] = True
        yield _Rule("progress", rows, f"must have {name} finite and {bound} in every record")


def _estimated(log: RunLog) -> BoolArray:
    codes, names = log.codes("how_counted")
    return np.array([name.startswith(ESTIMATED_COUNTS) for name in names], dtype=bool)[codes]


def _count_warnings(log: RunLog, counts: Counter[str]) -> None:
    codes, names = log.codes("finish_reason")
    reason = np.array(names)[codes]
    length, cap = log.output_tokens, log.max_new_tokens
    counts["longer than its cap, end unknown"] += int((length > cap).sum())
    counts["cut by length, but not at its cap"] += int(
        ((reason == "length") & (length != cap)).sum()
    )
    counts["finish_reason unknown"] += int((reason == "unknown").sum())
    counts["stopped exactly at its cap"] += int(((reason == "stop") & (length == cap)).sum())


# --- rules over the whole log -----------------------------------------------------------------

_NAMED = ("run_id", "request_key", "prompt_sha256", "model")


class _Identity(NamedTuple):
    """What identifies the runs of one batch: coded names and two numbers."""

    coded: dict[str, tuple[IntArray, list[str]]]
    repeat: IntArray
    cap: IntArray


def _identity(log: RunLog) -> _Identity:
    coded = {name: log.codes(name) for name in _NAMED}
    return _Identity(coded, log.repeat, log.max_new_tokens)


class _Whole:
    """The identities of all batches under one numbering of names."""

    def __init__(self, parts: list[tuple[str, int]], identities: list[_Identity]) -> None:
        self.parts = parts
        self.starts = np.cumsum([0, *(len(one.repeat) for one in identities)])
        self.repeat = np.concatenate([one.repeat for one in identities])
        self.cap = np.concatenate([one.cap for one in identities])
        self.codes: dict[str, IntArray] = {}
        self.names: dict[str, list[str]] = {}
        for name in _NAMED:
            number: dict[str, int] = {}
            merged = []
            for one in identities:
                codes, names = one.coded[name]
                lookup = [number.setdefault(value, len(number)) for value in names]
                merged.append(np.array(lookup, dtype=np.int64)[codes])
            self.codes[name], self.names[name] = np.concatenate(merged), list(number)

    def where(self, row: int) -> str:
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        file, first_row = self.parts[part]
        return f"{file} row {first_row + row - int(self.starts[part])}"

    def value(self, name: str, row: int) -> str:
        return repr(self.names[name][self.codes[name][row]])


def _check_unique(whole: _Whole) -> None:
    twice = _second_occurrence(whole.codes["run_id"])
    if twice is not None:
        first, second = twice
        raise InvalidInput(
            f"{whole.where(second)}: run_id is {whole.value('run_id', second)}, as in "
            f"{whole.where(first)}; run ids must be unique: drop one of the rows"
        )
    keys = whole.codes["request_key"] * (int(whole.repeat.max()) + 1) + whole.repeat
    twice = _second_occurrence(keys)
    if twice is not None:
        first, second = twice
        raise InvalidInput(
            f"{whole.where(second)}: repeat is {whole.repeat[second]} of request_key "
            f"{whole.value('request_key', second)}, as in {whole.where(first)}; each repeat of a "
            "request stands once: drop one, or renumber the repeats"
        )


def _second_occurrence(keys: IntArray) -> tuple[int, int] | None:
    """Return the rows of the first pair of equal keys, or None when all differ."""
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(np.diff(keys[order]) == 0)
    if not same.size:
        return None
    return int(order[same[0]]), int(order[same[0] + 1])


def _check_one_setup(whole: _Whole) -> None:
    keys = whole.codes["request_key"]
    first = np.zeros(len(whole.names["request_key"]), dtype=np.int64)
    first[keys[::-1]] = np.arange(len(keys))[::-1]
    fields = (
        ("prompt_sha256", whole.codes["prompt_sha256"]),
        ("model", whole.codes["model"]),
        ("max_new_tokens", whole.cap),
    )
    for name, values in fields:
        differs = np.flatnonzero(values != values[first[keys]])
        if differs.size:
            _raise_setup(whole, name, int(first[keys[differs[0]]]), int(differs[0]))


def _raise_setup(whole: _Whole, name: str, first: int, row: int) -> NoReturn:
    def shown(at: int) -> str:
        return str(whole.cap[at]) if name == "max_new_tokens" else whole.value(name, at)

    raise InvalidInput(
        f"{whole.where(row)}: {name} is {shown(row)}, but request_key "
        f"{whole.value('request_key', row)} has {shown(first)} in {whole.where(first)}; one "
        "request_key names one prompt, model and cap: give other requests other keys"
    )
