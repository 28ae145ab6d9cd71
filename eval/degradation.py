"""What a degraded signal achieves, and the standard ladder from clairvoyant to useless."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.signals import RemainingSignal
from eval.signal_quality import HeldOut, SignalQuality, score_signal
from oracles.degrade import degrade, parse_degradations

STANDARD_LADDER = (
    "noise(0.25)", "noise(0.5)", "noise(1)", "noise(2)",
    "wander(0.5)", "wander(1)",
    "swap(0.9)", "swap(0.7)", "swap(0.5)", "swap(0.3)", "swap(0)",
    "shrink(0.5)", "optimistic(1)", "pessimistic(1)", "bias(0.5)", "bias(2)",
    "buckets(10)", "buckets(5)", "buckets(2)",
    "stale(16)", "stale(64)", "refresh(32)", "missing(0.1)", "missing(0.5)", "anti",
)  # fmt: skip


def degradation_ladder(
    base: RemainingSignal,
    rows: HeldOut,
    rungs: Sequence[str] = STANDARD_LADDER,
    *,
    seed: int = 0,
) -> list[SignalQuality]:
    """Score ``base`` and each rung (a chain such as ``"noise(0.5) | stale(64)"``) on ``rows``:
    the tau, log-MAE and co-running concordance that a degradation achieved, not those it aimed at.
    """
    scores = [score_signal(base, rows)]
    for rung in rungs:
        _, steps = parse_degradations(f"| {rung}")
        signal = degrade(base, steps, rows.requests, rows.single_age, seed)
        scores.append(score_signal(signal, rows))
    return scores
