"""Decisions in running sets: who is picked as victim, what that costs, how well a set is ordered.

Every function takes scores (s, k) of s sets of k requests, the highest of which is picked (ties
share the pick), and returns one number a set (s,).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from contracts.policy import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Meetings:
    """Where each run may be met: ``run`` (p,), ``age`` (p,), ``remaining`` (p,), a uniform ``draw``
    (p,); the meetings of run i stand at ``i * per_run`` and after."""

    run: IntArray
    age: IntArray
    remaining: IntArray
    draw: FloatArray
    per_run: int


def draw_meetings(lengths: IntArray, per_run: int, rng: np.random.Generator) -> Meetings:
    """Return ``per_run`` ages of each run, uniform over its life."""
    run = np.repeat(np.arange(len(lengths)), per_run)
    age = (rng.random(len(run)) * lengths[run]).astype(np.int64)
    return Meetings(run, age, lengths[run] - age, rng.random(len(run)), per_run)


def draw_sets(
    meetings: Meetings, weight: FloatArray, num_sets: int, size: int, rng: np.random.Generator
) -> IntArray:
    """Return meetings (s, k), of distinct runs in each set; a run is met with a chance that grows
    with its ``weight`` (n,): its length, times how often a bootstrap drew its prompt."""
    race = np.full((num_sets, len(weight)), np.inf)
    some = weight > 0.0
    race[:, some] = rng.standard_exponential((num_sets, int(some.sum()))) / weight[some]
    run = np.argpartition(race, size - 1, axis=1)[:, :size]
    which = rng.integers(0, meetings.per_run, run.shape)
    return np.asarray(run * meetings.per_run + which, dtype=np.int64)


def pick_share(scores: FloatArray) -> FloatArray:
    """Return the chance (s, k) of each request to be the victim."""
    picked = scores == scores.max(axis=1, keepdims=True)
    return np.asarray(picked / picked.sum(axis=1, keepdims=True))


def regret(scores: FloatArray, cost: FloatArray) -> FloatArray:
    """Return what the pick costs beyond the cheapest choice, as a share of the dearest."""
    least, most = cost.min(axis=1), cost.max(axis=1)
    paid = (pick_share(scores) * cost).sum(axis=1)
    share: FloatArray = np.zeros(len(cost))
    np.divide(paid - least, most, out=share, where=most > 0.0)
    return share


def top_1(scores: FloatArray, remaining: IntArray) -> FloatArray:
    """Return the chance that a longest-remaining request was picked."""
    longest = remaining == remaining.max(axis=1, keepdims=True)
    return np.asarray((pick_share(scores) * longest).sum(axis=1))


def early_kills(scores: FloatArray, remaining: IntArray) -> FloatArray:
    """Return the chance that the pick had less left than the set's median."""
    below = remaining < np.median(remaining, axis=1)[:, None]
    return np.asarray((pick_share(scores) * below).sum(axis=1))


def concordance(scores: FloatArray, remaining: IntArray) -> FloatArray:
    """Return the share of pairs in the right order, equal scores half; NaN without such a pair."""
    first, second = np.triu_indices(scores.shape[1], k=1)
    truth = np.sign(remaining[:, first] - remaining[:, second])
    guess = np.sign(scores[:, first] - scores[:, second])
    pairs = (truth != 0).sum(axis=1)
    right = ((1.0 + truth * guess) / 2.0 * (truth != 0)).sum(axis=1)
    share: FloatArray = np.full(len(pairs), np.nan)
    np.divide(right, pairs, out=share, where=pairs > 0)
    return share


def ndcg(scores: FloatArray, remaining: IntArray) -> FloatArray:
    """Return the normalised discounted gain, gain = remaining; tied scores share their places."""
    discount = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(scores.shape[1]) + 2.0))])
    above = (scores[:, None, :] > scores[:, :, None]).sum(axis=2)
    equal = (scores[:, None, :] == scores[:, :, None]).sum(axis=2)
    place = (discount[above + equal] - discount[above]) / equal
    ideal = (-np.sort(-remaining, axis=1) * np.diff(discount)).sum(axis=1)
    return np.asarray((place * remaining).sum(axis=1) / ideal)
