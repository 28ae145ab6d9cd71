"""Many comparisons at once: the exact sign-flip max-T test over a family, Holm and BY for lists.

Under the null hypothesis of no difference in any cell, a seed's differences from the baseline are
as likely as their negatives, for all policies together; so flipping whole seeds generates the
joint distribution, shared baseline noise included (Westfall and Young 1993, single step).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.randomness import keyed_generator

EXACT_UP_TO = 16  # seeds: 2^16 flips; more are sampled
NUM_SAMPLED = 20_000
ROUNDING = 1e-9  # two sums of the same numbers in another order are a tie


@lru_cache(maxsize=4)
def sign_flips(num_seeds: int) -> FloatArray:
    """Return (m, n) rows of +1 and -1: all 2^n for up to 16 seeds, else 20,000 keyed ones. The
    first row changes nothing."""
    if num_seeds <= EXACT_UP_TO:
        bits = np.arange(2**num_seeds)[:, None] >> np.arange(num_seeds) & 1
    else:
        bits = keyed_generator(0, "sign-flips", num_seeds).integers(0, 2, (NUM_SAMPLED, num_seeds))
        bits[0] = 0
    return np.asarray(1.0 - 2.0 * bits, dtype=np.float64)


def max_t(differences: FloatArray) -> FloatArray:
    """Return the family-wise two-sided p of every column.

    ``differences`` (n, p) are treatment - baseline of n seeds. The statistic is |sum| / sqrt(sum of
    squares), which orders flips as |t| does (squares do not change) and is 0, not NaN, for a column
    of zeros, whose p is 1. No p lies below 2^(1 - n): five seeds never reach .05. Raises
    InvalidInput for fewer than two seeds, no column, or a value that is not finite.
    """
    d = np.asarray(differences, dtype=np.float64)
    if d.ndim != 2 or len(d) < 2 or not d.shape[1]:
        raise InvalidInput(
            f"differences have shape {d.shape}: give at least 2 seeds (rows) and a policy (column)"
        )
    if not np.isfinite(d).all():
        raise InvalidInput(
            "a difference is not a number: a breach rate is undetermined in some seed, so let the "
            "run drain for at least one deadline after the last tagged arrival"
        )
    size = np.sqrt((d * d).sum(axis=0))
    flipped = np.abs(sign_flips(len(d)) @ d) / np.where(size > 0, size, 1.0)
    observed = flipped[0]
    highest = np.sort(flipped.max(axis=1))
    as_high = len(highest) - np.searchsorted(highest, observed * (1 - ROUNDING), side="left")
    return np.asarray(as_high / len(highest), dtype=np.float64)


def holm(p_values: FloatArray) -> FloatArray:
    """Return Holm's step-down adjustment: family-wise error, any dependence."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    scaled = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(scaled, 1.0)
    return adjusted


def benjamini_yekutieli(p_values: FloatArray) -> FloatArray:
    """Return the BY adjustment: false discovery rate, any dependence (cells share seeds)."""
    from scipy import stats

    return np.asarray(stats.false_discovery_control(p_values, method="by"), dtype=np.float64)
