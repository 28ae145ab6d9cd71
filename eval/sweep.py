"""A sweep: one matrix for each engine setting and source, all on the same seeds and arrivals.

Settings of the engine form a grid; in each of them every policy x signal is compared with LIFO of
that setting. The tasks are those of eval.tasks: they resume, fail and are set aside alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from contracts.errors import InvalidInput
from eval.cells import Cell, read_cells, same_cohort
from eval.intervals import Interval, bootstrap_t_interval
from eval.matrix import task_path
from eval.matrix_config import MatrixConfig, Pressure
from eval.multiplicity import max_t
from eval.parallel import through
from eval.signal_sources import NO_SIGNAL
from eval.study import failures_of
from eval.study_config import BASELINE, Source, StudyConfig, source_folder
from eval.study_pilots import check_matrix, find_pilot, has_pilot, matrix_of, run_pilot
from eval.tables import Column, Table
from eval.task_limits import NO_LIMITS, TaskLimits
from eval.tasks import Failure, TaskCounts, clear_leftovers, count_tasks, run_task
from serving_sim.config import EngineConfig
from serving_sim.fault_rates import FaultSource


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """A point of the grid: its name in tables, the engine, and the faults that strike there."""

    name: str
    engine: EngineConfig
    faults: FaultSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """What a sweep is: a study's settings, sources, and engine settings.

    The pilots of a source run with the study's own engine; the pools and the rate that they place
    hold in all settings, so that settings may be read beside each other.
    """

    study: StudyConfig
    settings: tuple[EngineSetting, ...]
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not self.sources or not self.settings:
            raise InvalidInput("a sweep needs at least one source and one engine setting")
        for kind, names in (
            ("source", [source.name for source in self.sources]),
            ("engine setting", [setting.name for setting in self.settings]),
        ):
            if len(set(names)) < len(names):
                raise InvalidInput(f"two of the {kind}s have one name: {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class SweepPart:
    """The matrix of one engine setting and source, and the folder of its tasks."""

    setting: str
    source: str
    matrix: MatrixConfig
    folder: Path

    @property
    def name(self) -> str:
        """The setting and the source."""
        return f"{self.setting}, {self.source}"

    def paths(self) -> list[Path]:
        """Return the files that its tasks write, one a seed."""
        return [task_path(self.matrix, s, self.folder) for s in range(self.matrix.num_seeds)]


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One rule in one engine setting, source and pool. Rates are shares of 1; ``difference`` is to
    LIFO of the same setting in percentage points, over the ``num_seeds`` that were complete;
    ``p_value`` is family-wise (max-T over the rules of that cell). None where nothing is left."""

    setting: str
    source: str
    num_blocks: int
    policy: str
    signal: str
    num_seeds: int
    missing_seeds: int
    breach: float | None
    difference: Interval | None
    p_value: float | None
    preemptions_per_1000: float | None


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The table of a sweep, and the tasks that failed."""

    config: SweepConfig
    rows: tuple[SweepRow, ...]
    failures: tuple[Failure, ...]


def sweep_parts(config: SweepConfig, out_dir: Path) -> list[SweepPart]:
    """Return every engine setting x source as a matrix; runs the pilots that are not stored."""
    folders = [source_folder(source, out_dir) for source in config.sources]
    pairs = list(zip(config.sources, folders, strict=True))
    pilots = [find_pilot(config.study, source, folder) for source, folder in pairs]
    return [
        SweepPart(
            setting.name,
            source.name,
            replace(
                matrix_of(config.study, source, pilot), engine=setting.engine, faults=setting.faults
            ),
            folder,
        )
        for setting in config.settings
        for (source, folder), pilot in zip(pairs, pilots, strict=True)
    ]


def run_sweep(
    config: SweepConfig,
    out_dir: Path,
    *,
    num_jobs: int = -1,
    on_task: Callable[[str, int, int], None] = lambda *_: None,
    limits: TaskLimits = NO_LIMITS,
    retry_failed: bool = False,
    on_note: Callable[[str], None] = lambda _: None,
) -> SweepResult:
    """Run every seed of every setting and source that is not finished; see eval.study.run_study."""
    study = config.study
    for source in config.sources:
        check_matrix(study, source)
    folders = [source_folder(source, out_dir) for source in config.sources]
    clear_leftovers(out_dir, folders)
    pilots = [(study, *pair, limits) for pair in zip(config.sources, folders, strict=True)]
    through("pilots", run_pilot, pilots, num_jobs, on_task, on_note)
    parts = sweep_parts(config, out_dir)
    tasks = [
        (part.matrix, seed, part.folder, limits, retry_failed, part.name)
        for seed in range(study.num_seeds)
        for part in parts
    ]
    outcomes = through("seeds", run_task, tasks, num_jobs, on_task, on_note)
    failures = failures_of(outcomes, on_note)
    rows = [row for part in parts for row in _rows(part)]
    return SweepResult(config, tuple(rows), failures)


def sweep_status(config: SweepConfig, out_dir: Path) -> dict[str, TaskCounts]:
    """Return what became of the tasks of each setting and source; where pilots are missing, all
    tasks are. Files set aside are counted by source: its settings share a folder."""
    study, ready = config.study, []
    found: dict[str, TaskCounts] = {}
    for source in config.sources:
        if has_pilot(study, source, source_folder(source, out_dir)):
            ready.append(source)
            continue
        for setting in config.settings:
            counts = TaskCounts(0, 0, study.num_seeds, 0, float("nan"))
            found[f"{setting.name}, {source.name}"] = counts
    parts = sweep_parts(replace(config, sources=tuple(ready)), out_dir) if ready else []
    return found | {part.name: count_tasks(part.paths()) for part in parts}


def _rows(part: SweepPart) -> list[SweepRow]:
    done = [path for path in part.paths() if path.exists()]
    groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for path in done:  # in the order of seeds
        for cell in read_cells(path):
            groups[cell.pressure, cell.policy, cell.signal].append(cell)
    rows = []
    for pressure in part.matrix.pressures:
        rules = {key[1:]: cells for key, cells in groups.items() if key[0] == pressure.name}
        if not rules:
            rules = {(policy, signal.name): [] for policy, signal in part.matrix.crossings()}
        rows += _compared(part, pressure, rules)
    return rows


def _compared(
    part: SweepPart, pressure: Pressure, rules: dict[tuple[str, str], list[Cell]]
) -> list[SweepRow]:
    """Compare every rule with LIFO; one that accepted other requests than LIFO is shown without a
    difference, because the two breaches are then not of the same cohort."""
    lifo = rules[BASELINE, NO_SIGNAL]
    comparable = [
        rule for rule, cells in rules.items()
        if rule != (BASELINE, NO_SIGNAL) and same_cohort(cells, lifo)
    ]  # fmt: skip
    base = _breach_pp(lifo)
    differences: dict[tuple[str, str], np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    p_values: dict[tuple[str, str], float] = {}
    if len(lifo) >= 2 and comparable:
        differences = {rule: _breach_pp(rules[rule]) - base for rule in comparable}
        tested = max_t(np.array(list(differences.values())).T)
        p_values = dict(zip(comparable, tested.tolist(), strict=True))
    return [
        SweepRow(
            setting=part.setting,
            source=part.source,
            num_blocks=pressure.num_blocks,
            policy=rule[0],
            signal=rule[1],
            num_seeds=len(cells),
            missing_seeds=part.matrix.num_seeds - len(cells),
            breach=float(_breach_pp(cells).mean()) / 100 if cells else None,
            difference=bootstrap_t_interval(differences[rule]) if rule in differences else None,
            p_value=p_values.get(rule),
            preemptions_per_1000=(
                float(np.mean([cell.preemptions_per_1000 for cell in cells])) if cells else None
            ),
        )
        for rule, cells in rules.items()
    ]


def _breach_pp(cells: Sequence[Cell]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([100 * cell.score.breach for cell in cells])


def sweep_table(result: SweepResult) -> Table:
    """Return the one table of a sweep: breach per engine setting x policy x signal, and the paired
    difference to LIFO of the same setting with its 95 % interval."""
    columns = (
        Column("setting", "engine setting"),
        Column("source", "source"),
        Column("num_blocks", "blocks", "count"),
        Column("policy", "policy"),
        Column("signal", "signal"),
        Column("num_seeds", "seeds", "count"),
        Column("missing_seeds", "missing", "count"),
        Column("breach", "breach", "share"),
        Column("difference_pp", "vs LIFO, pp", "pp"),
        Column("low_pp", "low", "pp"),
        Column("high_pp", "high", "pp"),
        Column("p_value", "p", "p"),
        Column("preemptions_per_1000", "preemptions / 1000", "number"),
    )
    rows = tuple(
        (
            r.setting, r.source, r.num_blocks, r.policy, r.signal, r.num_seeds, r.missing_seeds,
            r.breach, *_ends(r.difference), r.p_value, r.preemptions_per_1000,
        )
        for r in result.rows
    )  # fmt: skip
    caption = (
        "Breach of each rule in each engine setting, and its paired difference over seeds to LIFO "
        "of the same setting (95 % bootstrap-t interval; p is family-wise over the rules of a "
        "cell, not over the table). A dash: no baseline, or another cohort was accepted."
    )
    return Table("table", caption, columns, rows)


def _ends(interval: Interval | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if interval is None else (interval.mean, interval.low, interval.high)
