"""Metrics of survival predictions, written out: concordance, likelihood, Brier score, CRPS.

Formulas are those of Harrell (1982), Uno et al. (2011), Graf et al. (1999) and Gneiting and Raftery
(2007); tests hold them to exact fractions on small fixtures, to scikit-learn and to scipy. Times
are whole tokens; ``event`` is False where a run was cut and is only known to be longer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from contracts.policy import FloatArray, IntArray
from contracts.signals import DistributionalSignal, SignalRequest

LEAST_PROBABILITY = 1e-9  # a log-likelihood must stay finite where a model ruled out what happened
_EVERY_TOKEN = 512  # horizons up to which a CRPS sums over every token; beyond, over a grid
_NUM_KNOTS = 192


def harrell_c(
    times: IntArray, event: np.ndarray, estimates: FloatArray, weights: FloatArray | None = None
) -> float:
    """Return the share of comparable pairs in the right order; equal estimates count half.

    A pair is comparable when the shorter was seen to end (at a tie: when one ended and the other
    was cut). ``weights`` (n,) count each row that often, as a bootstrap does.
    """
    return _weighted_c(concordant_pairs(times, event, estimates, np.ones(len(times))), weights)


def uno_c(
    times: IntArray,
    event: np.ndarray,
    estimates: FloatArray,
    tau: float | None = None,
    weights: FloatArray | None = None,
) -> float:
    """Return Uno's C: each comparable pair weighs 1 / G(shorter)^2, G the chance of not having been
    cut by then; only pairs whose shorter is below ``tau`` count (default: the longest time)."""
    pair = uno_pairs(times, event, tau)
    return _weighted_c(concordant_pairs(times, event, estimates, pair), weights)


def censoring_survival(times: IntArray, event: np.ndarray) -> Callable[[IntArray], FloatArray]:
    """Return G(t) = P(not cut by t), Kaplan-Meier with the roles exchanged: at a tie, those that
    ended left before those that were cut."""
    cut_times, cuts = np.unique(times[~event], return_counts=True)
    alive = np.array([(times >= t).sum() - ((times == t) & event).sum() for t in cut_times])
    curve = np.concatenate([[1.0], np.cumprod(1.0 - cuts / np.maximum(alive, 1))])

    def staying(at: IntArray) -> FloatArray:
        return np.asarray(curve[np.searchsorted(cut_times, at, side="right")])

    return staying


def brier_score(times: IntArray, event: np.ndarray, alive: FloatArray, horizon: float) -> float:
    """Return the mean of (P(longer than ``horizon``) - truth)^2, ``alive`` (n,) the predictions.

    Rows cut before the horizon get no say; the others speak for them (1 / G weights, Graf 1999).
    """
    staying = censoring_survival(times, event)
    later = times > horizon
    ended = (times <= horizon) & event
    share = np.zeros(len(times))
    at_horizon = float(staying(np.array([int(horizon)]))[0])
    before = np.maximum(staying(times), 1e-12)
    share[ended] = alive[ended] ** 2 / before[ended]
    share[later] = (1.0 - alive[later]) ** 2 / max(at_horizon, 1e-12)
    return float(share.mean())


def integrated_brier_score(
    times: IntArray, event: np.ndarray, alive: FloatArray, horizons: IntArray
) -> float:
    """Return the Brier score's mean over ``horizons`` (h,), rising, by the trapezoid rule;
    ``alive`` (n, h) are the predictions there."""
    scores = [brier_score(times, event, alive[:, j], horizon) for j, horizon in enumerate(horizons)]
    return float(np.trapezoid(scores, horizons) / (horizons[-1] - horizons[0]))


def log_likelihood(
    signal: DistributionalSignal,
    requests: list[SignalRequest],
    ages: IntArray,
    left: IntArray,
    known: np.ndarray,
) -> FloatArray:
    """Return log P(R = left) (n,), or log P(R > left) where the end is not ``known``; never below
    the logarithm of :data:`LEAST_PROBABILITY`."""
    beyond = signal.survival(requests, ages, left.astype(np.float64))
    before = signal.survival(requests, ages, left.astype(np.float64) - 1.0)
    return np.log(np.maximum(np.where(known, before - beyond, beyond), LEAST_PROBABILITY))


def crps(
    signal: DistributionalSignal, requests: list[SignalRequest], ages: IntArray, left: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return the CRPS (n,) in tokens and on log1p(R), of rows whose ``left`` is known.

    The integral of (P(R <= x) - 1[left <= x])^2 over x up to the cap: over every token up to 512,
    beyond that over a geometric grid.
    """
    rooms = np.array([r.max_tokens for r in requests]) - ages
    knots = [_horizons(int(room), int(r)) for room, r in zip(rooms, left, strict=True)]
    owner = np.repeat(np.arange(len(requests)), [len(h) - 1 for h in knots])
    at = np.concatenate([h[:-1] for h in knots])
    width = np.concatenate([np.diff(h) for h in knots])
    log_width = np.concatenate([np.diff(np.log1p(h)) for h in knots])
    asked = [requests[i] for i in owner.tolist()]
    ended = 1.0 - signal.survival(asked, ages[owner], at.astype(np.float64))
    error = (ended - (left[owner] <= at)) ** 2
    count = len(requests)
    return (
        np.bincount(owner, error * width, count).astype(np.float64),
        np.bincount(owner, error * log_width, count).astype(np.float64),
    )


def _horizons(room: int, left: int) -> IntArray:
    """Return whole horizons from 0 to the cap, with ``left`` among them."""
    if room <= _EVERY_TOKEN:
        return np.arange(room + 1)
    spaced = np.geomspace(1, room, _NUM_KNOTS).astype(np.int64)
    return np.unique(np.concatenate([[0, left], spaced, [room]]))


def concordant_pairs(
    times: IntArray, event: np.ndarray, estimates: FloatArray, pair: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return (right, total), (n, n) each: what the pair (i shorter, j) is worth, ``pair`` (n,) by
    i, and how much of it was ordered right. For up to a few thousand rows."""
    comparable = (times[None, :] > times[:, None]) | (
        (times[None, :] == times[:, None]) & ~event[None, :]
    )
    total = pair[:, None] * (comparable & event[:, None])
    sign = np.sign(estimates[None, :] - estimates[:, None])
    return total * (1.0 + sign) / 2.0, total


def uno_pairs(times: IntArray, event: np.ndarray, tau: float | None = None) -> FloatArray:
    """Return 1 / G(time)^2 (n,), 0 at times from ``tau`` on (default: the longest time)."""
    kept = event & (times < (float(times.max()) if tau is None else tau))
    staying = censoring_survival(times, event)(times)
    return np.divide(1.0, staying**2, out=np.zeros(len(times)), where=kept & (staying > 0))


def _weighted_c(pairs: tuple[FloatArray, FloatArray], weights: FloatArray | None) -> float:
    right, total = pairs
    w = np.ones(len(total)) if weights is None else weights
    worth = float(w @ total @ w)
    return float(w @ right @ w) / worth if worth > 0.0 else float("nan")
