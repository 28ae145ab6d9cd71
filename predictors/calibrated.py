"""A predictor whose bounds were calibrated: the same mean, levels corrected by age.

``predictors.registry.load_predictor`` wraps a checkpoint that carries a table in this class.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from contracts.errors import CheckpointError
from contracts.policy import FloatArray, IntArray
from contracts.signals import DistributionalSignal, SignalRequest
from predictors.base import Predictor, check_level, room
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, MetricRow, write_checkpoint
from predictors.conformal import CalibrationTable


class Calibrated(Predictor):
    """``base`` with quantiles and survival read through ``table``; ``remaining`` is unchanged.

    A quantile at 0.5 or above is an upper bound that holds at least that often, one below 0.5 a
    lower bound that fails at most that often: on prompts like those it was calibrated on.
    """

    family: ClassVar[str] = "calibrated"

    def __init__(self, base: Predictor, table: CalibrationTable) -> None:
        super().__init__(base.provenance)
        self.base, self.table, self.fitted_with = base, table, base.fitted_with

    @property
    def name(self) -> str:
        """The label of the base: a calibrated predictor is no family of its own."""
        return self.base.name

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return what the base answers; see RemainingSignal."""
        return self.base.remaining(requests, ages)

    def quantile(
        self, requests: Sequence[SignalRequest], ages: IntArray, level: float
    ) -> FloatArray:
        """Ask the base at each age group's own level; see DistributionalSignal."""
        check_level(level)
        return quantile_by_group(self.base, requests, ages, self.table, self.table.asked_at(level))

    def interval(
        self, requests: Sequence[SignalRequest], ages: IntArray, coverage: float
    ) -> tuple[FloatArray, FloatArray]:
        """Return bounds (n,), (n,) between which the remaining length lies that often; tighter
        than two one-sided bounds, which each pay for the other's caution."""
        check_level(coverage)
        central = self.table.interval_at(coverage)
        low, high = (
            quantile_by_group(self.base, requests, ages, self.table, (1.0 + sign * central) / 2.0)
            for sign in (-1.0, 1.0)
        )
        return low, high

    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        """Return the base's probabilities, corrected; see DistributionalSignal."""
        ended = 1.0 - self.base.survival(requests, ages, horizon)
        group = self.table.group(ages)
        for index in np.unique(group).tolist():
            rows = group == index
            ended[rows] = self.table.share_at(index, ended[rows])
        alive = np.where(horizon < 1.0, 1.0, 1.0 - ended)
        return np.where(np.floor(horizon) < room(requests, ages), alive, 0.0)

    def settings(self) -> JsonObject:
        """Return those of the base."""
        return self.base.settings()

    def tensors(self) -> dict[str, np.ndarray]:
        """Return those of the base."""
        return self.base.tensors()

    def save_pretrained(self, folder: Path | str, metrics: Sequence[MetricRow] = ()) -> None:
        """Write the base's checkpoint with the table in its ``config.json``."""
        write_checkpoint(
            Path(folder),
            self.base.family,
            self.provenance,
            self.settings(),
            metrics,
            self.tensors(),
            self.table.to_json(),
            self.fitted_with,
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Refuse: a checkpoint names the family of the base, never this class."""
        raise CheckpointError(
            f"{checkpoint.folder}: read it with predictors.registry.load_predictor, which knows "
            "every family and applies the calibration"
        )


def quantile_by_group(
    base: DistributionalSignal,
    requests: Sequence[SignalRequest],
    ages: IntArray,
    table: CalibrationTable,
    asked: FloatArray,
) -> FloatArray:
    """Return the quantiles (n,) of ``base``, each row at the level ``asked`` (g,) of its age group;
    1 is the cap, 0 a single token."""
    group = table.group(ages)
    out = np.where(asked[group] > 0.0, room(requests, ages), 1).astype(np.float64)
    for index in np.unique(group).tolist():
        if 0.0 < asked[index] < 1.0:
            rows = np.flatnonzero(group == index)
            chosen = [requests[i] for i in rows.tolist()]
            out[rows] = base.quantile(chosen, ages[rows], float(asked[index]))
    return out
