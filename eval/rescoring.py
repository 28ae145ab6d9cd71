"""Breach at any deadline from stored records, without another run, where that is legal.

It is legal when nothing that decided anything read a deadline, and when everybody was watched for
as long as the largest deadline asked about. One sort per engine run answers all deadlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.randomness import keyed_generator
from contracts.records import RequestRecord

DEADLINES_S = tuple(float(d) for d in range(600, 1801, 30))
NUM_RESAMPLES = 4_000
_ENDED = ("completed", "length_capped")


@dataclass(frozen=True, slots=True, eq=False)
class BreachCurve:
    """Breach and floor of one engine run at each deadline (all three (d,), shares of 1)."""

    deadlines_s: FloatArray
    breach: FloatArray
    floor: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class DifferenceCurve:
    """Mean paired difference at each deadline (percentage points) and a band that holds for all
    of them at once with ``confidence``."""

    deadlines_s: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    confidence: float


@dataclass(frozen=True, slots=True)
class Reversal:
    """The sign of a difference is known at two deadlines, and is not the same."""

    negative_at_s: float
    positive_at_s: float


def rescore(records: Sequence[RequestRecord], deadlines_s: Sequence[float]) -> BreachCurve:
    """Return breach and floor of the accepted tagged cohort at every deadline.

    Raises InvalidInput where rescoring is not legal: a component read a deadline, or a request was
    not watched to the largest one; the error names the request and what to do.
    """
    deadlines = _checked(deadlines_s)
    cohort = [r for r in records if r.cohort == "tagged" and r.state != "rejected"]
    _check_legal(cohort, deadlines)
    judged = [r for r in cohort if r.state != "withdrawn"]
    if not judged:
        raise InvalidInput("no accepted tagged request is left to judge: all were withdrawn")
    latency_us = np.sort([_latency_us(record) for record in judged])
    alone_us = np.sort([_microseconds(record.single_stream_s) for record in cohort])
    at_us = np.round(deadlines * 1e6)
    met = np.searchsorted(latency_us, at_us, side="right")
    feasible = np.searchsorted(alone_us, at_us, side="right")
    return BreachCurve(deadlines, 1.0 - met / len(judged), 1.0 - feasible / len(cohort))


def difference_curve(
    treatment: Sequence[BreachCurve], baseline: Sequence[BreachCurve], confidence: float = 0.95
) -> DifferenceCurve:
    """Return the paired difference over seeds with a simultaneous (sup-t) band.

    ``treatment`` and ``baseline`` hold one curve a seed, in the same order. Seeds are resampled
    whole, the same for all deadlines; the band's width is the quantile of the largest |t|.
    """
    if len(treatment) != len(baseline) or len(treatment) < 2:
        raise InvalidInput(
            f"{len(treatment)} seeds against {len(baseline)}: a band needs the same, at least 2"
        )
    deadlines = treatment[0].deadlines_s
    if any(not np.array_equal(c.deadlines_s, deadlines) for c in (*treatment, *baseline)):
        raise InvalidInput("the curves were scored at different deadlines: rescore all at the same")
    pairs = zip(treatment, baseline, strict=True)
    d = 100.0 * np.array([a.breach - b.breach for a, b in pairs])
    count = len(d)
    mean, error = d.mean(axis=0), d.std(axis=0, ddof=1) / np.sqrt(count)
    draws = keyed_generator(0, "sup-t", count).integers(0, count, (NUM_RESAMPLES, count))
    resampled = d[draws]
    errors = resampled.std(axis=1, ddof=1) / np.sqrt(count)
    off = np.abs(resampled.mean(axis=1) - mean)
    t = np.divide(off, errors, out=np.zeros_like(off), where=errors > 1e-12)
    width = _at_least_t(float(np.quantile(t.max(axis=1), confidence)), count, confidence) * error
    return DifferenceCurve(deadlines, mean, mean - width, mean + width, confidence)


def reversals(curve: DifferenceCurve) -> list[Reversal]:
    """Return every change of a *known* sign along the deadlines; a wiggle round 0 is none."""
    known = [
        (deadline, -1 if high < 0 else 1)
        for deadline, low, high in zip(
            curve.deadlines_s.tolist(), curve.low.tolist(), curve.high.tolist(), strict=True
        )
        if high < 0 or low > 0
    ]
    return [
        Reversal(*((a, b) if sign < 0 else (b, a)))
        for (a, sign), (b, other) in pairwise(known)
        if sign != other
    ]


def cumulative_incidence(
    times: Sequence[float], causes: Sequence[int], at: Sequence[float], cause: int = 1
) -> FloatArray:
    """Return P(ended by ``cause`` by t) for each t of ``at`` (Aalen and Johansen 1978).

    ``causes`` holds 0 for a censored time and a positive number for what ended it. Causes that
    compete are no censoring: treating failures so would overstate completion.
    """
    t, kind = np.asarray(times, dtype=np.float64), np.asarray(causes, dtype=np.int64)
    if t.shape != kind.shape or not t.size:
        raise InvalidInput(f"{t.size} times and {kind.size} causes: give one cause a time")
    steps = np.unique(t[kind > 0])
    at_risk = len(t) - np.searchsorted(np.sort(t), steps, side="left")
    of_cause = np.array([((t == step) & (kind == cause)).sum() for step in steps])
    of_any = np.array([((t == step) & (kind > 0)).sum() for step in steps])
    alive_before = np.concatenate([[1.0], np.cumprod(1.0 - of_any / at_risk)[:-1]])
    summed = np.concatenate([[0.0], np.cumsum(alive_before * of_cause / at_risk)])
    return summed[np.searchsorted(steps, np.asarray(at, dtype=np.float64), side="right")]


def incidence_of(records: Sequence[RequestRecord], at_s: Sequence[float]) -> dict[str, FloatArray]:
    """Return the cumulative incidence of ``completed`` and of ``failed`` among the accepted tagged
    requests, by seconds since arrival; unfinished and withdrawn ones are censored."""
    cohort = [r for r in records if r.cohort == "tagged" and r.state != "rejected"]
    times = [(r.censor_s if r.end_s is None else r.end_s) - r.arrival_s for r in cohort]
    causes = [1 if r.state in _ENDED else 2 if r.state == "failed" else 0 for r in cohort]
    return {
        "completed": cumulative_incidence(times, causes, at_s, 1),
        "failed": cumulative_incidence(times, causes, at_s, 2),
    }


def _check_legal(cohort: Sequence[RequestRecord], deadlines: FloatArray) -> None:
    largest = float(deadlines.max())
    for record in cohort:
        seen_s = record.deadline_seen
        if seen_s is not None and deadlines.tolist() != [seen_s]:
            raise InvalidInput(
                f"in the run of these records a policy read the deadline of {seen_s:g} s: they can "
                "be scored at that deadline only; run again for each other one"
            )
        watched_s = record.censor_s - record.arrival_s
        if record.state == "unfinished" and watched_s < largest:
            raise InvalidInput(
                f"request {record.request_id!r} was watched for {watched_s:.1f} s, less than the "
                f"largest deadline of {largest:.1f} s: ask for deadlines up to "
                f"{watched_s:.1f} s, or run again with a longer drain"
            )
        if record.end_s is None or record.end_reason != "patience":
            continue
        waited_s = record.end_s - record.arrival_s
        if record.state == "failed" and waited_s < largest:
            raise InvalidInput(
                f"request {record.request_id!r} ran out of patience after {waited_s:.1f} s, below "
                f"the largest deadline of {largest:.1f} s: nobody knows when it would have ended; "
                "ask for deadlines up to the patience"
            )


def _latency_us(record: RequestRecord) -> float:
    if record.state in _ENDED and record.end_s is not None:
        return _microseconds(record.end_s - record.arrival_s)
    return np.inf  # failed or unfinished: a breach at any deadline


def _microseconds(seconds: float) -> float:
    return float(round(seconds * 1e6)) if np.isfinite(seconds) else np.inf


def _at_least_t(quantile: float, count: int, confidence: float) -> float:
    """A simultaneous band is never narrower than the pointwise interval; resamples without spread
    (many equal seeds) could make it so."""
    from scipy import stats

    return max(quantile, float(stats.t.ppf(0.5 + confidence / 2, count - 1)))


def _checked(deadlines_s: Sequence[float]) -> FloatArray:
    deadlines = np.asarray(deadlines_s, dtype=np.float64)
    if not deadlines.size or not np.all(np.isfinite(deadlines) & (deadlines > 0)):
        raise InvalidInput(f"deadlines are {list(deadlines_s)}: give finite seconds above 0")
    if np.any(np.diff(deadlines) <= 0):
        raise InvalidInput("deadlines must rise: sort them, each once")
    return deadlines
