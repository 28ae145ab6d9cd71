"""The verbs ``train`` (fit a predictor, write a checkpoint) and ``score`` (judge a checkpoint)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from preemptbench.options import allow_mismatch_option, data_option, json_option, need_data, to_json
from traces.bundled import bundled_runs
from training.options import train_options


@click.command(short_help="Fit a length predictor and write a checkpoint.")
@train_options
def train(
    config: Path | None,
    family: str | None,
    runs: Path,
    out: Path | None,
    exclude_oracle: Path | None,
    folds: int | None,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Fit a length predictor on a run log, score it on held-out prompts, write a checkpoint."""
    from training.fit import run_fit

    run_fit(config, family, runs, out, exclude_oracle, folds, assignments, as_json)


@click.command(short_help="Score a checkpoint, or reproduce a suite of floors and ceilings.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Its folder.")
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=bundled_runs,
    help="Run log to score on. Default: the bundled one.",
)
@click.option(
    "--suite",
    type=click.Choice(["lrm"]),
    help="Instead of a checkpoint: floors and ceilings on repeated reasoning runs (lrm).",
)
@data_option
@click.option("--seed", default=0, show_default=True, help="Seed of the running sets.")
@click.option(
    "--details", is_flag=True, help="Every metric with intervals over prompts, coverage by age."
)
@click.option(
    "--learning-curve",
    is_flag=True,
    help="Instead: what more runs of a prompt are worth to oracle-K, and more training prompts to "
    "the checkpoint's recipe, by fitting it again.",
)
@click.option(
    "--figures",
    type=click.Path(path_type=Path),
    help="With --details or --learning-curve: folder for two figures.",
)
@click.option(
    "--slo-regret",
    is_flag=True,
    help="Instead: what its choice of victim costs in missed deadlines, by replay.",
)
@click.option(
    "--pressure",
    type=click.FloatRange(min=0, min_open=True),
    default=0.9,
    show_default=True,
    help="With --slo-regret: KV demand over the pool.",
)
@allow_mismatch_option
@json_option
def score(
    checkpoint: Path | None,
    runs: Path,
    suite: str | None,
    data: Path | None,
    seed: int,
    details: bool,
    learning_curve: bool,
    figures: Path | None,
    slo_regret: bool,
    pressure: float,
    allow_mismatch: bool,
    as_json: bool,
) -> None:
    """Score a checkpoint on the prompts of a run log that it was not trained on, or with --suite
    print what floors and ceilings reach on public data."""
    if (checkpoint is None) == (suite is None):
        raise click.UsageError("Give either --checkpoint FOLDER or --suite lrm.")
    if details + learning_curve + slo_regret > 1:
        raise click.UsageError("Give one of --details, --learning-curve and --slo-regret.")
    if figures is not None and not (details or learning_curve):
        raise click.UsageError("--figures goes with --details or --learning-curve.")
    if checkpoint is None:
        _score_lrm(data, seed, as_json)
        return
    from eval.signal_quality import quality_table
    from eval.signal_sources import load_predictors, load_signal
    from preemptbench.cli_curves import print_learning_curves
    from preemptbench.cli_details import print_details, print_slo_regret
    from training.crossfit import crossfit
    from training.evaluate import evaluate, unseen_runs
    from training.fit import ceilings, scores_json
    from training.rows import read_run_log

    log = list(read_run_log(runs))
    predictors = load_predictors(checkpoint)
    fresh = unseen_runs(predictors, log)
    click.echo(f"{len(fresh)} of {len(log)} runs are of prompts it never saw", err=True)
    signal = load_signal(predictors[0].name, checkpoint, fresh, allow_mismatch=allow_mismatch)
    if learning_curve:
        if len(predictors) > 1:
            click.echo(f"learning curves of the first of {len(predictors)} folds", err=True)
        print_learning_curves(log, predictors[0], seed=seed, as_json=as_json, figures=figures)
        return
    floor = crossfit(fresh, "age-km", num_folds=2)
    if slo_regret:
        floors = [floor] if floor.name != signal.name else []
        rated = [*floors, signal, *ceilings(fresh, ())]
        print_slo_regret(runs, fresh, rated, pressure=pressure, seed=seed, as_json=as_json)
        return
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


def _score_lrm(data: Path | None, seed: int, as_json: bool) -> None:
    from eval.lrm import FILTER, lrm_table, read_lrm, score_lrm

    folder = need_data(data)
    tables = {
        title: read_lrm(folder, keep_cut=keep_cut)
        for title, keep_cut in (("capped cells left out", False), ("capped cells kept", True))
    }
    scored = {title: score_lrm(cells, seed=seed) for title, cells in tables.items()}
    if as_json:
        rows = {title: [asdict(row) for row in part] for title, part in scored.items()}
        click.echo(to_json({"suite": "lrm", "filter": FILTER, "tables": rows}))
        return
    for title, cells in tables.items():
        click.echo(f"{title}: {len(cells.models)} models, {len(cells.model)} cells, ", nl=False)
        click.echo(f"{cells.lengths.size} runs (sampled), {int(cells.cut.sum())} of them cut")
        click.echo(lrm_table(scored[title]) + "\n")
    click.echo(f"filter: {FILTER}", err=True)
