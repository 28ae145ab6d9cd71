"""The picture of a timeline: KV occupancy, running, waiting and evictions over simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from contracts.policy import FloatArray, IntArray
from eval.save_figure import save_figure
from serving_sim.timeline import StepSeries

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, as in eval/figures.py
_BLUE, _GREEN, _ORANGE, _RED, _GREY = "#0072B2", "#009E73", "#E69F00", "#D55E00", "#666666"
NUM_BINS = 900  # about one a pixel of a panel


def write_timeline_figure(series: StepSeries, path: Path, title: str) -> None:
    """Draw ``series`` to ``path``; its suffix says in which format (.png or .svg)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11.0, 7.0), layout="constrained")
    kv, running, waiting, evicted = figure.subplots(4, 1, sharex=True, height_ratios=(3, 2, 2, 2))
    figure.suptitle(title, fontsize=11)
    share = 100.0 * series.values("KV blocks used") / series.usable_blocks
    _steps(kv, series, share, _BLUE)
    kv.axhline(100, color=_GREY, lw=0.8, ls="--")
    kv.set_ylim(0, 106)
    kv.set_ylabel(f"KV in use,\n% of {series.usable_blocks:,} blocks")
    _steps(running, series, series.values("running").astype(float), _GREEN)
    running.set_ylabel("requests\nrunning")
    _steps(waiting, series, series.values("waiting").astype(float), _ORANGE)
    waiting.set_ylabel("requests\nwaiting")
    _draw_evictions(evicted, series)
    evicted.set_xlabel("seconds since the run began (simulated)")
    evicted.set_xlim(0, series.end_s)
    for ax in (running, waiting):
        ax.set_ylim(0, max(1.0, ax.get_ylim()[1]))
        ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    for ax in (kv, running, waiting, evicted):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="x", lw=0.4, alpha=0.5)
        ax.tick_params(labelsize=8)
        ax.xaxis.label.set_fontsize(9)
        ax.yaxis.label.set_fontsize(9)
    figure.align_ylabels()
    save_figure(figure, path)


def envelope(
    t_s: FloatArray, values: FloatArray, end_s: float, num_bins: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return edges, shape (bins + 1,), and the least and the largest value in each bin, (bins,).

    ``values[i]`` holds from ``t_s[i]`` to the next sample, so what holds when a bin begins counts
    in it; a spike of one sample survives however wide the bins are.
    """
    edges = np.linspace(t_s[0], end_s, num_bins + 1)
    held = values[np.searchsorted(t_s, edges[:-1], side="right") - 1]
    low, high = held.copy(), held.copy()
    bins = np.clip(np.searchsorted(edges, t_s, side="right") - 1, 0, num_bins - 1)
    np.minimum.at(low, bins, values)
    np.maximum.at(high, bins, values)
    return edges, low, high


def _steps(ax: Axes, series: StepSeries, values: FloatArray, colour: str) -> None:
    """Draw a step line; of a long run, the mean of each bin and the band between its extremes."""
    t_s = series.t_s
    if len(t_s) <= 2 * NUM_BINS or not series.end_s > t_s[0]:
        t_s, values = np.append(t_s, series.end_s), np.append(values, values[-1])
        ax.fill_between(t_s, values, step="post", color=colour, alpha=0.2, lw=0)
        ax.step(t_s, values, where="post", color=colour, lw=1.0)
        return
    edges, low, high = envelope(t_s, values, series.end_s, NUM_BINS)
    low, high = np.append(low, low[-1]), np.append(high, high[-1])
    ax.fill_between(edges, low, step="post", color=colour, alpha=0.2, lw=0)
    ax.fill_between(edges, low, high, step="post", color=colour, alpha=0.5, lw=0.5)
    ax.plot((edges[:-1] + edges[1:]) / 2, means(t_s, values, edges), color=colour, lw=1.0)


def means(t_s: FloatArray, values: FloatArray, edges: FloatArray) -> FloatArray:
    """Return the mean over time in each bin, shape (bins,); ``values[i]`` holds from ``t_s[i]``."""
    t_s = np.append(t_s, edges[-1])
    area = np.concatenate(([0.0], np.cumsum(values * np.diff(t_s))))
    bins: FloatArray = np.diff(np.interp(edges, t_s, area)) / np.diff(edges)
    return bins


def thinned(at_s: FloatArray, end_s: float) -> tuple[FloatArray, IntArray]:
    """Return times, rising, and how many of ``at_s`` (n,), rising too, had come by then: each
    time, or of more than NUM_BINS the last in each bin that has any."""
    so_far = np.arange(1, len(at_s) + 1)
    if len(at_s) <= NUM_BINS:
        return at_s, so_far
    bins = np.minimum(at_s / end_s * NUM_BINS, NUM_BINS - 1).astype(np.int64)
    last = np.append(np.flatnonzero(np.diff(bins)), len(at_s) - 1)
    return at_s[last], so_far[last]


def _draw_evictions(ax: Axes, series: StepSeries) -> None:
    """Draw the count so far, and below it a tick an eviction; of many, one tick a pixel."""
    from matplotlib.ticker import MaxNLocator

    evicted_s = series.evicted_s
    count = len(evicted_s)
    ax.set_ylabel("evictions\nso far")
    ax.text(
        0.005, 0.9, f"{count:,} eviction{'s' * (count != 1)}", transform=ax.transAxes, fontsize=9
    )
    if not count:
        ax.set_yticks([0])
        return
    ticks_s, so_far = thinned(np.sort(evicted_s), series.end_s)
    t_s = np.concatenate(([0.0], ticks_s, [series.end_s]))
    ax.step(t_s, np.concatenate(([0], so_far, [count])), where="post", color=_RED, lw=1.2)
    # one broken line, not a mark each: a tenth of the bytes in an SVG
    gap = np.full(len(ticks_s), np.nan)
    ends = (np.full(len(ticks_s), y * count) for y in (-0.17, -0.06))
    bars = np.column_stack([*ends, gap]).ravel()
    ax.plot(np.repeat(ticks_s, 3), bars, color=_RED, lw=0.8, alpha=0.7)
    ax.set_ylim(-0.24 * count, 1.08 * count)
    ticks = MaxNLocator(4, integer=True).tick_values(0, count)
    ax.set_yticks([tick for tick in ticks if 0 <= tick <= count])
