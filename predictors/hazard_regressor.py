"""gbm-hazard as a scikit-learn estimator: any feature table, remaining tokens, censored rows too.

For tables of one's own, pipelines and searches; the recipe (``preemptbench train``) is the way to a
checkpoint that an engine can load. Both learn the same model: on the recipe's features, landmarks
and edges the estimator answers to the bit what the recipe's predictor does (a test holds it to it).
Needs scikit-learn: this module is imported by name only.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from contracts.errors import InvalidInput, missing_dependency
from contracts.policy import FloatArray
from predictors.base import check_level, curve_quantile
from predictors.boosting import BoostingSettings, grow_trees
from predictors.gbm_hazard import binary_rows
from predictors.trees import raw_scores_swept

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils import Tags, check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise missing_dependency("scikit-learn", "train", "the scikit-learn estimator") from error


class HazardRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Discrete-time hazard with boosted trees: ``predict`` answers the median of what remains.

    ``edges`` (b,) are the horizons between which the chance to end is learned, rising, above 0; by
    default ``num_bins`` of them, evenly spaced on a log scale between the shortest and the longest
    row seen to end. The other parameters are those of BoostingSettings. ``random_state`` seeds the
    choice of columns, ``n_jobs`` is the number of LightGBM's threads.

    Fitted: ``edges_`` (b,), ``trees_`` (the exported arrays).
    """

    def __init__(
        self,
        *,
        num_bins: int = 16,
        edges: Any = None,
        num_trees: int = 150,
        learning_rate: float = 0.08,
        num_leaves: int = 15,
        min_rows_per_leaf: int = 40,
        feature_share: float = 0.5,
        l2: float = 5.0,
        random_state: Any = 0,
        n_jobs: int = 1,
    ) -> None:
        self.num_bins = num_bins
        self.edges = edges
        self.num_trees = num_trees
        self.learning_rate = learning_rate
        self.num_leaves = num_leaves
        self.min_rows_per_leaf = min_rows_per_leaf
        self.feature_share = feature_share
        self.l2 = l2
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        sample_weight: Any = None,
        event_observed: Any = None,
        watched: Any = None,
    ) -> Self:
        """Fit on features ``X`` (n, f), NaN where unknown, and ``y`` (n,), what remained, above 0.

        ``event_observed`` (n,) is False where the row was cut after ``y`` (default: all ended).
        ``watched`` (n,) is how far each row could have been followed, such as cap - age: a bin
        beyond it enters neither as ended nor as survived. ``sample_weight`` of w is w equal rows.
        Raises ValueError (scikit-learn's checks) or InvalidInput when no row was seen to end.
        """
        X, y = validate_data(  # noqa: N806
            self, X, y, dtype=np.float64, ensure_all_finite="allow-nan", y_numeric=True
        )
        weight = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        if (y <= 0).any():
            raise ValueError(f"y holds {y.min():g}: what remains must be above 0")
        observed = _column(event_observed, True, len(y), "event_observed")
        reach = _column(watched, np.inf, len(y), "watched")
        rows, weight = _merged(np.column_stack([X, y, observed, reach]), weight)
        known, left, reach = rows[:, :-3], rows[:, -3], rows[:, -1]
        has_ended = rows[:, -2] > 0
        if not has_ended.any():
            raise InvalidInput(
                f"none of {len(y)} rows was seen to end: a hazard needs endings; follow rows longer"
            )
        self.edges_ = self._chosen_edges(left[has_ended])
        owner, bins, ended = binary_rows(left, has_ended, reach, self.edges_)
        self.trees_ = grow_trees(
            np.column_stack([known[owner], self.edges_[bins]]),
            ended.astype(np.float64),
            weight[owner],
            self._boosting(),
            {"objective": "binary"},
            seed=self._seed(),
            num_threads=self.n_jobs,
        )
        return self

    def predict(self, X: Any) -> FloatArray:  # noqa: N803
        """Return the median (n,) of what remains; the last edge where it lies beyond."""
        return self.predict_quantile(X, 0.5)

    def predict_quantile(self, X: Any, level: float) -> FloatArray:  # noqa: N803
        """Return the quantile (n,) at ``level``, in (0, 1); the last edge where it lies beyond."""
        check_level(level)
        alive = self.predict_survival(X)
        curve = np.column_stack([np.ones(len(alive)), alive])
        knots = np.concatenate([[0.0], self.edges_])
        return np.asarray(np.minimum(curve_quantile(knots, curve, level), knots[-1]))

    def predict_survival(self, X: Any) -> FloatArray:  # noqa: N803
        """Return P(remaining > ``edges_``) (n, b), falling along a row."""
        check_is_fitted(self)
        X = validate_data(  # noqa: N806
            self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False
        )
        rows = np.column_stack([X, np.zeros(len(X))])
        log_odds = raw_scores_swept(self.trees_, rows, self.edges_)
        return np.asarray(np.exp(-np.cumsum(np.logaddexp(0.0, log_odds), axis=1)))

    def __sklearn_tags__(self) -> Tags:
        """Say that features may be NaN and that the target is above 0."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.target_tags.positive_only = True
        return tags

    def _chosen_edges(self, ends: FloatArray) -> FloatArray:
        if self.edges is None:
            if self.num_bins < 1:
                raise InvalidInput(f"num_bins is {self.num_bins}: it must be at least 1")
            edges = np.unique(np.geomspace(ends.min(), ends.max(), self.num_bins))
        else:
            edges = np.asarray(self.edges, dtype=np.float64)
        if edges.ndim != 1 or not edges.size or edges[0] <= 0 or (np.diff(edges) <= 0).any():
            raise InvalidInput(f"edges are {edges.tolist()}: they must rise from above 0")
        return edges

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


def _column(values: Any, default: float, count: int, name: str) -> FloatArray:
    """Return ``values`` as (count,) float64, or so many defaults."""
    if values is None:
        return np.full(count, float(default))
    column = np.asarray(values, dtype=np.float64)
    if column.shape != (count,) or np.isnan(column).any():
        raise InvalidInput(
            f"{name} has shape {column.shape} for {count} rows: give one number for each"
        )
    return column


def _merged(rows: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the distinct rows in a fixed order with their summed weights, none of weight 0.

    LightGBM counts rows against ``min_rows_per_leaf`` whatever they weigh; where equal rows are one
    row, a weight of two and a row given twice are the same table, and so is any order of the rows.
    """
    some = weight > 0
    distinct, member = np.unique(rows[some], axis=0, return_inverse=True)
    summed = np.zeros(len(distinct))
    np.add.at(summed, member.ravel(), weight[some])
    return distinct, summed
