"""Breach at any deadline from stored records, without another run, where that is legal.

It is legal when nothing that decided anything read a deadline, and when everybody was watched for
as long as the largest deadline asked about. One sort per engine run answers all deadlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.randomness import keyed_generator
from contracts.records import RequestRecord
from eval.lives import ENDED, Lives, lives_of

DEADLINES_S = tuple(float(d) for d in range(600, 1801, 30))
NUM_DRAWS = 10_000


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
    """Return breach and floor of the accepted tagged cohort; see :func:`rescore_lives`."""
    return rescore_lives(lives_of(records), deadlines_s)


def rescore_lives(lives: Lives, deadlines_s: Sequence[float] | FloatArray) -> BreachCurve:
    """Return breach and floor of one engine run's cohort at every deadline.

    Raises InvalidInput where rescoring is not legal: a component read a deadline, or a request was
    not watched to the largest one; the error names the request and what to do.
    """
    deadlines = _checked(deadlines_s)
    _check_legal(lives, deadlines)
    judged = _judged(lives)
    latency_s = np.where(lives.has_ended, lives.end_s - lives.arrival_s, np.inf)
    latency_us = np.sort(_microseconds(latency_s[judged]))  # inf: a breach at any deadline
    alone_us = np.sort(_microseconds(lives.single_stream_s))
    at_us = np.round(deadlines * 1e6)
    met = np.searchsorted(latency_us, at_us, side="right")
    feasible = np.searchsorted(alone_us, at_us, side="right")
    return BreachCurve(deadlines, 1.0 - met / judged.sum(), 1.0 - feasible / len(lives))


def rescore_own(lives: Lives, multiples: Sequence[float] | FloatArray) -> BreachCurve:
    """Return breach and floor at multiples of each request's own deadline; ``deadlines_s`` of the
    curve are the multiples.

    Raises InvalidInput as :func:`rescore_lives` does, and where a request has no deadline.
    """
    factors = _checked(multiples)
    for at in np.flatnonzero(np.isnan(lives.deadline_s))[:1]:
        raise InvalidInput(
            f"request {str(lives.request_id[at])!r} has no deadline of its own: rescore at "
            "deadlines in seconds"
        )
    if not np.isnan(lives.deadline_seen).all() and factors.tolist() != [1.0]:
        raise InvalidInput(
            "in the run of these records a policy read the deadlines: they can be scored at those "
            "only; run again for others"
        )
    _check_watched(lives, factors.max() * lives.deadline_s)
    judged = _judged(lives)
    latency_s = np.where(lives.has_ended, lives.end_s - lives.arrival_s, np.inf)
    due_us = _microseconds(lives.deadline_s[:, None] * factors)
    late = _microseconds(latency_s)[:, None] > due_us
    hopeless = _microseconds(lives.single_stream_s)[:, None] > due_us
    return BreachCurve(factors, late[judged].mean(axis=0), hopeless.mean(axis=0))


def _judged(lives: Lives) -> npt.NDArray[np.bool_]:
    judged = np.asarray(lives.state != "withdrawn")
    if not judged.any():
        raise InvalidInput("no accepted tagged request is left to judge: all were withdrawn")
    return judged


def difference_curve(
    treatment: Sequence[BreachCurve], baseline: Sequence[BreachCurve], confidence: float = 0.95
) -> DifferenceCurve:
    """Return the paired difference over seeds with a simultaneous (sup-t) band.

    ``treatment`` and ``baseline`` hold one curve a seed, in the same order. The band's width is the
    quantile of the largest |t| over all deadlines under a multivariate t law with the correlation
    of the seeds' differences (Montiel Olea and Plagborg-Møller 2019). Resampling six seeds instead
    meets samples almost without spread, and bands ten times as wide.
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
    width = _largest_t(d, confidence) * error
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
    causes = [1 if r.state in ENDED else 2 if r.state == "failed" else 0 for r in cohort]
    return {
        "completed": cumulative_incidence(times, causes, at_s, 1),
        "failed": cumulative_incidence(times, causes, at_s, 2),
    }


def _check_legal(lives: Lives, deadlines: FloatArray) -> None:
    largest = float(deadlines.max())
    for seen_s in np.unique(lives.deadline_seen[~np.isnan(lives.deadline_seen)]).tolist():
        if deadlines.tolist() != [seen_s]:
            raise InvalidInput(
                f"in the run of these records a policy read the deadline of {seen_s:g} s: they can "
                "be scored at that deadline only; run again for each other one"
            )
    _check_watched(lives, np.full(len(lives), largest))


def _check_watched(lives: Lives, due_s: FloatArray) -> None:
    """Raise InvalidInput unless what became of everybody by its ``due_s`` (n,) is known."""
    watched_s = lives.censor_s - lives.arrival_s
    for at in np.flatnonzero((lives.state == "unfinished") & (watched_s < due_s))[:1]:
        raise InvalidInput(
            f"request {str(lives.request_id[at])!r} was watched for {watched_s[at]:.1f} s, less "
            f"than the largest deadline of {due_s[at]:.1f} s: ask for deadlines up to "
            f"{watched_s[at]:.1f} s, or run again with a longer drain"
        )
    waited_s = lives.end_s - lives.arrival_s
    impatient = (lives.state == "failed") & (lives.end_reason == "patience")
    for at in np.flatnonzero(impatient & (waited_s < due_s))[:1]:
        raise InvalidInput(
            f"request {str(lives.request_id[at])!r} ran out of patience after "
            f"{waited_s[at]:.1f} s, below the largest deadline of {due_s[at]:.1f} s: nobody knows "
            "when it would have ended; ask for deadlines up to the patience"
        )


def _microseconds(seconds: FloatArray) -> FloatArray:
    return np.round(seconds * 1e6)


def _largest_t(differences: FloatArray, confidence: float) -> float:
    """Return the quantile of max |t| over the columns; never below that of one t, which the
    simulated one could be where all columns move together."""
    from scipy import stats

    freedom = len(differences) - 1
    pointwise = float(stats.t.ppf(0.5 + confidence / 2, freedom))
    off = differences - differences.mean(axis=0)
    size = np.sqrt((off * off).sum(axis=0))
    moving = size > 1e-12
    if not moving.any():
        return pointwise
    rng = keyed_generator(0, "sup-t", len(differences))
    normal = rng.normal(size=(NUM_DRAWS, len(differences))) @ (off[:, moving] / size[moving])
    scale = np.sqrt(rng.chisquare(freedom, NUM_DRAWS) / freedom)
    return max(pointwise, float(np.quantile(np.abs(normal).max(axis=1) / scale, confidence)))


def _checked(deadlines_s: Sequence[float] | FloatArray) -> FloatArray:
    deadlines = np.asarray(deadlines_s, dtype=np.float64)
    if not deadlines.size or not np.all(np.isfinite(deadlines) & (deadlines > 0)):
        raise InvalidInput(f"deadlines are {list(deadlines_s)}: give finite seconds above 0")
    if np.any(np.diff(deadlines) <= 0):
        raise InvalidInput("deadlines must rise: sort them, each once")
    return deadlines
