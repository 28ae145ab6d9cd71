"""Calibrate 8B-class models on one GPU within eight minutes: profiles, figures, one summary.

    python -m benchmarks.calibrate_gpu [--out DIR] [--budget-s 450] [--models llama-3.1-8b ...]
        [--backend torch|paged|vllm]

Into --out (default: $OUT, else out/calibrate_gpu) go, for each model, NAME.jsonl (every timed step,
as it is timed), NAME.json (the profile), NAME.png (measured, fitted, roofline, errors), and, after
each model, summary.json. Weights are random, in bf16; nothing is downloaded. A model that fails
leaves what it timed; a second start goes on.

torch and transformers suffice for the timings. Without numba, scipy or matplotlib the grid is timed
at twice the density, not where a fit is wrong, and the rest is made elsewhere, by
``preemptbench calibrate --from-journal NAME.jsonl --out NAME.json --report NAME.png``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from contracts.errors import PreemptBenchError
from contracts.files import atomic_write_text
from serving_sim.calibration.adaptive import CalibrationSettings, time_steps
from serving_sim.calibration.backends import open_bench
from serving_sim.calibration.bench_config import BACKENDS, BenchConfig
from serving_sim.calibration.grid import AXES, Grid
from serving_sim.calibration.roofline import gpu_peak, step_roofline_s
from serving_sim.calibration.run import (
    CalibrationPlan,
    Outcome,
    journal_path,
    open_journal,
    run_calibration,
    summary,
)
from serving_sim.calibration.steps import shape_of

NEEDED_TO_FIT = ("numba", "scipy", "matplotlib")
SPARE_S = 15.0  # kept of the budget for fits and figures


def main() -> None:
    """Calibrate each model in turn, in its share of what is left of the budget."""
    args = _arguments()
    started_s = time.monotonic()
    missing = [name for name in NEEDED_TO_FIT if importlib.util.find_spec(name) is None]
    say(f"out: {args.out}; not installed, so timings only: {missing}" if missing else f"{args.out}")
    found: dict[str, Any] = {}
    for at, model in enumerate(args.models):
        left_s = args.budget_s - SPARE_S - (time.monotonic() - started_s)
        budget_s = left_s / (len(args.models) - at)
        if budget_s < 1.0:
            found[model] = {"error": f"no time left of {args.budget_s:g} s"}
            continue
        say(f"{model}: up to {budget_s:.0f} s")
        plan = _plan(args, model, budget_s)
        out = args.out / f"{model}.json"
        try:
            found[model] = _timings_only(plan, out) if missing else _calibrated(plan, out)
        except (PreemptBenchError, RuntimeError, MemoryError, OSError) as error:
            found[model] = {"error": f"{type(error).__name__}: {error}"}
        say(json.dumps(found[model], indent=1))
        _free_memory()
        atomic_write_text(args.out / "summary.json", json.dumps(found, indent=1) + "\n")
    say(f"done in {time.monotonic() - started_s:.0f} s: {args.out / 'summary.json'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path(os.environ.get("OUT", "out/calibrate_gpu"))
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--budget-s", type=float, default=450.0)
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b", "qwen3-8b"])
    parser.add_argument("--backend", default="torch", choices=BACKENDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fuse", action="store_true", help="torch.compile norms and MLP")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--max-chunk", type=int)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def _plan(args: argparse.Namespace, model: str, budget_s: float) -> CalibrationPlan:
    return CalibrationPlan(
        bench=BenchConfig(
            model=model,
            backend=args.backend,
            dtype=args.dtype,
            device=args.device,
            fuse=args.fuse,
        ),
        max_batch=args.max_batch,
        max_context_tokens=args.max_context,
        max_chunk_tokens=args.max_chunk,
        settings=CalibrationSettings(budget_s=budget_s),
    )


def _calibrated(plan: CalibrationPlan, out: Path) -> dict[str, Any]:
    from serving_sim.calibration.report import write_report

    outcome = run_calibration(plan, out, _progress)
    peak = gpu_peak(outcome.header.hardware)
    write_report(outcome.calibration, outcome.facts, peak, [], out.with_suffix(".png"))
    return summary(outcome, out) | _beside_the_roofline(outcome)


def _beside_the_roofline(outcome: Outcome) -> dict[str, Any]:
    """Return by surface how many times the roofline the measured steps take, in the median."""
    peak = gpu_peak(outcome.header.hardware)
    if peak is None:
        return {}
    ratios: dict[str, list[float]] = {}
    for row in outcome.calibration.measured:
        shape = shape_of(row)
        bound_s = step_roofline_s(shape, outcome.facts, peak)
        ratios.setdefault(shape.surface, []).append(row.seconds / bound_s)
    return {
        f"{surface}_times_the_roofline": round(statistics.median(values), 3)
        for surface, values in ratios.items()
    }


def _timings_only(plan: CalibrationPlan, out: Path) -> dict[str, Any]:
    """Time the coarse grid, uneven batches where the backend takes them, then the grid with every
    gap halved, as far as the budget goes."""
    deadline_s = time.monotonic() + plan.settings.budget_s
    grid = plan.grid
    dense = _halved(grid)
    bench = open_bench(plan.bench, grid.shapes())
    journal = open_journal(bench, dense, journal_path(out))
    first = [*grid.shapes(), *(grid.uneven() if bench.takes_uneven else ())]
    whole = all(
        time_steps(bench, grid, shapes, journal, deadline_s, _progress)
        for shapes in (first, dense.shapes())
    )
    journal.add_clock_state(bench.clock_state)
    return {
        "timings": str(journal.path),
        "hardware": bench.hardware,
        "kernel": bench.kernel,
        "clocks": bench.clock_state,
        "steps_timed": len(journal.outcomes),
        "stopped": "every step timed" if whole else "budget used",
    }


def _halved(grid: Grid) -> Grid:
    dense = grid
    for axis in AXES:
        for values in grid.gaps(axis):
            dense = dense.joined(axis, values)
    return replace(dense, max_context_tokens=grid.max_context_tokens)


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _progress(done: int, total: int, note: str) -> None:
    if done % 10 == 0:
        say(f"  {done}/{total} {note}")


def say(text: str) -> None:
    """Print at once: the machine may be taken away."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
