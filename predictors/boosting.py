"""Training boosted trees: the one place that calls LightGBM, and the one set of knobs for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.policy import FloatArray
from contracts.settings import require
from predictors.trees import TreeEnsemble, from_lightgbm

_MAX_LEAVES = 256


@dataclass(frozen=True, slots=True)
class BoostingSettings:
    """How trees are grown. ``feature_share`` is the share of columns each tree may use."""

    num_trees: int = 150
    learning_rate: float = 0.08
    num_leaves: int = 15
    min_rows_per_leaf: int = 40
    feature_share: float = 0.5
    l2: float = 5.0

    def __post_init__(self) -> None:
        require(
            self,
            ("num_trees", 1 <= self.num_trees <= 10_000, "between 1 and 10000"),
            ("learning_rate", 0.0 < self.learning_rate <= 1.0, "above 0 and at most 1"),
            ("num_leaves", 2 <= self.num_leaves <= _MAX_LEAVES, f"between 2 and {_MAX_LEAVES}"),
            ("min_rows_per_leaf", self.min_rows_per_leaf >= 1, "at least 1"),
            ("feature_share", 0.0 < self.feature_share <= 1.0, "above 0 and at most 1"),
            ("l2", self.l2 >= 0.0, "at least 0"),
        )


def grow_trees(
    rows: FloatArray,
    labels: FloatArray,
    weights: FloatArray,
    settings: BoostingSettings,
    objective: dict[str, str | float],
    *,
    seed: int,
    num_threads: int,
    group: Sequence[int] | None = None,
) -> TreeEnsemble:
    """Fit LightGBM to ``rows`` (n, f) and return its trees as arrays; same bytes for same input.

    ``objective`` holds LightGBM's objective and its own parameters; ``group`` the sizes of the
    sets, one after another, inside which a ranking is learned. One thread is the default
    everywhere: on tables this small, threads that share their cores with other work wait on each
    other (measured: 2.8 s with one thread, 47 s with two on two busy cores).
    """
    import lightgbm

    params = {
        **objective,
        "learning_rate": settings.learning_rate,
        "num_leaves": settings.num_leaves,
        "min_data_in_leaf": settings.min_rows_per_leaf,
        "feature_fraction": settings.feature_share,
        "lambda_l2": settings.l2,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": num_threads,
        "verbosity": -1,
    }
    data = lightgbm.Dataset(np.ascontiguousarray(rows), labels, weight=weights, group=group)
    booster = lightgbm.train(params, data, num_boost_round=settings.num_trees)
    return from_lightgbm(booster, rows.shape[1])
