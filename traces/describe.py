"""What a run log holds, benchmark by benchmark: lengths, caps, and how far repeats agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.policy import FloatArray, IntArray
from contracts.text_table import aligned
from traces.runlog import BoolArray, RunLog


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """One benchmark (or one family of it). Lengths are served output tokens.

    ``capped_share`` are runs cut by the cap or otherwise (event not observed), ``unknown_share``
    those whose end nobody recorded. The last four speak of requests with at least two runs, None
    when there is none: the share whose runs all have one length; the same among requests whose
    runs all ended (runs that meet one cap agree for no reason of their own); the median of
    longest/shortest; the median coefficient of variation.
    """

    benchmark: str
    family: str | None
    num_runs: int
    num_prompts: int
    num_requests: int
    repeats_min: int
    repeats_median: float
    repeats_max: int
    length_p10: float
    length_p50: float
    length_p90: float
    length_p99: float
    length_mean: float
    capped_share: float
    unknown_share: float
    identical_share: float | None
    identical_ended_share: float | None
    median_spread: float | None
    median_cv: float | None


def describe_runs(log: RunLog, *, by_family: bool = False) -> list[LengthSummary]:
    """Return a summary for each benchmark (and family), in the order of their names."""
    benchmark, benchmark_names = log.codes("benchmark")
    family, family_names = log.codes("family")
    num_families = len(family_names)
    group = benchmark * num_families + (family if by_family else 0)
    rows = []
    for code in np.unique(group).tolist():
        label = family_names[code % num_families] if by_family else None
        part = log.filter(group == code)
        rows.append(_summary(part, benchmark_names[code // num_families], label))
    return rows


def _summary(log: RunLog, benchmark: str, family: str | None) -> LengthSummary:
    ended, known, lengths = log.event_observed, log.event_known, log.output_tokens
    order = np.argsort(log.codes("request_key")[0], kind="stable")
    starts = np.flatnonzero(np.diff(log.codes("request_key")[0][order], prepend=-1))
    repeats = np.diff(np.append(starts, len(order)))
    shortest = np.minimum.reduceat(lengths[order], starts)
    longest = np.maximum.reduceat(lengths[order], starts)
    all_ended = np.minimum.reduceat(ended[order].astype(np.int64), starts) == 1
    many = repeats >= 2
    same = shortest == longest
    variation = _variation(lengths[order].astype(np.float64), starts, repeats)
    p10, p50, p90, p99 = np.quantile(lengths, [0.1, 0.5, 0.9, 0.99]).tolist()
    return LengthSummary(
        benchmark=benchmark,
        family=family,
        num_runs=len(log),
        num_prompts=len(log.codes("prompt_sha256")[1]),
        num_requests=repeats.size,
        repeats_min=int(repeats.min()),
        repeats_median=float(np.median(repeats)),
        repeats_max=int(repeats.max()),
        length_p10=p10,
        length_p50=p50,
        length_p90=p90,
        length_p99=p99,
        length_mean=float(lengths.mean()),
        capped_share=float(np.mean(known & ~ended)),
        unknown_share=float(np.mean(~known)),
        identical_share=_mean(same[many]),
        identical_ended_share=_mean(same[many & all_ended]),
        median_spread=_median((longest / shortest)[many]),
        median_cv=_median(variation[many]),
    )


def _variation(lengths: FloatArray, starts: IntArray, repeats: IntArray) -> FloatArray:
    """Return standard deviation (n - 1) over mean of each request's runs."""
    mean = np.add.reduceat(lengths, starts) / repeats
    squares = np.add.reduceat((lengths - np.repeat(mean, repeats)) ** 2, starts)
    variation: FloatArray = np.sqrt(squares / np.maximum(repeats - 1, 1)) / mean
    return variation


def _mean(values: BoolArray) -> float | None:
    return float(values.mean()) if values.size else None


def _median(values: FloatArray) -> float | None:
    return float(np.median(values)) if values.size else None


_HEADER = (
    "benchmark", "family", "runs", "prompts", "K", "p10", "p50", "p90", "p99", "mean",
    "capped", "unknown", "same", "same uncut", "max/min", "CV",
)  # fmt: skip


def format_summaries(rows: Sequence[LengthSummary]) -> str:
    """Return the summaries as a text table; shares in per cent."""
    return aligned([_HEADER, *(_cells(row) for row in rows)], left=range(2))


def _cells(row: LengthSummary) -> tuple[str, ...]:
    lengths = (row.length_p10, row.length_p50, row.length_p90, row.length_p99)
    return (
        row.benchmark,
        row.family or "all",
        str(row.num_runs),
        str(row.num_prompts),
        f"{row.repeats_min}/{row.repeats_median:g}/{row.repeats_max}",
        *(f"{length:.0f}" for length in lengths),
        f"{row.length_mean:.1f}",
        f"{row.capped_share:.1%}",
        f"{row.unknown_share:.1%}",
        _or_dash(row.identical_share, ".1%"),
        _or_dash(row.identical_ended_share, ".1%"),
        _or_dash(row.median_spread, ".2f"),
        _or_dash(row.median_cv, ".3f"),
    )


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
