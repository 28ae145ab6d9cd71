"""countdown as a scikit-learn estimator: quantiles of a total length from any feature table.

For tables of one's own, pipelines and searches; on the recipe's features the estimator grows the
trees of the recipe (a test holds it to it). A total minus an age is the countdown; the tail that
the predictor repairs with age-km is no matter of a table. Needs scikit-learn: this module is
imported by name only.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Self

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from predictors.boosted_regressor import BoostedRegressor, merged_rows
from predictors.countdown import LEVELS, grow_quantiles, total_quantiles


class CountdownRegressor(BoostedRegressor):
    """Boosted trees under the quantile loss on log totals: ``predict`` answers the median total.

    The parameters are those of BoostedRegressor. Fitted: ``trees_`` (the exported arrays of each
    of LEVELS).
    """

    def __init__(
        self,
        *,
        num_trees: int = 100,
        learning_rate: float = 0.08,
        num_leaves: int = 8,
        min_rows_per_leaf: int = 20,
        feature_share: float = 0.5,
        l2: float = 5.0,
        random_state: Any = 0,
        n_jobs: int = 1,
    ) -> None:
        super().__init__(
            num_trees=num_trees,
            learning_rate=learning_rate,
            num_leaves=num_leaves,
            min_rows_per_leaf=min_rows_per_leaf,
            feature_share=feature_share,
            l2=l2,
            random_state=random_state,
            n_jobs=n_jobs,
        )

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Fit on features ``X`` (n, f), NaN where unknown, and totals ``y`` (n,), above 0.

        A row cut at a cap enters with the cap: every quantile below the cap stays right (Powell
        1986). ``sample_weight`` of w is w equal rows. Raises ValueError (scikit-learn's checks).
        """
        X, y, weight = self._training_table(X, y, sample_weight)  # noqa: N806
        rows, weight = merged_rows(np.column_stack([X, y]), weight)
        self.trees_ = grow_quantiles(
            rows[:, :-1],
            rows[:, -1],
            weight,
            self._boosting(),
            seed=self._seed(),
            num_threads=self.n_jobs,
        )
        return self

    def predict(self, X: Any) -> FloatArray:  # noqa: N803
        """Return the median (n,) of the total."""
        return self.predict_quantile(X, 0.5)

    def predict_quantile(self, X: Any, level: float) -> FloatArray:  # noqa: N803
        """Return the quantile (n,) at ``level``; between two of LEVELS, on a straight line.

        Raises InvalidInput for a level outside LEVELS: nothing was learned there.
        """
        if not LEVELS[0] <= level <= LEVELS[-1]:
            raise InvalidInput(
                f"quantile level is {level}: countdown learns {LEVELS[0]} to {LEVELS[-1]}; use "
                "HazardRegressor for others"
            )
        features = self._features(X)  # first: it says so when nothing was fitted
        totals = total_quantiles(self.trees_, features)
        slot = max(1, bisect_left(LEVELS, level))
        share = (level - LEVELS[slot - 1]) / (LEVELS[slot] - LEVELS[slot - 1])
        return np.asarray((1.0 - share) * totals[:, slot - 1] + share * totals[:, slot])
