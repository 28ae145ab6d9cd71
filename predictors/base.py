"""What every predictor shares: what it was trained on, the bounds of its answers, its checkpoint.

A family supplies mathematics. Either ``residual_survival`` on a fixed set of horizons, from which
:class:`HorizonPredictor` derives mean, quantile and survival, or those three directly.

A cap is a cap: every answer is the *served* remaining length, min(natural length, max_tokens) -
age, so it never passes ``max_tokens - age``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from contracts.errors import CheckpointError, InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_uniform
from contracts.signals import SignalRequest
from predictors.card import JsonObject
from predictors.checkpoint import (
    Checkpoint,
    MetricRow,
    Provenance,
    read_checkpoint,
    write_checkpoint,
)

CHUNK_ROWS = 200_000


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSet:
    """Decode runs as a predictor is fitted on them: what was knowable, and how each run ended.

    ``output_tokens`` (n,) are lengths, ``event_observed`` (n,) is False where a run was cut
    (right-censored: it is longer than its ``output_tokens``); an unknown ending counts as cut.
    """

    requests: tuple[SignalRequest, ...]
    output_tokens: IntArray
    event_observed: np.ndarray
    provenance: Provenance

    def __post_init__(self) -> None:
        if not self.requests:
            raise InvalidInput("the training set holds no decode run: give a run log with some")
        if self.output_tokens.min() < 1:
            row = int(self.output_tokens.argmin())
            raise InvalidInput(
                f"run {self.requests[row].run_id!r} has {self.output_tokens[row]} output tokens; "
                "a training run must have at least 1"
            )

    @property
    def cap_tokens(self) -> int:
        """The largest cap any run was collected under."""
        return int(max(request.max_tokens for request in self.requests))

    def repeat_weights(self) -> FloatArray:
        """Return (n,) weights, mean 1, with which each request counts once, however often it ran.

        They must not depend on lengths: weighting rows by 1/(rows of the run) would make short
        runs count more at every age and so push every hazard up (measured on synthetic runs: the
        answers fell 20 % short; tests/laws/test_signal_laws.py holds the weights to this).
        """
        keys = [request.request_key for request in self.requests]
        _, member, counts = np.unique(keys, return_inverse=True, return_counts=True)
        weights = 1.0 / counts[member]
        return np.asarray(weights / weights.mean())


def held_out_runs(training: TrainingSet, share: float, seed: int) -> np.ndarray:
    """Return (n,) which runs a fit sets apart for itself (to stop early, to calibrate): about
    ``share`` of the prompts, whole.

    Raises InvalidInput when there is only one prompt.
    """
    prompts = sorted({request.prompt_sha256 for request in training.requests})
    if len(prompts) < 2:
        raise InvalidInput(
            "all training runs are of one prompt: the fit sets some prompts apart, so at least "
            "2 are needed; use age-km, or a log with more prompts"
        )
    ordered = sorted(prompts, key=lambda prompt: keyed_uniform(seed, "early-stop", prompt))
    chosen = set(ordered[: max(1, min(len(prompts) - 1, round(share * len(prompts))))])
    return np.array([request.prompt_sha256 in chosen for request in training.requests])


class Predictor(ABC):
    """A fitted RemainingSignal (and DistributionalSignal) that can be saved and loaded.

    ``provenance`` says what it was trained on; its prompts are excluded from honest scores.
    ``fitted_with`` is the seed and the settings of the fit, where they were noted
    (training.recipe.fit_noted): with them the same family can be fitted again.
    """

    family: ClassVar[str]
    clairvoyant = False
    fitted_with: JsonObject | None = None

    def __init__(self, provenance: Provenance) -> None:
        self.provenance = provenance

    @property
    def name(self) -> str:
        """The label of this signal in tables: its family."""
        return self.family

    @property
    def source_run_ids(self) -> Container[str]:
        """The runs it was trained on."""
        return frozenset(self.provenance.run_ids)

    @property
    def excluded_prompts(self) -> frozenset[str]:
        """SHA-256 of every prompt it was trained on: no score on one of them counts."""
        return frozenset(self.provenance.prompt_sha256s)

    @abstractmethod
    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return the expected served remaining tokens (n,); see RemainingSignal."""

    @abstractmethod
    def quantile(
        self, requests: Sequence[SignalRequest], ages: IntArray, level: float
    ) -> FloatArray:
        """Return the smallest r (n,) with P(remaining <= r) >= level; see DistributionalSignal."""

    @abstractmethod
    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        """Return P(remaining > horizon) (n,); see DistributionalSignal."""

    @abstractmethod
    def settings(self) -> JsonObject:
        """Return what ``config.json`` must say to rebuild it, apart from the arrays."""

    @abstractmethod
    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays of ``model.safetensors``."""

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Rebuild what ``settings`` and ``tensors`` gave; raises InvalidInput on a bad value."""

    def save_pretrained(self, folder: Path | str, metrics: Sequence[MetricRow] = ()) -> None:
        """Write the checkpoint folder; ``metrics`` are rows of held-out scores for its card."""
        write_checkpoint(
            Path(folder),
            self.family,
            self.provenance,
            self.settings(),
            metrics,
            self.tensors(),
            fitted_with=self.fitted_with,
        )

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> Self:
        """Read a checkpoint folder of this family, without any calibration it carries (that is
        predictors.registry.load_predictor); raises CheckpointError."""
        return cls.restored(read_checkpoint(Path(folder)))

    @classmethod
    def restored(cls, checkpoint: Checkpoint) -> Self:
        """Rebuild from a verified checkpoint; every refusal becomes one CheckpointError."""
        if checkpoint.family != cls.family:
            raise CheckpointError(
                f"{checkpoint.folder} holds a {checkpoint.family!r} predictor, not "
                f"{cls.family!r}: use predictors.registry.load_predictor"
            )
        try:
            predictor = cls.from_checkpoint(checkpoint)
        except InvalidInput as error:
            raise CheckpointError(f"{checkpoint.folder}: {error}") from None
        predictor.fitted_with = checkpoint.fitted_with
        return predictor


def room(requests: Sequence[SignalRequest], ages: IntArray) -> IntArray:
    """Return the tokens (n,) each request may still write, at least 1."""
    caps = np.array([request.max_tokens for request in requests], dtype=np.int64)
    return np.asarray(np.maximum(1, caps - ages), dtype=np.int64)


def check_level(level: float) -> None:
    """Raise InvalidInput unless ``level`` is a probability inside (0, 1)."""
    if not 0.0 < level < 1.0:
        raise InvalidInput(f"quantile level is {level}: it must lie between 0 and 1")


class HorizonPredictor(Predictor):
    """A predictor that knows P(remaining > h) at fixed horizons h and interpolates between.

    ``edges`` (b,) are the horizons in tokens, rising, the first at least 1. Between two edges,
    endings are spread evenly over the whole tokens; beyond the last, nobody ends before the cap
    (nothing was observed there).
    """

    def __init__(self, provenance: Provenance, edges: IntArray) -> None:
        super().__init__(provenance)
        if not edges.size or edges[0] < 1 or (np.diff(edges) < 1).any():
            raise InvalidInput(f"horizon edges are {edges.tolist()}: they must rise from 1 or more")
        self.edges = edges

    @abstractmethod
    def residual_survival(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return P(remaining > edges[j]) (n, b): within [0, 1] and falling along j."""

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Integrate the curve up to the cap; see RemainingSignal."""

        def mean(asked: Sequence[SignalRequest], at: IntArray) -> FloatArray:
            return self.mean_of(self.residual_survival(asked, at), room(asked, at))

        return _in_chunks(mean, requests, ages)

    def mean_of(self, alive: FloatArray, room_tokens: IntArray) -> FloatArray:
        """Return the mean (n,) of curves ``alive`` (n, b) at the edges, up to ``room_tokens``."""
        bound = room_tokens.astype(np.float64)
        knots, curve = self._with_start(alive)
        steps = np.diff(knots) * (curve[:, :-1] + curve[:, 1:]) / 2.0
        area = np.concatenate([np.zeros((len(curve), 1)), np.cumsum(steps, axis=1)], axis=1)
        slot, part = _locate(knots, bound)
        row = np.arange(len(curve))
        height = _interpolate(curve, slot, part)
        partial = (bound - knots[slot]) * (curve[row, slot] + height) / 2.0
        # whole tokens: the sum of S(0) … S(bound - 1) is the trapezoid plus half the drop
        mean = area[row, slot] + partial + (1.0 - height) / 2.0
        return np.clip(mean, 1.0, bound)

    def quantile(
        self, requests: Sequence[SignalRequest], ages: IntArray, level: float
    ) -> FloatArray:
        """Invert the curve; the cap where it never falls to 1 - level."""
        check_level(level)

        def inverted(asked: Sequence[SignalRequest], at: IntArray) -> FloatArray:
            whole = np.ceil(curve_quantile(*self._curve(asked, at), level) - 1e-9)
            return np.clip(whole, 1.0, room(asked, at).astype(np.float64))

        return _in_chunks(inverted, requests, ages)

    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        """Read the curve at whole tokens; 0 from the cap on."""

        def read(asked: Sequence[SignalRequest], at: IntArray, whole: FloatArray) -> FloatArray:
            knots, curve = self._curve(asked, at)
            slot, part = _locate(knots, whole)
            alive = np.where(whole < 1.0, 1.0, _interpolate(curve, slot, part))
            return np.where(whole < room(asked, at), alive, 0.0)

        return _in_chunks(read, requests, ages, np.floor(horizon).astype(np.float64))

    def _curve(
        self, requests: Sequence[SignalRequest], ages: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the knots (b + 1,) from 0 on and the survival (n, b + 1) at them."""
        return self._with_start(self.residual_survival(requests, ages))

    def _with_start(self, alive: FloatArray) -> tuple[FloatArray, FloatArray]:
        knots = np.concatenate([[0.0], self.edges])
        return knots, np.concatenate([np.ones((len(alive), 1)), alive], axis=1)


def _in_chunks(
    answer: Callable[..., FloatArray],
    requests: Sequence[SignalRequest],
    ages: IntArray,
    *more: FloatArray,
) -> FloatArray:
    """Return ``answer`` (n,) to all rows, asked for CHUNK_ROWS at a time: the features and curves
    of ten million rows at once take gigabytes."""
    if len(ages) <= CHUNK_ROWS:
        return answer(requests, ages, *more)
    parts = []
    for start in range(0, len(ages), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        parts.append(answer(requests[chunk], ages[chunk], *(values[chunk] for values in more)))
    return np.concatenate(parts)


def curve_quantile(knots: FloatArray, curve: FloatArray, level: float) -> FloatArray:
    """Return where the falling curves (n, b) at ``knots`` (b,), 1 at the first, reach 1 - ``level``
    (n,), straight lines between knots; infinity where one never does."""
    target = 1.0 - level
    above = (curve > target).sum(axis=1)  # falling curve: the first knot at or below target
    slot = np.minimum(above, len(knots) - 1)
    row = np.arange(len(curve))
    high, low = curve[row, slot - 1], curve[row, slot]
    share = np.divide(high - target, high - low, out=np.ones(len(curve)), where=high > low)
    reach = knots[slot - 1] + share * (knots[slot] - knots[slot - 1])
    return np.where(above < len(knots), reach, np.inf)


def _locate(knots: FloatArray, at: FloatArray) -> tuple[IntArray, FloatArray]:
    """Return the last knot at or before ``at`` and how far it is to the next, within [0, 1)."""
    slot = np.searchsorted(knots, at, side="right") - 1
    following = knots[np.minimum(slot + 1, len(knots) - 1)]
    gap = following - knots[slot]
    part = np.divide(at - knots[slot], gap, out=np.zeros(len(at)), where=gap > 0)
    return slot, part


def _interpolate(curve: FloatArray, slot: IntArray, part: FloatArray) -> FloatArray:
    row = np.arange(len(curve))
    following = np.minimum(slot + 1, curve.shape[1] - 1)
    return np.asarray(curve[row, slot] * (1.0 - part) + curve[row, following] * part)
