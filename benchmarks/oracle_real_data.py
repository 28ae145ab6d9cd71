"""The tables and figures of docs/oracles.md, from the public data sets.

    preemptbench runs import parquet DATA/reasoning_lengths/lengths.parquet \\
        --where source=vllm-ltr-temp0 --map max_new_tokens=max_tokens --map repeat=sample_idx \\
        --set prompt_tokens=1 --out out/temp0.parquet
    python -m benchmarks.oracle_real_data --data DATA --temp0 out/temp0.parquet [--images docs/img]

Prints Markdown-ready text; takes a few minutes on one core.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from contracts.runs import DecodeRun
from eval.agreement import ceiling, measure_agreement, write_agreement_figure
from eval.degradation import degradation_ladder
from eval.lrm import FILTER, LrmRow, exhausted_share, lrm_table, read_lrm, score_lrm
from eval.oracle_curve import curve_table, learning_curve, write_curve_figure
from eval.save_figure import save_figure
from eval.signal_quality import SignalQuality, held_out, quality_table, score_floors
from oracles.empirical import Clairvoyant, EmpiricalOracle
from oracles.run_table import read_run_table
from traces.bundled import bundled_runs
from traces.runlog import read_runs

_BLUE, _GREY, _RED = "#0072B2", "#999999", "#D55E00"


def main() -> None:
    """Print every table and write every figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("PREEMPTBENCH_DATA"))
    parser.add_argument("--temp0", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=5, help="of the learning curve")
    parser.add_argument("--images", type=Path, default=Path("docs/img"))
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data, or set PREEMPTBENCH_DATA")
    lrm(args.data, args.images)
    ladder(args.images)
    temp0(args.temp0, args.images, args.draws)


def lrm(data: Path, images: Path) -> None:
    """Floors and ceilings on repeated reasoning runs."""
    print(FILTER)
    left_out = read_lrm(data, keep_cut=False)
    rows = score_lrm(left_out)
    print(f"\n## lrm, capped cells left out ({len(left_out.model)} cells)\n{lrm_table(rows)}")
    print(f"strictly longer than the 4 others: {exhausted_share(left_out):.3f}")
    kept = read_lrm(data, keep_cut=True)
    print(f"\n## lrm, capped cells kept ({len(kept.model)} cells)\n{lrm_table(score_lrm(kept))}")
    print("\n## lrm, prompts with a median of at least 1,500 tokens")
    print(lrm_table(score_lrm(left_out, min_median=1500)))
    _lrm_figure(rows, images / "oracle-lrm.png")


def temp0(path: Path, images: Path, num_draws: int) -> None:
    """Agreement, ceiling and learning curve of the temperature-zero log."""
    start = time.perf_counter()
    oracle = EmpiricalOracle(read_run_table(path))
    print(f"\n## {path.stem}: {oracle.name} built in {time.perf_counter() - start:.1f} s")
    runs: Sequence[DecodeRun] = list(read_runs(path))
    found, spread = measure_agreement(runs)
    print(found, flush=True)
    write_agreement_figure(spread, "Qwen3.5-9B, vLLM, T = 0", images / "oracle-agreement.png")
    print(quality_table([ceiling(runs, num_draws=3)]))
    points = learning_curve(runs, num_draws=num_draws)
    print(curve_table(points))
    write_curve_figure(points, "Qwen3.5-9B, vLLM, T = 0", images / "oracle-curve.png")


def ladder(images: Path) -> None:
    """The degradation ladder on the bundled log: what each rung achieved."""
    runs = [run for run in read_runs(bundled_runs()) if run.repeat == 0]
    rows = held_out(runs)
    scores = degradation_ladder(Clairvoyant(runs), rows)
    print("\n## degradation ladder, bundled log, repeat 0\n" + quality_table(scores))
    _ladder_figure(scores, score_floors(rows), images / "oracle-degradation.png")


def _lrm_figure(rows: Sequence[LrmRow], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    ax = figure.subplots()
    colour = [
        _RED if "infinity" in r.signal else _BLUE if "oracle" in r.signal else _GREY for r in rows
    ]
    ax.barh([r.signal for r in rows], [r.regret for r in rows], color=colour)
    ax.invert_yaxis()
    ax.set_xlabel("relative regret of the longest-remaining pick (0 is best)")
    ax.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _ladder_figure(
    scores: Sequence[SignalQuality], floors: Sequence[SignalQuality], path: Path
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    ax = figure.subplots()
    for floor in floors:
        ax.axhline(floor.victim_regret, color=_GREY, lw=0.8, ls=":")
        ax.annotate(
            floor.signal,
            (1.0, floor.victim_regret),
            fontsize=8,
            color=_GREY,
            ha="right",
            va="bottom",
        )
    families: dict[str, list[SignalQuality]] = {}
    for score in scores[1:]:
        families.setdefault(score.signal.split(" | ")[1].split("(")[0], []).append(score)
    for index, (axis, members) in enumerate(families.items()):
        ax.plot(
            [m.kendall_tau for m in members],
            [m.victim_regret for m in members],
            "o^svD<>phX*Pd8"[index % 14] + "-",
            ms=5,
            lw=0.8,
            label=axis,
        )
    ax.set_xlabel("Kendall tau achieved")
    ax.set_ylabel("longest-remaining regret")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False, ncol=2)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
