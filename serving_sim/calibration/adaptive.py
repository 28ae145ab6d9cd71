"""The calibration itself: time a coarse grid, fit, ask the fit about steps it has not seen, and add
lines to the grid where it was wrong, until it is right enough or the time is used up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from contracts.errors import InvalidInput
from serving_sim.calibration.bench_config import StepBench
from serving_sim.calibration.grid import AXES, Grid
from serving_sim.calibration.journal import Journal, Outcome
from serving_sim.calibration.result import (
    Calibration,
    Probe,
    ProfileT,
    measurements,
    median_error,
    probes_of,
    work_of,
)
from serving_sim.calibration.steps import StepDoesNotFit, StepShape
from serving_sim.calibration.timing import Timing
from serving_sim.profile import StepProfile

if TYPE_CHECKING:
    from serving_sim.fit_surface import StepMeasurement

Fit = Callable[[Sequence["StepMeasurement"], Grid], ProfileT]
OnStep = Callable[[int, int, str], None]  # steps done, steps planned so far, a note
_BUDGET_USED = "budget used"
_WORST = 3.0  # times the target: 9 % by default, for a bar of 10 % on the 99th percentile


def silent(_done: int, _total: int, _note: str) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """When to stop: when the fit is ``target_error`` off in the median, and three times that at
    worst, on steps of either kind that it has not seen; or after ``budget_s`` of wall time, or
    ``max_rounds`` rounds of such steps."""

    target_error: float = 0.03
    budget_s: float = 300.0
    max_rounds: int = 8

    def __post_init__(self) -> None:
        if not 0.0 < self.target_error < 1.0:
            raise InvalidInput(f"target error {self.target_error}: give a share in (0, 1)")
        if not 0.0 < self.budget_s < math.inf:
            raise InvalidInput(f"budget of {self.budget_s} s: give a finite number above 0")
        if self.max_rounds < 1:
            raise InvalidInput(f"max_rounds {self.max_rounds}: give at least 1")


class _OutOfTime(Exception):
    """The budget is used up; what was timed so far is in the journal."""


@dataclass(slots=True)
class _Session:
    """Times steps until ``deadline_s`` (time.monotonic()), each at most once over all sessions.

    Only steps that this start asked for are fitted, so that a second start, which finds them in
    the journal, takes the same decisions as the first.
    """

    bench: StepBench
    grid: Grid
    journal: Journal
    deadline_s: float
    on_step: OnStep
    taken: dict[StepShape, Outcome] = field(default_factory=dict)
    planned: set[StepShape] = field(default_factory=set)

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
        self.taken[shape] = outcome
        self.on_step(len(self.taken), len(self.planned), str(shape))
        return outcome

    def take_all(self, shapes: Sequence[StepShape]) -> None:
        self.planned |= set(shapes)
        for shape in shapes:
            self.take(shape)

    def fit(self, fit: Fit[ProfileT]) -> ProfileT:
        return fit(measurements(self.taken), self.grid)


def calibrate(
    bench: StepBench,
    grid: Grid,
    fit: Fit[ProfileT],
    journal: Journal,
    settings: CalibrationSettings,
    *,
    uneven: Sequence[StepShape] = (),
    started_s: float | None = None,
    on_step: OnStep = silent,
) -> Calibration[ProfileT]:
    """Return the profile of ``bench`` over ``grid`` and how well it predicts.

    ``uneven`` steps are timed after the coarse grid and fitted to no table.
    ``started_s`` is the time.monotonic() from which the budget counts (default: now). Raises
    InvalidInput when the budget ends before the coarse grid is timed; a second start goes on.
    """
    begin_s = time.monotonic() if started_s is None else started_s
    session = _Session(bench, grid, journal, begin_s + settings.budget_s, on_step)
    _take_coarse_grid(session, settings.budget_s, uneven)
    rounds: list[list[Probe]] = []
    profile = session.fit(fit)
    stopped = f"after {settings.max_rounds} rounds"
    try:
        for _ in range(settings.max_rounds):
            probes = _probe(session, profile)
            if not probes:
                stopped = "the grid cannot be refined further"
                break
            rounds.append(probes)
            if _is_met(probes, settings.target_error):
                stopped = "target met"
                break
            _refine(session, probes, settings.target_error)
            profile = session.fit(fit)
    except _OutOfTime:
        stopped = _BUDGET_USED
    # the last probes lie between the knots: held out of the tables, they count in their error
    profile = session.fit(fit)
    return Calibration(
        profile=profile,
        measured=measurements(session.taken),
        skipped={s: why for s, why in session.taken.items() if isinstance(why, str)},
        rounds=rounds,
        mixed=probes_of("mixed", session.taken, profile),
        uneven=probes_of("uneven", session.taken, profile),
        stopped=stopped,
        wall_s=time.monotonic() - begin_s,
        notes=list(journal.notes),
    )


def _take_coarse_grid(session: _Session, budget_s: float, uneven: Sequence[StepShape]) -> None:
    try:
        session.take_all([*session.grid.shapes(), *uneven])
    except _OutOfTime:
        raise InvalidInput(
            f"the budget of {budget_s:g} s ended after {len(session.taken)} of "
            f"{len(session.planned)} steps of the coarse grid: run the same command again to go on "
            f"from {session.journal.path}, or give a larger --budget-s"
        ) from None


def _probe(session: _Session, profile: StepProfile) -> list[Probe]:
    """Time two steps in each gap of every axis, and say what was predicted."""
    probes = []
    for axis in AXES:
        for turn, values in enumerate(session.grid.gaps(axis)):
            steps = session.grid.line(axis, values[-1])
            line = [s for s in steps if s.kv_tokens <= session.bench.room_tokens]
            if not line:
                continue
            # walk along the other axis from gap to gap, so that the probes cover the surface
            for at in sorted({turn % len(line), (turn + len(line) // 2) % len(line)}):
                if isinstance(timing := session.take(line[at]), Timing):
                    predicted_s = profile.step_s(work_of(line[at]))
                    probes.append(Probe((axis, values), line[at], timing.seconds, predicted_s))
    return probes


def _refine(session: _Session, probes: list[Probe], target: float) -> None:
    """Time lines through the gaps that were predicted worst, and add them to the grid: half of
    those beyond the target, so that the next round can tell whether the others needed one."""
    wrong = sorted((p for p in probes if p.error > target), key=lambda p: (-p.error, p.shape))
    gaps = list(dict.fromkeys(probe.gap for probe in wrong if probe.gap is not None))
    for axis, values in gaps[: -(-len(gaps) // 2)]:
        for value in values:
            session.take_all(session.grid.line(axis, value))
        session.grid = session.grid.joined(axis, values)


def _is_met(probes: Sequence[Probe], target: float) -> bool:
    surfaces = {probe.shape.surface for probe in probes}
    groups = [[p for p in probes if p.shape.surface == surface] for surface in surfaces]
    return all(
        median_error(group) <= target and max(p.error for p in group) <= _WORST * target
        for group in groups
    )


def time_steps(
    bench: StepBench,
    grid: Grid,
    shapes: Sequence[StepShape],
    journal: Journal,
    deadline_s: float,
    on_step: OnStep = silent,
) -> bool:
    """Time ``shapes`` of ``grid`` into ``journal`` and fit nothing; say whether there was time for
    all of them. ``deadline_s`` is on the clock of time.monotonic()."""
    try:
        _Session(bench, grid, journal, deadline_s, on_step).take_all(shapes)
    except _OutOfTime:
        return False
    return True


def refit(
    journal: Journal, grid: Grid, fit: Fit[ProfileT], room_tokens: int, target_error: float
) -> Calibration[ProfileT]:
    """Return the calibration that the timings of ``journal``, begun with ``grid``, give.

    It takes the same decisions as the one that made them, and stops where the timings do.
    """
    begin_s = time.monotonic()
    settings = CalibrationSettings(target_error=target_error, budget_s=1.0, max_rounds=100)
    missing = [shape for shape in grid.shapes() if shape not in journal.outcomes]
    for shape in missing:
        journal.outcomes[shape] = "not timed"
    if missing:
        journal.notes.append(
            f"{len(missing)} steps of the grid were not timed; the fit bridges them"
        )
    result = calibrate(
        _NoBench(room_tokens),
        grid,
        fit,
        journal,
        settings,
        uneven=[shape for shape in journal.outcomes if shape.surface == "uneven"],
        started_s=begin_s - settings.budget_s,
    )
    result.wall_s = time.monotonic() - begin_s
    if result.stopped == _BUDGET_USED:
        result.stopped = "where the journal ends"
    return result


@dataclass(frozen=True, slots=True)
class _NoBench:
    """A bench that is gone: it knows how much room there was, and its time is over."""

    room_tokens: int

    def time(self, shape: StepShape) -> Timing:
        raise StepDoesNotFit(f"{shape} was not timed")
