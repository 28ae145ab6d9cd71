"""ONNX, write-only: a gbm-hazard as a graph that other runtimes answer from.

Nothing here reads an ONNX file. The graph takes ``features`` (n, f) float32, the columns named in
its metadata in that order, and returns ``survival`` (n, b) float32, P(remaining > edge). ONNX trees
compare in single precision: a threshold is rounded down to float32, so that ``x <= threshold``
stays as it was for every x that float32 can hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InvalidInput, missing_dependency
from contracts.files import atomic_path
from contracts.policy import FloatArray
from predictors.base import Predictor
from predictors.calibrated import Calibrated
from predictors.gbm_hazard import GbmHazard
from predictors.trees import LEAF, TreeEnsemble

_MISSING_NONE, _MISSING_ZERO = 0, 1


def export_onnx(predictor: Predictor, path: Path) -> None:
    """Write ``predictor`` to ``path``; its calibration table goes into the metadata, unapplied.

    Raises InvalidInput for a family that has no such graph or trees that ONNX cannot say, and
    MissingDependency without onnx.
    """
    try:
        import onnx
    except ImportError:
        raise missing_dependency("onnx", "onnx", "export --format onnx") from None
    base = predictor.base if isinstance(predictor, Calibrated) else predictor
    if not isinstance(base, GbmHazard):
        raise InvalidInput(
            f"family {base.family!r} cannot be exported to ONNX: only 'gbm-hazard' can; other "
            "families answer from their checkpoint with numpy"
        )
    model = _model(base)
    meta = {
        "family": base.family,
        "features": json.dumps(list(base.columns)),
        "edges_tokens": json.dumps(base.edges.tolist()),
        "trained_on": json.dumps(list(base.provenance.models)),
    }
    if isinstance(predictor, Calibrated):
        meta["calibration"] = json.dumps(predictor.table.to_json())
    onnx.helper.set_model_props(model, meta)
    onnx.checker.check_model(model)
    with atomic_path(path) as scratch:
        scratch.write_bytes(model.SerializeToString())


def _model(predictor: GbmHazard) -> Any:
    """Return the graph: every row meets every bin, trees, odds, product of 1 - hazard."""
    from onnx import TensorProto, helper, numpy_helper

    count, num_bins = len(predictor.columns), len(predictor.edges)
    constants = {
        "edges": predictor.edges.astype(np.float32).reshape(1, num_bins, 1),
        "repeat": np.array([1, num_bins, 1], dtype=np.int64),
        "row_shape": np.array([-1, 1, count], dtype=np.int64),
        "flat_shape": np.array([-1, count + 1], dtype=np.int64),
        "curve_shape": np.array([-1, num_bins], dtype=np.int64),
        "axis": np.array(1, dtype=np.int64),
        "first": np.array([0], dtype=np.int64),
        "edge_shape": np.array([num_bins, 1], dtype=np.int64),
    }
    nodes = [
        helper.make_node("Shape", ["features"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["rows"]),
        helper.make_node("Concat", ["rows", "edge_shape"], ["expand_to"], axis=0),
        helper.make_node("Reshape", ["features", "row_shape"], ["each"]),
        helper.make_node("Tile", ["each", "repeat"], ["known"]),
        helper.make_node("Expand", ["edges", "expand_to"], ["every_edge"]),
        helper.make_node("Concat", ["known", "every_edge"], ["table"], axis=2),
        helper.make_node("Reshape", ["table", "flat_shape"], ["flat"]),
        helper.make_node(
            "TreeEnsembleRegressor", ["flat"], ["log_odds"], domain="ai.onnx.ml",
            **_tree_attributes(predictor.trees),
        ),
        helper.make_node("Reshape", ["log_odds", "curve_shape"], ["curve"]),
        helper.make_node("Softplus", ["curve"], ["risk"]),
        helper.make_node("CumSum", ["risk", "axis"], ["total_risk"]),
        helper.make_node("Neg", ["total_risk"], ["log_survival"]),
        helper.make_node("Exp", ["log_survival"], ["survival"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "gbm_hazard",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", count])],
        [helper.make_tensor_value_info("survival", TensorProto.FLOAT, ["n", num_bins])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="preemptbench")
    model.ir_version = 8
    return model


def _tree_attributes(trees: TreeEnsemble) -> dict[str, Any]:
    """Return the attributes of TreeEnsembleRegressor; raises InvalidInput for zero-as-missing."""
    inner = trees.feature != LEAF
    if (inner & (trees.missing == _MISSING_ZERO)).any():
        raise InvalidInput(
            "a tree treats zero as missing, which ONNX cannot say: train without zero_as_missing"
        )
    sizes = np.diff(trees.tree_offsets)
    tree_of = np.repeat(np.arange(len(sizes)), sizes)
    start = trees.tree_offsets[tree_of]
    node_ids = np.arange(len(tree_of)) - start
    # where NaN counts as 0, it goes where 0 goes
    zero_left = (trees.threshold >= 0.0).astype(np.int64)
    nan_left = np.where(trees.missing == _MISSING_NONE, zero_left, trees.default_left)
    leaves = np.flatnonzero(~inner)
    return {
        "n_targets": 1,
        "post_transform": "NONE",
        "aggregate_function": "SUM",
        "nodes_treeids": tree_of.tolist(),
        "nodes_nodeids": node_ids.tolist(),
        "nodes_featureids": np.maximum(trees.feature, 0).tolist(),
        "nodes_modes": ["BRANCH_LEQ" if branch else "LEAF" for branch in inner.tolist()],
        "nodes_values": _rounded_down(trees.threshold).tolist(),
        "nodes_truenodeids": np.where(inner, trees.left - start, 0).tolist(),
        "nodes_falsenodeids": np.where(inner, trees.right - start, 0).tolist(),
        "nodes_missing_value_tracks_true": np.where(inner, nan_left, 0).tolist(),
        "target_treeids": tree_of[leaves].tolist(),
        "target_nodeids": node_ids[leaves].tolist(),
        "target_ids": [0] * len(leaves),
        "target_weights": trees.value[leaves].astype(np.float32).tolist(),
    }


def _rounded_down(values: FloatArray) -> np.ndarray:
    single = values.astype(np.float32)
    return np.where(single > values, np.nextafter(single, np.float32(-np.inf)), single)
