"""The verbs ``train`` (fit a predictor, write a checkpoint) and ``score`` (judge a checkpoint)."""

from __future__ import annotations

from pathlib import Path

import click

from traces.bundled import bundled_runs
from training.options import train_options


@click.command(short_help="Fit a length predictor and write a checkpoint.")
@train_options
def train(
    config: Path | None,
    family: str | None,
    runs: Path,
    out: Path | None,
    folds: int | None,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Fit a length predictor on a run log, score it on held-out prompts, write a checkpoint."""
    from training.fit import run_fit

    run_fit(config, family, runs, out, folds, assignments, as_json)


@click.command(short_help="Score a checkpoint on prompts it never saw.")
@click.option("--checkpoint", type=click.Path(path_type=Path), required=True, help="Its folder.")
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=bundled_runs,
    help="Run log to score on. Default: the bundled one.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the running sets.")
@click.option(
    "--details", is_flag=True, help="Every metric with intervals over prompts, coverage by age."
)
@click.option(
    "--figures", type=click.Path(path_type=Path), help="With --details: folder for two figures."
)
@click.option(
    "--allow-mismatch", is_flag=True, help="Score it on runs of a model it was not trained on."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def score(
    checkpoint: Path,
    runs: Path,
    seed: int,
    details: bool,
    figures: Path | None,
    allow_mismatch: bool,
    as_json: bool,
) -> None:
    """Score a checkpoint on the prompts of a run log that it was not trained on."""
    from eval.mismatch import matched_name
    from eval.signal_quality import quality_table
    from eval.signal_sources import load_predictors, load_signal
    from preemptbench.cli_details import print_details
    from training.crossfit import crossfit
    from training.evaluate import evaluate, unseen_runs
    from training.fit import ceilings, scores_json
    from training.rows import read_run_log

    log = list(read_run_log(runs))
    predictors = load_predictors(checkpoint)
    fresh = unseen_runs(predictors, log)
    click.echo(f"{len(fresh)} of {len(log)} runs are of prompts it never saw", err=True)
    floor = crossfit(fresh, "age-km", num_folds=2)
    name = matched_name(predictors, fresh, allow_mismatch=allow_mismatch)
    signal = load_signal(name, checkpoint, fresh)
    if details:
        print_details(
            fresh, floor, signal, ceilings(fresh, ()), seed=seed, as_json=as_json, figures=figures
        )
        return
    scores = evaluate([floor, signal], fresh, extra_signals=ceilings(fresh, ()), seed=seed)
    if as_json:
        click.echo(scores_json(scores, checkpoint=str(checkpoint)))
    else:
        click.echo(quality_table(scores))
