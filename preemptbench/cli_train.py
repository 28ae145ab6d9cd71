"""The verbs ``train`` (fit a predictor, write a checkpoint) and ``score`` (judge a checkpoint)."""

from __future__ import annotations

from pathlib import Path

import click

from traces.bundled import bundled_runs
from training.options import train_options


@click.command()
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


@click.command()
@click.option("--checkpoint", type=click.Path(path_type=Path), required=True, help="Its folder.")
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=bundled_runs,
    help="Run log to score on. Default: the bundled one.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the running sets.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def score(checkpoint: Path, runs: Path, seed: int, as_json: bool) -> None:
    """Score a checkpoint on the prompts of a run log that it was not trained on."""
    from eval.signal_quality import quality_table
    from predictors.registry import load_predictor
    from training.evaluate import evaluate, unseen_runs
    from training.fit import ceilings, scores_json
    from training.rows import read_run_log

    predictor = load_predictor(checkpoint)
    log = list(read_run_log(runs))
    fresh = unseen_runs(predictor, log)
    click.echo(
        f"{len(fresh)} of {len(log)} runs are of prompts {predictor.name} never saw", err=True
    )
    scores = evaluate([predictor], fresh, extra_signals=ceilings(fresh, ()), seed=seed)
    if as_json:
        click.echo(scores_json(scores, checkpoint=str(checkpoint)))
    else:
        click.echo(quality_table(scores))
