"""Exported trees answer as LightGBM does, and no bad array gets past the checks."""

from __future__ import annotations

import lightgbm
import numpy as np
import pytest

from contracts.errors import InvalidInput
from predictors.quick_trees import quick_scores, quick_trees
from predictors.trees import (
    ARRAY_NAMES,
    TreeEnsemble,
    checked,
    from_lightgbm,
    from_tensors,
    raw_scores,
    raw_scores_numpy,
    raw_scores_swept,
)

NUM_FEATURES = 6
EDGES = np.array([2.0, 4.0, 8.0, 16.0, 32.0])


def _rows(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, NUM_FEATURES))
    rows[rng.random(rows.shape) < 0.15] = np.nan
    rows[rng.random(rows.shape) < 0.15] = 0.0
    rows[:, -1] = rng.choice(EDGES, count)
    return rows


def _booster(**params: object) -> lightgbm.Booster:
    rows = _rows(3000, 0)
    rng = np.random.default_rng(1)
    score = np.nan_to_num(rows[:, 0], nan=1.0) + np.log(rows[:, -1]) * np.nan_to_num(rows[:, 1])
    labels = (score + rng.normal(size=len(rows)) > 0.5).astype(float)
    given = {"objective": "binary", "num_leaves": 15, "num_threads": 1, "verbosity": -1, **params}
    return lightgbm.train(given, lightgbm.Dataset(rows, labels), num_boost_round=40)


@pytest.fixture(scope="module")
def trees() -> TreeEnsemble:
    return from_lightgbm(_booster(), NUM_FEATURES)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"zero_as_missing": True},
        {"use_missing": False},
        {"objective": "quantile", "alpha": 0.3},
        {"min_data_in_leaf": 5000},  # no split at all: every tree is one leaf
    ],
)
def test_scores_equal_lightgbm(params: dict[str, object]) -> None:
    booster = _booster(**params)
    trees = from_lightgbm(booster, NUM_FEATURES)
    rows = _rows(2000, 2)
    expected = booster.predict(rows, raw_score=True)
    np.testing.assert_allclose(raw_scores(trees, rows), expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(raw_scores_numpy(trees, rows), expected, rtol=0, atol=1e-9)


def test_missing_values_are_exercised() -> None:
    kinds = [_booster(**p) for p in ({}, {"zero_as_missing": True}, {"use_missing": False})]
    seen = [set(from_lightgbm(kind, NUM_FEATURES).missing.tolist()) for kind in kinds]
    assert 2 in seen[0] and 1 in seen[1] and seen[2] == {0}


def test_a_sweep_equals_one_call_a_value(trees: TreeEnsemble) -> None:
    rows = _rows(300, 3)
    swept = raw_scores_swept(trees, rows, EDGES)
    for column, edge in enumerate(EDGES):
        rows[:, -1] = edge
        np.testing.assert_array_equal(swept[:, column], raw_scores(trees, rows))


def test_a_sweep_between_and_beyond_thresholds(trees: TreeEnsemble) -> None:
    values = np.array([0.5, 3.0, 3.5, 5.0, 1e6])
    rows = _rows(200, 4)
    swept = raw_scores_swept(trees, rows, values)
    for column, value in enumerate(values):
        rows[:, -1] = value
        np.testing.assert_array_equal(swept[:, column], raw_scores_numpy(trees, rows))


def test_arrays_round_trip(trees: TreeEnsemble) -> None:
    again = from_tensors(trees.to_tensors("t."), "t.", NUM_FEATURES)
    rows = _rows(100, 5)
    np.testing.assert_array_equal(raw_scores(again, rows), raw_scores(trees, rows))


def _first_inner(trees: TreeEnsemble) -> int:
    return int(np.flatnonzero(trees.feature >= 0)[0])


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("feature", NUM_FEATURES, "a column below"),
        ("feature", -2, "-1 or a column"),
        ("left", 0, "must lie behind its parent"),
        ("right", 10**9, "inside its tree"),
        ("right", 1, "parents"),
        ("missing", 3, "0, 1 or 2"),
        ("default_left", 2, "0 or 1"),
        ("threshold", np.nan, "finite"),
        ("value", np.inf, "finite"),
        ("tree_offsets", 5, "tree_offsets must rise"),
    ],
)
def test_a_bad_entry_is_refused(trees: TreeEnsemble, name: str, value: float, says: str) -> None:
    arrays = {key: getattr(trees, key).copy() for key in ARRAY_NAMES}
    arrays[name][_first_inner(trees)] = value
    with pytest.raises(InvalidInput, match=says):
        checked(NUM_FEATURES, arrays)


def test_bad_shapes_and_types_are_refused(trees: TreeEnsemble) -> None:
    good = {key: getattr(trees, key) for key in ARRAY_NAMES}
    for name, broken, says in (
        ("left", good["left"][:-1], "all must have as many"),
        ("value", good["value"].astype(np.float32), "must be float64"),
        ("feature", good["feature"].reshape(1, -1), "with 2 dimensions"),
        ("tree_offsets", np.array([0, 0, len(good["left"])]), "without an empty tree"),
    ):
        with pytest.raises(InvalidInput, match=says):
            checked(NUM_FEATURES, {**good, name: broken})
    with pytest.raises(InvalidInput, match="missing under"):
        from_tensors({}, "t.", NUM_FEATURES)


def test_rows_of_another_width_are_refused(trees: TreeEnsemble) -> None:
    with pytest.raises(InvalidInput, match="read 6 columns"):
        raw_scores(trees, np.zeros((2, 5)))
    with pytest.raises(InvalidInput, match="must be positive and rise"):
        raw_scores_swept(trees, np.zeros((2, 6)), np.array([4.0, 2.0]))


def test_a_categorical_split_is_refused() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 5, size=(500, 1)).astype(float)
    data = lightgbm.Dataset(rows, (rows[:, 0] % 2).astype(float), categorical_feature=[0])
    booster = lightgbm.train({"objective": "binary", "verbosity": -1, "num_threads": 1}, data, 3)
    with pytest.raises(InvalidInput, match="only numerical splits"):
        from_lightgbm(booster, 1)


@pytest.mark.parametrize(
    "params", [{}, {"use_missing": False}, {"num_leaves": 64}, {"min_data_in_leaf": 5000}]
)
def test_masked_bits_find_the_leaf_that_a_walk_finds(params: dict[str, object]) -> None:
    trees = from_lightgbm(_booster(**params), NUM_FEATURES)
    plan = quick_trees(trees, EDGES)
    assert plan is not None
    for count in (1, 7, 600):  # below, at and across the blocks of rows
        rows = _rows(count, 3)
        np.testing.assert_array_equal(
            quick_scores(plan, rows), raw_scores_swept(trees, rows, EDGES)
        )


@pytest.mark.parametrize("params", [{"num_leaves": 65}, {"zero_as_missing": True}])
def test_trees_that_must_be_walked(params: dict[str, object]) -> None:
    assert quick_trees(from_lightgbm(_booster(**params), NUM_FEATURES), EDGES) is None
