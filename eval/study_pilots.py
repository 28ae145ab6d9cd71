"""The pilots of a study: LIFO on seeds of their own, run before anything is compared.

They settle, for each source, how large the pool is (where LIFO's breach crosses the boundary),
which pressures belong to the low-breach regime, and the equivalence margin. No result uses their
seeds: choosing cells on the seeds one judges favours LIFO (reference: evaluation rules, finding 3).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InvalidInput
from contracts.files import atomic_write_text
from contracts.runs import DecodeRun
from eval.cells import Cell
from eval.matrix import SeedInputs, offered_kv_load, prepare_seed, run_cell, source_runs, task_key
from eval.matrix_config import MatrixConfig, Pressure
from eval.signal_sources import NO_SIGNAL, SignalSource, base_name
from eval.study_config import BASELINE, Source, StudyConfig
from eval.task_limits import NO_LIMITS, TaskLimits, TaskStopped, run_limited
from serving_sim.profile import single_stream_s

FIRST_PILOT_SEED = 1_000_000
_LONGEST_HELD = 2
_PRECISION = 1.005  # of the boundary's pool


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


def has_pilot(config: StudyConfig, source: Source, folder: Path) -> bool:
    """Say whether the pilots of ``source`` are stored in its ``folder``."""
    return _pilot_path(config, source, folder).exists()


def check_matrix(config: StudyConfig, source: Source) -> None:
    """Raise what the matrix of ``source`` would raise, before a pilot has run for minutes."""
    anywhere = Pilot(boundary_blocks=2, rate_per_s=1.0, lifo_breach=(), floor=(), kv_ratio=())
    matrix_of(config, source, anywhere)


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
            SignalSource(name, folders.get(base_name(name)), allow_mismatch=source.allow_mismatch)
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


def _pilot_path(config: StudyConfig, source: Source, folder: Path) -> Path:
    base = _base_matrix(config, source, rate_per_s=1.0, signals=(NO_SIGNAL,))
    key = task_key(base, config.num_pilots)
    settled = (config.pressures, config.boundary, config.concurrency)
    return folder / f"pilot-{key}-{_digits(settled)}.json"


def _digits(*values: object) -> str:
    import hashlib

    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]


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
