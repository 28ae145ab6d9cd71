"""How much a predictor gains from more training prompts: fits on nested shares of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import InvalidInput
from contracts.files import atomic_path
from contracts.randomness import keyed_uniform
from contracts.runs import DecodeRun
from eval.report_rows import Estimate
from eval.signal_report import report_signals
from predictors.registry import FamilySettings
from traces.runlog import RunLog
from traces.split import split_runs
from training.evaluate import assert_unseen
from training.rows import training_set

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
METRICS = ("concordance", "log_mae")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A fit on ``num_prompts`` prompts (``num_runs`` runs), judged on the held-out prompts:
    co-running ``concordance`` and ``log_mae`` with 95 % intervals over held-out prompts."""

    num_prompts: int
    num_runs: int
    concordance: Estimate
    log_mae: Estimate


def learning_curve(
    log: RunLog,
    settings: FamilySettings,
    *,
    shares: Sequence[float] = SHARES,
    test_share: float = 0.3,
    seed: int = 0,
    num_bootstraps: int = 200,
    num_threads: int = 1,
) -> list[CurvePoint]:
    """Fit ``settings`` on each of ``shares`` of the training prompts and score all on the same
    held-out rows and running sets. A smaller share lies within every larger one.

    Deterministic in its arguments. Raises InvalidInput for a share outside (0, 1], or one that
    leaves fewer than two prompts.
    """
    if not shares or min(shares) <= 0 or max(shares) > 1:
        raise InvalidInput(f"shares are {tuple(shares)}: they must lie in (0, 1]")
    split = split_runs(log, test_share=test_share, seed=seed)
    test = [run for run in split.test if run.has_known_length]
    train = list(split.train)
    parts = [_share_of(train, share, seed) for share in sorted(shares)]
    signals = []
    for part in parts:
        predictor = settings.fit(training_set(part), seed=seed, num_threads=num_threads)
        assert_unseen(predictor, test)
        signals.append(("signal", predictor))
    rows = report_signals(test, signals, num_bootstraps=num_bootstraps, seed=seed)
    scored = [row for row in rows if row.role == "signal"]
    return [
        CurvePoint(
            num_prompts=len({run.prompt_sha256 for run in part}),
            num_runs=len(part),
            **{name: row.metrics[name] for name in METRICS},
        )
        for part, row in zip(parts, scored, strict=True)
    ]


def curve_text(name: str, points: Sequence[CurvePoint]) -> str:
    """Return the curve as the lines of a Markdown table."""
    head = "| log, family | training prompts | runs | concordance | log-MAE |"
    lines = [head, "| --- | --- | --- | --- | --- |"]
    for point in points:
        cells = (
            f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]" for e in (point.concordance, point.log_mae)
        )
        lines.append(f"| {name} | {point.num_prompts} | {point.num_runs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_curves(curves: dict[str, list[CurvePoint]], path: Path) -> None:
    """Draw both metrics by the number of training prompts, a line for each of ``curves``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for ax, metric in zip(figure.subplots(1, 2), METRICS, strict=True):
        for name, points in curves.items():
            estimates: list[Estimate] = [getattr(point, metric) for point in points]
            at = [point.num_prompts for point in points]
            ax.plot(at, [e.value for e in estimates], "o-", ms=4, label=name)
            ax.fill_between(at, [e.low for e in estimates], [e.high for e in estimates], alpha=0.2)
        ax.set(xscale="log", xlabel="training prompts", ylabel=metric.replace("_mae", "-MAE"))
    figure.axes[0].legend(fontsize=8, frameon=False)
    with atomic_path(path) as scratch:
        figure.savefig(scratch, dpi=120, format="png", metadata={"Software": None})


def _share_of(runs: Sequence[DecodeRun], share: float, seed: int) -> list[DecodeRun]:
    """Return all runs of the first ``share`` of the prompts in an order keyed by ``seed``."""
    names = {run.prompt_sha256 for run in runs}
    order = sorted(names, key=lambda name: keyed_uniform(seed, "learning-curve", name))
    count = round(share * len(order))
    if count < 2:
        raise InvalidInput(
            f"a share of {share:g} leaves {count} of {len(order)} training prompts: it must leave "
            "2 at least; give larger shares, or a log of more prompts"
        )
    chosen = set(order[:count])
    return [run for run in runs if run.prompt_sha256 in chosen]
