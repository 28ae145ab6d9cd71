"""Small trees without branches: leaves are found by masking bits (QuickScorer, Lucchese 2015).

Leaves of a tree are bits from left to right. Every node whose answer is "right" clears the leaves
of its left part; the lowest bit left is the leaf. Nodes are asked for a block of rows at a time,
which compiles to vector code, and answers for the swept last column are prepared once. Sums are
taken in the order of :func:`predictors.trees.raw_scores_swept` and equal it to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from contracts.policy import FloatArray, IntArray
from predictors.trees import CAN_COMPILE, LEAF, TreeEnsemble, compiled

_MAX_LEAVES = 64
_BLOCK = 256
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_SHIFT = np.uint64(58)
_PLACE = np.zeros(64, dtype=np.int64)
for _bit in range(64):
    _PLACE[((1 << _bit) * int(_DE_BRUIJN) % (1 << 64)) >> 58] = _bit


@dataclass(frozen=True, slots=True, eq=False)
class QuickTrees:
    """Nodes that ask for known columns (``node_offsets`` by tree), groups of swept values that act
    alike (``group_offsets`` by tree; values ``low`` to ``high``), leaves from left to right."""

    node_offsets: IntArray
    feature: IntArray
    threshold: FloatArray
    nan_left: np.ndarray
    mask: np.ndarray
    group_offsets: IntArray
    group_mask: np.ndarray
    low: IntArray
    high: IntArray
    leaf_offsets: IntArray
    leaf: FloatArray
    num_values: int


def quick_trees(trees: TreeEnsemble, values: FloatArray) -> QuickTrees | None:
    """Return the plan for sweeping the last column over ``values`` (rising); None when a tree has
    more than 64 leaves or treats zero as missing, and without numba: then trees must be walked."""
    inner = trees.feature != LEAF
    if not CAN_COMPILE or not trees.num_trees:
        return None
    leaves_a_tree = np.add.reduceat(~inner, trees.tree_offsets[:-1])
    if leaves_a_tree.max() > _MAX_LEAVES or (inner & (trees.missing == 1)).any():
        return None
    first, middle = (np.array(each) for each in _leaf_ranges(trees))
    masks = np.array(
        [
            int(_ALL) ^ ((1 << last) - (1 << begin) if last > begin else 0)
            for begin, last in zip(first.tolist(), middle.tolist(), strict=True)
        ],
        dtype=np.uint64,
    )
    tree_of = np.repeat(np.arange(trees.num_trees), np.diff(trees.tree_offsets))
    known = np.flatnonzero(inner & (trees.feature != trees.num_features - 1))
    groups = [
        group
        for tree in range(trees.num_trees)
        for group in _groups(trees, tree, np.flatnonzero(inner & (tree_of == tree)), masks, values)
    ]
    leaves = np.flatnonzero(~inner)
    leaves = leaves[np.lexsort((first[leaves], tree_of[leaves]))]
    zero_left = trees.threshold >= 0.0
    nan_left = np.where(trees.missing == 0, zero_left, trees.default_left == 1)
    count = np.arange(trees.num_trees + 1)
    return QuickTrees(
        node_offsets=np.searchsorted(tree_of[known], count),
        feature=trees.feature[known],
        threshold=trees.threshold[known],
        nan_left=nan_left[known],
        mask=masks[known],
        group_offsets=np.searchsorted([group[0] for group in groups], count),
        group_mask=np.array([group[1] for group in groups], dtype=np.uint64),
        low=np.array([group[2] for group in groups], dtype=np.int64),
        high=np.array([group[3] for group in groups], dtype=np.int64),
        leaf_offsets=np.searchsorted(tree_of[leaves], count),
        leaf=trees.value[leaves],
        num_values=len(values),
    )


def quick_scores(plan: QuickTrees, rows: FloatArray) -> FloatArray:
    """Return the raw scores (n, b) of ``rows`` (n, f), whose last column is not read."""
    out = np.zeros((plan.num_values, len(rows)))
    _score(
        np.ascontiguousarray(rows.T), plan.node_offsets, plan.feature, plan.threshold,
        plan.nan_left, plan.mask, plan.group_offsets, plan.group_mask, plan.low, plan.high,
        plan.leaf_offsets, plan.leaf, out,
    )  # fmt: skip
    return out.T


def _leaf_ranges(trees: TreeEnsemble) -> tuple[list[int], list[int]]:
    """Return, for each node, its first leaf in its tree and the first leaf of its right part."""
    size = [1] * len(trees.feature)
    left, right = trees.left.tolist(), trees.right.tolist()
    inner = [node for node, feature in enumerate(trees.feature.tolist()) if feature != LEAF]
    for node in reversed(inner):  # children lie behind their parent
        size[node] = size[left[node]] + size[right[node]]
    first, middle = [0] * len(size), [0] * len(size)
    for node in inner:
        first[left[node]] = first[node]
        middle[node] = first[right[node]] = first[node] + size[left[node]]
    return first, middle


def _groups(
    trees: TreeEnsemble, tree: int, nodes: IntArray, masks: np.ndarray, values: FloatArray
) -> list[tuple[int, int, int, int]]:
    """Return (tree, mask, low, high) of the runs of values that clear the same leaves."""
    swept = nodes[trees.feature[nodes] == trees.num_features - 1]
    each = [
        int(np.bitwise_and.reduce(masks[swept[trees.threshold[swept] < value]], initial=_ALL))
        for value in values.tolist()
    ]
    cuts = [0, *(i for i in range(1, len(each)) if each[i] != each[i - 1]), len(each)]
    return [(tree, each[low], low, high) for low, high in pairwise(cuts)]


@compiled(cache=True, nogil=True)
def _score(  # type: ignore[no-untyped-def]
    columns, node_offsets, feature, threshold, nan_left, mask, group_offsets, group_mask, low,
    high, leaf_offsets, leaf, out,
):  # fmt: skip
    count = columns.shape[1]
    alive = np.empty(_BLOCK, np.uint64)
    found = np.empty(_BLOCK)
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        for tree in range(len(node_offsets) - 1):
            for row in range(size):
                alive[row] = _ALL
            for node in range(node_offsets[tree], node_offsets[tree + 1]):
                column = columns[feature[node], start : start + size]
                bound, cleared, nan_goes_left = threshold[node], mask[node], nan_left[node]
                for row in range(size):
                    x = column[row]
                    left = (x <= bound) | (nan_goes_left & (x != x))
                    alive[row] &= _ALL if left else cleared
            first = leaf_offsets[tree]
            for group in range(group_offsets[tree], group_offsets[tree + 1]):
                swept = group_mask[group]
                for row in range(size):
                    bits = alive[row] & swept
                    lowest = bits & (~bits + np.uint64(1))
                    found[row] = leaf[first + _PLACE[(lowest * _DE_BRUIJN) >> _SHIFT]]
                for index in range(low[group], high[group]):
                    for row in range(size):
                        out[index, start + row] += found[row]
