"""Boosted trees as plain arrays: exported from LightGBM, checked on load, evaluated here.

LightGBM's text-model parser crashes or hangs on damaged files, so no such file is ever read. An
ensemble is a handful of arrays whose every index is checked first: children lie behind their
parent inside one tree, so an evaluation always ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray

try:
    import numba
except ImportError:  # a serving engine's environment may lack it: then the numpy twin answers
    numba = None

CAN_COMPILE = numba is not None

MAX_NODES = 5_000_000
LEAF = -1
_MISSING_TYPES = {"None": 0, "Zero": 1, "NaN": 2}
_ZERO = 1e-35  # LightGBM's kZeroThreshold: what counts as zero where zero means missing


class _Booster(Protocol):
    def dump_model(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, eq=False)
class TreeEnsemble:
    """The sum of many regression trees over ``num_features`` columns.

    Nodes (m,) of all trees stand one after another, parents before children: tree t owns
    ``[tree_offsets[t], tree_offsets[t + 1])`` and its root comes first. ``feature`` is -1 at a
    leaf, whose answer is ``value``. ``x <= threshold`` goes ``left``. ``missing`` says which
    values follow ``default_left`` instead: 0 none (NaN counts as 0), 1 zeros and NaN, 2 NaN.
    Built only through :func:`checked`.
    """

    num_features: int
    feature: IntArray
    threshold: FloatArray
    left: IntArray
    right: IntArray
    missing: IntArray
    default_left: IntArray
    value: FloatArray
    tree_offsets: IntArray

    @property
    def num_trees(self) -> int:
        return len(self.tree_offsets) - 1

    def to_tensors(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays by name, each name starting with ``prefix``."""
        return {prefix + name: getattr(self, name) for name in ARRAY_NAMES}


ARRAY_NAMES = tuple(field.name for field in fields(TreeEnsemble) if field.name != "num_features")
_FLOAT_ARRAYS = frozenset(("threshold", "value"))


def from_tensors(tensors: Mapping[str, np.ndarray], prefix: str, num_features: int) -> TreeEnsemble:
    """Return the checked ensemble of what ``to_tensors`` gave; raises InvalidInput."""
    absent = [name for name in ARRAY_NAMES if prefix + name not in tensors]
    if absent:
        raise InvalidInput(f"tree arrays {', '.join(absent)} are missing under {prefix!r}")
    return checked(num_features, {name: tensors[prefix + name] for name in ARRAY_NAMES})


def from_lightgbm(booster: _Booster, num_features: int) -> TreeEnsemble:
    """Return the arrays of a freshly trained booster (numerical splits only)."""
    columns: dict[str, list[float]] = {name: [] for name in ARRAY_NAMES}
    columns["tree_offsets"].append(0)
    for tree in booster.dump_model()["tree_info"]:
        _append_node(tree["tree_structure"], columns)
        columns["tree_offsets"].append(len(columns["feature"]))
    kinds = {name: np.float64 if name in _FLOAT_ARRAYS else np.int64 for name in ARRAY_NAMES}
    arrays = {name: np.array(column, dtype=kinds[name]) for name, column in columns.items()}
    return checked(num_features, arrays)


def _append_node(node: Mapping[str, Any], columns: dict[str, list[float]]) -> int:
    """Append ``node`` and all below it in pre-order; return its index."""
    index = len(columns["feature"])
    is_leaf = "split_feature" not in node
    if not is_leaf and node["decision_type"] != "<=":
        raise InvalidInput(
            f"split of type {node['decision_type']!r}: only numerical splits can be exported; "
            "encode categories as numbers before training"
        )
    columns["feature"].append(LEAF if is_leaf else node["split_feature"])
    columns["threshold"].append(0.0 if is_leaf else node["threshold"])
    columns["missing"].append(0 if is_leaf else _MISSING_TYPES[node["missing_type"]])
    columns["default_left"].append(0 if is_leaf else int(node["default_left"]))
    columns["value"].append(node["leaf_value"] if is_leaf else 0.0)
    columns["left"].append(LEAF)
    columns["right"].append(LEAF)
    if not is_leaf:
        columns["left"][index] = _append_node(node["left_child"], columns)
        columns["right"][index] = _append_node(node["right_child"], columns)
    return index


def checked(num_features: int, arrays: Mapping[str, np.ndarray]) -> TreeEnsemble:
    """Return an ensemble after checking every type, size, range and link; raises InvalidInput."""
    for name in ARRAY_NAMES:
        kind = np.float64 if name in _FLOAT_ARRAYS else np.int64
        if arrays[name].ndim != 1 or arrays[name].dtype != kind:
            raise InvalidInput(
                f"tree array {name!r} is {arrays[name].dtype} with {arrays[name].ndim} "
                f"dimensions; it must be {np.dtype(kind).name} with 1"
            )
    trees = TreeEnsemble(num_features, **{n: np.ascontiguousarray(arrays[n]) for n in ARRAY_NAMES})
    num_nodes = len(trees.feature)
    if num_nodes > MAX_NODES:
        raise InvalidInput(f"the ensemble has {num_nodes} nodes; the bound is {MAX_NODES}")
    lengths = {len(arrays[name]) for name in ARRAY_NAMES if name != "tree_offsets"}
    if lengths != {num_nodes}:
        raise InvalidInput(f"tree arrays have {sorted(lengths)} nodes; all must have as many")
    _check_offsets(trees, num_nodes)
    _check_nodes(trees)
    _check_links(trees)
    return trees


def _check_offsets(trees: TreeEnsemble, num_nodes: int) -> None:
    offsets = trees.tree_offsets
    whole = len(offsets) >= 1 and offsets[0] == 0 and offsets[-1] == num_nodes
    if not whole or (np.diff(offsets) < 1).any():
        raise InvalidInput(
            f"tree_offsets must rise from 0 to {num_nodes}, the number of nodes, without an "
            "empty tree"
        )


def _check_nodes(trees: TreeEnsemble) -> None:
    rules = (
        ("feature", (trees.feature < LEAF) | (trees.feature >= trees.num_features),
         f"-1 or a column below {trees.num_features}"),
        ("missing", (trees.missing < 0) | (trees.missing > 2), "0, 1 or 2"),
        ("default_left", (trees.default_left < 0) | (trees.default_left > 1), "0 or 1"),
        ("threshold", ~np.isfinite(trees.threshold), "finite"),
        ("value", ~np.isfinite(trees.value), "finite"),
    )  # fmt: skip
    for name, broken, rule in rules:
        if broken.any():
            node = int(np.flatnonzero(broken)[0])
            raise InvalidInput(
                f"tree node {node}: {name} is {getattr(trees, name)[node]}; it must be {rule}"
            )


def _check_links(trees: TreeEnsemble) -> None:
    """Children lie behind their parent in the same tree, and every node but a root has one."""
    nodes = np.flatnonzero(trees.feature != LEAF)
    ends = trees.tree_offsets[np.searchsorted(trees.tree_offsets, nodes, side="right")]
    for name in ("left", "right"):
        child = getattr(trees, name)[nodes]
        broken = np.flatnonzero((child <= nodes) | (child >= ends))
        if broken.size:
            raise InvalidInput(
                f"tree node {nodes[broken[0]]}: its {name} child is {child[broken[0]]}; a child "
                "must lie behind its parent and inside its tree"
            )
    children = np.concatenate([trees.left[nodes], trees.right[nodes]])
    parents = np.bincount(children, minlength=len(trees.feature))
    parents[trees.tree_offsets[:-1]] += 1
    if (parents != 1).any():
        node = int(np.flatnonzero(parents != 1)[0])
        raise InvalidInput(f"tree node {node} has {parents[node]} parents; it must have one")


def raw_scores(trees: TreeEnsemble, rows: FloatArray) -> FloatArray:
    """Return the summed leaf values (n,) of ``rows`` (n, num_features): LightGBM's raw score."""
    _check_width(trees, rows)
    if numba is None:
        return raw_scores_numpy(trees, rows)
    out = np.zeros(len(rows))
    _sum_leaves(np.ascontiguousarray(rows), *_arrays(trees), out)
    return out


def raw_scores_swept(trees: TreeEnsemble, rows: FloatArray, values: FloatArray) -> FloatArray:
    """Return the raw scores (n, b) of ``rows`` with their last column set to each of ``values``.

    ``values`` (b,) are positive and rise. A tree is walked once for all of them: the walk splits
    only where a node asks for the last column.
    """
    _check_width(trees, rows)
    if not (values[0] > 0.0 and (np.diff(values) > 0.0).all()):
        raise InvalidInput(f"swept values {values.tolist()} must be positive and rise")
    if numba is None:
        return _swept_numpy(trees, rows, values)
    out = np.zeros((len(rows), len(values)))
    _sweep_leaves(np.ascontiguousarray(rows), values, *_arrays(trees), out)
    return out


def raw_scores_numpy(trees: TreeEnsemble, rows: FloatArray) -> FloatArray:
    """The slow twin of :func:`raw_scores`: all rows go one level down at a time."""
    _check_width(trees, rows)
    out = np.zeros(len(rows))
    for root in trees.tree_offsets[:-1].tolist():
        at = np.full(len(rows), root)
        inner = np.flatnonzero(trees.feature[at] != LEAF)
        while inner.size:
            node = at[inner]
            x = rows[inner, trees.feature[node]]
            is_nan, missing = np.isnan(x), trees.missing[node]
            x = np.where(is_nan & (missing != 2), 0.0, x)
            absent = (is_nan & (missing == 2)) | ((missing == 1) & (np.abs(x) <= _ZERO))
            goes_left = np.where(absent, trees.default_left[node] == 1, x <= trees.threshold[node])
            at[inner] = np.where(goes_left, trees.left[node], trees.right[node])
            inner = inner[trees.feature[at[inner]] != LEAF]
        out += trees.value[at]
    return out


def _swept_numpy(trees: TreeEnsemble, rows: FloatArray, values: FloatArray) -> FloatArray:
    """The slow twin of :func:`raw_scores_swept`: every pair of a row and a value is its own row."""
    pairs = np.repeat(rows, len(values), axis=0)
    pairs[:, -1] = np.tile(values, len(rows))
    return raw_scores_numpy(trees, pairs).reshape(len(rows), len(values))


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return numba's decorator; without numba, one that changes nothing (nobody calls it then)."""
    if numba is None:
        return lambda function: function
    decorator: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(**options)
    return decorator


def _check_width(trees: TreeEnsemble, rows: FloatArray) -> None:
    if rows.ndim != 2 or rows.shape[1] != trees.num_features:
        raise InvalidInput(
            f"rows have shape {rows.shape}; the trees read {trees.num_features} columns"
        )


def _arrays(trees: TreeEnsemble) -> tuple[np.ndarray, ...]:
    return tuple(getattr(trees, name) for name in ARRAY_NAMES)


@compiled(cache=True, inline="always")
def _goes_left(x, threshold, missing, default_left):  # type: ignore[no-untyped-def]
    if np.isnan(x):
        if missing != 0:
            return default_left == 1
        x = 0.0
    if missing == 1 and abs(x) <= _ZERO:
        return default_left == 1
    return x <= threshold


@compiled(cache=True, nogil=True)
def _sum_leaves(  # type: ignore[no-untyped-def]
    rows, feature, threshold, left, right, missing, default_left, value, offsets, out
):
    for row in range(rows.shape[0]):
        total = 0.0
        for tree in range(len(offsets) - 1):
            node = offsets[tree]
            while feature[node] != LEAF:
                x = rows[row, feature[node]]
                if _goes_left(x, threshold[node], missing[node], default_left[node]):
                    node = left[node]
                else:
                    node = right[node]
            total += value[node]
        out[row] = total


@compiled(cache=True, nogil=True)
def _sweep_leaves(  # type: ignore[no-untyped-def]
    rows, values, feature, threshold, left, right, missing, default_left, value, offsets, out
):
    last = rows.shape[1] - 1
    stack = np.empty((len(values) + 1, 3), np.int64)  # (node, first value, past the last value)
    for row in range(rows.shape[0]):
        for tree in range(len(offsets) - 1):
            stack[0, 0], stack[0, 1], stack[0, 2] = offsets[tree], 0, len(values)
            depth = 1
            while depth > 0:
                depth -= 1
                node, low, high = stack[depth]
                while feature[node] != LEAF:
                    if feature[node] == last:
                        cut = low
                        while cut < high and values[cut] <= threshold[node]:
                            cut += 1
                        if low < cut < high:  # both ways: the right part waits on the stack
                            stack[depth, 0], stack[depth, 1] = right[node], cut
                            stack[depth, 2] = high
                            depth += 1
                            high = cut
                        node = left[node] if cut > low else right[node]
                    elif _goes_left(
                        rows[row, feature[node]], threshold[node], missing[node], default_left[node]
                    ):
                        node = left[node]
                    else:
                        node = right[node]
                leaf = value[node]
                for index in range(low, high):
                    out[row, index] += leaf
