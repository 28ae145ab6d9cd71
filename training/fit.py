"""Fit one predictor on a run log: ``python -m training.fit --family gbm-hazard --runs … --out …``.

The log is split by prompt; the predictor is fitted on one side and scored on the other, beside
the floors and the ceiling, and the checkpoint carries those scores.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from contracts.errors import InvalidInput, PreemptBenchError
from contracts.runs import DecodeRun
from contracts.settings import assigned
from contracts.signals import RemainingSignal
from eval.signal_quality import SignalQuality, quality_table
from predictors.age_km import AgeKm, AgeKmSettings
from predictors.base import Predictor
from predictors.fused import Fused
from traces.runlog import RunLog
from traces.split import split_runs
from training.calibrate import calibrate_folds, cross_calibrate
from training.crossfit import crossfit, save_crossfit
from training.evaluate import LeaveOneOut, evaluate, has_repeats
from training.options import train_options
from training.recipe import Recipe, default_recipe, fit_noted, read_recipe
from training.rows import read_run_log, training_set, without_oracle


@dataclass(frozen=True, slots=True, eq=False)
class FitResult:
    """A fitted predictor and its held-out scores (floors and ceiling are rows of them too)."""

    predictor: Predictor
    scores: tuple[SignalQuality, ...]
    num_train_runs: int
    num_test_runs: int


def fit_recipe(
    log: RunLog, recipe: Recipe, say: Callable[[str], None] = lambda _: None
) -> FitResult:
    """Split ``log`` by prompt, fit on one side, score on the other; ``say`` hears of each step."""
    if recipe.test_share == 0.0:
        train, test = list(log), []
    else:
        split = split_runs(log, test_share=recipe.test_share, seed=recipe.seed)
        train, test = list(split.train), list(split.test)
    say(f"fitting {recipe.family} on {len(train)} runs, {len(test)} held out by prompt")
    rows = training_set(train)
    predictor = fit_noted(recipe.settings, rows, seed=recipe.seed, num_threads=recipe.num_threads)
    plain = predictor
    if recipe.calibration_folds:
        say(f"calibrating across {recipe.calibration_folds} folds of the training prompts")
        predictor = cross_calibrate(
            predictor,
            train,
            recipe.settings,
            num_folds=recipe.calibration_folds,
            seed=recipe.seed,
            num_threads=recipe.num_threads,
        )
    if not test:
        return FitResult(predictor, (), len(train), 0)
    signals: list[RemainingSignal] = [predictor]
    if plain.family != AgeKm.family:
        signals.insert(0, AgeKmSettings().fit(rows))
    say("scoring on the held-out prompts")
    extra = ceilings(test, train)
    if isinstance(plain, Fused):
        extra += [plain.with_prior(prior) for prior in extra]
    scores = evaluate(signals, test, extra_signals=extra, seed=recipe.seed)
    return FitResult(predictor, tuple(scores), len(train), len(test))


def crossfit_recipe(
    log: RunLog,
    recipe: Recipe,
    num_folds: int,
    out_dir: Path | None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[SignalQuality, ...]:
    """Fit once for each fold of prompts, save ``out_dir/fold-*``, and score every run by the
    fold that never saw its prompt."""
    runs = list(log)
    say(f"cross-fitting {recipe.family} on {len(runs)} runs in {num_folds} folds of prompts")
    signal = crossfit(
        runs,
        recipe.family,
        num_folds=num_folds,
        seed=recipe.seed,
        settings=recipe.settings,
        num_threads=recipe.num_threads,
    )
    if recipe.calibration_folds:
        signal = calibrate_folds(signal, runs)
    say("scoring every run by the fold that never saw its prompt")
    signals = [signal]
    if recipe.family != AgeKm.family:
        signals.insert(0, crossfit(runs, AgeKm.family, num_folds=num_folds, seed=recipe.seed))
    scores = evaluate(signals, runs, extra_signals=ceilings(runs, ()), seed=recipe.seed)
    if out_dir is not None:
        save_crossfit(signal, out_dir, scores)
    return tuple(scores)


def ceilings(test: Sequence[DecodeRun], train: Sequence[DecodeRun]) -> list[RemainingSignal]:
    """Return oracle-K leave-one-out over the whole log, or nothing without repeats in ``test``."""
    return [LeaveOneOut([*train, *test])] if has_repeats(test) else []


def chosen_recipe(config: Path | None, family: str | None, assignments: Sequence[str]) -> Recipe:
    """Return the recipe the command line asks for; raises InvalidInput unless it names one."""
    if (config is None) == (family is None):
        raise InvalidInput("name what to fit: either --config RECIPE.toml or --family NAME")
    recipe = read_recipe(config) if config is not None else default_recipe(family or "")
    return assigned(recipe, assignments)


def run_fit(
    config: Path | None,
    family: str | None,
    runs: Path,
    out: Path | None,
    exclude_oracle: Path | None,
    folds: int | None,
    assignments: Sequence[str],
    as_json: bool,
) -> None:
    """Do what the command line asks: results to stdout, talk to stderr."""

    alone = _is_main_process()

    def say(text: str) -> None:
        if alone:
            click.echo(text, err=True)

    recipe = chosen_recipe(config, family, assignments)
    if out is not None:
        _check_new_folder(out)
    log = read_run_log(runs)
    if exclude_oracle is not None:
        log, num_left_out = without_oracle(log, exclude_oracle)
        say(f"left out {num_left_out} runs of prompts that {exclude_oracle} knows")
    if folds is not None:
        scores = crossfit_recipe(log, recipe, folds, out if alone else None, say)
    else:
        result = fit_recipe(log, recipe, say)
        scores = result.scores
        if out is not None and alone:
            result.predictor.save_pretrained(out, [score.as_row() for score in scores])
    if not alone:
        return
    if out is not None:
        say(f"wrote {out}")
    if as_json:
        click.echo(scores_json(scores, family=recipe.family, out=str(out) if out else None))
    elif scores:
        click.echo(quality_table(scores))


def _is_main_process() -> bool:
    """Say whether this is the process that talks and writes, of those torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _check_new_folder(out: Path) -> None:
    """Refuse, before any work, a folder in which a new checkpoint would lie beside an old one."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "not empty" if out.is_dir() else "a file"
        raise InvalidInput(f"--out {out} is {what}: name a new folder, or delete it first")


def scores_json(scores: Sequence[SignalQuality], **more: str | None) -> str:
    """Return scores as one JSON object; a number that does not exist is null."""
    rows = [
        {key: None if value != value else value for key, value in score.as_row().items()}
        for score in scores
    ]
    return json.dumps({**more, "scores": rows}, indent=1, allow_nan=False)


@click.command()
@train_options
def main(
    config: Path | None,
    family: str | None,
    runs: Path,
    out: Path | None,
    exclude_oracle: Path | None,
    folds: int | None,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Fit one predictor on a run log and write its checkpoint."""
    try:
        run_fit(config, family, runs, out, exclude_oracle, folds, assignments, as_json)
    except PreemptBenchError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
