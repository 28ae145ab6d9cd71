"""Service: what a cohort got beside its breach, with nobody left out for not having ended.

A mean over completed requests flatters whoever starves the slow ones. Here every accepted request
that was not withdrawn counts: a time that never came counts as ``horizon_s``, the time for which
everybody is watched, and none counts for more. The mean so defined is the restricted mean time
(Royston and Parmar 2013) of a cohort that is watched alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.records import RequestRecord
from eval.lives import ENDED
from eval.outcomes import is_hopeless, outcome

TOP_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class ServiceScore:
    """One engine run's tagged cohort; times in seconds, restricted to the horizon.

    ``ttft`` is the time to the first token and ``e2e`` that to the end, both from the scheduled
    arrival; ``tpot`` the seconds a token after the first, up to the end or as far as watched, so
    that a request evicted after a few tokens has a huge one (NaN when none wrote two tokens).
    ``goodput_per_s`` is requests that met their deadline, and ``offered_per_s`` requests that came,
    both a second of the time in which the cohort arrived: no last straggler stretches it (NaN for
    one arrival). ``jain_fairness`` is Jain's index (Jain, Chiu and Hawe 1984) of slowdowns, e2e /
    seconds alone: 1 when all are slowed alike, 1/n when one bears it all. ``top_decile_breach`` and
    ``top_decile_floor`` are those of the tenth that takes longest alone. Shares are of 1:
    ``length_capped`` of accepted requests ended at their cap, ``preempted`` lost their KV at least
    once.
    """

    offered: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    e2e_mean_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    goodput_per_s: float
    offered_per_s: float
    preemptions_per_request: float
    preempted_share: float
    length_capped_share: float
    jain_fairness: float
    top_decile_breach: float
    top_decile_floor: float


def score_service(
    records: Iterable[RequestRecord], deadline_s: float | None, horizon_s: float
) -> ServiceScore:
    """Score the tagged cohort of one engine run; ``deadline_s`` is None for each request's own.

    Raises InvalidInput when no tagged request is left to judge, or the horizon is not above 0.
    """
    if not horizon_s > 0:
        raise InvalidInput(f"horizon_s is {horizon_s}: give the seconds watched, above 0")
    cohort = [record for record in records if record.cohort == "tagged"]
    judged = [r for r in cohort if r.state not in ("rejected", "withdrawn")]
    if not judged:
        raise InvalidInput(
            f"none of {len(cohort)} tagged requests was accepted and stayed: nothing to score"
        )
    ttft_s = _restricted([r.first_token_s for r in judged], judged, horizon_s)
    ended = [r.end_s if r.state in ENDED else None for r in judged]
    e2e_s = _restricted(ended, judged, horizon_s)
    tpot_s = _tpot_s(judged)
    alone_s = np.array([r.single_stream_s for r in judged])
    outcomes = np.array([outcome(r, deadline_s) for r in judged])
    breached = np.isin(outcomes, ("late", "failed", "unfinished"))
    hopeless = np.array([is_hopeless(r, deadline_s) for r in judged])
    longest = np.argsort(-alone_s, kind="stable")[: top_count(len(judged))]
    arrivals = [r.arrival_s for r in cohort]
    window_s = max(arrivals) - min(arrivals) or float("nan")
    return ServiceScore(
        offered=len(cohort),
        ttft_mean_s=float(ttft_s.mean()),
        ttft_p50_s=quantile(ttft_s, 0.5),
        ttft_p99_s=quantile(ttft_s, 0.99),
        tpot_mean_s=float(tpot_s.mean()) if tpot_s.size else float("nan"),
        tpot_p50_s=quantile(tpot_s, 0.5),
        tpot_p99_s=quantile(tpot_s, 0.99),
        e2e_mean_s=float(e2e_s.mean()),
        e2e_p50_s=quantile(e2e_s, 0.5),
        e2e_p99_s=quantile(e2e_s, 0.99),
        goodput_per_s=float((outcomes == "met").sum()) / window_s,
        offered_per_s=len(cohort) / window_s,
        preemptions_per_request=float(np.mean([r.num_preemptions for r in judged])),
        preempted_share=float(np.mean([r.num_preemptions > 0 for r in judged])),
        length_capped_share=float(np.mean([r.state == "length_capped" for r in judged])),
        jain_fairness=jain_index(e2e_s / alone_s),
        top_decile_breach=float(breached[longest].mean()),
        top_decile_floor=float(hopeless[longest].mean()),
    )


def jain_index(shares: FloatArray) -> float:
    """Return (sum x)^2 / (n sum x^2) of positive numbers: in [1/n, 1], the same for any unit."""
    largest = shares.max()
    if not 0 < largest < np.inf:
        return float("nan")
    x = shares / largest
    return float(x.sum() ** 2 / (len(x) * (x * x).sum()))


def quantile(values: FloatArray, share: float) -> float:
    """Return the smallest value that at least ``share`` of all do not exceed; NaN of nothing."""
    if not values.size:
        return float("nan")
    return float(np.quantile(values, share, method="inverted_cdf"))


def top_count(count: int) -> int:
    """Return how many requests the top decile of ``count`` has: at least one."""
    return max(1, round(TOP_SHARE * count))


def _restricted(
    when_s: Sequence[float | None], records: Sequence[RequestRecord], horizon_s: float
) -> FloatArray:
    waited = [
        horizon_s if at is None else at - record.arrival_s
        for at, record in zip(when_s, records, strict=True)
    ]
    return np.minimum(np.array(waited, dtype=np.float64), horizon_s)


def _tpot_s(records: Sequence[RequestRecord]) -> FloatArray:
    """Return seconds a token after the first, of every request that wrote two."""
    return np.array(
        [
            ((r.censor_s if r.end_s is None else r.end_s) - r.first_token_s) / (r.output_tokens - 1)
            for r in records
            if r.first_token_s is not None and r.output_tokens > 1
        ],
        dtype=np.float64,
    )
