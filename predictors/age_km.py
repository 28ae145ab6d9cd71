"""``age-km``: the conditional mean residual life of a model's runs; the floor of every table.

One Kaplan-Meier curve for each model, over all its training runs. It knows the age and nothing
else, as Past-Future (Gong et al., ASPLOS 2025) does with its window of finished lengths. Where no
training run lasted as long as the age, or the model is unknown, the answer is the cap itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from contracts.errors import CheckpointError
from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest
from contracts.survival import SurvivalCurve, kaplan_meier
from predictors.base import Predictor, TrainingSet, check_level, room
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, Provenance, need_array, need_list

CENSORING_RULE = "a run cut at a cap, or whose ending is unknown, is right-censored (Kaplan-Meier)"


class AgeKm(Predictor):
    """``curves`` maps a model's name to the survival curve of its lengths."""

    family: ClassVar[str] = "age-km"

    def __init__(self, provenance: Provenance, curves: Mapping[str, SurvivalCurve]) -> None:
        super().__init__(provenance)
        self.curves = dict(sorted(curves.items()))

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return the restricted mean residual life at each age."""
        bound = room(requests, ages)
        answers = self._by_model(
            requests, lambda curve, rows: curve.mean_residual(ages[rows], (ages + bound)[rows])
        )
        return np.clip(np.where(np.isnan(answers), bound, answers), 1.0, bound)

    def quantile(
        self, requests: Sequence[SignalRequest], ages: IntArray, level: float
    ) -> FloatArray:
        """Return the quantile of the residual life at each age."""
        check_level(level)
        bound = room(requests, ages)
        answers = self._by_model(
            requests,
            lambda curve, rows: curve.residual_quantile(ages[rows], (ages + bound)[rows], level),
        )
        return np.clip(np.where(np.isnan(answers), bound, answers), 1.0, bound)

    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        """Return S(age + horizon) / S(age); 0 from the cap on, 1 where nothing is known."""
        whole = np.floor(horizon).astype(np.float64)

        def alive(curve: SurvivalCurve, rows: IntArray) -> FloatArray:
            now = curve(ages[rows])
            known = (now > 0.0) & (ages[rows] < curve.last_tokens)
            then = curve(ages[rows] + whole[rows])
            share = np.full(len(rows), np.nan)
            np.divide(then, now, out=share, where=known)
            return share

        shares = self._by_model(requests, alive)
        shares[np.isnan(shares)] = 1.0
        shares[whole >= room(requests, ages)] = 0.0
        return shares

    def _by_model(
        self,
        requests: Sequence[SignalRequest],
        ask: Callable[[SurvivalCurve, IntArray], FloatArray],
    ) -> FloatArray:
        """Ask each model's curve for its rows; NaN where there is no such model."""
        answers = np.full(len(requests), np.nan)
        models = np.array([request.model for request in requests], dtype=object)
        for model, curve in self.curves.items():
            rows = np.flatnonzero(models == model)
            if rows.size:
                answers[rows] = ask(curve, rows)
        return answers

    def settings(self) -> JsonObject:
        """See Predictor."""
        return {
            "censoring_rule": CENSORING_RULE,
            "curve_models": list(self.curves),
            "curve_last_tokens": [curve.last_tokens for curve in self.curves.values()],
            "curve_num_runs": [curve.num_runs for curve in self.curves.values()],
        }

    def tensors(self) -> dict[str, np.ndarray]:
        """See Predictor."""
        curves = list(self.curves.values())
        return {
            "curve_times": np.concatenate([curve.times for curve in curves]),
            "curve_survival": np.concatenate([curve.survival for curve in curves]),
            "curve_offsets": np.cumsum([0, *(len(curve.times) for curve in curves)]),
        }

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """See Predictor."""
        settings, tensors = checkpoint.settings, checkpoint.tensors
        models = need_list(settings, "curve_models", str)
        last = need_list(settings, "curve_last_tokens", int)
        num_runs = need_list(settings, "curve_num_runs", int)
        times = need_array(tensors, "curve_times", np.int64)
        alive = need_array(tensors, "curve_survival", np.float64)
        offsets = need_array(tensors, "curve_offsets", np.int64)
        fits = len({len(models), len(last), len(num_runs), len(offsets) - 1}) == 1
        if not fits or len(times) != len(alive) or not _covers(offsets, len(times)):
            raise CheckpointError("the survival curves and their offsets do not fit each other")
        curves = {}
        for index, model in enumerate(models):
            part = slice(offsets[index], offsets[index + 1])
            curve = SurvivalCurve(times[part], alive[part], last[index], num_runs[index])
            curves[model] = _checked(model, curve)
        return cls(checkpoint.provenance, curves)


@dataclass(frozen=True, slots=True)
class AgeKmSettings:
    """Nothing to set: counting needs no training."""

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> AgeKm:
        """Count; ``seed`` and ``num_threads`` change nothing."""
        del seed, num_threads
        models = np.array([request.model for request in training.requests], dtype=object)
        curves = {}
        for model in sorted(set(models.tolist())):
            rows = np.flatnonzero(models == model)
            curves[model] = kaplan_meier(
                training.output_tokens[rows], training.event_observed[rows]
            )
        return AgeKm(training.provenance, curves)


def _covers(offsets: IntArray, count: int) -> bool:
    return bool(
        offsets.size and offsets[0] == 0 and offsets[-1] == count and (np.diff(offsets) >= 0).all()
    )


def _checked(model: str, curve: SurvivalCurve) -> SurvivalCurve:
    padded = np.concatenate([[1.0], curve.survival, [0.0]])
    rising = (np.diff(np.concatenate([[0], curve.times])) > 0).all()
    reached = not curve.times.size or curve.times[-1] <= curve.last_tokens
    if not rising or not reached or (np.diff(padded) > 0.0).any() or curve.last_tokens < 1:
        raise CheckpointError(
            f"the survival curve of {model!r} must fall from 1 over rising whole tokens, up to "
            f"its last observation ({curve.last_tokens})"
        )
    return curve
