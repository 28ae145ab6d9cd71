"""Right-censored lengths: Kaplan-Meier curves and what they say about the rest of a run.

A length cut at a cap is not a length: it enters as ``event_observed=False`` ("longer than this").
Means are restricted to a serving cap, because beyond the last event a mean is not identified.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalCurve:
    """A right-continuous step function S(t) = P(length > t), t in whole tokens.

    ``times`` (m,) are the distinct event times in rising order and ``survival`` (m,) the value
    from each on; before the first it is 1. ``last_tokens`` is the largest duration seen, event or
    not: beyond it the curve says nothing. ``num_runs`` counts the durations it was built from.
    """

    times: IntArray
    survival: FloatArray
    last_tokens: int
    num_runs: int

    def __call__(self, t: IntArray | FloatArray) -> FloatArray:
        """Return S at each t."""
        padded = np.concatenate([[1.0], self.survival])
        return padded[np.searchsorted(self.times, t, side="right")]

    def mean_residual(self, ages: IntArray, caps: IntArray) -> FloatArray:
        """Return E[min(L, cap) - age | L > age] (restricted mean residual life), elementwise.

        NaN where the curve gives L > age no probability, or was never observed that far: there
        it has no answer and a caller must fall back.
        """
        area_to = self._area(np.minimum(caps, self.last_tokens)) + np.maximum(
            caps - self.last_tokens, 0
        ) * self(np.array([self.last_tokens]))
        alive = self(ages)
        known = (alive > 0.0) & (ages < self.last_tokens)
        out = np.full(len(ages), np.nan)
        np.divide(area_to - self._area(ages), alive, out=out, where=known)
        return out

    def residual_quantile(self, ages: IntArray, caps: IntArray, level: float) -> FloatArray:
        """Return the smallest r with P(min(L, cap) - age <= r | L > age) >= level; NaN as above."""
        alive = self(ages)
        target = (1.0 - level) * alive
        # survival falls with time: the first event time at or below the target
        slot = np.searchsorted(-self.survival, -target * (1 + 1e-12), side="left")
        reach = np.append(self.times, np.iinfo(np.int64).max)[slot]
        out = (np.minimum(reach, caps) - ages).astype(np.float64)
        return np.where((alive > 0.0) & (ages < self.last_tokens), out, np.nan)

    def _area(self, upto: IntArray) -> FloatArray:
        """Return the integral of S from 0 to ``upto`` (tokens)."""
        knots = np.concatenate([[0], self.times])
        heights = np.concatenate([[1.0], self.survival])
        below = np.concatenate([[0.0], np.cumsum(np.diff(knots) * heights[:-1])])
        slot = np.searchsorted(knots, upto, side="right") - 1
        return np.asarray(below[slot] + (upto - knots[slot]) * heights[slot])


def kaplan_meier(durations: IntArray, event_observed: np.ndarray) -> SurvivalCurve:
    """Return the product-limit estimate (Kaplan and Meier 1958) of right-censored durations.

    ``durations`` (n,) are whole tokens >= 1; ``event_observed`` (n,) is False where the run was
    cut. At a tie, events come before censorings. Raises InvalidInput on an empty sample.
    """
    durations = np.asarray(durations, dtype=np.int64)
    if not durations.size:
        raise InvalidInput("a survival curve needs at least one run; the sample is empty")
    if durations.min() < 1:
        raise InvalidInput(f"a duration is {durations.min()} tokens: lengths must be at least 1")
    observed = np.asarray(event_observed, dtype=bool)
    times, events = np.unique(durations[observed], return_counts=True)
    at_risk = len(durations) - np.searchsorted(np.sort(durations), times, side="left")
    return SurvivalCurve(
        times=times.astype(np.int64),
        survival=np.cumprod(1.0 - events / at_risk).astype(np.float64),
        last_tokens=int(durations.max()),
        num_runs=len(durations),
    )
