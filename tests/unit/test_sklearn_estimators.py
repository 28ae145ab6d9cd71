"""The scikit-learn estimators: their conventions, the recipe's answers, censoring, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from contracts.errors import InvalidInput
from predictors.boosting import BoostingSettings
from predictors.countdown import LEVELS, CountdownSettings
from predictors.features import PROMPT_FEATURES, feature_columns, feature_matrix
from predictors.gbm_hazard import GbmHazardSettings, landmarks
from tests.synthetic_runs import synthetic_runs
from training.rows import training_set

pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra 'train')")
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator

from predictors.boosted_regressor import BoostedRegressor
from predictors.countdown_regressor import CountdownRegressor
from predictors.hazard_regressor import HazardRegressor

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3000, 2))
Y = np.exp(3.0 + X[:, 0] + 0.3 * RNG.normal(size=3000))
FEW = HazardRegressor(num_bins=30, num_trees=120, min_rows_per_leaf=10, feature_share=1.0)


@pytest.mark.parametrize("estimator", [HazardRegressor(), CountdownRegressor()], ids=str)
def test_every_check_of_scikit_learn_passes(estimator: BoostedRegressor) -> None:
    found = check_estimator(estimator, on_skip=None)
    not_passed = {check["check_name"] for check in found if check["status"] != "passed"}
    assert len(found) > 40
    assert not_passed <= {"check_array_api_input"}  # asks for an environment variable of scipy


def test_the_hazard_is_the_recipes_model() -> None:
    training = training_set(synthetic_runs(num_prompts=30))
    boosting = BoostingSettings(num_trees=20)
    fitted = GbmHazardSettings(boosting=boosting).fit(training, seed=3)
    run, ages = landmarks(training, GbmHazardSettings().num_landmarks, 3)
    known = feature_matrix([training.requests[i] for i in run.tolist()], ages)
    caps = np.array([request.max_tokens for request in training.requests])[run]
    regressor = HazardRegressor(edges=fitted.edges, num_trees=20, random_state=3)
    regressor.fit(
        known,
        training.output_tokens[run] - ages,
        sample_weight=training.repeat_weights()[run],
        event_observed=training.event_observed[run],
        watched=caps - ages,
    )
    np.testing.assert_allclose(
        regressor.predict_survival(known), fitted.survival_of(known), rtol=0, atol=1e-12
    )


def test_the_countdown_is_the_recipes_model() -> None:
    runs = synthetic_runs(num_prompts=60, repeats=1)
    training = training_set(runs)
    fitted = CountdownSettings(boosting=BoostingSettings(num_trees=20, min_rows_per_leaf=5)).fit(
        training, seed=3
    )
    known = feature_matrix(training.requests, np.zeros(len(runs), dtype=np.int64))
    known = known[:, feature_columns(PROMPT_FEATURES)]
    table = np.column_stack([known, training.output_tokens])
    assert len(np.unique(table, axis=0)) == len(runs)  # the estimator would merge equal rows
    regressor = CountdownRegressor(
        num_trees=20, num_leaves=15, min_rows_per_leaf=5, random_state=3
    ).fit(known, training.output_tokens)
    totals = fitted.totals(training.requests)
    assert len(np.unique(totals[:, 2])) > 5
    for column, level in enumerate(LEVELS):
        np.testing.assert_allclose(
            np.clip(regressor.predict_quantile(known, level), 1.0, fitted.edges[-1]),
            totals[:, column],
            rtol=1e-12,
        )


def test_quantiles_of_a_total_hold_and_a_cap_moves_none_below_it() -> None:
    new = RNG.normal(size=(2000, 2))
    ends = np.exp(3.0 + new[:, 0] + 0.3 * RNG.normal(size=2000))
    fitted = CountdownRegressor(feature_share=1.0).fit(X, Y)
    for level in (0.1, 0.375, 0.5, 0.9):
        held = np.mean(ends <= fitted.predict_quantile(new, level))
        assert held == pytest.approx(level, abs=0.04)
    capped = CountdownRegressor(feature_share=1.0).fit(X, np.minimum(Y, 40.0))
    low = np.exp(3.0 + new[:, 0]) < 25.0
    ratio = capped.predict(new[low]) / fitted.predict(new[low])
    assert np.abs(np.log(ratio)).mean() < 0.03
    with pytest.raises(InvalidInput, match=r"quantile level is 0.95: countdown learns 0.1 to 0.9"):
        fitted.predict_quantile(X, 0.95)


def test_the_median_and_quantiles_are_those_of_the_law() -> None:
    fitted = FEW.fit(X, Y)
    new = RNG.normal(size=(2000, 2))
    ends = np.exp(3.0 + new[:, 0] + 0.3 * RNG.normal(size=2000))
    assert np.mean(np.abs(np.log(fitted.predict(new)) - (3.0 + new[:, 0]))) < 0.12
    for level in (0.1, 0.5, 0.9):
        assert np.mean(ends <= fitted.predict_quantile(new, level)) == pytest.approx(
            level, abs=0.04
        )


def test_cut_rows_count_as_survived_not_as_ended() -> None:
    cut = np.exp(3.5 + 0.5 * RNG.normal(size=3000))
    seen = np.minimum(Y, cut)
    honest = HazardRegressor(num_trees=60, edges=np.geomspace(1.0, 200.0, 20))
    answers = honest.fit(X, seen, event_observed=cut >= Y).predict(X)
    naive = honest.fit(X, seen).predict(X)
    truth = np.exp(3.0 + X[:, 0])
    long = (truth > 20) & (truth < 60)  # where many are cut, and the curve still reaches one half
    assert abs(np.mean(np.log(answers / truth)[long])) < 0.1
    assert np.mean(np.log(naive / truth)[long]) < -0.15


def test_a_search_over_a_parameter() -> None:
    search = GridSearchCV(FEW, {"num_trees": [2, 120]}, cv=3).fit(X[:600], Y[:600])
    assert search.best_params_ == {"num_trees": 120}


def test_bad_input_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        FEW.fit(X, Y - 100.0)
    with pytest.raises(InvalidInput, match="needs endings"):
        FEW.fit(X, Y, event_observed=np.zeros(len(Y)))
    with pytest.raises(InvalidInput, match="one number for each"):
        FEW.fit(X, Y, watched=np.ones(3))
    with pytest.raises(InvalidInput, match="must rise from above 0"):
        HazardRegressor(edges=[3.0, 2.0]).fit(X, Y)
    with pytest.raises(InvalidInput, match="num_leaves is 1"):
        HazardRegressor(num_leaves=1).fit(X, Y)
    with pytest.raises(InvalidInput, match="quantile level is 1"):
        FEW.fit(X, Y).predict_quantile(X, 1.0)
