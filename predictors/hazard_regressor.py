"""gbm-hazard as a scikit-learn estimator: any feature table, remaining tokens, censored rows too.

For tables of one's own, pipelines and searches; the recipe (``preemptbench train``) is the way to a
checkpoint that an engine can load. Both learn the same model: on the recipe's features, landmarks
and edges the estimator answers to the bit what the recipe's predictor does (a test holds it to it).
Needs scikit-learn: this module is imported by name only.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from predictors.base import check_level, curve_quantile
from predictors.boosted_regressor import BoostedRegressor, merged_rows
from predictors.boosting import grow_trees
from predictors.gbm_hazard import binary_rows, binary_table
from predictors.trees import raw_scores_swept


class HazardRegressor(BoostedRegressor):
    """Discrete-time hazard with boosted trees: ``predict`` answers the median of what remains.

    ``edges`` (b,) are the horizons between which the chance to end is learned, rising, above 0; by
    default ``num_bins`` of them, evenly spaced on a log scale between the shortest and the longest
    row seen to end. The other parameters are those of BoostedRegressor.

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
        self.num_bins = num_bins
        self.edges = edges

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
        X, y, weight = self._training_table(X, y, sample_weight)  # noqa: N806
        observed = _column(event_observed, True, len(y), "event_observed")
        reach = _column(watched, np.inf, len(y), "watched")
        rows, weight = merged_rows(np.column_stack([X, y, observed, reach]), weight)
        known, left, reach = rows[:, :-3], rows[:, -3], rows[:, -1]
        has_ended = rows[:, -2] > 0
        if not has_ended.any():
            raise InvalidInput(
                f"none of {len(y)} rows was seen to end: a hazard needs endings; follow rows longer"
            )
        self.edges_ = self._chosen_edges(left[has_ended])
        owner, bins, ended = binary_rows(left, has_ended, reach, self.edges_)
        self.trees_ = grow_trees(
            binary_table(known, owner, self.edges_[bins]),
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
        X = self._features(X)  # noqa: N806
        rows = np.column_stack([X, np.zeros(len(X))])
        log_odds = raw_scores_swept(self.trees_, rows, self.edges_)
        return np.asarray(np.exp(-np.cumsum(np.logaddexp(0.0, log_odds), axis=1)))

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
