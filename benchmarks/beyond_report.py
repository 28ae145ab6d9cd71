"""Tables and pictures of benchmarks/beyond_the_paper.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eval.cells import Cell
from eval.intervals import Interval, within_grid
from eval.save_figure import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cells = Mapping[str, Sequence[Cell]]
Rule = tuple[str, str]
LIFO: Rule = ("lifo", "none")
_BY_SOURCE: tuple[Rule, ...] = (
    ("longest-remaining", "clairvoyant"),
    ("doomed-first", "clairvoyant"),
    ("remaining-per-sunk", "clairvoyant"),
    ("slack-per-sunk", "clairvoyant"),
    ("longest-remaining", "age-km"),
    ("least-computed", "none"),
)
# Okabe and Ito's palette, as in eval/figures.py
_COLOURS = {"none": "#666666", "age-km": "#0072B2", "clairvoyant": "#D55E00"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GapRow:
    """One cell searched in hindsight; breaches are shares. ``best`` is the least of the rules on
    this very cell, ``by_rule`` what each of them breached."""

    source: str
    load: float
    seed: int
    lifo: float
    best_rule: str
    best: float
    by_rule: dict[str, float]
    hindsight: float
    floor: float
    is_optimal: bool
    num_replays: int
    improved_at: int


def rules_of(cells: Cells) -> list[Rule]:
    """Return the rules in the order in which they were run."""
    return list(dict.fromkeys((c.policy, c.signal) for own in cells.values() for c in own))


def loads_of(cells: Cells) -> list[str]:
    """Return the names of the loads, from low to high."""
    return list(dict.fromkeys(c.pressure for own in cells.values() for c in own))


def breaches(cells: Sequence[Cell], load: str, rule: Rule) -> list[float]:
    """Return breach in percent by seed. Disconnects leave bounds only; none are injected here."""
    chosen = [c for c in cells if (c.pressure, c.policy, c.signal) == (load, *rule)]
    return [100 * c.score.breach for c in sorted(chosen, key=lambda c: c.seed)]


def difference(cells: Cells, load: str, rule: Rule) -> Interval:
    """Return the mean paired difference to LIFO over all sources, in percentage points."""
    return within_grid(
        {
            name: np.subtract(breaches(own, load, rule), breaches(own, load, LIFO)).tolist()
            for name, own in cells.items()
        }
    )


def mean_breach(cells: Cells, load: str, rule: Rule) -> float:
    """Return the mean over sources and seeds, in percent."""
    return float(np.mean([breaches(own, load, rule) for own in cells.values()]))


def print_rules(cells: Cells) -> Iterator[str]:
    """Yield a Markdown table: each rule beside LIFO, by load; then the same by source."""
    loads = loads_of(cells)
    yield f"\nBreach minus LIFO, pp [95 %], mean of {len(cells)} sources\n"
    yield from _head("rule", "signal", *(f"load {load}" for load in loads), "tax at the last")
    lifo = [f"(LIFO: {mean_breach(cells, load, LIFO):.1f} %)" for load in loads]
    yield _line("lifo", "none", *lifo, f"{_tax(cells, loads[-1], LIFO):.1%}")
    for rule in _ranked(cells, loads[-1]):
        shown = [_interval(difference(cells, load, rule)) for load in loads]
        yield _line(*rule, *shown, f"{_tax(cells, loads[-1], rule):.1%}")
    yield "\nBy source: LIFO's breach (%), some rules minus LIFO (pp, means over seeds)\n"
    yield from _head("source", "load", "lifo", *(", ".join(rule) for rule in _BY_SOURCE))
    for name, own in cells.items():
        for load in loads:
            alone = {name: own}
            means = [difference(alone, load, rule).mean for rule in _BY_SOURCE]
            lifo_breach = f"{mean_breach(alone, load, LIFO):.1f}"
            yield _line(name, load, lifo_breach, *(f"{mean:+.1f}" for mean in means))


def _ranked(cells: Cells, load: str) -> list[Rule]:
    others = [rule for rule in rules_of(cells) if rule != LIFO]
    return sorted(others, key=lambda rule: mean_breach(cells, load, rule))


def _tax(cells: Cells, load: str, rule: Rule) -> float:
    chosen = [
        c
        for own in cells.values()
        for c in own
        if (c.pressure, c.policy, c.signal) == (load, *rule)
    ]
    return sum(c.recomputed_tokens for c in chosen) / sum(c.computed_tokens for c in chosen)


def _interval(found: Interval) -> str:
    return f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def by_setting(cells: Cells) -> dict[str, dict[str, Sequence[Cell]]]:
    """Return setting -> source -> cells, from keys "setting|source"."""
    found: dict[str, dict[str, Sequence[Cell]]] = {}
    for key, own in cells.items():
        setting, _, source = key.partition("|")
        found.setdefault(setting, {})[source] = own
    return found


def print_settings(cells: Cells) -> Iterator[str]:
    """Yield, for each load, a table: what each setting does to LIFO, and each rule beside it."""
    settings = by_setting(cells)
    first = next(iter(settings.values()))
    rules = [rule for rule in rules_of(first) if rule != LIFO]
    for load in loads_of(first):
        yield f"\nLoad {load}: LIFO's breach (%), the rules minus LIFO (pp); * excludes 0\n"
        yield from _head("setting", "lifo", *(name for name, _ in rules), "tau")
        for name, own in _having(settings, load).items():
            shown = [_starred(difference(own, load, rule)) for rule in rules]
            tau = _agreement(first, own, load)
            yield _line(name, f"{mean_breach(own, load, LIFO):.1f}", *shown, f"{tau:+.2f}")


def _having(settings: Mapping[str, Cells], load: str) -> dict[str, Cells]:
    """Return the settings that were run at ``load``."""
    return {name: own for name, own in settings.items() if load in loads_of(own)}


def _starred(found: Interval) -> str:
    return f"{found.mean:+.1f}{'' if found.low <= 0 <= found.high else '*'}"


def _agreement(first: Cells, other: Cells, load: str) -> float:
    """Return Kendall's tau-b of the rules' mean breaches under two settings, on equal sources and
    seeds."""
    from scipy import stats

    seeds = {cell.seed for own in other.values() for cell in own}
    first = {name: [cell for cell in first[name] if cell.seed in seeds] for name in other}
    pairs = [[mean_breach(own, load, rule) for rule in rules_of(first)] for own in (first, other)]
    return float(stats.kendalltau(*pairs).statistic)


def print_gaps(rows: Sequence[GapRow]) -> Iterator[str]:
    """Yield a table of LIFO .. best rule .. best schedule found .. floor, by source and load."""
    yield "\nBreach (%): means over seeds; any schedule is at or above the floor\n"
    yield from _head(
        "source", "load", "LIFO", "best fixed rule", "its breach", "best rule of each cell",
        "best schedule found", "floor", "optimum proven", "replays", "last gain at",
    )  # fmt: skip
    for source, load in dict.fromkeys((row.source, row.load) for row in rows):
        own = [row for row in rows if (row.source, row.load) == (source, load)]
        rule, breach = best_fixed(own)
        means = [_percent(own, name) for name in ("lifo", "best", "hindsight", "floor")]
        yield _line(
            source, f"{load:g}", f"{means[0]:.1f}", rule, f"{breach:.1f}",
            *(f"{mean:.1f}" for mean in means[1:]),
            f"{sum(r.is_optimal for r in own)} of {len(own)}",
            f"{np.mean([r.num_replays for r in own]):.0f}",
            f"{np.median([r.improved_at for r in own]):.0f}",
        )  # fmt: skip


def best_fixed(rows: Sequence[GapRow]) -> tuple[str, float]:
    """Return the rule with the least mean breach over these cells, and that mean in percent."""
    means = {
        rule: 100 * float(np.mean([row.by_rule[rule] for row in rows])) for rule in rows[0].by_rule
    }
    best = min(means, key=means.__getitem__)
    return best, means[best]


def _percent(rows: Sequence[GapRow], name: str) -> float:
    return 100 * float(np.mean([getattr(row, name) for row in rows]))


def _head(*names: str) -> Iterator[str]:
    yield _line(*names)
    yield _line(*("---" for _ in names))


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def draw_rules(cells: Cells, path: Path) -> None:
    """Write a forest plot: a panel a load, a row a rule, left of 0 is less breach than LIFO."""
    loads, rules = loads_of(cells), _ranked(cells, loads_of(cells)[-1])[::-1]
    figure = _figure(11.0, 1.1 + 0.23 * len(rules))
    axes = figure.subplots(1, len(loads), sharey=True)
    for ax, load in zip(axes, loads, strict=True):
        ax.axvline(0, color="black", lw=0.8)
        for y, rule in enumerate(rules):
            found, colour = difference(cells, load, rule), _COLOURS[rule[1]]
            ax.plot([found.low, found.high], [y, y], color=colour, lw=1.6)
            ax.plot(found.mean, y, "o", ms=4.5, color=colour,
                    mfc="white" if found.low <= 0 <= found.high else colour)  # fmt: skip
        ax.set_title(
            f"load {load}: LIFO breaches {mean_breach(cells, load, LIFO):.1f} %", fontsize=10
        )
        ax.set_xlabel("breach minus LIFO, pp", fontsize=9)
        _quiet(ax)
    axes[0].set_yticks(range(len(rules)), [name for name, _ in rules], fontsize=8)
    for signal, colour in _COLOURS.items():
        label = "no signal" if signal == "none" else signal
        axes[-1].plot([], [], "o-", ms=4.5, color=colour, label=label)
    axes[-1].legend(fontsize=8, frameon=False, loc="upper right")
    save_figure(figure, path)


def draw_settings(cells: Cells, path: Path) -> None:
    """Write a heat map a load: settings by rules, breach minus LIFO under the same setting."""
    settings = by_setting(cells)
    first = next(iter(settings.values()))
    rules = [rule for rule in rules_of(first) if rule != LIFO]
    loads = loads_of(first)
    figure = _figure(13.0, 1.6 + 0.32 * len(settings))
    axes = figure.subplots(1, len(loads))
    for ax, load in zip(axes, loads, strict=True):
        having = _having(settings, load)
        found = [[difference(own, load, rule) for rule in rules] for own in having.values()]
        means = np.array([[one.mean for one in row] for row in found])
        image = ax.imshow(means, cmap="PuOr_r", vmin=-30, vmax=30, aspect="auto")
        for y, row in enumerate(found):
            for x, one in enumerate(row):
                bold = "normal" if one.low <= 0 <= one.high else "bold"
                ax.text(x, y, f"{one.mean:+.0f}", ha="center", va="center", fontsize=8, weight=bold,
                        color="white" if abs(one.mean) > 22 else "black")  # fmt: skip
        ax.set_xticks(range(len(rules)), [name for name, _ in rules], rotation=35, ha="right",
                      fontsize=8)  # fmt: skip
        ax.set_title(f"load {load}", fontsize=10)
        lifo = [f"{mean_breach(own, load, LIFO):.0f} %" for own in having.values()]
        labels = [f"{name} (LIFO {own})" for name, own in zip(having, lifo, strict=True)]
        ax.set_yticks(range(len(having)), labels, fontsize=8)
    figure.colorbar(image, ax=axes, label="breach minus LIFO, pp (bold: interval excludes 0)",
                    shrink=0.8)  # fmt: skip
    save_figure(figure, path)


def draw_gaps(rows: Sequence[GapRow], path: Path) -> None:
    """Write LIFO, the best rule, the best schedule found and the floor, by load."""
    sources = list(dict.fromkeys(row.source for row in rows))
    figure = _figure(4.6 * len(sources), 3.6)
    axes = figure.subplots(1, len(sources), sharey=True, squeeze=False)[0]
    for ax, source in zip(axes, sources, strict=True):
        own = [row for row in rows if row.source == source]
        loads = sorted({row.load for row in own})
        at = [[row for row in own if row.load == load] for load in loads]
        lines = {
            "LIFO": ([_percent(cells, "lifo") for cells in at], "o", "#666666"),
            "best fixed rule": ([best_fixed(cells)[1] for cells in at], "s", "#0072B2"),
            "best schedule found": ([_percent(cells, "hindsight") for cells in at], "^", "#D55E00"),
            "floor": ([_percent(cells, "floor") for cells in at], "_", "black"),
        }
        for label, (values, mark, colour) in lines.items():
            ax.plot(loads, values, marker=mark, color=colour, label=label, ms=6)
        floor = lines["floor"][0]
        ax.fill_between(loads, floor, lines["best schedule found"][0], color="#D55E00", alpha=0.12,
                        lw=0, label="where the optimum lies")  # fmt: skip
        ax.set(xlabel="load (1: LIFO breaches 15 % on pilot seeds)", title=source)
        ax.title.set_fontsize(10)
        ax.set_xticks(loads)
        _quiet(ax)
    axes[0].set_ylabel("breach, %")
    axes[0].legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _quiet(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="both", lw=0.4, alpha=0.4)
    ax.tick_params(labelsize=8)
