"""``gbm-hazard``: a discrete-time hazard on age, prompt and progress, learned with LightGBM.

From a landmark age a, remaining life is cut into bins (e[j-1], e[j]] of tokens. The model gives
the chance to end in bin j for a run that reached it; survival is the product of the chances not
to. Training rows are binary: (what was known at a, bin j) -> ended in it?

Censoring is native: a cut run contributes the bins it fully survived, and no more. Bins that
reach beyond the cap of a run's collection enter for nobody, ended or cut, since among runs under
that cap only the early endings of such a bin could be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_generator
from contracts.settings import require_at_least
from contracts.signals import SignalRequest
from predictors.base import HorizonPredictor, TrainingSet
from predictors.boosting import BoostingSettings, grow_trees
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, Provenance, need_array, need_list
from predictors.features import FEATURE_NAMES, feature_columns, feature_matrix
from predictors.model_levels import MODEL_FEATURE, ModelLevels, learn_levels
from predictors.quick_trees import quick_scores, quick_trees
from predictors.trees import TreeEnsemble, from_tensors, raw_scores_swept

CENSORING_RULE = (
    "a cut run contributes the bins it fully survived; a bin reaching beyond the collection cap "
    "contributes for nobody"
)


class GbmHazard(HorizonPredictor):
    """``trees`` score ``features``, then the model's level where ``levels`` tell several models
    apart and, as last column, the bin's upper edge: the log-odds of ending in that bin."""

    family: ClassVar[str] = "gbm-hazard"

    def __init__(
        self,
        provenance: Provenance,
        edges: IntArray,
        features: Sequence[str],
        trees: TreeEnsemble,
        levels: ModelLevels | None = None,
    ) -> None:
        super().__init__(provenance, edges)
        self.features, self._columns = tuple(features), feature_columns(features)
        self.trees, self.levels = trees, levels
        self.columns = self.features
        if levels is not None:
            self._columns = np.append(self._columns, len(FEATURE_NAMES))
            self.columns = (*self.features, MODEL_FEATURE)
        self._quick = quick_trees(trees, edges.astype(np.float64))

    def residual_survival(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return P(remaining > edge): the product of 1 - hazard over the bins up to it."""
        known = feature_matrix(requests, ages)
        if self.levels is not None:
            known = np.column_stack([known, self.levels.of(requests)])
        return self.survival_of(known)

    def survival_of(self, known: FloatArray) -> FloatArray:
        """Return the same from what is known, (n, len(FEATURE_NAMES)), and a column more, the
        models' levels, where the predictor has ``levels``."""
        rows = np.column_stack([known[:, self._columns], np.zeros(len(known))])
        if self._quick is None:
            log_odds = raw_scores_swept(self.trees, rows, self.edges.astype(np.float64))
        else:
            log_odds = quick_scores(self._quick, rows)
        return np.asarray(np.exp(-np.cumsum(np.logaddexp(0.0, log_odds), axis=1)))

    def settings(self) -> JsonObject:
        """See Predictor."""
        own: JsonObject = {"censoring_rule": CENSORING_RULE, "features": list(self.features)}
        return own if self.levels is None else own | self.levels.settings()

    def tensors(self) -> dict[str, np.ndarray]:
        """See Predictor."""
        own = {"edges": self.edges, **self.trees.to_tensors("trees.")}
        return own if self.levels is None else own | self.levels.tensors()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """See Predictor."""
        features = need_list(checkpoint.settings, "features", str)
        edges = need_array(checkpoint.tensors, "edges", np.int64)
        levels = ModelLevels.from_checkpoint(checkpoint)
        num_columns = len(features) + (levels is not None) + 1
        trees = from_tensors(checkpoint.tensors, "trees.", num_columns)
        return cls(checkpoint.provenance, edges, features, trees, levels)


@dataclass(frozen=True, slots=True)
class GbmHazardSettings:
    """How to fit ``gbm-hazard``. ``num_landmarks`` ages a run (plus age 0), ``num_bins`` of
    remaining life, log-spaced from ``first_edge_tokens`` to the cap. ``tell_models``: a log of
    several models gets one more feature, how long the model usually writes."""

    num_landmarks: int = 12
    num_bins: int = 16
    first_edge_tokens: int = 3
    features: tuple[str, ...] = FEATURE_NAMES
    boosting: BoostingSettings = field(default_factory=BoostingSettings)
    tell_models: bool = True

    def __post_init__(self) -> None:
        feature_columns(self.features)
        require_at_least(self, num_landmarks=0, num_bins=1, first_edge_tokens=1)

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> GbmHazard:
        """Fit on ``training``; deterministic in (training, settings, seed)."""
        edges = horizon_edges(self.first_edge_tokens, training.cap_tokens, self.num_bins)
        run, ages = landmarks(training, self.num_landmarks, seed)
        owner, bins, ended = hazard_rows(training, run, ages, edges)
        if not ended.any():
            raise InvalidInput(
                f"none of {len(training.requests)} training runs was seen to end below its cap: "
                "a hazard needs endings; collect with a higher cap"
            )
        known = feature_matrix([training.requests[i] for i in run.tolist()], ages)
        known = known[:, feature_columns(self.features)]
        levels = None
        if self.tell_models and len(training.provenance.models) > 1:
            levels, of_run = learn_levels(training)
            known = np.column_stack([known, of_run[run]])
        trees = grow_trees(
            binary_table(known, owner, edges[bins]),
            ended.astype(np.float64),
            training.repeat_weights()[run[owner]],
            self.boosting,
            {"objective": "binary"},
            seed=seed,
            num_threads=num_threads,
        )
        return GbmHazard(training.provenance, edges, self.features, trees, levels)


def horizon_edges(first_tokens: int, cap_tokens: int, count: int) -> IntArray:
    """Return rising whole-token horizons, log-spaced, the last at the cap."""
    spaced = np.geomspace(min(first_tokens, cap_tokens), cap_tokens, count)
    edges = np.unique(np.rint(spaced)).astype(np.int64)
    return np.unique(np.append(edges, cap_tokens))


def landmarks(training: TrainingSet, count: int, seed: int) -> tuple[IntArray, IntArray]:
    """Return (run, age) of each landmark: age 0, and up to ``count`` ages the run lived to see.

    Ages are jittered, denser when young, and drawn without a look at the run's length: ages
    spread over each run's own life would over-count short runs at every age.
    """
    ages = np.zeros((len(training.requests), count + 1), dtype=np.int64)
    for row, request in enumerate(training.requests):
        jitter = keyed_generator(seed, "landmarks", request.run_id).random(count)
        ages[row, 1:] = request.max_tokens * ((np.arange(count) + jitter) / max(count, 1)) ** 2
    fresh = np.diff(ages, axis=1, prepend=-1) > 0
    run, column = np.nonzero(fresh & (ages < training.output_tokens[:, None]))
    return run, ages[run, column]


def hazard_rows(
    training: TrainingSet, run: IntArray, ages: IntArray, edges: IntArray
) -> tuple[IntArray, IntArray, np.ndarray]:
    """Return (landmark, bin, ended) of every binary training row; see the module's rule."""
    caps = np.array([request.max_tokens for request in training.requests], dtype=np.int64)[run]
    left = training.output_tokens[run] - ages
    return binary_rows(left, training.event_observed[run], caps - ages, edges)


def binary_table(known: FloatArray, owner: IntArray, bin_edge: IntArray | FloatArray) -> FloatArray:
    """Return (n, f + 1): the features ``known`` (landmarks, f) of each binary row's landmark, and
    the bin. Filled column by column: of millions of rows there is room for one table, not two."""
    out = np.empty((len(owner), known.shape[1] + 1))
    for column, values in enumerate(known.T):
        out[:, column] = values[owner]
    out[:, -1] = bin_edge
    return out


def binary_rows(
    left: FloatArray | IntArray,
    observed: np.ndarray,
    watched: FloatArray | IntArray,
    edges: FloatArray | IntArray,
) -> tuple[IntArray, IntArray, np.ndarray]:
    """Return (row, bin, ended) of every binary training row of rows that had ``left`` (n,) to go
    when they ended, or were cut where not ``observed``, and were followed for ``watched`` at
    most."""
    survived = np.searchsorted(edges, left, side="left")  # edges below the end were passed
    survived = np.where(observed, survived, np.searchsorted(edges, left, side="right"))
    inside_cap = np.searchsorted(edges, watched, side="right")
    counts = np.minimum(survived + observed, inside_cap)
    owner = np.repeat(np.arange(len(left)), counts)
    starts = np.cumsum(counts) - counts
    bins = np.arange(len(owner)) - starts[owner]
    return owner, bins, observed[owner] & (bins == survived[owner])
