"""How much a predictor gains from more training prompts: fits on nested shares of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import InvalidInput
from contracts.randomness import keyed_uniform
from contracts.runs import DecodeRun
from contracts.text_table import aligned
from eval.report_rows import Estimate, ReportRows, draw_rows
from eval.save_figure import save_figure
from eval.signal_report import log_errors, mean_log_errors, signal_replicates
from predictors.base import Predictor
from training.evaluate import assert_unseen
from training.recipe import Recipe
from training.rows import training_set

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
LEAST_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A fit on ``num_prompts`` prompts (``num_runs`` runs), judged on the held-out prompts:
    co-running ``concordance`` and ``log_mae`` with 95 % intervals over held-out prompts."""

    num_prompts: int
    num_runs: int
    concordance: Estimate
    log_mae: Estimate


def learning_curve(
    train: Sequence[DecodeRun],
    test: Sequence[DecodeRun],
    recipe: Recipe,
    *,
    shares: Sequence[float] | None = None,
    seed: int = 0,
    num_bootstraps: int = 200,
    on_fit: Callable[[int, int], None] | None = None,
) -> list[CurvePoint]:
    """Fit ``recipe`` on each of ``shares`` of the prompts of ``train`` and score all on the same
    rows and running sets of ``test``, uncalibrated (neither metric reads a bound). A smaller share
    lies within every larger one; the whole is the recipe's own predictor.

    ``shares`` are by default those of SHARES that leave LEAST_PROMPTS prompts, and the whole.
    ``on_fit(done, total)`` is called after each fit. Runs of ``test`` of unknown served length are
    left out. Deterministic in its arguments. Raises InvalidInput for a share outside (0, 1], or one
    that leaves fewer than two prompts; LeakageError when a prompt is on both sides.
    """
    if shares is None:
        num_prompts = len({run.prompt_sha256 for run in train})
        shares = [share for share in SHARES if share * num_prompts >= LEAST_PROMPTS or share == 1.0]
    if not shares or min(shares) <= 0 or max(shares) > 1:
        raise InvalidInput(f"shares are {tuple(shares)}: they must lie in (0, 1]")
    parts = [_share_of(train, share, seed) for share in sorted(shares)]
    rows = draw_rows([run for run in test if run.has_known_length], num_bootstraps, seed)
    points = []
    for part in parts:
        predictor = recipe.settings.fit(
            training_set(part), seed=recipe.seed, num_threads=recipe.num_threads
        )
        points.append(_point(predictor, part, rows))
        if on_fit is not None:
            on_fit(len(points), len(parts))
    return points


def curve_text(points: Sequence[CurvePoint]) -> str:
    """Return the curve as aligned text."""
    lines = [["prompts", "runs", "concordance", "log-MAE"]]
    lines += [
        [str(p.num_prompts), str(p.num_runs), str(p.concordance), str(p.log_mae)] for p in points
    ]
    return aligned(lines)


def draw_curves(curves: dict[str, list[CurvePoint]], path: Path) -> Path:
    """Draw both metrics by the number of training prompts, a line for each of ``curves``."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    metrics = {"concordance": "concordance", "log_mae": "log-MAE"}
    for ax, (metric, label) in zip(figure.subplots(1, 2), metrics.items(), strict=True):
        for name, points in curves.items():
            estimates: list[Estimate] = [getattr(point, metric) for point in points]
            at = [point.num_prompts for point in points]
            ax.plot(at, [e.value for e in estimates], "o-", ms=4, label=name)
            ax.fill_between(at, [e.low for e in estimates], [e.high for e in estimates], alpha=0.2)
        ax.set(xscale="log", xlabel="training prompts", ylabel=label)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_locator(NullLocator())
    figure.axes[0].legend(fontsize=8, frameon=False)
    return save_figure(figure, path)


def _point(predictor: Predictor, part: Sequence[DecodeRun], rows: ReportRows) -> CurvePoint:
    assert_unseen(predictor, rows.runs)
    return CurvePoint(
        num_prompts=len({run.prompt_sha256 for run in part}),
        num_runs=len(part),
        concordance=Estimate.of(signal_replicates(predictor, rows)["concordance"]),
        log_mae=Estimate.of(mean_log_errors(rows, log_errors(predictor, rows))),
    )


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
