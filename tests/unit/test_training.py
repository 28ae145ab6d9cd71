"""From a run log to a checkpoint: recipes, splits without leaks, cross-fitting, the verbs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput, LeakageError, UnknownName
from contracts.runs import DecodeRun
from contracts.settings import assigned, updated
from contracts.signals import build_grid, signal_request
from eval.signal_quality import held_out, score_signal
from oracles.shards import run_to_json
from predictors.age_km import AgeKmSettings
from predictors.gbm_hazard import GbmHazardSettings
from predictors.registry import FAMILIES, load_predictor
from preemptbench.cli import cli
from preemptbench.cli_train import score, train
from tests.synthetic_runs import synthetic_runs
from traces.runlog import RunLog, write_runs
from training.crossfit import crossfit, save_crossfit
from training.evaluate import LeaveOneOut, evaluate, unseen_runs
from training.fit import fit_recipe, main
from training.recipe import default_recipe, read_recipe
from training.rows import read_run_log, training_set

RUNS = synthetic_runs(num_prompts=40)
RECIPES = Path(__file__).parents[2] / "training" / "recipes"
QUICK = ["--set", "settings.boosting.num_trees=10"]


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "runs.parquet"
    write_runs(RUNS, path)
    return path


def test_every_family_has_a_recipe_equal_to_its_defaults() -> None:
    for family in FAMILIES:
        recipe = read_recipe(RECIPES / f"{family.replace('-', '_')}.toml")
        assert recipe == default_recipe(family)


def test_overrides_reach_nested_settings() -> None:
    recipe = assigned(
        default_recipe("gbm-hazard"),
        ["settings.boosting.l2=1", "seed=7", 'settings.features=["age"]'],
    )
    assert isinstance(recipe.settings, GbmHazardSettings)
    assert recipe.settings.boosting.l2 == 1.0 and recipe.seed == 7
    assert recipe.settings.features == ("age",)
    assert recipe.settings.num_bins == GbmHazardSettings().num_bins


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"sede": 1}, UnknownName, "did you mean 'seed'"),
        ({"settings": {"boosting": {"num_tree": 1}}}, UnknownName, "did you mean 'num_trees'"),
        ({"seed": "one"}, InvalidInput, "must be a int"),
        ({"test_share": 1.0}, InvalidInput, r"must be in \[0, 1\)"),
        ({"num_threads": 0}, InvalidInput, "at least 1"),
        ({"settings": {"features": ["agee"]}}, UnknownName, "did you mean 'age'"),
    ],
)
def test_bad_recipes_are_refused(
    changes: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        updated(default_recipe("gbm-hazard"), changes, "recipe")


def test_bad_recipe_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    for text, says in (("family = 3", "family is 3"), ("family", "not TOML"), ("seed=1", "None")):
        path.write_text(text)
        with pytest.raises(InvalidInput, match=says):
            read_recipe(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_recipe(tmp_path / "absent.toml")
    with pytest.raises(InvalidInput, match="write key=value"):
        assigned(default_recipe("age-km"), ["seed"])


def test_a_training_set_says_where_it_comes_from() -> None:
    rows = training_set(iter(RUNS))
    assert rows.provenance.run_ids == tuple(sorted(run.run_id for run in RUNS))
    assert len(rows.provenance.prompt_sha256s) == len({run.prompt_sha256 for run in RUNS})
    assert rows.provenance.num_capped == sum(not run.event_observed for run in RUNS) > 0
    with pytest.raises(InvalidInput, match="nothing to train on"):
        training_set([])


def test_a_shard_and_a_log_read_alike(log_path: Path, tmp_path: Path) -> None:
    shard = tmp_path / "shard-0.jsonl"
    shard.write_text("".join(run_to_json(run) + "\n" for run in RUNS))
    logs = [list(read_run_log(path)) for path in (shard, log_path)]
    for runs in logs:  # progress is kept in single precision
        assert [replace(run, progress=None) for run in runs] == [
            replace(run, progress=None) for run in RUNS
        ]
        tracks = zip(runs, RUNS, strict=True)
        assert all(np.allclose(run.progress, ours.progress, atol=1e-6) for run, ours in tracks)
    with pytest.raises(InvalidInput, match="does not exist"):
        read_run_log(tmp_path / "absent.jsonl")


def test_crossfit_never_scores_a_prompt_it_saw(tmp_path: Path) -> None:
    settings = GbmHazardSettings(num_landmarks=3)
    signal = crossfit(RUNS, "gbm-hazard", num_folds=3, seed=5, settings=settings)
    save_crossfit(signal, tmp_path, ())
    folds = set()
    for run in RUNS:
        fold = signal.fold(signal_request(run))
        folds.add(fold)
        predictor = signal.signals[fold]
        assert run.run_id not in predictor.source_run_ids
        assert run.prompt_sha256 not in load_predictor(tmp_path / f"fold-{fold}").excluded_prompts
    assert folds == {0, 1, 2}
    assert signal.source_run_ids == {run.run_id for run in RUNS}


def test_a_cross_fitted_answer_is_its_folds_checkpoint(tmp_path: Path) -> None:
    signal = crossfit(RUNS, "age-km", num_folds=2)
    save_crossfit(signal, tmp_path, ())
    requests = [signal_request(run) for run in RUNS[:20]]
    grid = build_grid(signal, requests)
    for row, request in enumerate(requests):
        alone = load_predictor(tmp_path / f"fold-{signal.fold(request)}")
        expected = alone.remaining([request], np.array([16]))[0]
        assert grid.read(row, 16)[0] == expected


def test_crossfit_is_deterministic_and_reports(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    settings = GbmHazardSettings(num_landmarks=2)
    for name in ("a", "b"):
        signal = crossfit(
            RUNS,
            "gbm-hazard",
            num_folds=2,
            settings=settings,
            on_fold=lambda done, total: seen.append((done, total)),
        )
        save_crossfit(signal, tmp_path / name, ())
    assert seen == [(1, 2), (2, 2)] * 2
    for file in sorted((tmp_path / "a").rglob("*.*")):
        assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()


def test_scoring_on_a_training_prompt_is_refused() -> None:
    predictor = AgeKmSettings().fit(training_set(RUNS[:60]))
    with pytest.raises(LeakageError, match="was trained on prompt"):
        evaluate([predictor], RUNS)
    assert {run.prompt_id for run in unseen_runs([predictor], RUNS)} == {
        run.prompt_id for run in RUNS[60:]
    }
    with pytest.raises(LeakageError, match="every prompt"):
        unseen_runs([predictor], RUNS[:60])


def test_the_ceiling_answers_a_run_by_its_siblings() -> None:
    ceiling = LeaveOneOut(RUNS)
    assert ceiling.name == "oracle-2 (ceiling)"
    rows = held_out(RUNS, num_sets=100)
    best = score_signal(ceiling, rows)
    assert best.log_mae < 0.3 and best.top1 > 0.7
    run = next(run for run in RUNS if run.event_observed and run.output_tokens > 20)
    siblings = [r for r in RUNS if r.request_key == run.request_key and r.repeat != run.repeat]
    expected = np.mean([r.output_tokens for r in siblings])
    answer = ceiling.remaining([signal_request(run)], np.array([0]))[0]
    assert answer == pytest.approx(expected) and siblings
    with pytest.raises(InvalidInput, match="not in the log"):
        stranger = synthetic_runs(num_prompts=1, repeats=1, model="else")[0]
        ceiling.remaining([signal_request(stranger)], np.array([0]))


def test_fit_scores_between_floors_and_ceiling() -> None:
    result = fit_recipe(RunLog.from_runs(RUNS), default_recipe("gbm-hazard"))
    names = [row.signal for row in result.scores]
    assert names == ["lifo", "fifo", "random", "age-km", "gbm-hazard", "oracle-2 (ceiling)"]
    of = {row.signal: row for row in result.scores}
    assert of["oracle-2 (ceiling)"].log_mae < of["gbm-hazard"].log_mae < of["age-km"].log_mae
    assert result.num_train_runs + result.num_test_runs == len(RUNS)
    everything = updated(default_recipe("age-km"), {"test_share": 0.0}, "test")
    all_of_it = fit_recipe(RunLog.from_runs(RUNS), everything)
    assert all_of_it.scores == () and all_of_it.num_train_runs == len(RUNS)


def test_runs_of_unknown_length_are_left_out_of_scores() -> None:
    lost = [_aborted(run) for run in RUNS[-3:]]
    predictor = AgeKmSettings().fit(training_set(RUNS[:60]))
    rows = evaluate([predictor], [*RUNS[60:-3], *lost], num_sets=10)
    assert rows[-1].num_requests == len(RUNS) - 63


def _aborted(run: DecodeRun) -> DecodeRun:
    return replace(run, output_tokens=1, finish_reason="abort", event_observed=False)


def test_the_verbs_train_and_score(log_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "checkpoint"
    args = ["--family", "gbm-hazard", "--runs", str(log_path), "--out", str(out), "--json", *QUICK]
    trained = CliRunner().invoke(train, args, catch_exceptions=False)
    printed = json.loads(trained.stdout)
    assert printed["family"] == "gbm-hazard" and "fitting gbm-hazard" in trained.stderr
    assert [row["signal"] for row in printed["scores"]][4] == "gbm-hazard"
    assert printed["scores"][0]["log_mae"] is None
    args = ["--checkpoint", str(out), "--runs", str(log_path), "--json"]
    scored = CliRunner().invoke(score, args, catch_exceptions=False)
    again = json.loads(scored.stdout)["scores"]
    # the prompts held out of training are what score finds unseen: same rows, same numbers
    assert again[4] == printed["scores"][4]
    table = CliRunner().invoke(score, args[:-1], catch_exceptions=False)
    assert table.stdout.splitlines()[5].startswith("gbm-hazard")


def test_the_script_takes_a_recipe_and_explains_itself(log_path: Path, tmp_path: Path) -> None:
    config = str(RECIPES / "age_km.toml")
    good = CliRunner().invoke(main, ["--config", config, "--runs", str(log_path)])
    assert good.exit_code == 0 and "age-km" in good.stdout
    for args, says in (
        (["--runs", str(log_path)], "either --config"),
        (["--family", "age-kn", "--runs", str(log_path)], "did you mean 'age-km'"),
        (["--family", "age-km", "--runs", str(tmp_path / "no.parquet")], "no.parquet"),
    ):
        bad = CliRunner().invoke(main, args)
        assert bad.exit_code == 1 and says in bad.output, bad.output


@pytest.mark.parametrize(
    ("family", "assignment"),
    [
        ("past-future", "settings.window_runs=50"),
        ("log-t", "settings.loop.num_epochs=2"),
        ("gbm-rank", "settings.num_sets=50"),
        ("fused", "settings.boosting.num_trees=10"),
        ("text-progress", "settings.loop.num_epochs=2"),
        ("gru-progress", "settings.loop.num_epochs=2"),
    ],
)
def test_both_ways_of_training_give_one_checkpoint(
    family: str, assignment: str, log_path: Path, tmp_path: Path
) -> None:
    """``python -m training.fit --config`` and ``preemptbench train --family``."""
    recipe = RECIPES / f"{family.replace('-', '_')}.toml"
    common = ["--runs", str(log_path), "--set", assignment, "--json"]
    by_config = [*common, "--config", str(recipe), "--out", str(tmp_path / "a")]
    by_family = [*common, "--family", family, "--out", str(tmp_path / "b")]
    results = [CliRunner().invoke(main, by_config), CliRunner().invoke(train, by_family)]
    assert [result.exit_code for result in results] == [0, 0], results[0].output
    signals = [row["signal"] for row in json.loads(results[0].stdout)["scores"]]
    assert family in signals and "age-km" in signals
    assert ("fused(oracle-2 (ceiling))" in signals) == (family == "fused")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    load_predictor(tmp_path / "a")


def test_the_prompts_of_an_oracle_can_be_left_out(tmp_path: Path) -> None:
    runs = synthetic_runs(num_prompts=24, repeats=2)
    known = {run.prompt_sha256 for run in runs[:24]}
    whole, part = tmp_path / "whole.parquet", tmp_path / "part.parquet"
    write_runs(runs, whole)
    write_runs([run for run in runs if run.prompt_sha256 in known], part)
    oracle, out = tmp_path / "oracle", tmp_path / "out"
    assert (
        CliRunner().invoke(cli, ["oracle", "build", str(part), "--out", str(oracle)]).exit_code == 0
    )
    wanted = ["train", "--family", "age-km", "--exclude-oracle", str(oracle), "--out", str(out)]
    done = CliRunner().invoke(cli, [*wanted, "--runs", str(whole)])
    assert done.exit_code == 0, done.output
    assert "left out 24 runs" in done.stderr
    trained = set(load_predictor(out).provenance.prompt_sha256s)
    assert trained and not trained & known
    nothing = CliRunner().invoke(cli, [*wanted[:-1], str(tmp_path / "b"), "--runs", str(part)])
    assert isinstance(nothing.exception, InvalidInput)
    assert "knows every prompt" in str(nothing.exception)
