"""``countdown``: a total length predicted from the prompt, minus the age, with the tail repaired.

What most length predictors of the literature do once a request runs. Totals are quantiles of the
served length min(length, cap), learned with LightGBM's quantile loss; a run cut at the cap enters
with the cap, which leaves every quantile below the cap right (Powell 1986). Once the age passes
the predicted median, the prediction is spent: ``age-km`` answers instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest
from predictors.age_km import AgeKm, AgeKmSettings
from predictors.base import HorizonPredictor, TrainingSet, room
from predictors.boosting import BoostingSettings, grow_trees
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, Provenance, need_array, need_list
from predictors.features import PROMPT_FEATURES, feature_columns, feature_matrix, rows_by_request
from predictors.gbm_hazard import horizon_edges
from predictors.trees import TreeEnsemble, from_tensors, raw_scores

LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
_MEDIAN = LEVELS.index(0.5)
_NUM_EDGES = 32
CENSORING_RULE = (
    "a cut run enters with the served length, its cap (censored quantile regression, Powell 1986); "
    "the fallback is Kaplan-Meier"
)


class Countdown(HorizonPredictor):
    """``trees`` maps each of LEVELS to an ensemble that scores log(total) from ``features``."""

    family: ClassVar[str] = "countdown"

    def __init__(
        self,
        provenance: Provenance,
        edges: IntArray,
        features: Sequence[str],
        trees: Mapping[float, TreeEnsemble],
        tail: AgeKm,
    ) -> None:
        super().__init__(provenance, edges)
        self.features, self._columns = tuple(features), feature_columns(features)
        self.trees = dict(trees)
        self.tail = tail

    def totals(self, requests: Sequence[SignalRequest]) -> FloatArray:
        """Return the predicted quantiles (n, len(LEVELS)) of total length, in tokens, rising."""
        groups = rows_by_request(requests)
        rows = feature_matrix([request for request, _ in groups], np.zeros(len(groups), np.int64))
        each = np.clip(total_quantiles(self.trees, rows[:, self._columns]), 1.0, self.edges[-1])
        out = np.empty((len(requests), len(LEVELS)))
        for total, (_, members) in zip(each, groups, strict=True):
            out[members] = total
        return out

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return the median total minus the age, or what ``age-km`` says once that is spent."""
        left = self.totals(requests)[:, _MEDIAN] - ages
        spent = left <= 0.0
        out = np.clip(left, 1.0, room(requests, ages))
        chosen = [requests[i] for i in np.flatnonzero(spent).tolist()]
        out[spent] = self.tail.remaining(chosen, ages[spent])
        return out

    def residual_survival(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return the total's distribution given total > age, or that of ``age-km`` once spent."""
        totals = self.totals(requests)
        out = np.empty((len(requests), len(self.edges)))
        for row, (total, age) in enumerate(zip(totals, ages.tolist(), strict=True)):
            out[row] = _alive(total, age + self.edges, self.edges[-1])
            out[row] /= _alive(total, np.array([age]), self.edges[-1])[0] or 1.0
        spent = np.flatnonzero(totals[:, _MEDIAN] <= ages)
        chosen = [requests[i] for i in spent.tolist()]
        for column, edge in enumerate(self.edges.tolist()):
            horizon = np.full(len(spent), float(edge))
            out[spent, column] = self.tail.survival(chosen, ages[spent], horizon)
        return out

    def settings(self) -> JsonObject:
        """See Predictor."""
        own: JsonObject = {
            "censoring_rule": CENSORING_RULE,
            "features": list(self.features),
            "quantile_levels": list(LEVELS),
        }
        return self.tail.settings() | own

    def tensors(self) -> dict[str, np.ndarray]:
        """See Predictor."""
        out = {"edges": self.edges, **self.tail.tensors()}
        for level in LEVELS:
            out |= self.trees[level].to_tensors(f"q{level}.")
        return out

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """See Predictor."""
        levels = need_list(checkpoint.settings, "quantile_levels", float)
        if levels != LEVELS:
            raise InvalidInput(f"quantile levels are {levels}; this release reads {LEVELS}")
        features = need_list(checkpoint.settings, "features", str)
        trees = {
            level: from_tensors(checkpoint.tensors, f"q{level}.", len(features)) for level in LEVELS
        }
        edges = need_array(checkpoint.tensors, "edges", np.int64)
        tail = AgeKm.from_checkpoint(checkpoint)
        return cls(checkpoint.provenance, edges, features, trees, tail)


@dataclass(frozen=True, slots=True)
class CountdownSettings:
    """How to fit ``countdown``; ``features`` may be prompt features only."""

    features: tuple[str, ...] = PROMPT_FEATURES
    boosting: BoostingSettings = field(
        default_factory=lambda: BoostingSettings(num_trees=100, min_rows_per_leaf=20, num_leaves=8)
    )

    def __post_init__(self) -> None:
        feature_columns(self.features)
        late = [name for name in self.features if name not in PROMPT_FEATURES]
        if late or not self.features:
            raise InvalidInput(
                f"countdown features {', '.join(late) or '(none)'}: a total is predicted before "
                f"the first token; choose from {', '.join(PROMPT_FEATURES)}"
            )

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> Countdown:
        """Fit on ``training``; deterministic in (training, settings, seed)."""
        at_start = np.zeros(len(training.requests), dtype=np.int64)
        rows = feature_matrix(training.requests, at_start)[:, feature_columns(self.features)]
        trees = grow_quantiles(
            rows,
            training.output_tokens.astype(np.float64),
            training.repeat_weights(),
            self.boosting,
            seed=seed,
            num_threads=num_threads,
        )
        edges = horizon_edges(1, training.cap_tokens, _NUM_EDGES)
        tail = AgeKmSettings().fit(training)
        return Countdown(training.provenance, edges, self.features, trees, tail)


def grow_quantiles(
    rows: FloatArray,
    totals: FloatArray,
    weights: FloatArray,
    boosting: BoostingSettings,
    *,
    seed: int,
    num_threads: int,
) -> dict[float, TreeEnsemble]:
    """Return for each of LEVELS the trees that score that quantile of log(``totals``) (n,)."""
    return {
        level: grow_trees(
            rows,
            np.log(totals),
            weights,
            boosting,
            {"objective": "quantile", "alpha": level},
            seed=seed,
            num_threads=num_threads,
        )
        for level in LEVELS
    }


def total_quantiles(trees: Mapping[float, TreeEnsemble], rows: FloatArray) -> FloatArray:
    """Return the quantiles (n, len(LEVELS)) of the total, rising along a row."""
    scores = [raw_scores(trees[level], rows) for level in LEVELS]
    return np.asarray(np.exp(np.sort(np.column_stack(scores), axis=1)))


def _alive(total: FloatArray, at: IntArray, cap_tokens: int) -> FloatArray:
    """Return P(total > at): straight lines through the predicted quantiles, ending at the cap."""
    knots = np.concatenate([[0.0], total, [float(cap_tokens)]])
    shares = 1.0 - np.array([0.0, *LEVELS, 1.0])
    return np.interp(at, knots, shares)
