"""The matrix: every policy x signal on the same workloads. The one place where policies and
signals meet.

One task is one seed: it fixes the truth (which repeat of each prompt executes), the arrivals and
the signals' answers, then runs every pressure, policy and signal on them, so all cells of a seed
share their randomness. A finished task is a file; a second start runs what is missing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from contracts.records import RequestRecord
from contracts.runs import DecodeRun
from contracts.signals import RemainingGrid, SignalRequest, build_grid, signal_request
from eval.cells import Cell, read_cells, set_aside_damaged, write_task
from eval.matrix_config import MatrixConfig, Pressure
from eval.mismatch import TRAINED_ON
from eval.named_policies import find_policy
from eval.outcomes import accepted_digest, score_breach
from eval.parallel import through
from eval.service import score_service
from eval.signal_sources import NO_SIGNAL, SignalSource, check_pairing, split_truth
from eval.task_key import content_key
from eval.task_trail import at_place
from oracles.empirical import SAMPLED_LABEL
from serving_sim.engine import SimResult, StepLog, simulate
from serving_sim.faults import FaultPlan
from serving_sim.jump import ENGINES, Simulate
from serving_sim.profile import profile_document, single_stream_s
from traces.arrivals import build_workload, workload_from_trace
from traces.deadlines import DeadlineClass, with_deadline_classes
from traces.runlog import read_runs
from traces.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class SeedInputs:
    """What all cells of one seed share: the workload, who asks, the signals' answers, faults."""

    workload: Workload
    requests: tuple[SignalRequest, ...]
    grids: dict[str, RemainingGrid | None]
    faults: FaultPlan | None = None


def prepare_seed(config: MatrixConfig, runs: Sequence[DecodeRun], seed: int) -> SeedInputs:
    """Fix truth, arrivals and grids of ``seed``. Of a request's K runs, run s mod K executes in
    seed s, and an oracle is built from the others only."""
    if config.trace is not None:
        workload = workload_from_trace(
            config.trace,
            num_warmup=config.num_warmup,
            num_tagged=config.num_tagged,
            num_filler=config.num_filler,
            seed=seed,
            deadline_s=config.deadline_s,
            name=f"{config.trace.stem}-seed-{seed}",
        )
        workload = with_deadline_classes(workload, config.deadline_classes, seed)
        return SeedInputs(workload, (), {NO_SIGNAL: None}, _faults(config, workload, seed))
    truth, others = split_truth(runs, seed)
    workload = build_workload(
        truth,
        rate_per_s=config.rate_per_s,
        cv=config.arrival_cv,
        num_warmup=config.num_warmup,
        num_tagged=config.num_tagged,
        num_filler=config.num_filler,
        seed=seed,
        deadline_s=config.deadline_s,
        name=f"{config.runs.stem}-seed-{seed}",
    )
    workload = with_deadline_classes(workload, config.deadline_classes, seed)
    assert workload.run_ids is not None
    by_id = {run.run_id: signal_request(run) for run in truth}
    requests = tuple(by_id[run_id] for run_id in workload.run_ids)
    grids: dict[str, RemainingGrid | None] = {}
    for source in config.signals:
        grids[source.name] = _grid(config, source, truth, others, workload, requests, seed)
    return SeedInputs(workload, requests, grids, _faults(config, workload, seed))


def _faults(config: MatrixConfig, workload: Workload, seed: int) -> FaultPlan | None:
    return None if config.faults is None else config.faults.plan(workload, seed)


def _grid(
    config: MatrixConfig,
    source: SignalSource,
    truth: Sequence[DecodeRun],
    others: Sequence[DecodeRun],
    workload: Workload,
    requests: Sequence[SignalRequest],
    seed: int,
) -> RemainingGrid | None:
    signal = source.build(truth, others, seed)
    if signal is None:
        return None
    grid = build_grid(
        signal, requests, stride=config.grid_stride, horizons=workload.output_tokens - 1
    )
    check_pairing(requests, grid)
    return grid


def run_cell(
    config: MatrixConfig,
    inputs: SeedInputs,
    pressure: Pressure,
    policy_name: str,
    signal_name: str,
    seed: int,
    on_step: Callable[[StepLog], None] | None = None,
) -> tuple[Cell, SimResult]:
    """Run one engine and score it; the step engine if somebody listens to its steps."""
    engine: Simulate = ENGINES[config.simulator]
    if on_step is not None:
        engine = partial(simulate, on_step=on_step)
    result = engine(
        inputs.workload,
        replace(config.engine, num_blocks=pressure.num_blocks, drain_s=config.watched_s),
        config.step_profile(),
        find_policy(policy_name),
        signal=inputs.grids[signal_name],
        seed=seed,
        faults=inputs.faults,
    )
    tagged = [record for record in result.records if record.cohort == "tagged"]
    deadline_s = None if config.deadline_classes else config.deadline_s
    preemptions = sum(record.num_preemptions for record in tagged)
    cell = Cell(
        pressure=pressure.name,
        num_blocks=pressure.num_blocks,
        policy=policy_name,
        signal=_labelled(signal_name, inputs.grids[signal_name]),
        seed=seed,
        score=score_breach(tagged, deadline_s),
        accepted_digest=accepted_digest(tagged),
        service=score_service(tagged, deadline_s, config.watched_s),
        breach_by_class=_breach_by_class(tagged, config.deadline_classes),
        preemptions_per_1000=1000 * preemptions / len(tagged),
        recompute_tax=result.recomputed_tokens / max(1, result.computed_tokens),
        num_preemptions=result.num_preemptions,
        computed_tokens=result.computed_tokens,
        recomputed_tokens=result.recomputed_tokens,
        cache_hit_tokens=result.cache_hit_tokens,
        signal_fallbacks=result.signal_fallbacks,
        breach_by_half=_breach_by_half(tagged, deadline_s),
        num_steps=result.num_steps,
        end_s=result.end_s,
        drained=result.drained,
    )
    return cell, result


def _labelled(name: str, grid: RemainingGrid | None) -> str:
    """Return a signal's name in results: an oracle of sampled runs says so in every one, and so
    does a checkpoint of another model."""
    if grid is None:
        return name
    if TRAINED_ON in grid.name:
        return grid.name
    return name + SAMPLED_LABEL if SAMPLED_LABEL in grid.name else name


def _breach_by_class(
    tagged: Sequence[RequestRecord], classes: Sequence[DeadlineClass]
) -> tuple[float, ...]:
    """Breach of each class at its own deadline, in the order of ``classes``; NaN for a class of
    which nobody was accepted."""
    out = []
    for one in classes:
        mine = [r for r in tagged if r.deadline_s == one.deadline_s and r.state != "rejected"]
        out.append(score_breach(mine, None).breach if mine else float("nan"))
    return tuple(out)


def _breach_by_half(
    tagged: Sequence[RequestRecord], deadline_s: float | None
) -> tuple[float, float]:
    """Breach of the earlier and of the later half of the cohort, by arrival: where the second is
    much larger, the queue grows, and the breach depends on how long one watches."""
    middle = len(tagged) // 2
    halves = [score_breach(half, deadline_s).breach for half in (tagged[:middle], tagged[middle:])]
    return halves[0], halves[1]


def source_runs(config: MatrixConfig) -> list[DecodeRun]:
    """Return the decode runs that requests are drawn from; none when a trace is replayed."""
    return [] if config.trace is not None else list(read_runs(config.runs))


def run_seed(config: MatrixConfig, seed: int, out_dir: Path) -> Path:
    """Run every cell of ``seed`` and write its task file (skipped when it is there already; a
    damaged one is set aside with a warning)."""
    path = task_path(config, seed, out_dir)
    if note := set_aside_damaged(path):
        warnings.warn(note, stacklevel=2)
    if path.exists():
        return path
    inputs = prepare_seed(config, source_runs(config), seed)
    cells: list[Cell] = []
    records: list[tuple[Cell, tuple[RequestRecord, ...]]] = []
    for pressure in config.pressures:
        for policy, signal in config.crossings():
            with at_place(f"pressure {pressure.name}, policy {policy}, signal {signal.name}"):
                cell, result = run_cell(config, inputs, pressure, policy, signal.name, seed)
            cells.append(cell)
            records.append((cell, result.records))
    write_task(path, cells, records)
    return path


def task_path(config: MatrixConfig, seed: int, out_dir: Path) -> Path:
    """Return where the cells of ``seed`` lie once it is done; its records lie beside."""
    return out_dir / "cells" / f"seed-{seed:03d}-{task_key(config, seed)}.parquet"


def run_matrix(
    config: MatrixConfig,
    out_dir: Path,
    *,
    num_jobs: int = -1,
    on_seed: Callable[[int, int], None] | None = None,
) -> list[Cell]:
    """Run the whole matrix with joblib and return its cells in a fixed order.

    Workers write their own results, so a crash loses unfinished seeds only. ``num_jobs`` is
    joblib's: -1 takes every core; a Dask or Ray cluster is reached through joblib's backends.
    """

    def on_task(_: str, done: int, total: int) -> None:
        if on_seed is not None:
            on_seed(done, total)

    seeds = range(config.first_seed, config.first_seed + config.num_seeds)
    calls = [(config, seed, out_dir) for seed in seeds]
    done: list[Path] = through("seeds", run_seed, calls, num_jobs, on_task, warnings.warn)
    # a task holds its cells by pressure and crossing: one of each task, then the next of each
    tasks = sorted((read_cells(path) for path in done), key=lambda cells: cells[0].seed)
    return [cell for same in zip(*tasks, strict=True) for cell in same]


def task_key(config: MatrixConfig, seed: int) -> str:
    """Return the content address of a task; see eval.task_key."""
    settings = asdict(config) | {
        "seed": seed,
        "num_seeds": None,
        "first_seed": None,
        "profile": profile_document(config.step_profile()),
        "faults": repr(config.faults),  # it names the kinds
    }
    del settings["simulator"]  # a task is the same whichever engine runs it
    source = {"runs": config.runs} if config.trace is None else {"trace": config.trace}
    files = source | {s.name: s.folder for s in config.signals if s.folder}
    return content_key(settings, files, config.policies)


def offered_kv_load(config: MatrixConfig, runs: Sequence[DecodeRun]) -> dict[str, float]:
    """Return, for each pressure, blocks the arrivals would hold on average if each request ran
    alone (Little's law), divided by the usable blocks. It understates the load: in a batch every
    request takes longer, and what is preempted is computed again."""
    profile, engine = config.step_profile(), config.engine
    held = []
    for run in runs:
        alone_s = single_stream_s(run.prompt_tokens, run.output_tokens, engine, profile)
        mean_tokens = run.prompt_tokens + run.output_tokens / 2
        held.append(alone_s * mean_tokens / engine.block_size)
    demand = config.rate_per_s * float(np.mean(held))
    return {p.name: demand / (p.num_blocks - 1) for p in config.pressures}
