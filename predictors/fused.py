"""``fused``: what is known of the prompt as prior, what this run has shown as evidence.

An oracle-K knows the prompt and nothing of the run; progress knows the run and nothing of the
prompt. By Bayes, with R the remaining life in bins and a the age,

    P(R | prompt, progress, a)  ~  P(R | prompt, a) * (P(R | progress, a) / P(R | a)) ^ trust.

``trust`` below 1 makes up for what prompt and progress say twice. The prior is any signal handed
in by :meth:`Fused.with_prior` (predictors never import oracles): its distribution of total length
is smoothed on the log scale by a Student kernel, as one prompt's few runs are no more than points,
and then conditioned on the age; past its longest run the kernel's tail answers. Both evidence
terms are ``gbm-hazard`` models; trust and kernel width maximise the censored likelihood on
prompts the evidence was not learned on, each run's prior being the other runs of its request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.signals import AnyRuns, DistributionalSignal, RemainingSignal, SignalRequest
from contracts.survival import kaplan_meier
from predictors.base import HorizonPredictor, TrainingSet, held_out_runs
from predictors.boosting import BoostingSettings
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, Provenance, need, need_array, need_list
from predictors.features import AGE_FEATURES, PROGRESS_FEATURES, rows_by_request
from predictors.gbm_hazard import GbmHazard, GbmHazardSettings, landmarks
from predictors.trees import from_tensors

_NUM_POINTS = 160  # of total length, log-spaced up to the cap
_KERNEL_DEGREES = 3.5  # the tail of lengths around their prompt's own, TIE (arXiv 2604.00499)
_WIDTHS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.45, 0.7)
_TRUSTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.6)
CENSORING_RULE = (
    "evidence as gbm-hazard; trust and width by censored likelihood: a cut run contributes "
    "P(remaining > what it lasted)"
)


class Fused(HorizonPredictor):
    """``evidence`` reads progress and age, ``base`` the age only; ``width`` is the kernel's, on
    the log scale. Without a prior, the base stands in for it: nothing is known of the prompt."""

    family: ClassVar[str] = "fused"

    def __init__(self, evidence: GbmHazard, base: GbmHazard, trust: float, width: float) -> None:
        super().__init__(evidence.provenance, evidence.edges)
        if not np.array_equal(evidence.edges, base.edges):
            raise InvalidInput("evidence and base must share their horizon edges")
        if not 0.0 <= trust <= max(_TRUSTS) or not 0.0 < width < 10.0:
            raise InvalidInput(f"trust {trust} or kernel width {width} is out of bounds")
        self.evidence, self.base, self.trust, self.width = evidence, base, trust, width
        self.prior: RemainingSignal | None = None

    def with_prior(self, prior: RemainingSignal) -> Fused:
        """Return this predictor with ``prior`` for what is known of a prompt; a signal without
        ``survival`` gives its answer at age 0 as one point."""
        fused = Fused(self.evidence, self.base, self.trust, self.width)
        fused.prior, fused.clairvoyant = prior, prior.clairvoyant
        return fused

    @property
    def name(self) -> str:
        """``fused``, or ``fused(NAME)`` with the prior's name."""
        return self.family if self.prior is None else f"{self.family}({self.prior.name})"

    @property
    def source_run_ids(self) -> Container[str]:
        """The runs it was trained on, and those of its prior."""
        own = super().source_run_ids
        return own if self.prior is None else AnyRuns((own, self.prior.source_run_ids))

    def residual_survival(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return P(remaining > edge) given prior and evidence."""
        base = self.base.residual_survival(requests, ages)
        prior = base
        if self.prior is not None:
            totals = _totals_of(self.prior, requests)
            prior = smoothed_residual(totals, requests, ages, self.edges, self.width)
        ratio = log_ratio(self.evidence.residual_survival(requests, ages), base)
        return posterior_survival(prior, self.trust * ratio)

    def settings(self) -> JsonObject:
        """See Predictor."""
        return {
            "censoring_rule": CENSORING_RULE,
            "features": list(self.evidence.features),
            "trust": self.trust,
            "kernel_width": self.width,
        }

    def tensors(self) -> dict[str, np.ndarray]:
        """See Predictor; the prior is no part of the checkpoint."""
        own = {"edges": self.edges, **self.evidence.trees.to_tensors("evidence.")}
        return own | self.base.trees.to_tensors("base.")

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """See Predictor."""
        features = need_list(checkpoint.settings, "features", str)
        edges = need_array(checkpoint.tensors, "edges", np.int64)

        def hazard(prefix: str, names: Sequence[str], provenance: Provenance) -> GbmHazard:
            trees = from_tensors(checkpoint.tensors, prefix, len(names) + 1)
            return GbmHazard(provenance, edges, names, trees)

        return cls(
            hazard("evidence.", features, checkpoint.provenance),
            hazard("base.", AGE_FEATURES, checkpoint.provenance),
            need(checkpoint.settings, "trust", float),
            need(checkpoint.settings, "kernel_width", float),
        )


@dataclass(frozen=True, slots=True)
class FusedSettings:
    """How to fit ``fused``; ``features`` are what the evidence reads: the run, not its prompt."""

    num_landmarks: int = 12
    num_bins: int = 24
    first_edge_tokens: int = 3
    features: tuple[str, ...] = AGE_FEATURES + PROGRESS_FEATURES
    boosting: BoostingSettings = field(default_factory=BoostingSettings)

    def __post_init__(self) -> None:
        self._hazard(self.features)
        late = sorted(set(self.features) - set(AGE_FEATURES + PROGRESS_FEATURES))
        if late or not set(self.features) & set(PROGRESS_FEATURES):
            raise InvalidInput(
                f"fused features {', '.join(late) or '(no progress)'}: evidence is what the run "
                f"itself shows; choose from {', '.join(AGE_FEATURES + PROGRESS_FEATURES)}"
            )

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> Fused:
        """Fit on ``training``; deterministic in (training, settings, seed).

        Raises InvalidInput without progress, or without repeats to learn the prior's trust from.
        """
        if all(request.progress is None for request in training.requests):
            raise InvalidInput(
                "no training run has progress records, which fused takes as evidence: collect "
                "with progress, or use gbm-hazard"
            )
        apart = held_out_runs(training, 0.5, seed)

        def pair(rows: TrainingSet) -> tuple[GbmHazard, GbmHazard]:
            both = (self._hazard(self.features), self._hazard(AGE_FEATURES))
            evidence, base = (s.fit(rows, seed=seed, num_threads=num_threads) for s in both)
            return evidence, base

        scout = pair(_part(training, ~apart))
        trust, width = self._weighed(training, apart, scout, seed)
        return Fused(*pair(training), trust, width)

    def _hazard(self, features: tuple[str, ...]) -> GbmHazardSettings:
        return GbmHazardSettings(
            self.num_landmarks,
            self.num_bins,
            self.first_edge_tokens,
            features,
            self.boosting,
            tell_models=False,
        )

    def _weighed(
        self,
        training: TrainingSet,
        apart: np.ndarray,
        scout: tuple[GbmHazard, GbmHazard],
        seed: int,
    ) -> tuple[float, float]:
        """Return the (trust, width) of the best censored likelihood on the runs set apart."""
        totals = _leave_one_out_totals(training)
        run, ages = landmarks(training, self.num_landmarks, seed)
        asked = apart[run] & np.array([training.requests[i].run_id in totals for i in run.tolist()])
        run, ages = run[asked], ages[asked]
        if not run.size:
            raise InvalidInput(
                "no held-out training request was run twice: fused learns how far to trust a "
                "prior from repeats; collect with repeats, or use gbm-hazard"
            )
        requests = [training.requests[i] for i in run.tolist()]
        evidence, base = (signal.residual_survival(requests, ages) for signal in scout)
        ratio, edges = log_ratio(evidence, base), scout[0].edges
        left, observed = training.output_tokens[run] - ages, training.event_observed[run]
        weight = training.repeat_weights()[run]
        best = (-np.inf, 0.0, _WIDTHS[0])
        for width in _WIDTHS:
            prior = smoothed_residual(totals, requests, ages, edges, width)
            for trust in _TRUSTS:
                alive = posterior_survival(prior, trust * ratio)
                score = float(weight @ _log_likelihood(alive, edges, left, observed))
                best = max(best, (score, trust, width))
        return best[1], best[2]


def log_ratio(evidence: FloatArray, base: FloatArray) -> FloatArray:
    """Return the log of evidence over base, bin by bin and beyond the last (n, b + 1)."""
    return np.log(_masses(evidence)) - np.log(_masses(base))


def posterior_survival(prior: FloatArray, log_likelihood: FloatArray) -> FloatArray:
    """Return P(remaining > edge) (n, b) from a prior's and the log-likelihood of each bin."""
    logs = np.log(_masses(prior)) + log_likelihood
    masses = np.exp(logs - logs.max(axis=1, keepdims=True))
    tail = np.cumsum(masses[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(np.minimum.accumulate(tail[:, 1:] / tail[:, :1], axis=1))


def smoothed_residual(
    totals: Mapping[str, FloatArray],
    requests: Sequence[SignalRequest],
    ages: IntArray,
    edges: IntArray,
    width: float,
) -> FloatArray:
    """Return P(L > age + edge | L > age) (n, b), L drawn from the smoothed total lengths.

    ``totals`` maps a run's id to P(total > point) (_NUM_POINTS,), the points log-spaced from 1 to
    the request's cap - 1; what lies beyond the last never ends before the cap.
    """
    out = np.empty((len(requests), len(edges)))
    kernels: dict[int, FloatArray] = {}
    for request, rows in rows_by_request(requests):
        logs = _log_points(request.max_tokens)
        cap = request.max_tokens
        if cap not in kernels:
            kernels[cap] = _kernel(logs, width)
        total = totals[request.run_id]
        alive = total[-1] + kernels[cap] @ -np.diff(total, prepend=1.0)
        at = np.log(np.maximum(ages[rows, None] + np.concatenate([[0], edges]), 1.0))
        curve = np.maximum(np.interp(at, logs, alive), 1e-12)
        curve[ages[rows] == 0, 0] = 1.0
        out[rows] = np.minimum.accumulate(curve[:, 1:] / curve[:, :1], axis=1)
    return np.minimum(out, 1.0)


def _log_points(cap_tokens: int) -> FloatArray:
    return np.linspace(0.0, np.log(max(cap_tokens - 1.0, 2.0)), _NUM_POINTS)


def _kernel(logs: FloatArray, width: float) -> FloatArray:
    """Return P(length > point i | it lies in the cell that ends at point k) (points, points)."""
    from scipy.special import stdtr

    centres = logs - 0.5 * np.diff(logs, prepend=logs[0])
    return np.asarray(stdtr(_KERNEL_DEGREES, -(logs[:, None] - centres) / width))


def _totals_of(prior: RemainingSignal, requests: Sequence[SignalRequest]) -> dict[str, FloatArray]:
    """Ask ``prior`` for the distribution of each request's total length: at age 0, so that
    nothing the run has shown can slip in twice."""
    groups = [request for request, _ in rows_by_request(requests)]
    if not isinstance(prior, DistributionalSignal):
        zeros = np.zeros(len(groups), dtype=np.int64)
        means = prior.remaining(groups, zeros)
        return {
            request.run_id: (mean > np.exp(_log_points(request.max_tokens))).astype(np.float64)
            for request, mean in zip(groups, means, strict=True)
        }
    asked = [request for request in groups for _ in range(_NUM_POINTS)]
    points = np.concatenate([np.exp(_log_points(request.max_tokens)) for request in groups])
    alive = prior.survival(asked, np.zeros(len(asked), dtype=np.int64), points)
    # rounding must not raise the curve: masses are its steps
    curves = np.minimum.accumulate(alive.reshape(len(groups), _NUM_POINTS), axis=1)
    return {request.run_id: curve for request, curve in zip(groups, curves, strict=True)}


def _leave_one_out_totals(training: TrainingSet) -> dict[str, FloatArray]:
    """Return, for each run of a repeated request, the total lengths of its other runs."""
    members: dict[str, list[int]] = defaultdict(list)
    for row, request in enumerate(training.requests):
        members[request.request_key].append(row)
    totals = {}
    for rows in members.values():
        for row in rows if len(rows) > 1 else ():
            others = [other for other in rows if other != row]
            curve = kaplan_meier(training.output_tokens[others], training.event_observed[others])
            request = training.requests[row]
            totals[request.run_id] = curve(np.exp(_log_points(request.max_tokens)))
    return totals


def _part(training: TrainingSet, chosen: np.ndarray) -> TrainingSet:
    requests = tuple(training.requests[i] for i in np.flatnonzero(chosen).tolist())
    return TrainingSet(
        requests,
        training.output_tokens[chosen],
        training.event_observed[chosen],
        training.provenance,
    )


def _masses(alive: FloatArray) -> FloatArray:
    """Return the chance of each bin and of what lies beyond (n, b + 1), none of them 0."""
    padded = np.hstack([np.ones((len(alive), 1)), alive, np.zeros((len(alive), 1))])
    return np.maximum(-np.diff(padded, axis=1), 1e-12)


def _log_likelihood(
    alive: FloatArray, edges: IntArray, left: IntArray, observed: np.ndarray
) -> FloatArray:
    """Return (n,) log P(the bin it ended in), or of outliving the last edge a cut run passed."""
    padded = np.hstack([np.ones((len(alive), 1)), alive])
    row = np.arange(len(left))
    ended = np.minimum(np.searchsorted(edges, left, side="left"), len(edges) - 1)
    passed = np.searchsorted(edges, left, side="right")
    chance = np.where(observed, padded[row, ended] - padded[row, ended + 1], padded[row, passed])
    return np.log(np.maximum(chance, 1e-12))
