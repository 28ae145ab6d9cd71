"""Many Kaplan-Meier curves at once: one for every prompt of a log, asked without a Python loop.

The same estimate as :func:`contracts.survival.kaplan_meier`, for groups of runs that share a few
flat arrays, so that ten million runs cost arrays and no objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.survival import SurvivalCurve

AnyIntArray = NDArray[np.int32] | IntArray
_SHIFT = 32  # a knot is named by (curve << 32) | tokens, which one searchsorted finds
_TOKENS = (1 << _SHIFT) - 1
_BLOCK = 1 << 20  # runs worked on at a time: scratch arrays stay small beside the result


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalCurves:
    """``num_curves`` step functions S(t) = P(length > t); curve g owns ``offsets[g]:offsets[g+1]``.

    ``knots`` (m,) hold curve and token count of every distinct duration (a knot at 0 first),
    ``survival`` (m,) S from there on, ``area`` (m,) its integral up to there, ``outlived`` (m,)
    how many runs were longer. ``num_events`` (g,) counts the runs that were seen to end.
    """

    offsets: IntArray
    knots: IntArray
    survival: FloatArray
    area: FloatArray
    outlived: IntArray
    num_events: IntArray

    @property
    def num_curves(self) -> int:
        """How many curves there are."""
        return len(self.offsets) - 1

    @property
    def num_runs(self) -> IntArray:
        """(g,) durations behind each curve."""
        return np.asarray(self.outlived[self.offsets[:-1]], dtype=np.int64)

    @property
    def last_tokens(self) -> IntArray:
        """(g,) the largest duration of each curve, event or not: beyond it nothing is known."""
        return np.asarray(self.knots[self.offsets[1:] - 1] & _TOKENS)

    @property
    def last_survival(self) -> FloatArray:
        """(g,) S from the largest duration on; above 0 where the longest runs were cut."""
        return self.survival[self.offsets[1:] - 1]

    def curve(self, index: int) -> SurvivalCurve:
        """Return one curve on its own; its times are the durations at which S falls."""
        part = slice(self.offsets[index] + 1, self.offsets[index + 1])
        before = self.survival[self.offsets[index] : self.offsets[index + 1] - 1]
        falls = self.survival[part] < before
        return SurvivalCurve(
            times=(self.knots[part] & _TOKENS)[falls],
            survival=self.survival[part][falls],
            last_tokens=int(self.last_tokens[index]),
            num_runs=int(self.num_runs[index]),
        )

    def at(self, curve: IntArray, tokens: IntArray) -> FloatArray:
        """Return S (n,) of ``curve`` (n,) at whole ``tokens`` (n,)."""
        return self.survival[self._knot(curve, tokens)]

    def alive(self, curve: IntArray, ages: IntArray) -> IntArray:
        """Return (n,) how many runs of each curve were longer than ``ages``."""
        return np.asarray(self.outlived[self._knot(curve, ages)], dtype=np.int64)

    def mean_residual(self, curve: IntArray, ages: IntArray, caps: IntArray) -> FloatArray:
        """Return E[min(L, cap) - age | L > age] (n,); NaN where no run was longer than the age.

        Between the last observation and the cap S keeps its last value (see SurvivalCurve).
        """
        known, now = self._known(curve, ages)
        out = np.full(len(ages), np.nan)
        areas = self._area(curve, caps) - self._area(curve, ages)
        np.divide(areas, now, out=out, where=known)
        return out

    def residual_quantile(
        self, curve: IntArray, ages: IntArray, caps: IntArray, level: float
    ) -> FloatArray:
        """Return the smallest r (n,) with P(min(L, cap) - age <= r | L > age) >= level."""
        known, now = self._known(curve, ages)
        target = (1.0 - level) * now * (1 + 1e-12)  # rounding must not push past a knot
        low, high = self._knot(curve, ages), self.offsets[curve + 1]
        while (open_rows := low < high).any():
            middle = np.minimum((low + high) // 2, len(self.survival) - 1)
            falls = self.survival[middle] <= target
            high = np.where(open_rows & falls, middle, high)
            low = np.where(open_rows & ~falls, middle + 1, low)
        inside = low < self.offsets[curve + 1]
        reach = self.knots[np.minimum(low, len(self.knots) - 1)] & _TOKENS
        served = np.where(inside, np.minimum(reach, caps), caps) - ages
        return np.where(known, served.astype(np.float64), np.nan)

    def residual_survival(self, curve: IntArray, ages: IntArray, horizon: IntArray) -> FloatArray:
        """Return P(L > age + horizon | L > age) (n,); NaN as above."""
        known, now = self._known(curve, ages)
        out = np.full(len(ages), np.nan)
        np.divide(self.at(curve, ages + horizon), now, out=out, where=known)
        return out

    def _known(self, curve: IntArray, ages: IntArray) -> tuple[np.ndarray, FloatArray]:
        now = self.at(curve, ages)
        return (now > 0.0) & (self.alive(curve, ages) > 0), now

    def _knot(self, curve: IntArray, tokens: IntArray) -> IntArray:
        wanted = (curve << _SHIFT) | np.clip(tokens, 0, _TOKENS)
        return np.searchsorted(self.knots, wanted, side="right") - 1

    def _area(self, curve: IntArray, upto: IntArray) -> FloatArray:
        at = self._knot(curve, upto)
        width = upto - (self.knots[at] & _TOKENS)
        return np.asarray(self.area[at] + width * self.survival[at])


def kaplan_meier_by(
    group: AnyIntArray, durations: AnyIntArray, event_observed: np.ndarray, num_groups: int
) -> SurvivalCurves:
    """Return the product-limit curve of each group 0 … num_groups - 1 of right-censored durations.

    All inputs are (n,); ``durations`` are whole tokens from 1 to 2**31 - 1; at a tie, events come
    before censorings. Raises InvalidInput when a group has no run or a duration is below 1.
    """
    sizes = np.bincount(group, minlength=num_groups)
    if num_groups < 1 or not sizes.all():
        raise InvalidInput("a survival curve needs at least one run; the sample is empty")
    shortest = int(durations.min())
    if shortest < 1:
        raise InvalidInput(f"a duration is {shortest} tokens: lengths must be at least 1")
    # one number a run (group, duration, cut?), sorted in place: ten million runs stay 80 MB
    runs = np.asarray(group, dtype=np.int64) << _SHIFT
    runs |= np.asarray(durations, dtype=np.int64) << 1
    runs |= ~np.asarray(event_observed, dtype=bool)
    runs.sort()
    edges = np.concatenate([[0], np.cumsum(sizes)])
    marks = np.searchsorted(edges, np.arange(0, len(runs), _BLOCK), side="right") - 1
    blocks = [*np.unique(marks).tolist(), num_groups]
    parts = [
        _curves_of(runs[edges[first] : edges[last]], first, edges[first : last + 1] - edges[first])
        for first, last in pairwise(blocks)
    ]
    if len(parts) == 1:
        return parts[0]
    shifts = np.cumsum([0, *(len(part.knots) for part in parts)])
    starts = [part.offsets[:-1] + shift for part, shift in zip(parts, shifts, strict=False)]
    return SurvivalCurves(
        np.append(np.concatenate(starts), shifts[-1]),
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("knots", "survival", "area", "outlived", "num_events")
        ),
    )


def _curves_of(runs: IntArray, first_group: int, edges: IntArray) -> SurvivalCurves:
    """Return the curves of sorted, packed ``runs``; group g owns ``edges[g]:edges[g+1]``."""
    num_groups = len(edges) - 1
    begins = np.flatnonzero(np.diff(runs >> 1, prepend=-1))
    durations = runs[begins]
    group = (durations >> _SHIFT) - first_group
    named = (group + first_group << _SHIFT) | ((durations & _TOKENS) >> 1)
    events = np.add.reduceat((runs & 1) ^ 1, begins)
    factor = 1.0 - events / (edges[group + 1] - begins)  # at risk: those that are not shorter
    outlived = edges[group + 1] - np.append(begins[1:], len(runs))
    # every curve begins with a knot at 0 tokens
    zeros = np.arange(first_group, first_group + num_groups, dtype=np.int64) << _SHIFT
    slots = np.searchsorted(named, zeros)
    knots = np.insert(named, slots, zeros)
    factor = np.insert(factor, slots, 1.0)
    offsets = np.append(slots + np.arange(num_groups), len(knots)).astype(np.int64)
    # a duration without an event keeps the value before it, to the last bit
    source = np.where((factor < 1.0) | (knots & _TOKENS == 0), np.arange(len(knots)), 0)
    survival = _scan(factor, offsets, np.multiply)[np.maximum.accumulate(source)]
    steps = np.zeros(len(knots))
    steps[1:] = np.diff(knots & _TOKENS) * survival[:-1]
    steps[offsets[:-1]] = 0.0
    return SurvivalCurves(
        offsets=offsets,
        knots=knots,
        survival=survival,
        area=_scan(steps, offsets, np.add),
        outlived=np.insert(outlived, slots, np.diff(edges)).astype(np.int32),
        num_events=np.add.reduceat((runs & 1) ^ 1, edges[:-1]),
    )


def _scan(
    values: FloatArray,
    offsets: IntArray,
    combine: Callable[[FloatArray, FloatArray], FloatArray],
) -> FloatArray:
    """Return the running product or sum inside each segment, by doubling: log2(longest) passes.

    A plain running sum over all segments, less its value at each start, would lose the digits
    that a short segment after many long ones needs.
    """
    out = values.astype(np.float64)
    position = np.arange(len(out)) - np.repeat(offsets[:-1], np.diff(offsets))
    longest, step = int(np.diff(offsets).max()), 1
    while step < longest:
        reach = np.flatnonzero(position >= step)
        out[reach] = combine(out[reach], out[reach - step])
        step *= 2
    return out
