"""What may be said about a difference: better, worse, equivalent within δ, or inconclusive.

"No significant difference" is not a finding. Either the interval lies inside a margin that was set
beforehand (two one-sided tests, Schuirmann 1987), or the study could not have seen an effect below
its minimum detectable one, and says how large that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray

Word = Literal["better", "worse", "equivalent", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``p_value`` is the family-wise one against no difference, ``equivalence_p`` that of the two
    one-sided tests against a difference of ``margin`` or more; ``mde`` is the minimum detectable
    effect. All but the p-values are in the unit of the differences (percentage points)."""

    word: Word
    p_value: float
    equivalence_p: float
    margin: float
    mde: float

    def __str__(self) -> str:
        if self.word == "equivalent":
            return f"equivalent within {self.margin:g} pp"
        if self.word == "inconclusive":
            return f"inconclusive (MDE {self.mde:.1f} pp)"
        return self.word


def judge(
    differences: Sequence[float] | FloatArray,
    p_value: float,
    margin: float,
    *,
    num_tests: int = 1,
    alpha: float = 0.05,
) -> Verdict:
    """Return the verdict on breach differences (treatment - baseline, percentage points) of seeds.

    Equivalence goes first: a difference known to be smaller than the margin is no reason to switch,
    however sure its sign. Lower breach is better. ``num_tests`` is the size of the family that
    ``p_value`` was adjusted for; the minimum detectable effect allows for it (Bonferroni). Raises
    InvalidInput for a margin that is not above 0.
    """
    if not 0.0 < margin < np.inf:
        raise InvalidInput(f"the equivalence margin is {margin} pp: set it above 0 beforehand")
    d = np.asarray(differences, dtype=np.float64)
    equivalence_p = two_one_sided_tests(d, margin)
    word: Word = "inconclusive"
    if equivalence_p <= alpha:
        word = "equivalent"
    elif p_value <= alpha:
        word = "better" if d.mean() < 0 else "worse"
    mde = minimum_detectable_effect(float(d.std(ddof=1)), len(d), alpha=alpha / num_tests)
    return Verdict(word, p_value, equivalence_p, margin, mde)


def two_one_sided_tests(differences: FloatArray, margin: float) -> float:
    """Return the p of |mean| >= ``margin``: at most α where the 1 - 2α interval is inside ±margin.

    Seeds that all agree have no spread to test with: p is then 0 inside the margin, 1 outside.
    """
    from scipy import stats

    d = np.asarray(differences, dtype=np.float64)
    mean, error = float(d.mean()), float(d.std(ddof=1)) / np.sqrt(len(d))
    if error == 0.0:
        return 0.0 if abs(mean) < margin else 1.0
    return float(stats.t.sf((margin - abs(mean)) / error, len(d) - 1))


def minimum_detectable_effect(
    sd: float, num_seeds: int, *, alpha: float = 0.05, power: float = 0.8
) -> float:
    """Return the true mean difference that a paired t test of ``num_seeds`` would find with
    probability ``power``, for differences of standard deviation ``sd`` (same unit)."""
    from scipy import optimize, stats

    if num_seeds < 2:
        raise InvalidInput(f"{num_seeds} seed(s): a minimum detectable effect needs at least 2")
    if sd == 0.0:
        return 0.0
    critical = float(stats.t.ppf(1 - alpha / 2, num_seeds - 1))

    def lacking(effect: float) -> float:
        # a rejection on the wrong side is no find (and at this power has almost no probability)
        return float(stats.nct.sf(critical, num_seeds - 1, effect * np.sqrt(num_seeds)) - power)

    most = 4.0 * critical / np.sqrt(num_seeds)  # in standard deviations: found almost surely
    return sd * float(optimize.brentq(lacking, 0.0, most))


def default_margin(baseline_breach_pp: float) -> float:
    """Return min(1 pp, a tenth of the baseline's breach), at least 0.1 pp: the margin of a study
    whose configuration sets none. It must come from pilot seeds, never from the seeds judged."""
    return max(0.1, min(1.0, 0.1 * baseline_breach_pp))
