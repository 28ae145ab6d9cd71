"""The tail of a prompt's lengths beyond its longest run: log-t, its spread borrowed from others.

K runs say where the lengths of a prompt lie, and little about how far they scatter. So the
variance of log length within a prompt is shrunk toward that of its family, and the family's toward
that of its model, as an inverse-chi-square prior of ``PRIOR_RUNS`` degrees of freedom would; the
location's own uncertainty is added. Runs that were cut enter at their expected log length given
that they are longer (a censored normal, fitted by EM), not at the cap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contracts.log_t import DEGREES_OF_FREEDOM
from contracts.policy import FloatArray, IntArray
from oracles.run_table import RunTable

PRIOR_RUNS = 4.0
_EM_ROUNDS = 50
# the scale at which a log-t has the variance of the log lengths it stands for
_SCALE_OF_DEVIATION = math.sqrt((DEGREES_OF_FREEDOM - 2.0) / DEGREES_OF_FREEDOM)


@dataclass(frozen=True, slots=True, eq=False)
class LogTails:
    """``location`` and ``scale`` (p,) of log length for each request; NaN where no run ended, or
    where no prompt of the model ran twice with different lengths (there is no spread to borrow)."""

    location: FloatArray
    scale: FloatArray


def fit_tails(table: RunTable) -> LogTails:
    """Fit the tail of every request of ``table``."""
    _, family = np.unique(table.keys[:, 2], return_inverse=True)
    _, model = np.unique(table.keys[:, 3], return_inverse=True)
    family, model = family.reshape(-1), model.reshape(-1)
    count = table.runs_per_request()
    ended = np.bincount(table.request_of, table.event_observed, table.num_requests)
    y = np.log(table.output_tokens)
    location, square = _moments(y, table.request_of, count)
    variance = _shrunk(square, count, family, model)
    some_cut = (ended > 0) & (ended < count)
    if some_cut.any():
        rows = np.flatnonzero(some_cut[table.request_of])
        for _ in range(_EM_ROUNDS):
            before = location
            location, square = _em_round(table, y, rows, count, location, square, variance)
            variance = _shrunk(square, count, family, model)
            if np.nanmax(np.abs(location - before)) < 1e-9:
                break
    deviation = np.sqrt(variance * (1.0 + 1.0 / count))
    known = (ended > 0) & (variance > 0.0)
    return LogTails(
        location=np.where(known, location, np.nan),
        scale=np.where(known, deviation * _SCALE_OF_DEVIATION, np.nan),
    )


def _moments(
    y: FloatArray, group: NDArray[np.int32], count: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return the mean (p,) and the summed squared deviation (p,) of ``y`` in each group."""
    mean: FloatArray = np.bincount(group, y, len(count)) / count
    return mean, np.asarray(np.bincount(group, (y - mean[group]) ** 2, len(count)), np.float64)


def _shrunk(square: FloatArray, count: IntArray, family: IntArray, model: IntArray) -> FloatArray:
    """Return the variance (p,) of log length within each request, shrunk twice; NaN where the
    whole model shows none."""
    freedom = count - 1.0
    model_freedom = np.bincount(model, freedom)
    model_variance = np.full(len(model_freedom), np.nan)
    np.divide(
        np.bincount(model, square), model_freedom, out=model_variance, where=model_freedom > 0
    )
    model_of = np.zeros(family.max() + 1, dtype=np.int64)
    model_of[family] = model
    family_variance = (PRIOR_RUNS * model_variance[model_of] + np.bincount(family, square)) / (
        PRIOR_RUNS + np.bincount(family, freedom)
    )
    return np.asarray((PRIOR_RUNS * family_variance[family] + square) / (PRIOR_RUNS + freedom))


def _em_round(
    table: RunTable,
    y: FloatArray,
    rows: IntArray,
    count: IntArray,
    location: FloatArray,
    square: FloatArray,
    variance: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Return location and square again, with cut runs at their expected log length and spread."""
    from scipy.special import log_ndtr

    owner = table.request_of[rows]
    deviation = np.sqrt(np.where(variance > 0.0, variance, np.nan))[owner]
    below = (y[rows] - location[owner]) / deviation
    hazard = np.exp(-0.5 * below**2 - 0.5 * math.log(2 * math.pi) - log_ndtr(-below))
    cut = ~table.event_observed[rows] & np.isfinite(deviation)
    filled = np.where(cut, location[owner] + deviation * hazard, y[rows])
    extra = np.where(cut, deviation**2 * (1.0 + below * hazard - hazard**2), 0.0)
    touched = np.unique(owner)
    mean = np.bincount(owner, filled, len(count))[touched] / count[touched]
    location, square = location.copy(), square.copy()
    location[touched] = mean
    residual = (filled - location[owner]) ** 2 + extra
    square[touched] = np.bincount(owner, residual, len(count))[touched]
    return location, square
