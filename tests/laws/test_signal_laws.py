"""What must hold for every registered predictor, whatever it learned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.conformance import check_signal
from contracts.signals import ProgressTrack, build_grid, signal_request
from contracts.survival import kaplan_meier
from eval.signal_quality import held_out, score_signal
from predictors.age_km import AgeKmSettings
from predictors.base import Predictor
from predictors.boosting import BoostingSettings
from predictors.gbm_hazard import GbmHazardSettings
from predictors.registry import FAMILIES
from tests.hidden_runs import with_hidden
from tests.quick_families import QUICK
from tests.synthetic_runs import CAP_TOKENS, STRIDE, synthetic_runs
from training.rows import training_set

RUNS = with_hidden(synthetic_runs(num_prompts=80))
TRAIN, TEST = RUNS[:180], RUNS[180:]


def test_every_family_is_held_to_these_laws() -> None:
    assert set(QUICK) == set(FAMILIES)


@pytest.fixture(scope="module", params=sorted(QUICK))
def predictor(request: pytest.FixtureRequest) -> Predictor:
    return QUICK[request.param].fit(training_set(TRAIN), seed=1)


def test_conformance(predictor: Predictor) -> None:
    # the suite edits progress behind age 24, so its runs must have lived to see it
    check_signal(predictor, [run for run in TEST if run.output_tokens >= 3 * STRIDE])


@settings(max_examples=25, deadline=None)
@given(
    row=st.integers(0, len(TEST) - 1),
    age=st.integers(0, CAP_TOKENS - 1),
    wild=st.floats(allow_nan=True, allow_infinity=True),
    extra=st.integers(0, 40),
)
def test_the_future_changes_no_answer(
    predictor: Predictor, row: int, age: int, wild: float, extra: int
) -> None:
    """Progress after age t, edited or cut off, changes no grid value at ages <= t."""
    request = signal_request(TEST[row])
    assert request.progress is not None
    age = min(age, TEST[row].output_tokens - 1)
    seen = request.progress.seen(age)
    edited = np.concatenate([seen, np.full((extra, seen.shape[1]), wild)])
    horizon = np.array([age])
    tracks = (request.progress, ProgressTrack(STRIDE, edited))
    grids = [
        build_grid(predictor, [replace(request, progress=track)], stride=4, horizons=horizon)
        for track in tracks
    ]
    np.testing.assert_array_equal(grids[0].remaining, grids[1].remaining)
    np.testing.assert_array_equal(grids[0].upper, grids[1].upper)


@settings(max_examples=40, deadline=None)
@given(
    row=st.integers(0, len(TEST) - 1),
    cap_tokens=st.integers(1, 3 * CAP_TOKENS),
    share=st.floats(0.0, 1.0, exclude_max=True),
    level=st.floats(0.01, 0.99),
)
def test_answers_stay_between_one_and_the_cap(
    predictor: Predictor, row: int, cap_tokens: int, share: float, level: float
) -> None:
    """Whatever the serving cap, above or below the one it was trained under."""
    request = replace(signal_request(TEST[row]), max_tokens=cap_tokens)
    age = np.array([int(share * cap_tokens)])
    bound = max(1, cap_tokens - int(age[0]))
    assert 1.0 <= predictor.remaining([request], age)[0] <= bound
    quantile = predictor.quantile([request], age, level)[0]
    assert 1.0 <= quantile <= bound and quantile == int(quantile)
    alive = predictor.survival([request], age, np.array([quantile]))[0]
    assert alive <= 1.0 - level + 1e-9 or quantile == bound


def test_the_mean_is_the_sum_of_survival(predictor: Predictor) -> None:
    """E[R] = P(R > 0) + P(R > 1) + …, for families whose mean is that of their distribution."""
    if predictor.family == "countdown":
        pytest.skip("countdown answers with a median minus the age, by definition")
    requests = [signal_request(run) for run in TEST[:10]]
    ages = np.array([3 * i for i in range(10)])
    alive = sum(
        predictor.survival(requests, ages, np.full(10, float(h))) for h in range(CAP_TOKENS)
    )
    np.testing.assert_allclose(predictor.remaining(requests, ages), alive, rtol=1e-9)


def test_a_hazard_without_features_is_kaplan_meier() -> None:
    """Knowing the bin only, from age 0 only, the learned hazard is the life table's."""
    training = training_set(synthetic_runs(num_prompts=300, repeats=1))
    free = BoostingSettings(
        num_trees=400, learning_rate=0.3, min_rows_per_leaf=1, feature_share=1.0, l2=0.0
    )
    signal = GbmHazardSettings(num_landmarks=0, features=(), boosting=free).fit(training)
    curve = kaplan_meier(training.output_tokens, training.event_observed)
    learned = signal.residual_survival(training.requests[:1], np.array([0]))[0]
    np.testing.assert_allclose(learned, curve(signal.edges), atol=2e-3)
    assert 0.0 < curve(signal.edges)[-1] < 0.5  # some ended, some were cut: the law has teeth


def test_a_hazard_that_knows_the_age_only_is_age_km() -> None:
    """At every age it answers with the conditional mean residual life, within 12 %, unbiased.

    Weighting rows by 1/(rows of their run) instead breaks this law by 20 % on average.
    """
    training = training_set(synthetic_runs(num_prompts=1500, repeats=1))
    coarse = BoostingSettings(num_trees=60, num_leaves=8, feature_share=1.0, l2=0.0)
    hazard = GbmHazardSettings(features=("age",), num_landmarks=20, boosting=coarse).fit(training)
    floor = AgeKmSettings().fit(training)
    ages = np.arange(0, 170, 5)
    requests = [training.requests[0]] * len(ages)
    ratio = np.log(hazard.remaining(requests, ages) / floor.remaining(requests, ages))
    assert np.abs(ratio).max() < 0.12 and abs(ratio.mean()) < 0.04


def test_what_is_learned_beats_what_is_not() -> None:
    """On held-out prompts the hazard's log-MAE and victims are far better than age-km's."""
    train = training_set(TRAIN)
    rows = held_out(TEST, num_sets=200)
    learned = score_signal(GbmHazardSettings().fit(train), rows)
    floor = score_signal(AgeKmSettings().fit(train), rows)
    assert learned.log_mae < 0.7 * floor.log_mae
    assert learned.victim_regret < 0.7 * floor.victim_regret
    assert learned.concordance > floor.concordance + 0.1
