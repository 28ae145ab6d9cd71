"""A study: one matrix for each source of lengths, at pressures dense around the regime's boundary.

Seeds come in two kinds that never meet. *Pilot* seeds run LIFO only and settle, before anything is
compared, how large the pool of each source is (where LIFO's breach crosses the boundary), which
pressures belong to the low-breach regime, and the equivalence margin. *Study* seeds are judged.
Choosing cells on the seeds one judges favours LIFO (reference: evaluation rules, finding 3).
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InvalidInput
from contracts.files import atomic_write_text
from contracts.runs import DecodeRun
from eval.cells import Cell, read_cells
from eval.matrix import (
    SeedInputs,
    offered_kv_load,
    prepare_seed,
    run_cell,
    source_runs,
    task_key,
    task_path,
)
from eval.matrix_config import MatrixConfig, Pressure
from eval.signal_sources import NO_SIGNAL, SignalSource
from eval.task_limits import NO_LIMITS, TaskLimits, TaskStopped, run_limited
from eval.tasks import Failure, TaskCounts, TaskOutcome, clear_leftovers, count_tasks, run_task
from eval.verdicts import default_margin
from serving_sim.config import EngineConfig
from serving_sim.profile import single_stream_s
from traces.deadlines import DeadlineClass

BASELINE = "lifo"
FIRST_PILOT_SEED = 1_000_000
_LONGEST_HELD = 2
_PRECISION = 1.005  # of the boundary's pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a column of the study has its lengths from: a run log of one model family on one
    benchmark, and the checkpoints that answer for it (name -> folder). ``kind`` says what the log
    is: "parametric", "sampled" or "temperature zero". With ``allow_mismatch``, checkpoints trained
    for another model answer too, and results say so."""

    model_family: str
    benchmark: str
    runs: Path
    kind: str
    checkpoints: tuple[tuple[str, Path], ...] = ()
    allow_mismatch: bool = False

    @property
    def name(self) -> str:
        """The family and the benchmark."""
        return f"{self.model_family} on {self.benchmark}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """What a study is. Times in seconds.

    ``pressures`` are KV demands relative to that at which LIFO's breach on pilot seeds crosses
    ``boundary`` (1 is there, 0.8 has a quarter more KV). ``concurrency`` is how many requests would
    run on average if each ran alone; it sets the rate. Requests are watched for ``observe_s``, so
    that records can be rescored up to there. ``margin_pp`` is the equivalence margin; by
    default min(1, a tenth of LIFO's breach in the regime on pilot seeds). With ``deadline_classes``
    each request is due at the deadline of its class, and ``deadline_s`` is not used.
    """

    name: str
    policies: tuple[str, ...]
    signals: tuple[str, ...]
    pressures: tuple[float, ...] = (0.8, 0.9, 1.0, 1.1, 1.25)
    num_seeds: int = 20
    num_pilots: int = 5
    boundary: float = 0.15
    deadline_s: float = 900.0
    observe_s: float = 1800.0
    concurrency: float = 64.0
    num_warmup: int = 150
    num_tagged: int = 200
    arrival_cv: float = 1.0
    grid_stride: int = 64
    margin_pp: float | None = None
    deadline_classes: tuple[DeadlineClass, ...] = ()
    profile: str = "rtx4090-llama-3.1-8b"
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(num_blocks=2))

    def __post_init__(self) -> None:
        if BASELINE not in self.policies:
            raise InvalidInput(
                f"the policies are {', '.join(self.policies)}: every comparison is with "
                f"{BASELINE}, so add it"
            )
        if self.num_seeds < 2:
            raise InvalidInput(
                f"num_seeds is {self.num_seeds}: a difference needs at least 2 seeds, and a "
                "two-sided p below .05 at least 6"
            )
        if self.num_pilots < 1:
            raise InvalidInput(f"num_pilots is {self.num_pilots}: the regime needs at least 1")
        if not self.pressures or min(self.pressures) <= 0:
            raise InvalidInput(f"pressures are {self.pressures}: give numbers above 0")
        if not 0 < self.boundary < 1:
            raise InvalidInput(f"boundary is {self.boundary}: it must be a share in (0, 1)")


def deadline_text(config: StudyConfig) -> str:
    """Return the deadline in words: one for all, or each class with its own."""
    classes = config.deadline_classes
    if not classes:
        return f"{config.deadline_s:g} s"
    return ", ".join(f"{c.deadline_s:g} s for {c.share:.0%} ({c.name})" for c in classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilot:
    """What the pilot seeds settled for one source; shares of 1, one entry a pressure."""

    boundary_blocks: int
    rate_per_s: float
    lifo_breach: tuple[float, ...]
    floor: tuple[float, ...]
    kv_ratio: tuple[float, ...]

    def in_regime(self, boundary: float) -> tuple[bool, ...]:
        """Say which pressures belong to the low-breach regime."""
        return tuple(breach < boundary for breach in self.lifo_breach)


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
    hears of files set aside. A task beyond its ``limits`` is recorded as failed and stays so
    until ``retry_failed``. Raises InvalidInput when a pilot passes them or fewer than two
    seeds are complete.
    """
    if not sources:
        raise InvalidInput("a study needs at least one source of lengths")
    folders = [source_folder(source, out_dir) for source in sources]
    clear_leftovers(out_dir, folders)
    pairs = list(zip(sources, folders, strict=True))
    through("pilots", run_pilot, [(config, *pair, limits) for pair in pairs], num_jobs, on_task)
    pilots = [find_pilot(config, *pair) for pair in pairs]
    matrices = [matrix_of(config, *pair) for pair in zip(sources, pilots, strict=True)]
    tasks = [
        (matrix, seed, folder, limits, retry_failed, source.name)
        for seed in range(config.num_seeds)
        for matrix, folder, source in zip(matrices, folders, sources, strict=True)
    ]
    failures = failures_of(through("seeds", run_task, tasks, num_jobs, on_task), on_note)
    study = StudyResult(config, [], _margin(config, pilots), failures)
    if len(study.seeds) < 2:
        raise InvalidInput(f"nothing can be compared. {study.missing_text()}")
    parts = zip(sources, matrices, pilots, folders, strict=True)
    study.sources.extend(
        SourceResult(source, matrix, pilot, _cells(matrix, study.seeds, folder), folder)
        for source, matrix, pilot, folder in parts
    )
    return study


def through(
    stage: str,
    call: Callable[..., Any],
    tasks: Sequence[Sequence[Any]],
    num_jobs: int,
    on_task: Callable[[str, int, int], None],
) -> list[Any]:
    """Run ``call`` on the arguments of every task with joblib; return its answers in any order."""
    from joblib import Parallel, delayed

    try:
        workers = Parallel(n_jobs=num_jobs, return_as="generator_unordered")
    except ValueError:  # Ray's backend hands all answers over at the end
        workers = Parallel(n_jobs=num_jobs)
    on_task(stage, 0, len(tasks))
    answers = []
    for done, answer in enumerate(workers(delayed(call)(*task) for task in tasks), 1):
        answers.append(answer)
        on_task(stage, done, len(tasks))
    return answers


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


def _pilot_path(config: StudyConfig, source: Source, folder: Path) -> Path:
    base = _base_matrix(config, source, rate_per_s=1.0, signals=(NO_SIGNAL,))
    key = task_key(base, config.num_pilots)
    settled = (config.pressures, config.boundary, config.concurrency)
    return folder / f"pilot-{key}-{_digits(settled)}.json"


def run_pilot(config: StudyConfig, source: Source, out_dir: Path, limits: TaskLimits) -> None:
    """Settle the pilots of ``source`` under ``limits``, or read them; raises InvalidInput when they
    pass one, since without pilots there is no study."""
    try:
        needed = NO_LIMITS if has_pilot(config, source, out_dir) else limits
        run_limited(find_pilot, (config, source, out_dir), needed)
    except TaskStopped as stopped:
        raise InvalidInput(
            f"the pilots of {source.name} failed ({stopped}): allow more, or leave the source out"
        ) from None


def find_pilot(config: StudyConfig, source: Source, out_dir: Path) -> Pilot:
    """Return what the pilot seeds settle for ``source``; kept in ``out_dir`` for the next start."""
    base = _base_matrix(config, source, rate_per_s=1.0, signals=(NO_SIGNAL,))
    path = _pilot_path(config, source, out_dir)
    if path.exists() and (stored := _stored_pilot(path)) is not None:
        return stored
    runs = source_runs(base)
    base, inputs, blocks = _place_boundary(config, base, runs)
    pressures = _pressures(config, blocks)
    scores = [[_lifo(base, inputs, s, p.num_blocks) for s in inputs] for p in pressures]
    load = offered_kv_load(replace(base, pressures=pressures), runs)
    pilot = Pilot(
        boundary_blocks=blocks,
        rate_per_s=base.rate_per_s,
        lifo_breach=tuple(float(np.mean([c.score.breach for c in cells])) for cells in scores),
        floor=tuple(float(np.mean([c.score.floor for c in cells])) for cells in scores),
        kv_ratio=tuple(load[p.name] for p in pressures),
    )
    atomic_write_text(path, json.dumps(asdict(pilot), indent=1) + "\n")
    return pilot


def _stored_pilot(path: Path) -> Pilot | None:
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        lists = {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
        return Pilot(**stored | lists)
    except (ValueError, TypeError, AttributeError):
        moved = path.parent / "quarantine" / path.name
        moved.parent.mkdir(exist_ok=True)
        path.replace(moved)
        warnings.warn(f"{path} is damaged: moved to {moved.parent}, and run again", stacklevel=3)
        return None


def matrix_of(config: StudyConfig, source: Source, pilot: Pilot) -> MatrixConfig:
    """Return the matrix of ``source`` at the pressures that its pilots placed."""
    signals = (NO_SIGNAL, *(name for name in config.signals if name != NO_SIGNAL))
    base = _base_matrix(config, source, rate_per_s=pilot.rate_per_s, signals=signals)
    return replace(
        base, policies=config.policies, pressures=_pressures(config, pilot.boundary_blocks)
    )


def _base_matrix(
    config: StudyConfig, source: Source, *, rate_per_s: float, signals: Sequence[str]
) -> MatrixConfig:
    folders = dict(source.checkpoints)
    return MatrixConfig(
        runs=source.runs,
        policies=(BASELINE,),
        signals=tuple(
            SignalSource(name, folders.get(name), allow_mismatch=source.allow_mismatch)
            for name in signals
        ),
        pressures=(Pressure("any", 2),),
        engine=config.engine,
        profile=config.profile,
        num_seeds=config.num_seeds,
        rate_per_s=rate_per_s,
        arrival_cv=config.arrival_cv,
        num_warmup=config.num_warmup,
        num_tagged=config.num_tagged,
        deadline_s=config.deadline_s,
        observe_s=max(
            config.observe_s, config.deadline_s, *(c.deadline_s for c in config.deadline_classes)
        ),
        grid_stride=config.grid_stride,
        deadline_classes=config.deadline_classes,
    )


def _pressures(config: StudyConfig, boundary_blocks: int) -> tuple[Pressure, ...]:
    usable = boundary_blocks - 1
    return tuple(
        Pressure(f"{demand:g}", max(2, 1 + round(usable / demand))) for demand in config.pressures
    )


def _place_boundary(
    config: StudyConfig, base: MatrixConfig, runs: Sequence[DecodeRun]
) -> tuple[MatrixConfig, dict[int, SeedInputs], int]:
    """Return the matrix at its rate, the pilots' inputs, and the pool at which LIFO's mean breach
    on them crosses the boundary.

    The smallest pool of the study holds two of the longest requests (one that cannot hold one would
    refuse it). Where LIFO stays below the boundary even there, that pool is the highest pressure,
    and all cells of the source belong to the low-breach regime.
    """
    profile = base.step_profile()
    mean_s = np.mean(
        [single_stream_s(r.prompt_tokens, r.output_tokens, config.engine, profile) for r in runs]
    )
    placed = replace(base, rate_per_s=config.concurrency / float(mean_s))
    seeds = range(FIRST_PILOT_SEED, FIRST_PILOT_SEED + config.num_pilots)
    inputs = {seed: prepare_seed(placed, runs, seed) for seed in seeds}
    longest = max(run.prompt_tokens + run.max_new_tokens for run in runs)
    smallest = _LONGEST_HELD * config.engine.blocks_for(longest)
    low = 1 + math.ceil(smallest * max(1.0, *config.pressures))
    if _pilot_breach(placed, inputs, low) < config.boundary:
        return placed, inputs, low
    demand = offered_kv_load(replace(placed, pressures=(Pressure("all", 2),)), runs)["all"]
    high = max(2 * low, math.ceil(8 * demand))
    return placed, inputs, _bisect(config, placed, inputs, low, high)


def _bisect(
    config: StudyConfig, base: MatrixConfig, inputs: dict[int, SeedInputs], low: int, high: int
) -> int:
    if (ample := _pilot_breach(base, inputs, high)) >= config.boundary:
        raise InvalidInput(
            f"LIFO breaches {ample:.1%} with {high} blocks, where hardly anybody is preempted: no "
            f"pool brings it below {config.boundary:.0%}; allow a longer deadline than "
            f"{config.deadline_s:g} s, or lower the concurrency"
        )
    while high > low + 1 and high / low > _PRECISION:
        middle = round(math.sqrt(low * high))
        if _pilot_breach(base, inputs, middle) >= config.boundary:
            low = middle
        else:
            high = middle
    return high


def _pilot_breach(base: MatrixConfig, inputs: dict[int, SeedInputs], num_blocks: int) -> float:
    cells = [_lifo(base, inputs, seed, num_blocks) for seed in inputs]
    return float(np.mean([cell.score.breach for cell in cells]))


def _lifo(base: MatrixConfig, inputs: dict[int, SeedInputs], seed: int, num_blocks: int) -> Cell:
    pool = Pressure("pilot", num_blocks)
    return run_cell(base, inputs[seed], pool, BASELINE, NO_SIGNAL, seed)[0]


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


def source_folder(source: Source, out_dir: Path) -> Path:
    """Return the folder of the tasks of ``source``."""
    return out_dir / "sources" / re.sub(r"[^\w.-]", "-", source.name)


def has_pilot(config: StudyConfig, source: Source, folder: Path) -> bool:
    """Say whether the pilots of ``source`` are stored in its ``folder``."""
    return _pilot_path(config, source, folder).exists()


def _digits(*values: object) -> str:
    import hashlib

    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]
