"""How long each model usually writes: one number a model, for logs that hold several.

A predictor trained on several models' runs would otherwise have to guess which one it watches. The
level is the mean log length of the model's runs, served lengths for cut ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.signals import SignalRequest
from predictors.base import TrainingSet
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, need_array, need_list

MODEL_FEATURE = "model_log_length"
_NAMES, _TENSOR = "models", "model_levels"


@dataclass(frozen=True, slots=True, eq=False)
class ModelLevels:
    """``levels`` (m + 1,) of ``models`` (m names), the last for any other model."""

    models: tuple[str, ...]
    levels: FloatArray

    def of(self, requests: Sequence[SignalRequest]) -> FloatArray:
        """Return the level (n,) of each request's model."""
        place = {name: index for index, name in enumerate(self.models)}
        return self.levels[[place.get(request.model, -1) for request in requests]]

    def settings(self) -> JsonObject:
        """Return what a checkpoint's settings keep."""
        return {_NAMES: list(self.models)}

    def tensors(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint's tensors keep."""
        return {_TENSOR: self.levels}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self | None:
        """Return the levels of a checkpoint; None when it was trained on one model."""
        if _NAMES not in checkpoint.settings:
            return None
        models = tuple(need_list(checkpoint.settings, _NAMES, str))
        levels = need_array(checkpoint.tensors, _TENSOR, np.float64)
        if levels.shape != (len(models) + 1,) or not np.isfinite(levels).all():
            raise InvalidInput(
                f"the checkpoint holds {levels.shape} model levels of {len(models)} models and "
                "another: it is damaged, train again"
            )
        return cls(models, levels)


def learn_levels(training: TrainingSet) -> tuple[ModelLevels, FloatArray]:
    """Return the levels of all models, and for each run (n,) its model's level as other prompts
    tell it: a row that read its own length in the level would trust it too much."""
    models, model = np.unique([r.model for r in training.requests], return_inverse=True)
    _, prompt = np.unique([r.prompt_sha256 for r in training.requests], return_inverse=True)
    logs = np.log(training.output_tokens)
    pairs, pair = np.unique(np.stack([model, prompt]), axis=1, return_inverse=True)
    sums, counts = np.bincount(model, logs), np.bincount(model)
    own_sum = np.bincount(pair.ravel(), logs)[pair.ravel()]
    own_count = np.bincount(pair.ravel(), minlength=pairs.shape[1])[pair.ravel()]
    others = counts[model] - own_count
    elsewhere = np.divide(
        sums[model] - own_sum, others, out=np.full(len(logs), logs.mean()), where=others > 0
    )
    levels = np.append(sums / counts, logs.mean())
    return ModelLevels(tuple(models.tolist()), levels), elsewhere
