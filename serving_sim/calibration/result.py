"""What a calibration finds: measured steps, the profile fitted to them, and where it was wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from serving_sim.calibration.grid import AxisName
from serving_sim.calibration.journal import Outcome
from serving_sim.calibration.steps import StepShape
from serving_sim.calibration.timing import Timing
from serving_sim.profile import StepProfile, StepWork

if TYPE_CHECKING:
    from serving_sim.fit_surface import StepMeasurement

ProfileT = TypeVar("ProfileT", bound=StepProfile)


@dataclass(frozen=True, slots=True)
class Probe:
    """A step that the fit was asked for and had not seen. ``gap`` is the axis and the values on it
    that would bring the step into the grid; None for a mixed step, which no grid holds."""

    gap: tuple[AxisName, tuple[int, ...]] | None
    shape: StepShape
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s / self.measured_s - 1.0)


@dataclass(slots=True)
class Calibration(Generic[ProfileT]):
    """What a calibration found. ``rounds`` holds the probes of each whole round, ``mixed`` prefills
    beside decodes, which are never fitted: the surfaces of both are taken to add up. ``uneven``
    holds decodes of which one is longer: the profile's skew share is fitted to them, no table."""

    profile: ProfileT
    measured: list[StepMeasurement]
    skipped: dict[StepShape, str]
    rounds: list[list[Probe]]
    mixed: list[Probe]
    stopped: str
    wall_s: float
    uneven: list[Probe] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def held_out_error(self) -> float:
        """Median error of the last round of probes, of the fit before it; NaN without one."""
        return median_error(self.rounds[-1]) if self.rounds else math.nan

    @property
    def mixed_error(self) -> float:
        """Median error of mixed steps; NaN where none fits."""
        return median_error(self.mixed) if self.mixed else math.nan

    @property
    def uneven_error(self) -> float:
        """Median error of uneven decodes, to which the skew share is fitted; NaN without any."""
        return median_error(self.uneven) if self.uneven else math.nan


def median_error(probes: Sequence[Probe]) -> float:
    """Return the median relative error of ``probes``."""
    return float(np.median([probe.error for probe in probes]))


def measurements(outcomes: Mapping[StepShape, Outcome]) -> list[StepMeasurement]:
    """Return the decode and prefill steps that have a time, in order of their shape."""
    from serving_sim.fit_surface import StepMeasurement

    return [
        StepMeasurement(*shape[:4], outcome.seconds, outcome.spread_s, outcome.num_timed)
        for shape, outcome in sorted(outcomes.items(), key=lambda item: item[0])
        if isinstance(outcome, Timing) and shape.surface in ("decode", "prefill")
    ]


def probes_of(
    surface: str, outcomes: Mapping[StepShape, Outcome], profile: StepProfile
) -> list[Probe]:
    """Return the steps of ``surface`` that have a time, beside what ``profile`` says of them."""
    return [
        Probe(None, shape, outcome.seconds, profile.step_s(work_of(shape)))
        for shape, outcome in sorted(outcomes.items(), key=lambda item: item[0])
        if isinstance(outcome, Timing) and shape.surface == surface
    ]


def work_of(shape: StepShape) -> StepWork:
    """Return ``shape`` as the simulator's work of a step."""
    return StepWork(
        prefill_tokens=shape.prefill_chunk_tokens,
        prefill_context_tokens=shape.prefill_tokens_kept,
        num_decodes=shape.num_decodes,
        decode_context_tokens=shape.decode_kv_tokens,
        num_requests=shape.num_requests,
        max_decode_context_tokens=max(shape.decode_context_tokens, shape.longest_context_tokens),
    )
