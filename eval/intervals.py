"""Intervals for mean differences: of one cell, of a fixed grid, and of grids like it.

The unit is the seed within a cell, then the cell; never the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.randomness import keyed_generator

NUM_RESAMPLES = 9_999


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with a two-sided interval. ``method`` says how it was made, ``num_units`` from how
    many seeds, cells or clusters."""

    mean: float
    low: float
    high: float
    num_units: int
    method: str


def t_interval(values: Sequence[float] | FloatArray, confidence: float = 0.95) -> Interval:
    """Return Student's interval; values that all agree give a point, not NaN."""
    from scipy import stats

    v = _checked(values)
    quantile = float(stats.t.ppf(0.5 + confidence / 2, len(v) - 1))
    half = quantile * float(v.std(ddof=1)) / np.sqrt(len(v))
    mean = float(v.mean())
    return Interval(mean, mean - half, mean + half, len(v), "t")


def bootstrap_t_interval(
    values: Sequence[float] | FloatArray, confidence: float = 0.95
) -> Interval:
    """Return the studentised bootstrap interval (Efron and Tibshirani 1993, 12.5), whose coverage
    holds with few seeds where the percentile interval's does not.

    With many equal values (a low-breach cell is full of zeros) resamples without spread appear.
    Once they are more than a tail holds, the t interval is returned, and says so.
    """
    v = _checked(values)
    tail = (1.0 - confidence) / 2.0
    draws = keyed_generator(0, "bootstrap-t", len(v)).integers(0, len(v), (NUM_RESAMPLES, len(v)))
    resampled = v[draws]
    errors = resampled.std(axis=1, ddof=1) / np.sqrt(len(v))
    usable = errors > 1e-12 * max(1.0, float(np.abs(v).max()))
    if (~usable).mean() > tail / 2:
        return t_interval(v, confidence)
    t = (resampled.mean(axis=1)[usable] - v.mean()) / errors[usable]
    low, high = np.quantile(t, [tail, 1.0 - tail])
    error, mean = float(v.std(ddof=1) / np.sqrt(len(v))), float(v.mean())
    return Interval(mean, mean - high * error, mean - low * error, len(v), "bootstrap-t")


def within_grid(by_cell: Mapping[str, Sequence[float]], confidence: float = 0.95) -> Interval:
    """Return the interval of the mean over exactly these cells, for new seeds.

    ``by_cell`` maps a cell to its differences, the same seeds in the same order in each: seeds are
    shared by cells, so a seed's mean over the grid is the unit.
    """
    lengths = {len(values) for values in by_cell.values()}
    if len(lengths) != 1:
        raise InvalidInput(
            f"cells have {sorted(lengths)} seeds: the mean over a grid needs the same seeds in each"
        )
    seeds = np.mean([list(values) for values in by_cell.values()], axis=0)
    return t_interval(seeds, confidence)


def across_grid(
    by_cell: Mapping[str, Sequence[float]],
    cluster_of: Mapping[str, str],
    confidence: float = 0.95,
) -> Interval:
    """Return the interval of the mean over cells like these, for new cells.

    Cells of one cluster (a model family with a benchmark, say) share lengths, so the cluster's
    mean is the unit: with few clusters the interval is wide, as it should be.
    """
    clusters: dict[str, list[float]] = {}
    for cell, values in by_cell.items():
        clusters.setdefault(cluster_of[cell], []).append(float(np.mean(values)))
    return t_interval([float(np.mean(means)) for means in clusters.values()], confidence)


def look_alphas(looks: Sequence[int], alpha: float = 0.05) -> tuple[float, ...]:
    """Return the level to test at, look by look, when seeds are added until a result is clear.

    ``looks`` are the numbers of seeds, fixed beforehand. The level spent by a look grows with its
    share t of the seeds as α ln(1 + (e - 1) t) (Lan and DeMets 1983, Pocock type); each look gets
    what was added since the last, so the levels add up to α and the union bound holds.
    """
    if not looks or list(looks) != sorted(set(looks)) or looks[0] < 2:
        raise InvalidInput(f"looks are {tuple(looks)}: give rising numbers of seeds from 2 on")
    shares = np.array(looks, dtype=np.float64) / looks[-1]
    spent = alpha * np.log1p((np.e - 1.0) * shares)
    return tuple(np.diff(spent, prepend=0.0).tolist())


def _checked(values: Sequence[float] | FloatArray) -> FloatArray:
    v = np.asarray(values, dtype=np.float64)
    if len(v) < 2:
        raise InvalidInput(f"{len(v)} value(s): an interval needs at least 2")
    if not np.isfinite(v).all():
        raise InvalidInput(
            "a value is not a number: a breach rate is undetermined in some seed; let the run "
            "drain for at least one deadline after the last tagged arrival"
        )
    return v
