"""Which part of a victim rule helps, how far any rule could go, and does the ranking survive?

Three parts on bundled length laws (parametric): ``rules`` (what separates remaining from sunk work,
slack from doom, by load), ``settings`` (gate, watermark, engine modes, bursts, faults), and
``hindsight`` (a search over victim sequences on the small cells). Run::

    python -m benchmarks.beyond_the_paper --out beyond --figures docs/img

Finished tasks are files in ``--out``; a second start runs what is missing. Tables go to stdout.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.beyond_report import (
    GapRow,
    draw_gaps,
    draw_rules,
    draw_settings,
    print_gaps,
    print_rules,
    print_settings,
)
from eval.cells import Cell, read_cells
from eval.hindsight import BASES, search
from eval.matrix import prepare_seed, run_seed, source_runs
from eval.matrix_config import MatrixConfig
from eval.replay import ReplayCase
from eval.study_config import Source, StudyConfig, source_folder
from eval.study_pilots import find_pilot, matrix_of
from preemptbench.study_presets import PAPER, drawn_sources
from serving_sim.config import EngineConfig, OffloadSettings, SglangSettings
from serving_sim.fault_rates import FaultRate, FaultSource
from traces.length_profiles import draw_runs, find_law
from traces.runlog import write_runs

T = TypeVar("T")
SMALL_SOURCES = (
    ("GLM-Z1-32B", "LRMTokenEconomy"),
    ("DeepSeek-R1-0528", "MisguidedAttention"),
    ("Gemini-2.5-Flash", "MisguidedAttention"),
)
RULES = (
    "lifo", "random", "least-computed", "least-generated", "most-generated", "longest-remaining",
    "remaining-times-sunk", "remaining-per-sunk", "most-slack", "slack-per-sunk", "doomed-first",
    "doomed-then-slack", "goodspeed-bid", "bidkv", "reclaimable-unfinished", "most-budget-left",
    "spare-evicted",
)  # fmt: skip
FEW_RULES = (
    "lifo", "random", "least-computed", "longest-remaining", "remaining-per-sunk",
    "slack-per-sunk", "doomed-first", "doomed-then-slack",
)  # fmt: skip
LOADS = (0.8, 1.0, 1.2)
SMALL_CAP_TOKENS = 4096
LARGE = replace(
    PAPER, name="large", policies=RULES, signals=("age-km", "clairvoyant"), pressures=LOADS,
    num_seeds=10, observe_s=PAPER.deadline_s,
)  # fmt: skip
# much smaller than the large cells, so that the step engine's modes can be run;
# the deadline shrinks with the cap, and LIFO's breach is still placed at 15 % by the pool
SMALL = replace(
    LARGE, name="small", policies=FEW_RULES, signals=("clairvoyant",), deadline_s=120.0,
    observe_s=120.0, concurrency=16.0, num_warmup=30, num_tagged=60, num_seeds=6,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a variant changes; everything else, the pool included, is as in the first one. What only
    the step engine follows (``is_slow``) is run at the highest load only."""

    name: str
    is_slow: bool = False
    engine: EngineConfig = PAPER.engine
    arrival_cv: float = 1.0
    faults: FaultSource | None = None


def _engine(**changes: object) -> EngineConfig:
    return replace(PAPER.engine, **changes)  # type: ignore[arg-type]


_FAULTS = FaultSource(
    rates=(
        FaultRate(kind="failure", probability=0.02, mean_after_s=30.0),
        FaultRate(kind="worker_loss", per_hour=12.0, settings={"restart_s": 10.0}),
        FaultRate(kind="stall", per_hour=30.0, settings={"extra_s": 3.0}),
    )
)
SETTINGS = (
    Setting(name="vLLM's defaults, synchronous"),
    Setting(name="admission gate off", engine=_engine(reserve_full_isl=False)),
    Setting(name="512 tokens a step", engine=_engine(max_num_batched_tokens=512)),
    Setting(
        name="512 tokens a step, gate off",
        engine=_engine(max_num_batched_tokens=512, reserve_full_isl=False),
    ),
    Setting(name="watermark 2 %", engine=_engine(watermark=0.02)),
    Setting(name="watermark 5 %", engine=_engine(watermark=0.05)),
    Setting(name="watermark 10 %", engine=_engine(watermark=0.10)),
    Setting(name="prefix caching off", engine=_engine(enable_prefix_caching=False)),
    Setting(name="bursts (cv 3)", arrival_cv=3.0),
    Setting(name="async scheduling", is_slow=True, engine=_engine(async_scheduling=True)),
    Setting(name="SGLang's scheduler", is_slow=True, engine=_engine(sglang=SglangSettings())),
    Setting(
        name="offload at 25 GB/s",
        is_slow=True,
        engine=_engine(offload=OffloadSettings(bytes_per_s=25e9)),
    ),
    Setting(name="faults", is_slow=True, faults=_FAULTS),
)


def small_sources(out_dir: Path) -> list[Source]:
    """Return the small sources: their laws cut at SMALL_CAP_TOKENS, runs drawn."""
    sources = []
    for family, benchmark in SMALL_SOURCES:
        law = replace(find_law(family, benchmark), cap_tokens=SMALL_CAP_TOKENS)
        path = out_dir / f"inputs-{SMALL_CAP_TOKENS}" / f"{family}-{benchmark}.parquet"
        if not path.exists():
            drawn = draw_runs(law, num_prompts=100, repeats=20, seed=0)
            write_runs(drawn, path, {"drawn_from": law.name, "law_source": law.source})
        sources.append(
            Source(model_family=family, benchmark=benchmark, runs=path, kind="parametric")
        )
    return sources


def matrices(
    config: StudyConfig, sources: Sequence[Source], out_dir: Path, num_jobs: int
) -> dict[str, MatrixConfig]:
    """Place LIFO's boundary for each source on pilot seeds; return the matrices by source."""
    folders = [source_folder(source, out_dir / config.name) for source in sources]
    pairs = list(zip(sources, folders, strict=True))
    run_all(f"{config.name} pilots", [(find_pilot, (config, *pair)) for pair in pairs], num_jobs)
    return {
        source.name: matrix_of(config, source, find_pilot(config, source, folder))
        for source, folder in pairs
    }


def run_cells(
    by_name: Mapping[str, MatrixConfig], out_dir: Path, num_jobs: int, stage: str
) -> dict[str, list[Cell]]:
    """Run all seeds of all matrices and return the cells by the matrices' names."""
    tasks = [(name, seed) for name, matrix in by_name.items() for seed in range(matrix.num_seeds)]
    calls = [(run_seed, (by_name[name], seed, out_dir)) for name, seed in tasks]
    cells: dict[str, list[Cell]] = {name: [] for name in by_name}
    for (name, _), path in zip(tasks, run_all(stage, calls, num_jobs), strict=True):
        cells[name] += read_cells(path)
    return cells


def gap_rows(
    by_source: Mapping[str, MatrixConfig],
    out_dir: Path,
    num_jobs: int,
    num_seeds: int,
    num_replays: int,
) -> list[GapRow]:
    """Search every small cell in hindsight; the journals are in ``out_dir``."""
    tasks = [
        (_gap, (name, matrix, at, seed, out_dir / "hindsight", num_replays))
        for seed in range(num_seeds)
        for name, matrix in by_source.items()
        for at in range(len(matrix.pressures))
    ]
    return run_all("hindsight", tasks, num_jobs)


def _gap(
    name: str, matrix: MatrixConfig, at: int, seed: int, folder: Path, num_replays: int
) -> GapRow:
    pressure = matrix.pressures[at]
    inputs = prepare_seed(matrix, source_runs(matrix), seed)
    engine = replace(matrix.engine, num_blocks=pressure.num_blocks, drain_s=matrix.watched_s)
    case = ReplayCase(
        inputs.workload, engine, matrix.step_profile(), matrix.deadline_s,
        inputs.grids["clairvoyant"], seed,
    )  # fmt: skip
    journal = folder / f"{matrix.runs.stem}-{pressure.name}-{seed}.json"
    bases = (*BASES, "slack-per-sunk", "least-computed", "random")
    found = search(case, bases=bases, num_replays=num_replays, seed=seed, journal=journal)
    return GapRow(
        source=name,
        load=float(pressure.name),
        seed=seed,
        lifo=found.breach_by_rule["lifo"],
        best_rule=found.best_rule,
        best=found.breach_by_rule[found.best_rule],
        by_rule=found.breach_by_rule,
        hindsight=found.breach,
        floor=found.floor,
        is_optimal=found.is_optimal,
        num_replays=found.num_replays,
        improved_at=found.improved_at,
    )


def run_all(
    stage: str, tasks: Sequence[tuple[Callable[..., T], tuple[Any, ...]]], num_jobs: int
) -> list[T]:
    """Run the calls through joblib, in order, and say how many are done."""
    from joblib import Parallel, delayed

    workers = Parallel(n_jobs=num_jobs, return_as="generator")
    results: list[T] = []
    for done, result in enumerate(workers(delayed(call)(*args) for call, args in tasks), 1):
        results.append(result)
        print(f"\r{stage}: {done} of {len(tasks)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen parts, print their tables, write their figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("beyond"), help="folder for finished work")
    parser.add_argument("--figures", type=Path, help="folder for the PNG files (default: --out)")
    parser.add_argument("--part", choices=("rules", "settings", "hindsight"), action="append")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replays", type=int, default=1000, help="of a hindsight search")
    parser.add_argument("--searches", type=int, default=6, help="seeds of a hindsight cell")
    parser.add_argument("--sources", type=int, help="of part rules (default: all laws)")
    parser.add_argument("--skip-slow", action="store_true", help="no setting of the step engine")
    parser.add_argument("--quick", action="store_true", help="two seeds, 100 replays: minutes")
    chosen = parser.parse_args(arguments)
    parts = chosen.part or ["rules", "settings", "hindsight"]
    figures: Path = chosen.figures or chosen.out
    figures.mkdir(parents=True, exist_ok=True)
    large, small = (_quick(c) if chosen.quick else c for c in (LARGE, SMALL))
    for line in _parts(chosen, parts, large, small, figures):
        print(line)


def _quick(config: StudyConfig) -> StudyConfig:
    return replace(config, num_seeds=2, num_pilots=2)


def _parts(
    chosen: argparse.Namespace,
    parts: Sequence[str],
    large: StudyConfig,
    small: StudyConfig,
    figures: Path,
) -> Iterator[str]:
    out, jobs = chosen.out, chosen.jobs
    if "rules" in parts:
        by_source = matrices(large, drawn_sources(large, out)[: chosen.sources], out, jobs)
        cells = run_cells(by_source, out, jobs, "rules")
        yield from print_rules(cells)
        draw_rules(cells, figures / "beyond-rules.png")
    if not {"settings", "hindsight"} & set(parts):
        return
    by_source = matrices(small, small_sources(out), out, jobs)
    if "settings" in parts:
        varied = {
            f"{setting.name}|{name}": replace(
                matrix,
                engine=setting.engine,
                arrival_cv=setting.arrival_cv,
                faults=setting.faults,
                pressures=matrix.pressures[-1:] if setting.is_slow else matrix.pressures[::2],
            )
            for setting in SETTINGS
            if not (setting.is_slow and chosen.skip_slow)
            for name, matrix in by_source.items()
        }
        cells = run_cells(varied, out, jobs, "settings")
        yield from print_settings(cells)
        draw_settings(cells, figures / "beyond-settings.png")
    if "hindsight" in parts:
        num_seeds, replays = (2, 100) if chosen.quick else (chosen.searches, chosen.replays)
        rows = gap_rows(by_source, out, jobs, num_seeds, replays)
        yield from print_gaps(rows)
        draw_gaps(rows, figures / "beyond-hindsight.png")


if __name__ == "__main__":
    main()
