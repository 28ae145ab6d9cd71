"""The report of ``score --details`` as text, and its two figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contracts.text_table import aligned
from eval.save_figure import save_figure
from eval.signal_report import ReportRow

GROUPS = {
    "Victims (headline: regret minus LIFO's on the same sets; below 0 is better)": (
        "regret_length_minus_lifo", "regret_length", "top1", "early_kills",
        "regret_recompute_minus_lifo", "regret_recompute",
    ),
    "Order": ("concordance", "ndcg", "tau_b", "harrell_c", "uno_c"),
    "Error": ("log_mae", "skill", "log_mae_exhausted"),
    "Distribution": ("crps", "log_crps", "log_likelihood", "ibs", "d_calibration_p"),
    "Reaching the cap (share expected, share that did, Brier score)": (
        "cap_said", "cap_seen", "cap_brier",
    ),
}  # fmt: skip


def report_text(rows: Sequence[ReportRow]) -> str:
    """Return a table for each group of metrics, then coverage, error by age and by family."""
    parts = []
    for title, names in GROUPS.items():
        shown = [row for row in rows if any(name in row.metrics for name in names)]
        lines = [["signal", *names]]
        lines += [
            [row.signal, *(str(row.metrics.get(name, "-")) for name in names)] for row in shown
        ]
        parts.append(f"{title}\n{_aligned(lines)}")
    bounds = [
        [row.signal, c.bound, f"{c.overall:.3f}", f"{c.by_request:.3f}",
         f"{min(c.by_age):.3f}", f"{c.at_cap:.3f}",
         f"{c.width:.0f}", " ".join(f"{share:.2f}" for share in c.by_age)]
        for row in rows for c in row.coverage
    ]  # fmt: skip
    if bounds:
        heads = ["signal", "bound", "held", "by request", "worst age", "at cap", "width",
                 "by age, young to old"]  # fmt: skip
        lines = [heads, *bounds]
        parts.append(f"Coverage of rows as they are met\n{_aligned(lines)}")
    by_age = [(row.signal, {str(age): v for age, v in row.by_age.items()}) for row in rows]
    by_family = [(row.signal, dict(row.by_family)) for row in rows]
    parts += _profile("log-MAE by age (first token of each tenth of rows)", by_age)
    parts += _profile("log-MAE by family of prompts", by_family)
    return "\n\n".join(parts)


def write_figures(rows: Sequence[ReportRow], folder: Path) -> tuple[Path, Path]:
    """Write ``error-by-age.png`` and ``reliability.png`` to ``folder``; return their paths."""
    from matplotlib.figure import Figure

    error, reliability = folder / "error-by-age.png", folder / "reliability.png"
    figure = Figure(figsize=(7, 4), layout="constrained")
    ax = figure.subplots()
    for row in rows:
        if row.by_age:
            ax.plot(list(row.by_age), list(row.by_age.values()), "o-", ms=3, label=row.signal)
    ax.set(xlabel="age, tokens", ylabel="mean |log1p(answer) - log1p(remaining)|")
    ax.legend(fontsize=8, frameon=False)
    save_figure(figure, error)
    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    ax = figure.subplots()
    ax.plot([0, 1], [0, 1], color="black", lw=0.8)
    for row in rows:
        if row.pit:
            shares = [sum(row.pit[: i + 1]) for i in range(len(row.pit))]
            levels = [(i + 1) / len(row.pit) for i in range(len(row.pit))]
            ax.plot([0, *levels], [0, *shares], "o-", ms=3, label=row.signal)
    ax.set(xlabel="probability the signal gave", ylabel="share of prompts at or below it")
    ax.legend(fontsize=8, frameon=False)
    save_figure(figure, reliability)
    return error, reliability


def _profile(title: str, profiles: Sequence[tuple[str, dict[str, float]]]) -> list[str]:
    known = [(name, profile) for name, profile in profiles if profile]
    if not known:
        return []
    lines = [["signal", *known[0][1]]]
    lines += [[name, *(f"{value:.3f}" for value in part.values())] for name, part in known]
    return [f"{title}\n{_aligned(lines)}"]


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    return aligned(lines, left=range(len(lines[0])))
