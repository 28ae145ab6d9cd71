"""Tables from scattered measurements: holes filled along the axes, monotone, no knot too many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import isotonic_regression

from contracts.policy import FloatArray

Axes = tuple[tuple[float, ...], ...]
_SWEEPS = 3
_DIGITS = 5  # of a written value; half a unit of the last is 5e-5 at most, below any timing's noise


def grid_of(points: FloatArray, values: FloatArray, axes: Axes) -> FloatArray:
    """Return the mean value of each grid point, NaN where there is none; ``points`` has shape
    (points, axes) and holds values of the axes only."""
    shape = [len(axis) for axis in axes]
    at = tuple(np.searchsorted(axis, points[:, i]) for i, axis in enumerate(axes))
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, at, values)
    np.add.at(count, at, 1)
    mean: FloatArray = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean


def fill_holes(grid: FloatArray, axes: Axes) -> FloatArray:
    """Return ``grid`` without NaN: a hole takes the mean of what each axis says by itself.

    First linearly between neighbours, wherever that reaches; then linearly on from the last two,
    never falling, and level before the first. NaN stays where no axis has a value.
    """
    for beyond in (False, True):
        while np.isnan(grid).any():
            guesses = np.stack([_along(grid, i, axes[i], beyond) for i in range(grid.ndim)])
            known = ~np.isnan(guesses)
            mean = np.where(known, guesses, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
            new = np.isnan(grid) & known.any(axis=0)
            if not new.any():
                break
            grid = np.where(new, mean, grid)
    return grid


def _along(grid: FloatArray, i: int, axis: Sequence[float], beyond: bool) -> FloatArray:
    x = np.array(axis)
    lines = np.moveaxis(grid, i, -1)
    out = np.full(lines.shape, np.nan)
    for at in np.ndindex(lines.shape[:-1]):
        known = ~np.isnan(lines[at])
        if known.any() and not known.all():
            out[at] = _line(x, x[known], lines[at][known], beyond)
    return np.moveaxis(out, -1, i)


def _line(x: FloatArray, known_x: FloatArray, known: FloatArray, beyond: bool) -> FloatArray:
    """Return the values at ``x`` that the known ones imply; NaN outside them unless ``beyond``."""
    inside: FloatArray = np.interp(
        x, known_x, known, right=None if beyond else np.nan, left=None if beyond else np.nan
    )
    if beyond and len(known) > 1:
        slope = max(0.0, (known[-1] - known[-2]) / (known_x[-1] - known_x[-2]))
        inside = inside + slope * np.maximum(0.0, x - known_x[-1])
    return inside


def monotone(grid: FloatArray) -> FloatArray:
    """Return the grid with values that fall along no axis: least squares along each in turn, then
    the running maximum for what is left."""
    for _ in range(_SWEEPS):
        for i in range(grid.ndim):
            if (np.diff(grid, axis=i) < 0.0).any():
                grid = np.apply_along_axis(lambda line: isotonic_regression(line).x, i, grid)
    for i in range(grid.ndim):
        grid = np.maximum.accumulate(grid, axis=i)
    return grid


def thin(
    grid: FloatArray, axes: Axes, whole_s: FloatArray, tolerance: float
) -> tuple[FloatArray, Axes]:
    """Drop the inner knots whose line is straight enough without them.

    A knot goes if, in the gap that it leaves, 99 % of the original points stay within ``tolerance``
    of ``whole_s``, the seconds of the step that the point is part of (same shape as ``grid``).
    """
    for i in range(grid.ndim):
        kept = list(range(len(axes[i])))
        at = 1
        while at < len(kept) - 1:
            without = kept[:at] + kept[at + 1 :]
            gap = slice(kept[at - 1] + 1, kept[at + 1])
            bent = np.moveaxis(_bend(grid, axes[i], without, i) / whole_s, i, 0)[gap]
            if np.quantile(bent, 0.99) < tolerance:
                kept = without
            else:
                at += 1
        grid, whole_s = grid.take(kept, axis=i), whole_s.take(kept, axis=i)
        axes = (*axes[:i], tuple(axes[i][k] for k in kept), *axes[i + 1 :])
    return grid, axes


def _bend(grid: FloatArray, axis: Sequence[float], kept: list[int], i: int) -> FloatArray:
    """Return how far each value is from the line through the kept knots of axis ``i``."""
    x = np.array(axis)
    right = np.clip(np.searchsorted(x[kept], x, side="right"), 1, len(kept) - 1)
    low, high = np.array(kept)[right - 1], np.array(kept)[right]
    shape = [1] * grid.ndim
    shape[i] = len(x)
    share = ((x - x[low]) / (x[high] - x[low])).reshape(shape)
    left, far = grid.take(low, axis=i), grid.take(high, axis=i)
    bend: FloatArray = np.abs(left + share * (far - left) - grid)
    return bend


def written(seconds: FloatArray) -> FloatArray:
    """Return the seconds that a file with _DIGITS significant digits of microseconds gives back."""
    microseconds = [float(f"{s * 1e6:.{_DIGITS}g}") for s in seconds.ravel()]
    return (np.array(microseconds) * 1e-6).reshape(seconds.shape)
