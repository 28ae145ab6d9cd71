"""Breach against signal quality: how good must "how long will it still run?" be to beat LIFO?

A clairvoyant signal is degraded rung by rung, one axis at a time, and longest-remaining evicts by
what is left of it. Quality is measured where it counts: on the running sets in which LIFO chose a
victim. Sources, sizes and deadline are those of the paper preset (drawn lengths, parametric). Run::

    python -m benchmarks.quality_curve --out quality --figures docs/img

Finished tasks are files in ``--out``; a second start runs what is missing. Tables go to stdout.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.beyond_report import LIFO, Cells, difference, loads_of, mean_breach
from benchmarks.beyond_the_paper import matrices, run_all, run_cells
from eval.intervals import Interval
from eval.matrix_config import MatrixConfig
from eval.running_sets import SetQuality, judge_signals
from preemptbench.study_presets import PAPER, drawn_sources

RULE = "longest-remaining"
BASE = "clairvoyant"
AXES: Mapping[str, tuple[str, ...]] = {
    "noise": ("noise(0.25)", "noise(0.5)", "noise(1)", "noise(2)", "noise(4)"),
    "wander": ("wander(0.5, 1024)", "wander(1, 1024)", "wander(2, 1024)"),
    "swap": ("swap(0.9)", "swap(0.7)", "swap(0.5)", "swap(0.3)", "swap(0)"),
    "shrink": ("shrink(0.75)", "shrink(0.5)", "shrink(0.25)"),
    "optimistic": ("optimistic(0.5)", "optimistic(1)", "optimistic(2)"),
    "pessimistic": ("pessimistic(0.5)", "pessimistic(1)", "pessimistic(2)"),
    "bias": ("bias(0.25)", "bias(4)"),
    "buckets": ("buckets(10)", "buckets(5)", "buckets(2)"),
    "stale": ("stale(512)", "stale(2048)", "stale(8192)"),
    "missing": ("missing(0.05)", "missing(0.2)", "missing(0.5)"),
    "anti": ("anti",),
}
NUM_JUDGED = 2  # a signal's quality scatters far less over seeds than breach does
OTHERS = ("age-km", "surrogate-gbm", "oracle-4")
SIGNALS = (BASE, *(f"{BASE} | {rung}" for rungs in AXES.values() for rung in rungs), *OTHERS)
STUDY = replace(
    PAPER, name="quality", policies=("lifo", RULE), signals=SIGNALS, pressures=(0.95, 1.1),
    num_seeds=10, observe_s=PAPER.deadline_s,
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Rung:
    """One signal: its quality (mean over sources), and by load what evicting by it does to breach,
    in percentage points, less LIFO's."""

    axis: str
    signal: str
    concordance: float
    kendall_tau: float
    log_mae: float
    by_load: Mapping[str, Interval]


def judge(name: str, matrix: MatrixConfig) -> tuple[str, list[SetQuality]]:
    """Return the quality of every signal on the sets of the first seeds."""
    return name, judge_signals(matrix, range(NUM_JUDGED))


def rungs_of(cells: Cells, quality: Mapping[str, Sequence[SetQuality]]) -> list[Rung]:
    """Return every signal with its mean quality and its differences; the same sources for all. One
    where LIFO evicted nobody has no running sets, and counts for the differences only."""
    axis_of = {f"{BASE} | {rung}": axis for axis, rungs in AXES.items() for rung in rungs}
    found = []
    for at, signal in enumerate(SIGNALS):
        own = [scores[at] for scores in quality.values() if scores[at].num_sets]
        assert {one.signal for one in own} == {signal}
        found.append(
            Rung(
                axis_of.get(signal, ""),
                signal,
                *(float(np.mean([getattr(q, n) for q in own])) for n in _MEASURES),
                {load: difference(cells, load, (RULE, signal)) for load in loads_of(cells)},
            )
        )
    return found


_MEASURES = ("concordance", "kendall_tau", "log_mae")


def crossing(base: Rung, rungs: Sequence[Rung], load: str) -> float:
    """Return the concordance at which an axis meets LIFO, read off the line between the two rungs
    on either side; NaN where it never does."""
    line = [base, *rungs]
    for better, worse in pairwise(line):
        high, low = better.by_load[load].mean, worse.by_load[load].mean
        if high < 0 <= low:
            share = -high / (low - high)
            return better.concordance + share * (worse.concordance - better.concordance)
    return float("nan")


def tables(cells: Cells, rungs: Sequence[Rung]) -> Iterator[str]:
    """Yield the table of all rungs, and that of the crossings."""
    loads = loads_of(cells)
    lifo = ", ".join(f"{mean_breach(cells, load, LIFO):.1f} % at {load}" for load in loads)
    yield f"\n{len(cells)} sources; LIFO breaches {lifo}. Breach minus LIFO, pp [95 %]\n"
    heads = ["signal", "concordance", "tau", "log-MAE", *(f"load {load}" for load in loads)]
    yield _line(heads)
    yield _line(["---"] * len(heads))
    for rung in rungs:
        shown = [f"{i.mean:+.1f} [{i.low:+.1f}, {i.high:+.1f}]" for i in rung.by_load.values()]
        measures = (f"{getattr(rung, name):.2f}" for name in _MEASURES)
        yield _line([f"`{rung.signal.removeprefix(f'{BASE} | ')}`", *measures, *shown])
    yield "\nConcordance at which an axis meets LIFO (- : never between its rungs)\n"
    yield _line(["axis", *(f"load {load}" for load in loads)])
    yield _line(["---"] * (1 + len(loads)))
    for axis in AXES:
        own = [rung for rung in rungs if rung.axis == axis]
        if len(own) < 2:  # two points make no curve
            continue
        at = [crossing(rungs[0], own, load) for load in loads]
        yield _line([axis, *("-" if np.isnan(x) else f"{x:.2f}" for x in at)])


def _line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(parts) + " |"


def draw(cells: Cells, rungs: Sequence[Rung], path: Path) -> None:
    """Write a panel a load: a line an axis from clairvoyant downwards, named signals as stars."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    loads, colours = loads_of(cells), colormaps["tab20"](np.linspace(0, 1, 20)[: len(AXES)])
    figure = Figure(figsize=(5.4 * len(loads), 4.6), layout="constrained")
    axes = figure.subplots(1, len(loads), sharey=True, squeeze=False)[0]
    for ax, load in zip(axes, loads, strict=True):
        ax.axhline(0, color="black", lw=0.9)
        for index, axis in enumerate(AXES):
            line = [rungs[0], *(rung for rung in rungs if rung.axis == axis)]
            ax.plot(
                [rung.concordance for rung in line],
                [rung.by_load[load].mean for rung in line],
                marker="os^vDPX<>ph"[index], ms=5, lw=1, label=axis,
                color=colours[index],
            )  # fmt: skip
        for rung in rungs:
            if rung.signal in OTHERS:
                at = (rung.concordance, rung.by_load[load].mean)
                ax.plot(*at, "*", ms=13, color="black", zorder=4)
                ax.annotate(rung.signal, at, (9, 5), textcoords="offset points", fontsize=8)
        breach = mean_breach(cells, load, LIFO)
        ax.set_title(f"load {load}: LIFO breaches {breach:.1f} %", fontsize=10)
        ax.set_xlabel("concordance on LIFO's running sets (.5: knows nothing)", fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(lw=0.4, alpha=0.4)
    axes[0].set_ylabel(f"breach of {RULE} minus LIFO, pp")
    axes[-1].legend(fontsize=8, frameon=False, ncol=2, title="clairvoyant degraded by")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, measure, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("quality"))
    parser.add_argument("--figures", type=Path, help="folder for the PNG file (default: --out)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", type=int, default=STUDY.num_seeds)
    parser.add_argument("--sources", type=int, help="how many laws (default: all)")
    chosen = parser.parse_args(arguments)
    study = replace(STUDY, num_seeds=chosen.seeds)
    sources = drawn_sources(study, chosen.out)[: chosen.sources]
    by_source = matrices(study, sources, chosen.out, chosen.jobs)
    cells = run_cells(by_source, chosen.out, chosen.jobs, "seeds")
    judged = run_all("quality", [(judge, pair) for pair in by_source.items()], chosen.jobs)
    rungs = rungs_of(cells, dict(judged))
    for line in tables(cells, rungs):
        print(line)
    draw(cells, rungs, (chosen.figures or chosen.out) / "beyond-quality.png")


if __name__ == "__main__":
    main()
