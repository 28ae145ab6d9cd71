"""The calibration itself: time a coarse grid, fit, ask the fit about steps it has not seen, and add
lines to the grid where it was wrong, until it is right enough or the time is used up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from contracts.errors import InvalidInput
from serving_sim.calibration.bench import StepBench
from serving_sim.calibration.grid import AXES, AxisName, Grid
from serving_sim.calibration.journal import Journal, Outcome
from serving_sim.calibration.steps import StepDoesNotFit, StepShape
from serving_sim.calibration.timing import Timing
from serving_sim.profile import StepProfile, StepWork

if TYPE_CHECKING:
    from serving_sim.fit_surface import StepMeasurement

ProfileT = TypeVar("ProfileT", bound=StepProfile)
Fit = Callable[[Sequence["StepMeasurement"]], ProfileT]
OnStep = Callable[[int, int, str], None]  # steps done, steps planned so far, a note


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """When to stop: the median relative error of the fit on steps it has not seen, or ``budget_s``
    of wall time; at most ``max_rounds`` refinements."""

    target_error: float = 0.03
    budget_s: float = 300.0
    max_rounds: int = 6

    def __post_init__(self) -> None:
        if not 0.0 < self.target_error < 1.0:
            raise InvalidInput(f"target error {self.target_error}: give a share in (0, 1)")
        if not 0.0 < self.budget_s < math.inf:
            raise InvalidInput(f"budget of {self.budget_s} s: give a finite number above 0")
        if self.max_rounds < 1:
            raise InvalidInput(f"max_rounds {self.max_rounds}: give at least 1")


@dataclass(frozen=True, slots=True)
class Probe:
    """A step that the fit was asked for and had not seen. ``line`` is the axis and the value on it
    that would bring the step into the grid; None for a mixed step, which no grid holds."""

    line: tuple[AxisName, int] | None
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
    beside decodes, which are never fitted: the surfaces of both are taken to add up."""

    profile: ProfileT
    measured: list[StepMeasurement]
    skipped: dict[StepShape, str]
    rounds: list[list[Probe]]
    mixed: list[Probe]
    stopped: str
    wall_s: float
    notes: list[str] = field(default_factory=list)

    @property
    def held_out_error(self) -> float:
        """Median error of the last round of probes, of the fit before it; NaN without one."""
        return _median_error(self.rounds[-1]) if self.rounds else math.nan

    @property
    def mixed_error(self) -> float:
        """Median error of mixed steps; NaN where none fits."""
        return _median_error(self.mixed) if self.mixed else math.nan


class _OutOfTime(Exception):
    """The budget is used up; what was timed so far is in the journal."""


class _Session:
    """Times steps within the budget, each at most once over all sessions."""

    def __init__(
        self, bench: StepBench, journal: Journal, deadline_s: float, on_step: OnStep
    ) -> None:
        self.bench, self.journal, self.deadline_s, self.on_step = (
            bench, journal, deadline_s, on_step,
        )  # fmt: skip
        self.planned: set[StepShape] = set()
        self.done: set[StepShape] = set()

    def take(self, shape: StepShape) -> Outcome:
        """Return the time of ``shape``, or why there is none; raises _OutOfTime."""
        outcome = self.journal.outcomes.get(shape)
        if outcome is None:
            if time.monotonic() >= self.deadline_s:
                raise _OutOfTime
            try:
                outcome = self.bench.time(shape)
            except StepDoesNotFit as error:
                outcome = str(error)
            self.journal.add(shape, outcome)
        self.planned.add(shape)
        self.done.add(shape)
        self.on_step(len(self.done), len(self.planned), str(shape))
        return outcome

    def take_all(self, shapes: Sequence[StepShape]) -> None:
        self.planned |= set(shapes)
        for shape in shapes:
            self.take(shape)


def silent(_done: int, _total: int, _note: str) -> None:
    """Report nothing."""


def calibrate(
    bench: StepBench,
    grid: Grid,
    fit: Fit[ProfileT],
    journal: Journal,
    settings: CalibrationSettings,
    *,
    started_s: float | None = None,
    on_step: OnStep = silent,
) -> Calibration[ProfileT]:
    """Return the profile of ``bench`` over ``grid`` and how well it predicts.

    ``started_s`` is the time.monotonic() from which the budget counts (default: now). Raises
    InvalidInput when the budget ends before the coarse grid is timed; a second start goes on.
    """
    begin_s = time.monotonic() if started_s is None else started_s
    session = _Session(bench, journal, begin_s + settings.budget_s, on_step)
    try:
        session.take_all(grid.shapes())
    except _OutOfTime:
        raise InvalidInput(
            f"the budget of {settings.budget_s:g} s ended after {len(session.done)} of "
            f"{len(session.planned)} steps of the coarse grid: run the same command again to go on "
            f"from {journal.path}, or give a larger --budget-s"
        ) from None
    rounds: list[list[Probe]] = []
    profile = fit(_rows(journal))
    stopped = "refined as often as allowed"
    try:
        for _ in range(settings.max_rounds):
            probes = _probe(session, grid, profile)
            if not probes:
                stopped = "the grid cannot be refined further"
                break
            rounds.append(probes)
            if _median_error(probes) <= settings.target_error:
                stopped = "target met"
                break
            grid = _refine(session, grid, probes, settings.target_error)
            profile = fit(_rows(journal))
    except _OutOfTime:
        stopped = "budget used"
        profile = fit(_rows(journal))
    return _conclude(journal, profile, rounds, stopped, begin_s)


def time_grid(
    bench: StepBench, grid: Grid, journal: Journal, deadline_s: float, on_step: OnStep = silent
) -> bool:
    """Time the steps of ``grid`` into ``journal`` and fit nothing; say whether there was time for
    all of them. ``deadline_s`` is on the clock of time.monotonic()."""
    try:
        _Session(bench, journal, deadline_s, on_step).take_all(grid.shapes())
    except _OutOfTime:
        return False
    return True


def refit(journal: Journal, fit: Fit[ProfileT]) -> Calibration[ProfileT]:
    """Return the calibration that the timings of ``journal`` give, with no probes and no device."""
    begin_s = time.monotonic()
    return _conclude(journal, fit(_rows(journal)), [], "fitted to a journal", begin_s)


def _conclude(
    journal: Journal,
    profile: ProfileT,
    rounds: list[list[Probe]],
    stopped: str,
    begin_s: float,
) -> Calibration[ProfileT]:
    return Calibration(
        profile=profile,
        measured=_rows(journal),
        skipped={s: why for s, why in journal.outcomes.items() if isinstance(why, str)},
        rounds=rounds,
        mixed=_mixed(journal, profile),
        stopped=stopped,
        wall_s=time.monotonic() - begin_s,
        notes=list(journal.notes),
    )


def _rows(journal: Journal) -> list[StepMeasurement]:
    from serving_sim.fit_surface import StepMeasurement

    return [
        StepMeasurement(*shape, outcome.seconds, outcome.spread_s, outcome.num_timed)
        for shape, outcome in sorted(journal.outcomes.items(), key=lambda item: item[0])
        if isinstance(outcome, Timing) and shape.surface != "mixed"
    ]


def work_of(shape: StepShape) -> StepWork:
    """Return ``shape`` as the simulator's work of a step."""
    return StepWork(
        prefill_tokens=shape.prefill_chunk_tokens,
        prefill_context_tokens=shape.prefill_tokens_kept,
        num_decodes=shape.num_decodes,
        decode_context_tokens=shape.num_decodes * shape.decode_context_tokens,
        num_requests=shape.num_requests,
        max_decode_context_tokens=shape.decode_context_tokens,
    )


def _probe(session: _Session, grid: Grid, profile: StepProfile) -> list[Probe]:
    """Time one step in the middle of every gap of every axis, and say what was predicted."""
    probes = []
    for axis in AXES:
        for turn, value in enumerate(grid.gaps(axis)):
            line = [s for s in grid.line(axis, value) if s.kv_tokens <= session.bench.room_tokens]
            if not line:
                continue
            # walk along the other axis from gap to gap, so that the probes cover the surface
            shape = line[turn % len(line)]
            if isinstance(timing := session.take(shape), Timing):
                predicted_s = profile.step_s(work_of(shape))
                probes.append(Probe((axis, value), shape, timing.seconds, predicted_s))
    return probes


def _mixed(journal: Journal, profile: StepProfile) -> list[Probe]:
    return [
        Probe(None, shape, outcome.seconds, profile.step_s(work_of(shape)))
        for shape, outcome in sorted(journal.outcomes.items(), key=lambda item: item[0])
        if shape.surface == "mixed" and isinstance(outcome, Timing)
    ]


def _refine(session: _Session, grid: Grid, probes: list[Probe], target: float) -> Grid:
    """Time a line through the gaps that were predicted worst, and return the grid with them: half
    of those beyond the target, so that the next round can tell whether the others needed one."""
    wrong = sorted((p for p in probes if p.error > target), key=lambda p: (-p.error, p.shape))
    for probe in wrong[: max(1, len(wrong) // 2)]:
        if probe.line is not None:
            session.take_all(grid.line(*probe.line))
            grid = grid.with_value(*probe.line)
    return grid


def _median_error(probes: Sequence[Probe]) -> float:
    return float(np.median([probe.error for probe in probes]))
