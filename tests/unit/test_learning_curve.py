"""Learning curves: nested shares, one held-out side, a checkpoint's own recipe; the verb."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from contracts.errors import InvalidInput, LeakageError
from contracts.runs import DecodeRun
from eval.oracle_curve import possible_ks
from eval.report_rows import draw_rows
from eval.signal_report import log_errors, mean_log_errors
from predictors.boosting import BoostingSettings
from predictors.gbm_hazard import GbmHazardSettings
from predictors.registry import load_predictor
from preemptbench.cli_train import score
from tests.synthetic_runs import synthetic_runs
from traces.runlog import RunLog, write_runs
from traces.split import split_runs
from training.crossfit import crossfit, save_crossfit
from training.fit import fit_recipe
from training.learning_curve import _share_of, curve_text, draw_curves, learning_curve
from training.recipe import Recipe, recipe_of

RUNS = synthetic_runs(num_prompts=100, repeats=2)
SETTINGS = GbmHazardSettings(boosting=BoostingSettings(num_trees=40))
RECIPE = Recipe("gbm-hazard", SETTINGS, seed=3, test_share=0.3, calibration_folds=2)
TRAIN, TEST = (list(side) for side in split_runs(RunLog.from_runs(RUNS), test_share=0.3, seed=3))


def test_a_smaller_share_lies_within_a_larger_one() -> None:
    small, large = _share_of(RUNS, 0.1, 0), _share_of(RUNS, 0.5, 0)
    prompts = [{run.prompt_sha256 for run in part} for part in (small, large)]
    assert prompts[0] < prompts[1]
    assert [len(part) for part in prompts] == [10, 50]
    assert len(small) == 20  # with every repeat
    assert _share_of(RUNS, 1.0, 0) == RUNS
    assert {r.prompt_sha256 for r in _share_of(RUNS, 0.1, 1)} != prompts[0]


def test_more_prompts_help_and_all_are_judged_on_the_same_rows(tmp_path: Path) -> None:
    fits: list[tuple[int, int]] = []
    shares = (1.0, 1 / 16, 1 / 4)
    curve = learning_curve(
        TRAIN,
        TEST,
        RECIPE,
        shares=shares,
        num_bootstraps=20,
        on_fit=lambda *done: fits.append(done),
    )
    assert [point.num_prompts for point in curve] == [4, 18, 70]
    assert fits == [(1, 3), (2, 3), (3, 3)]
    first, last = curve[0], curve[-1]
    assert last.log_mae.value < first.log_mae.value
    assert last.concordance.value > first.concordance.value
    for point in curve:
        for estimate in (point.concordance, point.log_mae):
            assert estimate.low <= estimate.value <= estimate.high
    again = learning_curve(TRAIN, TEST, RECIPE, shares=(1.0,), num_bootstraps=20)
    assert again == [last]  # the other fits change nothing
    assert curve_text(curve).count("\n") == 3
    draw_curves({"x": curve}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_shares_that_cannot_be_are_refused() -> None:
    for shares in ((), (0.0,), (1.5,)):
        with pytest.raises(InvalidInput, match=r"must lie in \(0, 1\]"):
            learning_curve(TRAIN, TEST, RECIPE, shares=shares)
    with pytest.raises(InvalidInput, match="leaves 1 of 70 training prompts"):
        learning_curve(TRAIN, TEST, RECIPE, shares=(0.01,))
    with pytest.raises(LeakageError):
        learning_curve(TRAIN, TRAIN, RECIPE, shares=(1.0,))
    sizes = [p.num_prompts for p in learning_curve(TRAIN, TEST, RECIPE, num_bootstraps=1)]
    assert sizes == [9, 18, 35, 70]  # a sixteenth would leave four


def test_the_whole_is_the_checkpoint_itself(tmp_path: Path) -> None:
    """Its recipe is read from the folder; the last fit answers what the checkpoint does."""
    log = RunLog.from_runs(RUNS)  # rounds the progress signals to float32
    fit_recipe(log, RECIPE).predictor.save_pretrained(tmp_path)
    predictor = load_predictor(tmp_path)
    again = recipe_of(predictor)
    assert (again.family, again.settings, again.seed) == ("gbm-hazard", SETTINGS, 3)
    train = [run for run in log if run.prompt_sha256 in predictor.excluded_prompts]
    test = [run for run in log if run.prompt_sha256 not in predictor.excluded_prompts]
    (point,) = learning_curve(train, test, again, shares=(1.0,), num_bootstraps=0)
    rows = draw_rows(test, 0, 0)
    assert point.log_mae.value == mean_log_errors(rows, log_errors(predictor, rows))[0]


def test_the_ks_a_log_allows() -> None:
    assert possible_ks(RUNS) == (1,)

    def repeated(counts: Sequence[int]) -> list[DecodeRun]:
        return [
            replace(RUNS[0], request_key=str(i)) for i, n in enumerate(counts) for _ in range(n)
        ]

    assert possible_ks(repeated([1, 5, 5])) == (1, 2, 3, 4)
    assert possible_ks(repeated([2, 5, 9])) == (1, 2, 3, 4)  # two of three requests have five
    assert possible_ks(repeated([41, 41])) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 40)
    with pytest.raises(InvalidInput, match="ran once"):
        possible_ks(repeated([1, 1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints (noted, and without its settings) and logs (repeats, single runs, strangers)."""
    path = tmp_path_factory.mktemp("curves")
    predictor = fit_recipe(RunLog.from_runs(RUNS), replace(RECIPE, calibration_folds=0)).predictor
    predictor.save_pretrained(path / "noted")
    predictor.fitted_with = None
    predictor.save_pretrained(path / "silent")
    folds = crossfit(RUNS, "gbm-hazard", num_folds=2, settings=SETTINGS)
    save_crossfit(folds, path / "folds", ())
    write_runs(RUNS, path / "runs.parquet")
    write_runs([run for run in RUNS if run.repeat == 0], path / "single.parquet")
    write_runs(TEST, path / "fresh.parquet")
    return path


def _score(folder: Path, checkpoint: str, log: str, *more: str) -> Result:
    args = ["--checkpoint", str(folder / checkpoint), "--runs", str(folder / f"{log}.parquet")]
    return CliRunner().invoke(score, [*args, "--learning-curve", *more], catch_exceptions=False)


def test_the_verb_prints_both_curves(folder: Path, tmp_path: Path) -> None:
    result = _score(folder, "noted", "runs", "--figures", str(tmp_path))
    assert "oracle-K by K, on 30 requests" in result.stdout
    assert "gbm-hazard by training prompts" in result.stdout
    assert result.stdout.splitlines()[-1].split()[:2] == ["70", "140"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "learning-curve-k.png", "learning-curve-prompts.png",
    }  # fmt: skip
    told = json.loads(_score(folder, "noted", "runs", "--json").stdout)
    assert [point["k"] for point in told["by_k"]] == [1]
    assert [point["num_prompts"] for point in told["by_training_prompts"]] == [9, 18, 35, 70]
    assert told["left_out"] == []


def test_of_a_cross_fit_the_first_fold_is_asked(folder: Path) -> None:
    result = _score(folder, "folds", "runs", "--json")
    assert "the first of 2 folds" in result.stderr
    assert json.loads(result.stdout)["by_training_prompts"][-1]["num_prompts"] == 50


@pytest.mark.parametrize(
    ("checkpoint", "log", "missing", "says"),
    [
        (
            "noted",
            "single",
            "by_k",
            "no learning curve by K: each request of these 30 runs ran once",
        ),
        ("silent", "runs", "by_training_prompts", "does not say which settings"),
        (
            "noted",
            "fresh",
            "by_training_prompts",
            "none of the 70 prompts gbm-hazard was trained on",
        ),
    ],
)
def test_a_curve_that_cannot_be_had_is_said(
    folder: Path, checkpoint: str, log: str, missing: str, says: str
) -> None:
    result = _score(folder, checkpoint, log, "--json")
    told = json.loads(result.stdout)
    curves = {"by_k", "by_training_prompts"}
    assert {key for key in curves if told[key] is None} == {missing}
    assert says in told["left_out"][0] and says in result.stderr


def test_neither_curve_and_flags_that_do_not_go_together(folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"by K: each .* by training prompts: the gbm-hazard"):
        _score(folder, "silent", "single")
    assert "Give one of --details" in _score(folder, "noted", "runs", "--details").stderr
    args = ["--checkpoint", str(folder / "noted"), "--figures", str(folder)]
    assert "--figures goes with" in CliRunner().invoke(score, args).stderr
