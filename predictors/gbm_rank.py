"""``gbm-rank``: who has more left, learned with lambdarank inside co-running sets.

Order is what a victim rule reads, so order is what is learned (the idea of LTR, arXiv 2408.15792,
at every age instead of at the prompt only). Training sets are drawn as an onlooker meets running
requests: of one model, each run in proportion to its length, at an age uniform over its life.

A score has no unit. It becomes tokens through isotonic regression of the hazard: on prompts the
trees never saw, the chance to end in each bin of remaining life may only fall as the score rises,
so a higher score means a longer life at every horizon (isotonic distributional regression).

Censoring: the served length of a run that reached its cap is known, so it is ranked. A run cut
before that is in no set; the hazards take the bins it survived, as ``gbm-hazard`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_generator
from contracts.settings import require_at_least
from contracts.signals import SignalRequest
from predictors.base import HorizonPredictor, TrainingSet, held_out_runs
from predictors.boosting import BoostingSettings, grow_trees
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, Provenance, need_array, need_list
from predictors.features import FEATURE_NAMES, feature_columns, feature_matrix
from predictors.gbm_hazard import hazard_rows, horizon_edges, landmarks
from predictors.trees import TreeEnsemble, from_tensors, raw_scores

CENSORING_RULE = (
    "sets hold runs of known served length (ended, or at the cap); the hazards that turn scores "
    "into tokens take the bins a cut run survived"
)


class GbmRank(HorizonPredictor):
    """``trees`` score ``features``; ``knots`` (k,) are scores, rising, and ``alive`` (k, b) is
    P(remaining > edge) at each, straight lines between."""

    family: ClassVar[str] = "gbm-rank"

    def __init__(
        self,
        provenance: Provenance,
        edges: IntArray,
        features: Sequence[str],
        trees: TreeEnsemble,
        knots: FloatArray,
        alive: FloatArray,
    ) -> None:
        super().__init__(provenance, edges)
        if (
            not knots.size
            or (np.diff(knots) <= 0.0).any()
            or alive.shape
            != (
                len(knots),
                len(edges),
            )
        ):
            raise InvalidInput("score knots must rise, with one survival curve for each")
        if alive.min() < 0.0 or alive.max() > 1.0 or (np.diff(alive, axis=1) > 0.0).any():
            raise InvalidInput("survival at the score knots must fall within [0, 1]")
        self.features, self._columns = tuple(features), feature_columns(features)
        self.trees, self.knots, self.alive = trees, knots, alive

    def scores(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return the score (n,) of each request: higher means more left; no unit."""
        return raw_scores(self.trees, feature_matrix(requests, ages)[:, self._columns])

    def residual_survival(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return the curve of the score, between those of the nearest knots."""
        scores = self.scores(requests, ages)
        columns = [np.interp(scores, self.knots, column) for column in self.alive.T]
        return np.column_stack(columns)

    def settings(self) -> JsonObject:
        """See Predictor."""
        return {"censoring_rule": CENSORING_RULE, "features": list(self.features)}

    def tensors(self) -> dict[str, np.ndarray]:
        """See Predictor."""
        own = {"edges": self.edges, "knots": self.knots, "alive": self.alive}
        return own | self.trees.to_tensors("trees.")

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """See Predictor."""
        features = need_list(checkpoint.settings, "features", str)
        tensors = checkpoint.tensors
        return cls(
            checkpoint.provenance,
            need_array(tensors, "edges", np.int64),
            features,
            from_tensors(tensors, "trees.", len(features)),
            need_array(tensors, "knots", np.float64),
            need_array(tensors, "alive", np.float64, 2),
        )


@dataclass(frozen=True, slots=True)
class GbmRankSettings:
    """How to fit ``gbm-rank``: ``num_sets`` of up to ``set_size`` runs for the order; then
    ``num_knots`` scores with ``num_bins`` of remaining life, from ``num_landmarks`` ages a run of
    the ``held_out_share`` of prompts that the order was not learned on."""

    num_sets: int = 1500
    set_size: int = 8
    num_knots: int = 20
    num_bins: int = 24
    first_edge_tokens: int = 3
    num_landmarks: int = 12
    held_out_share: float = 0.3
    features: tuple[str, ...] = FEATURE_NAMES
    boosting: BoostingSettings = field(default_factory=BoostingSettings)

    def __post_init__(self) -> None:
        feature_columns(self.features)
        require_at_least(self, num_sets=1, set_size=2, num_knots=1, num_bins=1)
        require_at_least(self, first_edge_tokens=1, num_landmarks=0)
        if not self.features or not 0.0 < self.held_out_share < 1.0:
            raise InvalidInput(
                f"gbm-rank needs features ({len(self.features)} named) and a held_out_share "
                f"({self.held_out_share}) between 0 and 1"
            )

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> GbmRank:
        """Fit on ``training``; deterministic in (training, settings, seed)."""
        columns = feature_columns(self.features)
        apart = held_out_runs(training, self.held_out_share, seed)
        sets = list(co_running_sets(training, ~apart, self.num_sets, self.set_size, seed))
        run = np.concatenate([members for members, _ in sets])
        ages = np.concatenate([met for _, met in sets])
        left = training.output_tokens[run] - ages
        sizes = [len(members) for members, _ in sets]
        grades = np.concatenate([_grades(part) for part in np.split(left, np.cumsum(sizes)[:-1])])
        trees = grow_trees(
            feature_matrix([training.requests[i] for i in run.tolist()], ages)[:, columns],
            grades,
            training.repeat_weights()[run],
            self.boosting,
            {
                "objective": "lambdarank",
                "lambdarank_truncation_level": self.set_size,
                "label_gain": ",".join(str(grade) for grade in range(self.set_size)),
            },
            seed=seed,
            num_threads=num_threads,
            group=sizes,
        )
        edges = horizon_edges(self.first_edge_tokens, training.cap_tokens, self.num_bins)
        knots, alive = self._isotonic(training, apart, trees, edges, seed)
        return GbmRank(training.provenance, edges, self.features, trees, knots, alive)

    def _isotonic(
        self,
        training: TrainingSet,
        apart: np.ndarray,
        trees: TreeEnsemble,
        edges: IntArray,
        seed: int,
    ) -> tuple[FloatArray, FloatArray]:
        """Return score knots and the survival curve at each, from the prompts set apart."""
        run, ages = landmarks(training, self.num_landmarks, seed)
        run, ages = run[apart[run]], ages[apart[run]]
        owner, bins, ended = hazard_rows(training, run, ages, edges)
        if not ended.any():
            raise InvalidInput(
                f"none of {apart.sum()} runs held out to turn scores into tokens was seen to end "
                "below its cap: collect with a higher cap, or use more prompts"
            )
        known = feature_matrix([training.requests[i] for i in run.tolist()], ages)
        scores = raw_scores(trees, known[:, feature_columns(self.features)])
        cuts = np.unique(np.quantile(scores, np.arange(1, self.num_knots) / self.num_knots))
        place = np.searchsorted(cuts, scores, side="right")
        held, place = np.unique(place, return_inverse=True)
        weight = training.repeat_weights()[run]
        knots = (np.bincount(place, weight * scores) / np.bincount(place, weight)).astype(
            np.float64
        )
        shape = (len(held), len(edges))
        at_risk, ends = np.zeros(shape), np.zeros(shape)
        np.add.at(at_risk, (place[owner], bins), weight[owner])
        np.add.at(ends, (place[owner], bins), weight[owner] * ended)
        alive = np.cumprod(1.0 - _falling_hazards(ends, at_risk), axis=1)
        return knots, alive.astype(np.float64)


def co_running_sets(
    training: TrainingSet, usable: np.ndarray, num_sets: int, set_size: int, seed: int
) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield (runs, ages) of ``num_sets`` sets of distinct runs of one model, as an onlooker meets
    them: a run in proportion to its length, at a uniform age. Raises InvalidInput if no model has
    two usable runs of known served length."""
    caps = np.array([request.max_tokens for request in training.requests], dtype=np.int64)
    usable = usable & (training.event_observed | (training.output_tokens >= caps))
    models = np.array([request.model for request in training.requests], dtype=object)
    pools = [np.flatnonzero(usable & (models == model)) for model in sorted(set(models.tolist()))]
    pools = [pool for pool in pools if len(pool) > 1]
    if not pools:
        raise InvalidInput(
            "no model has two training runs of known served length outside the held-out prompts: "
            "an order needs at least two"
        )
    tokens = np.array([training.output_tokens[pool].sum() for pool in pools], dtype=np.float64)
    for index in range(num_sets):
        rng = keyed_generator(seed, "co-running", index)
        pool = pools[int(rng.choice(len(pools), p=tokens / tokens.sum()))]
        size = min(set_size, len(pool))
        race = rng.standard_exponential(len(pool)) / training.output_tokens[pool]
        members = pool[np.argpartition(race, size - 1)[:size]]
        yield members, (rng.random(size) * training.output_tokens[members]).astype(np.int64)


def _grades(left: IntArray) -> FloatArray:
    """Return each member's place in its set, 0 for the least left; ties share the lower place."""
    return np.searchsorted(np.sort(left), left).astype(np.float64)


def _falling_hazards(ends: FloatArray, at_risk: FloatArray) -> FloatArray:
    """Return, bin by bin, the hazards (k, b) nearest to ends / at_risk that fall as scores rise.

    Where nobody was at risk a neighbour's hazard holds: such knots have next to no weight.
    """
    from scipy.optimize import isotonic_regression

    hazards = np.divide(ends, at_risk, out=np.zeros_like(ends), where=at_risk > 0.0)
    out = np.empty_like(hazards)
    for column, weight in enumerate(at_risk.T):
        out[:, column] = isotonic_regression(
            hazards[:, column], weights=np.maximum(weight, 1e-9), increasing=False
        ).x
    return np.clip(out, 0.0, 1.0)
