"""The demo, top to bottom: run log -> oracle -> predictors -> signal quality -> matrix -> report.

It simulates the collected runs themselves: nothing is stretched. The KV pool supplies the
pressure; rate and deadline are scaled to short outputs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from contracts.errors import InvalidInput
from eval.cells import Cell, write_cells
from eval.matrix import offered_kv_load, run_matrix
from eval.matrix_config import MatrixConfig, Pressure
from eval.signal_quality import SignalQuality
from eval.signal_sources import NO_SIGNAL, SignalSource
from eval.summary import SummaryRow, summarise
from oracles.empirical import Clairvoyant, ladder_shares
from serving_sim.config import EngineConfig
from traces.describe import LengthSummary, describe_runs
from traces.runlog import RunLog, read_runs

NUM_FOLDS = 5
PREDICTORS = ("age-km", "countdown", "gbm-hazard")
MATRIX_PREDICTORS = ("age-km", "gbm-hazard")
POLICIES = (
    "lifo",
    "fifo",
    "random",
    "largest-kv",
    "least-computed",
    "most-computed",
    "sglang-retract",
    "young(0.25)",
    "young(0.5)",
    "longest-remaining",
    "shortest-remaining",
)
PRESSURES = (Pressure("low", 221), Pressure("medium", 191), Pressure("overload", 161))


def demo_matrix(
    runs: Path,
    checkpoints: dict[str, Path],
    *,
    oracle: str = "oracle",
    num_seeds: int = 10,
    policies: tuple[str, ...] = POLICIES,
    pressures: tuple[Pressure, ...] = PRESSURES,
) -> MatrixConfig:
    """Return the matrix of the demo; ``checkpoints`` maps a predictor's name to its folder."""
    return MatrixConfig(
        runs=runs,
        policies=policies,
        signals=(
            SignalSource(NO_SIGNAL),
            *(SignalSource(name, folder) for name, folder in checkpoints.items()),
            SignalSource(oracle),
            SignalSource("clairvoyant"),
        ),
        pressures=pressures,
        engine=EngineConfig(num_blocks=2, max_num_seqs=64, max_num_batched_tokens=2048),
        profile="rtx4090-llama-3.1-8b",
        num_seeds=num_seeds,
        rate_per_s=7.0,
        num_warmup=60,
        num_tagged=600,
        deadline_s=5.0,
    )


@dataclass(slots=True)
class DemoResult:
    """Everything the demo found, for the printed table and the report."""

    log: RunLog
    config: MatrixConfig
    lengths: list[LengthSummary]
    families: list[LengthSummary]
    provenance: dict[str, int]
    quality: list[SignalQuality]
    load: dict[str, float]
    cells: list[Cell]
    rows: list[SummaryRow]
    seconds: dict[str, float] = field(default_factory=dict)


class Stopwatch:
    """Wall time of each stage, by name; ``say`` hears of every stage as it begins."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._say = say

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block under ``name``."""
        self._say(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def run_demo(
    runs_path: Path,
    out_dir: Path,
    *,
    num_seeds: int = 10,
    num_jobs: int = -1,
    say: Callable[[str], None] = lambda _: None,
    on_seed: Callable[[int, int], None] | None = None,
) -> DemoResult:
    """Run the whole job on one run log and return what it found; cells resume from ``out_dir``."""
    from training.crossfit import crossfit, save_crossfit
    from training.evaluate import LeaveOneOut, evaluate

    watch = Stopwatch(say)
    with watch.stage("read and describe the run log"):
        log = read_runs(runs_path)
        runs = list(log)
        num_repeats = max(Counter(run.request_key for run in runs).values())
        if num_repeats < 2:
            raise InvalidInput(
                f"every request of {runs_path} ran once: an oracle needs other runs of the same "
                "request; collect with --repeats 2 or more"
            )
        lengths, families = describe_runs(log), describe_runs(log, by_family=True)
    with watch.stage(f"cross-fit {', '.join(PREDICTORS)} ({NUM_FOLDS} folds of prompts)"):
        folders = {name: out_dir / "checkpoints" / name for name in PREDICTORS}
        signals = {name: crossfit(runs, name, num_folds=NUM_FOLDS) for name in PREDICTORS}
    with watch.stage("score the signals on held-out prompts"):
        ceilings = (LeaveOneOut(runs), Clairvoyant(runs))
        quality = evaluate(tuple(signals.values()), runs, extra_signals=ceilings)
        provenance = ladder_shares(runs, stride=8)
        for name, signal in signals.items():
            save_crossfit(signal, folders[name], quality)
    config = demo_matrix(
        runs_path,
        {name: folders[name] for name in MATRIX_PREDICTORS},
        oracle=f"oracle-{num_repeats - 1}",
        num_seeds=num_seeds,
    )
    num_cells = len(config.crossings()) * len(config.pressures) * num_seeds
    with watch.stage(f"simulate {num_cells} cells"):
        cells = run_matrix(config, out_dir, num_jobs=num_jobs, on_seed=on_seed)
    write_cells(out_dir / "cells.parquet", cells)
    return DemoResult(
        log=log,
        config=config,
        lengths=lengths,
        families=families,
        provenance=provenance,
        quality=quality,
        load=offered_kv_load(config, runs),
        cells=cells,
        rows=summarise(cells),
        seconds=watch.seconds,
    )
