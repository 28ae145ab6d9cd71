"""The figures of a study's report, as inline SVG (see eval.figures for how they are drawn)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from contracts.policy import FloatArray
from eval.figures import COLOURS, GREY, new_figure, quiet, to_svg
from eval.intervals import Interval
from eval.signal_sources import NO_SIGNAL
from eval.study import SourceResult
from eval.study_quality import QualityRow
from eval.study_rescoring import LIFO, RuleCurve
from eval.study_summary import PARTS, Comparison, GridRow, Rule, label
from eval.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_LINES = len(COLOURS)


def grid_forest(grid: Mapping[str, Sequence[GridRow]]) -> str:
    """Every rule's difference to LIFO, a panel for each part: thick for these cells and new seeds,
    thin for new sources."""
    parts = [part for part in PARTS if grid[part]]
    first = sorted(grid[parts[0]], key=lambda row: row.within.mean)
    labels = [label(row.rule) for row in first if row.rule != LIFO]
    colours = signal_colours([row.rule for row in first])
    figure = new_figure(11.0, 1.1 + 0.25 * len(labels))
    axes = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    for ax, part in zip(axes, parts, strict=True):
        ax.axvline(0, color="black", lw=0.8)
        for row in (row for row in grid[part] if row.rule != LIFO):
            y, colour = len(labels) - 1 - labels.index(label(row.rule)), colours[row.rule[1]]
            if row.across is not None:
                ax.plot([row.across.low, row.across.high], [y, y], color=colour, lw=0.9, alpha=0.8)
            i, known = row.within, row.within.high < 0 or row.within.low > 0
            ax.plot([i.low, i.high], [y, y], color=colour, lw=3.2, solid_capstyle="butt")
            ax.plot(i.mean, y, "o", ms=6, color=colour, mfc=colour if known else "white")
        lifo = next(row for row in grid[part] if row.rule == LIFO)
        ax.set_title(f"{part}: {lifo.num_cells} cells, LIFO {lifo.breach:.1%}", fontsize=10)
        ax.set_xlabel("breach minus LIFO, percentage points")
        quiet(ax)
    axes[0].set_yticks(range(len(labels)), labels[::-1])
    return to_svg(figure)


def pilot_lines(sources: Sequence[SourceResult], boundary: float) -> str:
    """LIFO's breach on pilot seeds against KV pressure, a line a source, and the boundary."""
    figure = new_figure(7.0, 3.4)
    ax = figure.subplots()
    ax.axhline(100 * boundary, color="black", lw=0.9, ls="--")
    for at, source in enumerate(sources):
        x = [float(pressure.name) for pressure in source.matrix.pressures]
        y = [100 * breach for breach in source.pilot.lifo_breach]
        style = {"color": COLOURS[at % MAX_LINES], "marker": _MARKERS[at // MAX_LINES % 6]}
        ax.plot(x, y, ms=4, lw=1.2, label=source.source.name, **style)
    ax.set_xlabel("KV pressure (1: LIFO crosses the boundary)")
    ax.set_ylabel("LIFO breach on pilot seeds, %", fontsize=8)
    _legend(ax)
    quiet(ax)
    return to_svg(figure)


def by_pressure(comparisons: Sequence[Comparison], rules: Sequence[Rule]) -> str:
    """Mean difference to LIFO over sources at each pressure, a line a rule; sources as dots."""
    figure = new_figure(9.0, 3.8)
    ax = figure.subplots()
    ax.axhline(0, color="black", lw=0.8)
    pressures = list(dict.fromkeys(c.pressure for c in comparisons))
    for at, rule in enumerate(rules[:MAX_LINES]):
        of_rule = [c for c in comparisons if c.rule == rule]
        points = {p: [c.difference.mean for c in of_rule if c.pressure == p] for p in pressures}
        x = [float(p) for p in pressures if points[p]]
        y = [float(np.mean(points[p])) for p in pressures if points[p]]
        ax.plot(x, y, lw=1.4, ms=5, color=COLOURS[at], marker=_MARKERS[at], label=label(rule))
        for pressure, values in points.items():
            ax.plot(
                [float(pressure)] * len(values), values, ".", ms=3, alpha=0.4, color=COLOURS[at]
            )
    ax.set_xlabel("KV pressure (1: LIFO crosses the boundary on pilot seeds)")
    ax.set_ylabel("breach minus LIFO, pp", fontsize=8)
    _legend(ax)
    quiet(ax)
    return to_svg(figure)


def dose_lines(doses: Mapping[str, Sequence[tuple[float, Interval]]]) -> str:
    """Difference to LIFO against the depth at which ``young(depth)`` takes its victim."""
    figure = new_figure(7.0, 3.2)
    ax = figure.subplots()
    ax.axhline(0, color="black", lw=0.8)
    for at, part in enumerate(part for part in PARTS if doses[part]):
        depths = [0.0, *(depth for depth, _ in doses[part])]
        intervals = [Interval(0.0, 0.0, 0.0, 0, ""), *(i for _, i in doses[part])]
        x = np.array(depths) + 0.008 * (at - 0.5)  # intervals beside each other, not on top
        _error_bars(ax, x.tolist(), intervals, COLOURS[at], _MARKERS[at], part)
    ax.set_xlabel("depth of the victim: 0 the youngest (LIFO), 1 the oldest")
    ax.set_ylabel("breach minus LIFO, pp", fontsize=8)
    _legend(ax, "upper left")
    quiet(ax)
    return to_svg(figure)


def ladder_points(rungs: Mapping[str, Sequence[GridRow]]) -> str:
    """Difference to LIFO of one rule under each signal, from none to clairvoyant."""
    names = list(dict.fromkeys(row.rule[1] for rows in rungs.values() for row in rows))
    figure = new_figure(7.0, 3.2)
    ax = figure.subplots()
    ax.axhline(0, color="black", lw=0.8)
    for at, part in enumerate(part for part in PARTS if rungs[part]):
        x = [names.index(row.rule[1]) + 1 + 0.12 * (at - 0.5) for row in rungs[part]]
        intervals = [row.within for row in rungs[part]]
        _error_bars(ax, x, intervals, COLOURS[at], _MARKERS[at], part, joined=False)
    ax.plot(0, 0, "o", color="black", ms=5)
    ax.set_xticks(range(len(names) + 1), ["none (LIFO)", *names])
    if len(names) > 4:
        ax.tick_params(axis="x", rotation=30)
    ax.set_ylabel("breach minus LIFO, pp", fontsize=8)
    _legend(ax)
    quiet(ax)
    return to_svg(figure)


def quality_points(rows: Sequence[QualityRow]) -> str:
    """Difference to LIFO against a signal's quality on running sets: a row for each part, a point
    for each signal and source."""
    parts = [part for part in PARTS if any(row.part == part for row in rows)]
    signals = list(dict.fromkeys(row.quality.signal for row in rows))
    figure = new_figure(9.0, 0.9 + 2.7 * len(parts))
    grid = figure.subplots(len(parts), 2, squeeze=False, sharey="row")
    for axes, part in zip(grid, parts, strict=True):
        for ax, metric in zip(axes, ("concordance", "log_mae"), strict=True):
            ax.axhline(0, color="black", lw=0.8)
            for at, name in enumerate(signals):
                mine = [r for r in rows if (r.part, r.quality.signal) == (part, name)]
                x = [getattr(row.quality, metric) for row in mine]
                style = {"color": COLOURS[at % MAX_LINES], "marker": _MARKERS[at % len(_MARKERS)]}
                y = [row.difference_pp for row in mine]
                ax.plot(x, y, ls="", ms=5, alpha=0.85, label=name, **style)
            quiet(ax)
        axes[0].set_ylabel(f"{part}:\nbreach minus LIFO, pp", fontsize=8)
        axes[0].axvline(0.5, color=GREY, lw=0.8, ls="--")
    grid[-1][0].set_xlabel("concordance in running sets (dashed: chance)")
    grid[-1][1].set_xlabel("log-MAE in running sets")
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=6, fontsize=7, frameon=False)
    return to_svg(figure)


def payers_bars(table: Table) -> str:
    """Breach, the score over completed requests, the longest tenth and the floor of every rule, a
    panel for each part; ``table`` is study_service.payers_table."""
    keys = [column.key for column in table.columns]
    rows: list[dict[str, Any]] = [dict(zip(keys, row, strict=True)) for row in table.rows]
    parts = [part for part in PARTS if any(row["part"] == part for row in rows)]
    labels = list(dict.fromkeys(row["rule"] for row in rows))
    figure = new_figure(11.0, 1.1 + 0.24 * len(labels))
    axes = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    for ax, part in zip(axes, parts, strict=True):
        for row in (row for row in rows if row["part"] == part):
            y = len(labels) - 1 - labels.index(row["rule"])
            ends = [100 * row["completed_only"], 100 * row["breach"]]
            ax.plot(ends, [y, y], color=COLOURS[0], lw=1.4, alpha=0.6)
            ax.plot(ends[0], y, "o", ms=5, mfc="white", color=COLOURS[0])
            ax.plot(ends[1], y, "o", ms=5, color=COLOURS[0])
            ax.plot(100 * row["top_decile_breach"], y, "x", ms=5, color=COLOURS[1])
            ax.plot(100 * row["floor"], y, "|", ms=9, color="black")
        ax.set_title(part, fontsize=10)
        ax.set_xlabel("breach, % of accepted requests")
        quiet(ax)
    axes[0].set_yticks(range(len(labels)), labels[::-1])
    return to_svg(figure)


def deadline_curves(
    curves: Mapping[str, Sequence[RuleCurve]], rules: Sequence[Rule], deadlines_s: FloatArray
) -> str:
    """Difference to LIFO against the deadline with simultaneous bands, and below it LIFO's own
    breach with the floor."""
    parts = [part for part in PARTS if curves[part]]
    figure = new_figure(11.0, 5.2)
    grid = figure.subplots(2, len(parts), sharex=True, squeeze=False, height_ratios=(3, 1.3))
    for column, part in enumerate(parts):
        top, bottom = grid[0][column], grid[1][column]
        top.axhline(0, color="black", lw=0.8)
        of_rule = {curve.rule: curve for curve in curves[part]}
        for at, rule in enumerate(rules[:MAX_LINES]):
            if rule in of_rule and (d := of_rule[rule].difference) is not None:
                top.plot(d.deadlines_s, d.mean, color=COLOURS[at], lw=1.5, label=label(rule))
                top.fill_between(d.deadlines_s, d.low, d.high, color=COLOURS[at], alpha=0.13, lw=0)
                mark = slice(at, None, 6)
                x, y = d.deadlines_s[mark], d.mean[mark]
                top.plot(x, y, _MARKERS[at], ms=4, color=COLOURS[at])
        top.set_title(part, fontsize=10)
        if lifo := of_rule.get(LIFO):
            bottom.plot(deadlines_s, 100 * lifo.breach, color="black", lw=1.3)
            bottom.fill_between(deadlines_s, 100 * lifo.floor, color=GREY, alpha=0.4, lw=0)
        bottom.set_xlabel("deadline, s")
        for ax in (top, bottom):
            quiet(ax)
    grid[0][0].set_ylabel("breach minus LIFO, pp", fontsize=8)
    grid[1][0].set_ylabel("LIFO (line),\nfloor (grey), %", fontsize=8)
    _legend(grid[0][0])
    return to_svg(figure)


def highlights(rows: Sequence[GridRow]) -> list[Rule]:
    """Return up to six rules worth a line each: all signals under one rule first, then the rules
    without a signal from the least breach to the most."""
    ordered = sorted((row for row in rows if row.rule != LIFO), key=lambda row: row.breach)
    signals = [row.rule for row in ordered if row.rule[0] == "longest-remaining"][: MAX_LINES - 2]
    plain = [row.rule for row in ordered if row.rule[1] == NO_SIGNAL]
    room = MAX_LINES - len(signals)
    return [*signals, *(plain if len(plain) <= room else [*plain[: room - 1], plain[-1]])]


def signal_colours(rules: Sequence[Rule]) -> dict[str, str]:
    """Return a colour for each signal, grey for none."""
    names = dict.fromkeys(signal for _, signal in rules if signal != NO_SIGNAL)
    chosen = {name: COLOURS[i % MAX_LINES] for i, name in enumerate(sorted(names))}
    return {NO_SIGNAL: GREY, **chosen}


def _error_bars(
    ax: Axes,
    x: Sequence[float],
    intervals: Sequence[Interval],
    colour: str,
    marker: str,
    name: str,
    *,
    joined: bool = True,
) -> None:
    mean = [i.mean for i in intervals]
    ax.vlines(x, [i.low for i in intervals], [i.high for i in intervals], color=colour, lw=1.6)
    line = "-" if joined else ""
    ax.plot(x, mean, marker=marker, ls=line, lw=1.2, ms=6, color=colour, label=name)


def _legend(ax: Axes, place: str = "best") -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7, frameon=False, loc=place)
