"""Whether probabilities mean what they say: PIT, D-calibration, coverage and width by age.

A row is one (run, age); the shares here are over rows as a scheduler meets them, since a bound is
promised among the requests that run. Means over requests of their own shares would count short
runs more, which an upper bound nearly always covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.policy import FloatArray, IntArray
from contracts.signals import DistributionalSignal, SignalRequest


@dataclass(frozen=True, slots=True)
class DCalibration:
    """``shares`` of the PIT in equal bins (censored rows spread over what is left to them), the
    chi-square against evenness and its p-value."""

    shares: tuple[float, ...]
    chi_square: float
    p_value: float


def randomised_pit(
    signal: DistributionalSignal,
    requests: Sequence[SignalRequest],
    ages: IntArray,
    left: IntArray,
    draw: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Return (pit, reached), (n,) each: P(R < left) + draw * P(R = left), uniform when calibrated,
    and P(R <= left), from which a censored row's PIT is uniform up to 1.

    ``draw`` (n,) is uniform; it spreads the mass of whole tokens, and that of the cap.
    """
    before = 1.0 - signal.survival(requests, ages, left.astype(np.float64) - 1.0)
    reached = 1.0 - signal.survival(requests, ages, left.astype(np.float64))
    return before + draw * (reached - before), reached


def d_calibration(
    pit: FloatArray, reached: FloatArray, known: np.ndarray, num_bins: int = 10
) -> DCalibration:
    """Return the D-calibration of Haider et al. (JMLR 2020): rows whose end is not ``known`` put
    their mass evenly on [reached, 1]. Rows must be independent: one for each prompt."""
    from scipy.stats import chi2

    edges = np.linspace(0.0, 1.0, num_bins + 1)
    mass = np.histogram(np.clip(pit[known], 0.0, 1.0), edges)[0].astype(np.float64)
    for start in reached[~known].tolist():
        inside = np.clip(edges[1:] - np.maximum(edges[:-1], start), 0.0, None)
        mass += inside / inside.sum() if inside.sum() > 0.0 else np.eye(num_bins)[-1]
    even = mass.sum() / num_bins
    chi_square = float(((mass - even) ** 2).sum() / even)
    p_value = float(chi2.sf(chi_square, num_bins - 1))
    return DCalibration(tuple((mass / mass.sum()).tolist()), chi_square, p_value)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often a bound held: over all rows, and in each tenth of rows by age.

    ``ages`` are the first ages of the tenths; ``at_cap`` is the share of rows whose bound is the
    cap itself, which covers always and tells nothing. ``width`` is the mean bound (or interval) in
    tokens; ``waste`` its mean excess over R where it held. ``by_request`` is the mean over requests
    of their own shares, beside ``overall``, which weighs a request by how long it runs.
    """

    bound: str
    overall: float
    by_age: tuple[float, ...]
    ages: tuple[int, ...]
    at_cap: float
    width: float
    waste: float
    by_request: float = float("nan")


def coverage(
    name: str,
    low: FloatArray,
    high: FloatArray,
    ages: IntArray,
    left: IntArray,
    caps: IntArray,
    weight: FloatArray | None = None,
    num_groups: int = 10,
    owner: IntArray | None = None,
) -> Coverage:
    """Return how often ``low`` <= R <= ``high`` held among rows (n,) of known R = ``left``.

    ``weight`` (n,) may undo that some prompts ran more often; it must not depend on lengths.
    ``owner`` (n,) numbers the requests, for ``by_request``.
    """
    w = np.ones(len(left)) if weight is None else weight
    held = (low <= left) & (left <= high)
    edges = np.unique(np.quantile(ages, np.arange(1, num_groups) / num_groups, method="higher"))
    group = np.searchsorted(edges, ages, side="right")
    count = np.bincount(group, w, len(edges) + 1)
    shares = np.bincount(group, w * held, len(edges) + 1)[count > 0] / count[count > 0]
    firsts = [int(ages[group == index].min()) for index in np.flatnonzero(count > 0).tolist()]
    return Coverage(
        bound=name,
        overall=float(np.average(held, weights=w)),
        by_age=tuple(shares.tolist()),
        ages=tuple(firsts),
        at_cap=float((high >= caps - ages).mean()),
        width=float((high - low).mean()),
        waste=float((high - left)[held].mean()) if held.any() else float("nan"),
        by_request=float("nan") if owner is None else _request_share(owner, held, w),
    )


def _request_share(owner: IntArray, held: np.ndarray, weight: FloatArray) -> float:
    """Return the mean over requests of their own shares, each request at its rows' weight."""
    _, member = np.unique(owner, return_inverse=True)
    count = np.bincount(member)
    own = np.bincount(member, held) / count
    return float(np.average(own, weights=np.bincount(member, weight) / count))
