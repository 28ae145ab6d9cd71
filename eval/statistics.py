"""Paired comparison over seeds. The unit of replication is the seed within a cell, never the
request: requests of one seed share a queue, so pooling them overstates what is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean of (treatment - baseline) over seeds with a two-sided t interval, in the unit given.

    ``correlation`` is that of the two series: near 1, common random numbers did their work.
    """

    mean: float
    low: float
    high: float
    sd: float
    num_seeds: int
    correlation: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies wholly on one side of 0."""
        return self.low > 0 or self.high < 0


def paired_difference(
    treatment: Sequence[float], baseline: Sequence[float], confidence: float = 0.95
) -> PairedDifference:
    """Return the paired difference of two series over the same seeds (Student's t on n - 1).

    Raises InvalidInput on unequal lengths, fewer than two seeds, or a NaN on either side.
    """
    from scipy import stats

    if len(treatment) != len(baseline):
        raise InvalidInput(
            f"{len(treatment)} seeds against {len(baseline)}: a paired difference needs the same"
        )
    if len(treatment) < 2:
        raise InvalidInput(f"{len(treatment)} seed(s): an interval needs at least 2")
    x, y = np.asarray(treatment, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if not np.isfinite(x - y).all():
        raise InvalidInput(
            "a breach rate is undetermined in some seed: let the run drain for at least one "
            "deadline after the last tagged arrival"
        )
    d = x - y
    sd = float(d.std(ddof=1))
    half = float(stats.t.ppf(0.5 + confidence / 2, len(d) - 1)) * sd / np.sqrt(len(d))
    both_vary = x.std() > 0 and y.std() > 0
    return PairedDifference(
        mean=float(d.mean()),
        low=float(d.mean() - half),
        high=float(d.mean() + half),
        sd=sd,
        num_seeds=len(d),
        correlation=float(np.corrcoef(x, y)[0, 1]) if both_vary else float("nan"),
    )
