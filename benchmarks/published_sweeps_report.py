"""Tables and picture of benchmarks/published_sweeps.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.published_setups import ORDER, POOLS, VARIANTS, WATERMARKS
from benchmarks.published_sweeps import TaxRow, WatermarkRow
from eval.save_figure import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#009E73", "#0072B2", "#E69F00", "#D55E00")  # Okabe and Ito's, as in eval/figures.py
_MARKS = ("o", "s", "^", "v")


def print_tables(first: Sequence[WatermarkRow], second: Sequence[TaxRow]) -> None:
    """Print Markdown tables; where there are two figures, the first is the published one."""
    _print_watermarks(first)
    _print_taxes(second)


def _print_watermarks(rows: Sequence[WatermarkRow]) -> None:
    main = next(iter(VARIANTS))
    print("Preemptions against the watermark (published / ours)\n")
    _head("watermark", "preemptions", "least–most", "output tokens/s", "TTFT p50, s", "E2E p50, s")
    for row in (row for row in rows if row.variant == main):
        count, tokens_per_s, ttft_s, e2e_s = WATERMARKS[row.watermark]
        _line(
            f"{row.watermark:.2f}",
            f"{count} / {row.preemptions:.0f}",
            f"{row.least}–{row.most}",
            f"{tokens_per_s:,} / {row.tokens_per_s:,.0f}",
            f"{_or_dash(ttft_s)} / {row.ttft_p50_s:.1f}",
            f"{_or_dash(e2e_s)} / {row.e2e_p50_s:.1f}",
        )
    print("\nPreemptions under other readings\n")
    _head("reading", *(f"{w:.2f}" for w in WATERMARKS))
    for variant in dict.fromkeys(row.variant for row in rows):
        _line(variant, *(f"{row.preemptions:.0f}" for row in rows if row.variant == variant))


def _print_taxes(rows: Sequence[TaxRow]) -> None:
    print("\nRecompute tax against KV blocks (published / ours)\n")
    _head("reading", "blocks", *ORDER, "waste, least-computed to LIFO", "order")
    for row in rows:
        _line(row.reading, f"{row.num_blocks}", *_taxes(row), _change(row), _order(row))
    print("\nTokens lost by a preemption, 400 blocks (published: LIFO 415, least-computed 261)\n")
    _head("reading", *ORDER)
    for row in (row for row in rows if row.num_blocks == min(POOLS)):
        pairs = zip(row.recomputed_tokens, row.preemptions, strict=True)
        _line(row.reading, *(f"{lost / count:.0f}" if count else "–" for lost, count in pairs))


def _taxes(row: TaxRow) -> list[str]:
    shares = [f"{tax:.1%}" for tax in row.tax]
    at = ORDER.index("lifo")
    shares[at] = f"{POOLS[row.num_blocks][0]:.1%} / {shares[at]}"
    return shares


def _change(row: TaxRow) -> str:
    published = POOLS[row.num_blocks][1]
    return " / ".join("–" if x is None else f"{x:+.0%}" for x in (published, row.change))


def _order(row: TaxRow) -> str:
    return "–" if not any(row.tax) else "yes" if row.is_ordered else "no"


def _head(*cells: str) -> None:
    _line(*cells)
    _line(*("---" for _ in cells))


def _line(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def write_figure(first: Sequence[WatermarkRow], second: Sequence[TaxRow], path: Path) -> None:
    """Write both sweeps side by side; the format is that of the file name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_watermarks(left, [row for row in first if row.variant == next(iter(VARIANTS))])
    titles = {
        "beforehand": "settings chosen beforehand",
        "afterwards": "settings chosen afterwards",
    }
    for ax, (reading, title) in zip((middle, right), titles.items(), strict=True):
        _draw_taxes(ax, [row for row in second if row.reading == reading])
        ax.set_title(title, fontsize=10)
    right.legend(fontsize=8, frameon=False, loc="lower left")
    for ax in (left, middle, right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", lw=0.4, alpha=0.5)
        ax.tick_params(labelsize=8)
    save_figure(figure, path)


def _draw_watermarks(ax: Axes, rows: Sequence[WatermarkRow]) -> None:
    x = [row.watermark for row in rows]
    low = [row.preemptions - row.least for row in rows]
    high = [row.most - row.preemptions for row in rows]
    mean = [row.preemptions for row in rows]
    ax.errorbar(x, mean, yerr=[low, high], fmt="s-", ms=5, color=_COLOURS[1], capsize=3,
                label="ours, range over seeds")  # fmt: skip
    published = [count for count, *_ in WATERMARKS.values()]
    ax.plot(list(WATERMARKS), published, "x", ms=8, mew=2, color="black", label="published, LIFO")
    ax.set(xlabel="watermark, share of KV blocks", ylabel="preemptions", ylim=(0, None))
    ax.set_title("450 requests, 128 clients", fontsize=10)
    ax.legend(fontsize=8, frameon=False)


def _draw_taxes(ax: Axes, rows: Sequence[TaxRow]) -> None:
    x = [row.num_blocks for row in rows]
    for i, name in enumerate(ORDER):
        y = [100 * row.tax[i] for row in rows]
        ax.plot(x, y, marker=_MARKS[i], ms=5, color=_COLOURS[i], label=name)
    published = [100 * tax for tax, _ in POOLS.values()]
    ax.plot(list(POOLS), published, "x", ms=8, mew=2, color="black", label="published, LIFO")
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(POOLS), [f"{blocks}" for blocks in POOLS])
    ax.minorticks_off()
    ax.set(xlabel="KV blocks", ylabel="recompute tax, %", ylim=(-3, 100))
