"""How long a model usually writes: what a level is, and what a predictor makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import InvalidInput
from contracts.signals import signal_request
from predictors.boosting import BoostingSettings
from predictors.checkpoint import Checkpoint
from predictors.gbm_hazard import GbmHazard, GbmHazardSettings
from predictors.model_levels import MODEL_FEATURE, learn_levels
from tests.synthetic_runs import make_run
from training.rows import training_set

RNG = np.random.default_rng(0)
RUNS = [
    make_run(
        prompt=f"question {i}", prompt_id=f"q{i}", model=model, repeat=repeat, cap_tokens=400,
        natural_tokens=int(RNG.integers(low, 2 * low)),
    )
    for i in range(30)
    for model, low in (("terse", 20), ("thinker", 150))
    for repeat in range(2)
]  # fmt: skip
SETTINGS = GbmHazardSettings(num_landmarks=4, boosting=BoostingSettings(num_trees=40))


def test_a_level_is_the_mean_log_length_and_a_row_does_not_see_its_own_prompt() -> None:
    levels, of_run = learn_levels(training_set(RUNS))
    logs = np.log([run.output_tokens for run in RUNS])
    assert levels.models == ("terse", "thinker")
    for model, level in zip(levels.models, levels.levels, strict=False):
        own = np.array([run.model == model for run in RUNS])
        assert level == pytest.approx(logs[own].mean(), rel=1e-12)
    assert levels.levels[-1] == pytest.approx(logs.mean(), rel=1e-12)
    for row, run in enumerate(RUNS):
        others = [r.model == run.model and r.prompt_id != run.prompt_id for r in RUNS]
        assert of_run[row] == pytest.approx(logs[others].mean(), rel=1e-12)
    unseen = replace(signal_request(RUNS[0]), model="newcomer")
    assert levels.of([unseen, signal_request(RUNS[1])]).tolist() == [
        levels.levels[-1], levels.levels[0],
    ]  # fmt: skip


def test_a_model_with_one_prompt_falls_back_to_all_runs() -> None:
    lone = replace(RUNS[0], model="lone", run_id="lone")
    _, of_run = learn_levels(training_set([*RUNS, lone]))
    assert of_run[-1] == pytest.approx(np.log([r.output_tokens for r in [*RUNS, lone]]).mean())


def test_the_level_tells_models_apart_and_survives_a_checkpoint(tmp_path: Path) -> None:
    told, untold = (
        replace(SETTINGS, tell_models=tell).fit(training_set(RUNS)) for tell in (True, False)
    )
    asked = [replace(signal_request(RUNS[0]), model=name) for name in ("terse", "thinker")]
    ages = np.zeros(2, dtype=np.int64)
    short, long = told.remaining(asked, ages)
    assert long > 4 * short
    assert np.ptp(untold.remaining(asked, ages)) == 0.0
    told.save_pretrained(tmp_path / "told")
    again = GbmHazard.from_pretrained(tmp_path / "told")
    assert again.columns[-1] == MODEL_FEATURE
    np.testing.assert_array_equal(again.remaining(asked, ages), told.remaining(asked, ages))


def test_one_model_needs_no_level_and_a_damaged_table_is_refused() -> None:
    alone = SETTINGS.fit(training_set([run for run in RUNS if run.model == "terse"]))
    assert alone.levels is None and MODEL_FEATURE not in alone.columns
    told = SETTINGS.fit(training_set(RUNS))
    tensors = told.tensors() | {"model_levels": np.zeros(2)}
    broken = Checkpoint("x", told.family, told.provenance, told.settings(), [], tensors)
    with pytest.raises(InvalidInput, match="model levels of 2 models"):
        GbmHazard.from_checkpoint(broken)
