"""A study: one matrix for each source of lengths, at pressures dense around the regime's boundary.

Seeds come in two kinds that never meet: the pilots' (eval.study_pilots), which settle pools, regime
and margin, and the study's, which are judged.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contracts.errors import InvalidInput
from eval.cells import Cell, read_cells
from eval.matrix import task_path
from eval.matrix_config import MatrixConfig
from eval.parallel import through
from eval.study_config import Source, StudyConfig, source_folder
from eval.study_pilots import (
    Pilot,
    check_matrix,
    find_pilot,
    has_pilot,
    matrix_of,
    run_pilot,
)
from eval.task_limits import NO_LIMITS, TaskLimits
from eval.tasks import Failure, TaskCounts, TaskOutcome, clear_leftovers, count_tasks, run_task
from eval.verdicts import default_margin


@dataclass(frozen=True, slots=True, eq=False)
class SourceResult:
    """The cells of one source, its matrix, and what its pilots settled."""

    source: Source
    matrix: MatrixConfig
    pilot: Pilot
    cells: list[Cell]
    out_dir: Path


@dataclass(frozen=True, slots=True, eq=False)
class StudyResult:
    """All sources of a study and the margin its verdicts use (percentage points).

    A seed that failed in any source is left out of all of them, so that every comparison, in a cell
    or over the grid, is paired over the same seeds.
    """

    config: StudyConfig
    sources: list[SourceResult]
    margin_pp: float
    failures: tuple[Failure, ...] = ()

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that every source finished; only these are judged."""
        failed = {failure.seed for failure in self.failures}
        return tuple(seed for seed in range(self.config.num_seeds) if seed not in failed)

    def missing_text(self) -> str:
        """Say which seeds are missing and why; empty when none is."""
        if not self.failures:
            return ""
        missing = self.config.num_seeds - len(self.seeds)
        return (
            f"{missing} of {self.config.num_seeds} seeds missing, left out for every source and "
            "rule (a task that fails is seldom an ordinary one: read the rest with that in mind; "
            "--retry-failed runs them again):\n"
            + "\n".join(f"  {failure}" for failure in self.failures)
        )


def run_study(
    config: StudyConfig,
    sources: Sequence[Source],
    out_dir: Path,
    *,
    num_jobs: int = -1,
    on_task: Callable[[str, int, int], None] = lambda *_: None,
    limits: TaskLimits = NO_LIMITS,
    retry_failed: bool = False,
    on_note: Callable[[str], None] = warnings.warn,
) -> StudyResult:
    """Run pilots, then every seed of every source; finished tasks are read, not run again.

    ``num_jobs`` is joblib's; other backends are chosen around the call (joblib.parallel_config).
    ``on_task`` hears the stage, how many of its tasks are done, and how many there are; ``on_note``
    hears of files set aside and of what a task warned. A task beyond its ``limits`` is recorded as
    failed and stays so until ``retry_failed``. Raises InvalidInput when a pilot passes them or
    fewer than two seeds are complete.
    """
    if not sources:
        raise InvalidInput("a study needs at least one source of lengths")
    for source in sources:
        check_matrix(config, source)
    folders = [source_folder(source, out_dir) for source in sources]
    clear_leftovers(out_dir, folders)
    pairs = list(zip(sources, folders, strict=True))
    pilot_tasks = [(config, *pair, limits) for pair in pairs]
    through("pilots", run_pilot, pilot_tasks, num_jobs, on_task, on_note)
    pilots = [find_pilot(config, *pair) for pair in pairs]
    matrices = [matrix_of(config, *pair) for pair in zip(sources, pilots, strict=True)]
    tasks = [
        (matrix, seed, folder, limits, retry_failed, source.name)
        for seed in range(config.num_seeds)
        for matrix, folder, source in zip(matrices, folders, sources, strict=True)
    ]
    outcomes = through("seeds", run_task, tasks, num_jobs, on_task, on_note)
    failures = failures_of(outcomes, on_note)
    study = StudyResult(config, [], _margin(config, pilots), failures)
    if len(study.seeds) < 2:
        raise InvalidInput(f"nothing can be compared. {study.missing_text()}")
    parts = zip(sources, matrices, pilots, folders, strict=True)
    study.sources.extend(
        SourceResult(source, matrix, pilot, _cells(matrix, study.seeds, folder), folder)
        for source, matrix, pilot, folder in parts
    )
    return study


def failures_of(
    outcomes: Sequence[TaskOutcome], on_note: Callable[[str], None]
) -> tuple[Failure, ...]:
    """Return the failures among ``outcomes`` in a fixed order; the notes go to ``on_note``."""
    for note in sorted(outcome.note for outcome in outcomes if outcome.note):
        on_note(note)
    found = [outcome.failure for outcome in outcomes if outcome.failure]
    return tuple(sorted(found, key=lambda failure: (failure.seed, failure.where)))


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How far one source is: whether its pilots ran, and what became of its seeds."""

    source: str
    has_pilot: bool
    seeds_done: int
    seeds: int
    counts: TaskCounts

    def __str__(self) -> str:
        pilots = "pilots done" if self.has_pilot else "pilots missing"
        return f"{self.source}: {pilots}, {self.counts}"


def study_status(
    config: StudyConfig, sources: Sequence[Source], out_dir: Path
) -> list[SourceStatus]:
    """Say what is done and what a start would run."""
    rows = []
    for source in sources:
        folder = source_folder(source, out_dir)
        is_piloted = has_pilot(config, source, folder)
        counts = TaskCounts(0, 0, config.num_seeds, 0, math.nan)
        if is_piloted:
            matrix = matrix_of(config, source, find_pilot(config, source, folder))
            counts = count_tasks([task_path(matrix, s, folder) for s in range(config.num_seeds)])
        rows.append(SourceStatus(source.name, is_piloted, counts.done, config.num_seeds, counts))
    return rows


def _cells(matrix: MatrixConfig, seeds: Sequence[int], folder: Path) -> list[Cell]:
    return [cell for seed in seeds for cell in read_cells(task_path(matrix, seed, folder))]


def _margin(config: StudyConfig, pilots: Sequence[Pilot]) -> float:
    if config.margin_pp is not None:
        return config.margin_pp
    inside = [
        breach
        for pilot in pilots
        for breach, low in zip(pilot.lifo_breach, pilot.in_regime(config.boundary), strict=True)
        if low
    ]
    return round(default_margin(100 * float(np.mean(inside)) if inside else 0.0), 2)
