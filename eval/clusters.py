"""Which policies belong together: compact letters, and the set that may hold the best.

Letters may overlap, and that is honest: A and B, B and C can be indistinguishable while A and C
are not. Both take losses (breach, say) of the same seeds for every policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from eval.multiplicity import ROUNDING, max_t, sign_flips


def pairwise_p(losses: FloatArray) -> FloatArray:
    """Return (p, p) family-wise p-values of all pairs of columns of ``losses`` (seeds, policies);
    one max-T family; 1 on the diagonal."""
    count = losses.shape[1]
    out = np.ones((count, count))
    pairs = list(combinations(range(count), 2))
    if pairs:
        p = max_t(np.stack([losses[:, i] - losses[:, j] for i, j in pairs], axis=1))
        for (i, j), value in zip(pairs, p, strict=True):
            out[i, j] = out[j, i] = value
    return out


def compact_letters(
    names: Sequence[str], p_values: FloatArray, order: Sequence[float], *, alpha: float = 0.05
) -> dict[str, str]:
    """Return letters such that two policies share one if and only if they do not differ at
    ``alpha`` (insert-and-absorb, Piepho 2004). ``order`` (the mean loss, say) names the groups: the
    group of the smallest is a."""
    groups = [set(range(len(names)))]
    for i, j in combinations(range(len(names)), 2):
        if p_values[i, j] > alpha:
            continue
        split = [group for group in groups if {i, j} <= group]
        groups = [group for group in groups if not {i, j} <= group]
        for candidate in (group - {k} for group in split for k in (i, j)):
            if not any(candidate <= group for group in groups):
                groups = [group for group in groups if not group <= candidate] + [candidate]
    groups.sort(key=lambda group: sorted(order[i] for i in group))
    letters = ["" for _ in names]
    for at, group in enumerate(groups):
        for i in group:
            letters[i] += _letter(at)
    return dict(zip(names, letters, strict=True))


def _letter(at: int) -> str:
    """Return a, b, …, z, a1, b1, …"""
    round_, place = divmod(at, 26)
    return chr(ord("a") + place) + (str(round_) if round_ else "")


def model_confidence_set(names: Sequence[str], losses: FloatArray) -> dict[str, float]:
    """Return each policy's p of belonging to the set that holds the best with the chosen
    confidence: at level α, keep those with p >= α (Hansen, Lunde and Nason 2011).

    Policies leave one by one, the worst first, while a max-T test over all pairs of those left
    rejects that they are equal. The test is the sign-flip one, exact for few seeds; the authors'
    bootstrap keeps all of eleven equal policies in a third of studies of six seeds where 95 % are
    due (docs/statistics.md). Policies that are equal in every seed stand and fall together.
    """
    losses = np.asarray(losses, dtype=np.float64)
    if losses.ndim != 2 or losses.shape[1] != len(names) or len(losses) < 2:
        raise InvalidInput(
            f"losses have shape {losses.shape} for {len(names)} policies: one column each, and at "
            "least 2 seeds"
        )
    count = len(names)
    first, second = np.triu_indices(count, 1)
    d = losses[:, first] - losses[:, second]
    size = np.sqrt((d * d).sum(axis=0))
    size = np.where(size > 1e-12, size, np.inf)  # equal in every seed: the statistic is 0
    flipped = np.abs(sign_flips(len(d)) @ (d / size))
    t = np.zeros((count, count))
    t[first, second] = d.sum(axis=0) / size
    t -= t.T
    left, p_values, highest = list(range(count)), {}, 0.0
    while len(left) > 1:
        within = np.isin(first, left) & np.isin(second, left)
        largest = flipped[:, within].max(axis=1)
        p = float((largest >= largest[0] * (1 - ROUNDING)).mean())
        highest = max(highest, p)
        worst = t[np.ix_(left, left)].max(axis=1)
        gone = [i for i, value in zip(left, worst, strict=True) if value >= worst.max() - 1e-12]
        if len(gone) == len(left):
            break
        for i in gone:
            p_values[names[i]] = highest
        left = [i for i in left if i not in gone]
    return {name: p_values.get(name, 1.0) for name in names}
