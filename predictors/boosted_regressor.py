"""What the scikit-learn estimators share: the parameters of boosting, checked and merged rows.

Needs scikit-learn: this module, and those of the estimators, are imported by name only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from contracts.errors import missing_dependency
from contracts.policy import FloatArray
from predictors.boosting import BoostingSettings

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils import Tags, check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise missing_dependency("scikit-learn", "train", "the scikit-learn estimator") from error


class BoostedRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """The base of the estimators: positive targets, features that may be NaN.

    The parameters are those of BoostingSettings; ``random_state`` seeds the choice of columns,
    ``n_jobs`` is the number of LightGBM's threads.
    """

    def __init__(
        self,
        *,
        num_trees: int = 150,
        learning_rate: float = 0.08,
        num_leaves: int = 15,
        min_rows_per_leaf: int = 40,
        feature_share: float = 0.5,
        l2: float = 5.0,
        random_state: Any = 0,
        n_jobs: int = 1,
    ) -> None:
        self.num_trees = num_trees
        self.learning_rate = learning_rate
        self.num_leaves = num_leaves
        self.min_rows_per_leaf = min_rows_per_leaf
        self.feature_share = feature_share
        self.l2 = l2
        self.random_state = random_state
        self.n_jobs = n_jobs

    def __sklearn_tags__(self) -> Tags:
        """Say that features may be NaN and that the target is above 0."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.target_tags.positive_only = True
        return tags

    def _training_table(
        self,
        X: Any,  # noqa: N803
        y: Any,
        sample_weight: Any,
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return features (n, f), target (n,) above 0 and weights (n,), checked; ValueError."""
        X, y = validate_data(  # noqa: N806
            self, X, y, dtype=np.float64, ensure_all_finite="allow-nan", y_numeric=True
        )
        weight = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        if (y <= 0).any():
            raise ValueError(f"y holds {y.min():g}: a number of tokens must be above 0")
        return X, y, weight

    def _features(self, X: Any) -> FloatArray:  # noqa: N803
        """Return the features (n, f) to answer for, once fitted."""
        check_is_fitted(self)
        found = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
        return np.asarray(found)

    def _seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _boosting(self) -> BoostingSettings:
        return BoostingSettings(
            num_trees=self.num_trees,
            learning_rate=self.learning_rate,
            num_leaves=self.num_leaves,
            min_rows_per_leaf=self.min_rows_per_leaf,
            feature_share=self.feature_share,
            l2=self.l2,
        )


def merged_rows(rows: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the distinct rows in a fixed order with their summed weights, none of weight 0.

    LightGBM counts rows against ``min_rows_per_leaf`` whatever they weigh; where equal rows are one
    row, a weight of two and a row given twice are the same table, and so is any order of the rows.
    """
    some = weight > 0
    distinct, member = np.unique(rows[some], axis=0, return_inverse=True)
    summed = np.zeros(len(distinct))
    np.add.at(summed, member.ravel(), weight[some])
    return distinct, summed
