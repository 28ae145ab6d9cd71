"""The words and pictures of the demo: what it prints, and the page it writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from contracts.files import atomic_write_text
from eval.figures import breach_and_gap, forest, lengths_by_family
from eval.report import Section, figure, paragraph, summary_tables, table, write_report
from eval.signal_quality import SignalQuality, quality_table
from eval.summary import BASELINE, SummaryRow, format_table
from preemptbench.demo import DemoResult
from serving_sim.profile import load_profile

TITLE = "What signal does preemption need?"


def opening_text(result: DemoResult) -> str:
    """Return what is printed about the run log, the oracle and the signals."""
    return (
        f"\n{_log_text(result)}\n\nSignals on held-out prompts (floors first, ceilings last):\n"
        f"{quality_table(result.quality)}\n"
    )


def closing_text(result: DemoResult) -> str:
    """Return the table of results and what to make of it."""
    return f"{format_table(result.rows)}\n\n{verdict(result.rows)}"


def _log_text(result: DemoResult) -> str:
    row = result.lengths[0]
    total = sum(result.provenance.values())
    own = result.provenance["prompt"] / total if total else float("nan")
    return (
        f"Run log: {row.num_runs} temperature-zero runs of {row.num_prompts} prompts in "
        f"{len(result.families)} families (K = {row.repeats_median:.0f}), median "
        f"{row.length_p50:.0f} tokens, {row.capped_share:.0%} cut at the cap. All repeats have "
        f"one length for {_share(row.identical_share)} of the prompts "
        f"({_share(row.identical_ended_share)} of those whose runs all ended).\n"
        f"Oracle: a prompt's own other runs answer at {own:.1%} of all ages; the rest falls back "
        "to its family, model or cap."
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def verdict(rows: Sequence[SummaryRow]) -> str:
    """Return a sentence a pressure: the least breach, LIFO's, how many intervals exclude 0."""
    lines = []
    compared = [row for row in rows if row.difference is not None]
    for pressure in dict.fromkeys(row.pressure for row in rows):
        here = [row for row in compared if row.pressure == pressure]
        lifo = next(r for r in rows if r.pressure == pressure and r.policy == BASELINE)
        best = min(here, key=lambda row: row.breach)
        d = best.difference
        assert d is not None
        least = (
            f"least is {best.label} with {best.breach:.1%} "
            f"({d.mean:+.1f} pp, {d.low:+.1f} to {d.high:+.1f})"
            if best.breach < lifo.breach
            else "no alternative breaches less"
        )
        lower = sum(r.difference is not None and r.difference.high < 0 for r in here)
        higher = sum(r.difference is not None and r.difference.low > 0 for r in here)
        lines.append(
            f"KV pressure {pressure}: LIFO breaches {lifo.breach:.1%}; {least}; of "
            f"{len(here)} alternatives {lower} lie below LIFO and {higher} above (their intervals "
            "exclude 0)."
        )
    expected = 0.05 * len(compared)
    return "\n".join(lines) + (
        f"\nIntervals are pointwise: among {len(compared)} comparisons about {expected:.0f} would "
        "exclude 0 by chance alone. * marks those that do."
    )


def write_demo_report(result: DemoResult, path: Path) -> Path:
    """Write the report page, and its first figure beside it; return the page's path."""
    config = result.config
    forest_svg = forest(result.rows)
    atomic_write_text(path.with_name("forest.svg"), forest_svg)
    write_report(
        path,
        TITLE,
        verdict(result.rows),
        [
            Section(
                "Difference to LIFO",
                figure(
                    forest_svg,
                    "Paired difference in breach to LIFO on the same seeds, with a 95 % t interval "
                    f"over {config.num_seeds} seeds. Left of the line is better than LIFO; filled "
                    "points exclude 0. Grey: policies that read no signal.",
                ),
            ),
            Section("All figures", summary_tables(result.rows)),
            Section(
                "What survivorship would hide",
                figure(
                    breach_and_gap(result.rows),
                    "Breach over all accepted requests (filled) and over completed requests only "
                    "(hollow). Observation stops one deadline after the last scored arrival; what "
                    "still waits then has missed it, but a completed-only score never sees it. "
                    "Ticks: the floor, requests that would breach alone on an idle engine.",
                ),
            ),
            Section("Signals on held-out prompts", _quality_html(result.quality)),
            Section("The run log", paragraph(_log_text(result)) + _lengths_figure(result)),
            Section("How it was measured", _method(result)),
        ],
    )
    return path


def _halves(rows: Sequence[SummaryRow]) -> list[str]:
    return [
        f"{row.breach_by_half[0]:.1%} and {row.breach_by_half[1]:.1%} ({row.pressure})"
        for row in rows
        if row.policy == BASELINE
    ]


def _quality_html(quality: Sequence[SignalQuality]) -> str:
    head = (
        "signal", "log-MAE", "MAE", "Kendall τ", "concordance", "top-1", "victim regret",
        "early kills", "cover 80 %", "cover 90 %",
    )  # fmt: skip
    rows = []
    for q in quality:
        values = (
            q.log_mae, q.mae, q.kendall_tau, q.concordance, q.top1, q.victim_regret,
            q.early_kills, q.cover80, q.cover90,
        )  # fmt: skip
        rows.append([q.signal, *("" if np.isnan(v) else f"{v:.3g}" for v in values)])
    note = paragraph(
        "Predictors are cross-fitted by prompt; lifo, fifo and random are floors, the oracle "
        "(each repeat answered from the others) and clairvoyant are ceilings. Errors are averaged "
        "per request first. Victim regret: how much shorter than the longest remaining request "
        "the pick was, in sets of eight that could run together."
    )
    return note + table(head, rows)


def _lengths_figure(result: DemoResult) -> str:
    lengths: dict[str, list[int]] = defaultdict(list)
    by_request: dict[tuple[str, str], list[int]] = defaultdict(list)
    for run in result.log:
        lengths[run.family].append(run.output_tokens)
        by_request[run.family, run.request_key].append(run.output_tokens)
    spread: dict[str, list[float]] = defaultdict(list)
    for (family, _), group in by_request.items():
        spread[family].append(max(group) / min(group))
    cap = max(run.max_new_tokens for run in result.log)
    return figure(
        lengths_by_family(lengths, cap, spread),
        "Left: every run by prompt family, median marked. Right: how far the repeats of one "
        "prompt lie apart; 1 means that all had one length.",
    )


def _method(result: DemoResult) -> str:
    config = result.config
    profile = load_profile(config.profile)
    load = ", ".join(f"{name} {value:.2f}" for name, value in result.load.items())
    engine = config.engine
    seconds = "; ".join(f"{name}: {s:.0f} s" for name, s in result.seconds.items())
    return "".join(
        paragraph(text)
        for text in (
            f"Each seed executes one repeat of every prompt (the truth), draws {config.num_warmup} "
            f"warm-up, {config.num_tagged} scored and {config.num_filler} filler requests with "
            f"replacement, and lets them arrive as a Poisson process at {config.rate_per_s:g} a "
            f"second. The deadline is {config.deadline_s:g} s after arrival. Lengths are as "
            "collected; nothing is stretched.",
            "In the earlier and the later half of the scored arrivals LIFO breaches "
            + "; ".join(_halves(result.rows))
            + ". Where the later half is much worse the queue grows for as long as one watches: "
            "that pressure is an overload, and its breach depends on the length of the run.",
            "The oracle of a seed is built from the other repeats of the same prompts; predictors "
            "are cross-fitted, so that no request is scored by one that saw its prompt; the "
            "clairvoyant signal reads the truth itself and is only a bound.",
            f"The engine follows the vLLM V1 scheduler: {engine.block_size}-token blocks, "
            f"{engine.max_num_batched_tokens} batched tokens, {engine.max_num_seqs} sequences, "
            "full-prompt admission gate, recompute on preemption with soft KV. KV load if every "
            f"request ran alone, as a share of the pool: {load} (in a batch it is higher).",
            f"Step time: profile {profile.name}. Source: {profile.source}. Licence: "
            f"{profile.licence}.",
            f"Wall time: {seconds}.",
        )
    )
