"""The figures of a report, as inline SVG. Each function takes summary rows and returns the mark-up.

matplotlib is driven through its object interface (no pyplot, no global state) and told to keep
text as text, so that a report stays small, searchable and self-contained.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from eval.signal_sources import NO_SIGNAL
from eval.summary import BASELINE, SummaryRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#7a7a7a"  # seen on white and on black


def forest(rows: Sequence[SummaryRow]) -> str:
    """Paired difference to LIFO with its interval, a panel for each pressure; left of 0 is less
    breach. Colours tell the signal, grey is a policy without one."""
    shown = [row for row in rows if row.difference is not None]
    pressures = list(dict.fromkeys(row.pressure for row in shown))
    labels = list(dict.fromkeys(row.label for row in shown))
    colours = signal_colours(rows)
    figure = new_figure(11.0, 0.9 + 0.24 * len(labels))
    axes = figure.subplots(1, len(pressures), sharey=True, squeeze=False)[0]
    for ax, pressure in zip(axes, pressures, strict=True):
        ax.axvline(0, color="black", lw=0.8)
        for row in (row for row in shown if row.pressure == pressure):
            d, y = row.difference, len(labels) - 1 - labels.index(row.label)
            assert d is not None
            colour = colours.get(row.signal, GREY)
            ax.plot([d.low, d.high], [y, y], color=colour, lw=1.6, solid_capstyle="butt")
            ax.plot(d.mean, y, "o", ms=5, color=colour, mfc=colour if d.excludes_zero else "white")
        lifo = next(r for r in rows if r.pressure == pressure and r.policy == BASELINE)
        ax.set_title(f"{pressure}: LIFO breaches {lifo.breach:.1%}", fontsize=10)
        ax.set_xlabel("breach minus LIFO, percentage points")
        quiet(ax)
    axes[0].set_yticks(range(len(labels)), labels[::-1])
    return to_svg(figure)


def breach_and_gap(rows: Sequence[SummaryRow]) -> str:
    """Breach over all accepted requests (filled) and over completed ones only (hollow), with the
    floor as a tick; the bar between the two is what survivorship would have hidden."""
    pressures = list(dict.fromkeys(row.pressure for row in rows))
    labels = list(dict.fromkeys(row.label for row in rows))
    colours = signal_colours(rows)
    figure = new_figure(11.0, 0.9 + 0.24 * len(labels))
    axes = figure.subplots(1, len(pressures), sharey=True, squeeze=False)[0]
    for ax, pressure in zip(axes, pressures, strict=True):
        for row in (row for row in rows if row.pressure == pressure):
            y, colour = len(labels) - 1 - labels.index(row.label), colours.get(row.signal, GREY)
            pair = [100 * row.completed_only, 100 * row.breach]
            ax.plot(pair, [y, y], color=colour, lw=1.2, alpha=0.6)
            ax.plot(pair[0], y, "o", ms=5, mfc="white", color=colour)
            ax.plot(pair[1], y, "o", ms=5, color=colour)
            ax.plot(100 * row.floor, y, "|", ms=9, color="black")
        ax.set_title(pressure, fontsize=10)
        ax.set_xlabel("breach, % of accepted requests")
        ax.set_xlim(left=min(-0.5, ax.get_xlim()[0]))
        quiet(ax)
    axes[0].set_yticks(range(len(labels)), labels[::-1])
    return to_svg(figure)


def lengths_by_family(
    lengths: Mapping[str, Sequence[int]], cap_tokens: int, spread: Mapping[str, Sequence[float]]
) -> str:
    """Output lengths of each prompt family (left), and how far the repeats of one prompt lie
    apart, longest / shortest (right); families sorted by their median length."""
    order = sorted(lengths, key=lambda name: float(np.median(lengths[name])))
    figure = new_figure(11.0, 0.9 + 0.22 * len(order))
    left, right = figure.subplots(1, 2, sharey=True)
    rng = np.random.default_rng(0)  # jitter for the eye only
    for y, name in enumerate(order):
        x = np.asarray(lengths[name])
        left.plot(x, y + rng.uniform(-0.28, 0.28, len(x)), ".", ms=3, alpha=0.45, color=COLOURS[0])
        left.plot(np.median(x), y, "|", ms=14, mew=2, color="black")
        ratios = np.asarray(spread[name])
        jitter = y + rng.uniform(-0.28, 0.28, len(ratios))
        right.plot(ratios, jitter, ".", ms=4, alpha=0.6, color=COLOURS[1])
    left.axvline(cap_tokens, color=GREY, lw=0.8, ls="--")
    left.set_xlabel(f"output tokens of a run (dashed: the cap, {cap_tokens})")
    right.set_xlabel("longest / shortest of the repeats of one prompt")
    right.set_xscale("log", base=2)
    right.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    left.set_yticks(range(len(order)), order)
    for ax in (left, right):
        quiet(ax)
    return to_svg(figure)


def signal_colours(rows: Sequence[SummaryRow]) -> dict[str, str]:
    """Return one colour for each signal, in the order the rows name them."""
    names = dict.fromkeys(row.signal for row in rows if row.signal != NO_SIGNAL)
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def new_figure(width_in: float, height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def quiet(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", lw=0.4, alpha=0.5)
    ax.tick_params(labelsize=8)
    ax.xaxis.label.set_fontsize(8)


def to_svg(figure: Figure) -> str:
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "preemptbench"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
