"""The arithmetic of the predictors: curves to answers, rows of the hazard, features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from contracts.errors import InvalidInput, UnknownName
from contracts.policy import FloatArray, IntArray
from contracts.signals import ProgressTrack, SignalRequest, signal_request
from contracts.survival import kaplan_meier
from predictors.age_km import AgeKmSettings
from predictors.base import HorizonPredictor, TrainingSet
from predictors.boosting import BoostingSettings
from predictors.checkpoint import Checkpoint
from predictors.countdown import CountdownSettings
from predictors.features import FEATURE_NAMES, feature_columns, feature_matrix
from predictors.gbm_hazard import GbmHazardSettings, hazard_rows, horizon_edges, landmarks
from predictors.registry import FAMILIES, find_family
from tests.synthetic_runs import STRIDE, make_run, synthetic_runs
from training.rows import training_set


class _Curve(HorizonPredictor):
    """A predictor whose survival curve is given."""

    family = "curve"

    def __init__(self, edges: IntArray, alive: FloatArray) -> None:
        super().__init__(training_set(synthetic_runs(num_prompts=1)).provenance, edges)
        self.alive = alive

    def residual_survival(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        return np.tile(self.alive, (len(requests), 1)) * np.ones((len(ages), 1))

    def settings(self) -> dict:  # type: ignore[type-arg]
        return {}

    def tensors(self) -> dict[str, np.ndarray]:
        return {}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> _Curve:
        raise NotImplementedError


def _request(cap_tokens: int) -> SignalRequest:
    return signal_request(
        make_run(prompt="p", prompt_id="p", natural_tokens=9, cap_tokens=cap_tokens)
    )


@pytest.mark.parametrize("cap_tokens", [1, 2, 3, 5, 8, 11, 40])
@pytest.mark.parametrize("age", [0, 1, 4])
def test_horizon_answers_equal_a_sum_over_whole_tokens(cap_tokens: int, age: int) -> None:
    """Mean, quantile and survival against the plain definition on P(R > h), h = 0, 1, 2 …"""
    edges, alive = np.array([2, 5, 8]), np.array([0.9, 0.3, 0.1])
    signal = _Curve(edges, alive)
    bound = max(1, cap_tokens - age)
    whole = np.interp(np.arange(bound), [0, *edges], [1.0, *alive])  # flat beyond the last edge
    ask = ([_request(cap_tokens)], np.array([age]))
    assert signal.remaining(*ask)[0] == pytest.approx(whole.sum(), abs=1e-12)
    for level in (0.05, 0.1, 0.5, 0.7, 0.85, 0.95):
        reached = np.flatnonzero(whole <= 1.0 - level + 1e-12)
        expected = max(1, int(reached[0])) if reached.size else bound
        assert signal.quantile(*ask, level)[0] == expected, level
    for horizon in (0.0, 0.5, 1.0, 3.7, 8.0, 100.0):
        inside = int(horizon) < bound
        expected_share = whole[int(horizon)] if inside else 0.0
        assert signal.survival(*ask, np.array([horizon]))[0] == pytest.approx(expected_share)


def test_bad_levels_and_edges_are_refused() -> None:
    signal = _Curve(np.array([2, 5]), np.array([0.5, 0.1]))
    for level in (0.0, 1.0, -3.0, float("nan")):
        with pytest.raises(InvalidInput, match="between 0 and 1"):
            signal.quantile([_request(9)], np.array([0]), level)
    with pytest.raises(InvalidInput, match="must rise"):
        _Curve(np.array([5, 2]), np.array([0.5, 0.1]))


def _training(lengths: list[int], cap_tokens: int = 10) -> TrainingSet:
    return training_set(
        make_run(prompt=f"p{i}", prompt_id=f"p{i}", natural_tokens=n, cap_tokens=cap_tokens)
        for i, n in enumerate(lengths)
    )


def test_hazard_rows_by_hand() -> None:
    """Edges 2, 4, 8, 10; cap 10. Lengths 3 and 10 end, 99 is cut at 10."""
    training = _training([3, 10, 99])
    run, ages = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 2, 0, 5, 0, 5])
    owner, bins, ended = hazard_rows(training, run, ages, np.array([2, 4, 8, 10]))
    rows = [list(zip(bins[owner == i], ended[owner == i], strict=True)) for i in range(6)]
    assert rows[0] == [(0, False), (1, True)]
    assert rows[1] == [(0, True)]
    assert rows[2] == [(0, False), (1, False), (2, False), (3, True)]
    assert rows[3] == [(0, False), (1, False)]  # its end lies in (4, 8], which passes the cap
    assert rows[4] == [(0, False), (1, False), (2, False), (3, False)]
    assert rows[5] == [(0, False), (1, False)]


def test_a_run_cut_below_the_cap_gives_only_bins_it_survived() -> None:
    aborted = replace(
        make_run(prompt="a", prompt_id="a", natural_tokens=7, cap_tokens=10),
        finish_reason="abort",
        event_observed=False,
    )
    unknown = replace(aborted, run_id="b", finish_reason="unknown", event_observed=None)
    training = training_set([aborted, unknown])
    edges = np.array([2, 4, 8, 10])
    _, bins, ended = hazard_rows(training, np.array([0, 1]), np.array([0, 0]), edges)
    assert bins.tolist() == [0, 1, 0, 1] and not ended.any()


def test_landmarks_do_not_look_at_lengths() -> None:
    """A longer run keeps the landmark ages of the shorter one and only adds later ones."""
    short, long = _training([40], 200), _training([150], 200)
    _, short_ages = landmarks(short, 12, seed=3)
    _, long_ages = landmarks(long, 12, seed=3)
    assert short_ages.tolist() == [age for age in long_ages.tolist() if age < 40]
    assert short_ages[0] == 0 and len(long_ages) > len(short_ages)


def test_repeats_share_the_weight_of_their_request() -> None:
    once = synthetic_runs(num_prompts=4, repeats=1)
    extra = [run for run in synthetic_runs(num_prompts=1, repeats=3) if run.repeat]
    weights = training_set([*once, *extra]).repeat_weights()
    assert weights[0] + weights[4:].sum() == pytest.approx(weights[1])
    assert weights.mean() == pytest.approx(1.0)


def test_horizon_edges_end_at_the_cap() -> None:
    for first, cap, count in ((3, 256, 16), (1, 1, 5), (4, 32768, 29), (9, 4, 3)):
        edges = horizon_edges(first, cap, count)
        assert edges[-1] == cap and (np.diff(edges) > 0).all() and edges[0] >= 1


def test_age_km_is_the_survival_curve() -> None:
    lengths = [3, 5, 5, 9, 99, 99]
    training = _training(lengths, cap_tokens=12)
    signal = AgeKmSettings().fit(training)
    curve = kaplan_meier(training.output_tokens, training.event_observed)
    requests = [training.requests[0]] * 4
    ages = np.array([0, 3, 5, 9])
    np.testing.assert_allclose(
        signal.remaining(requests, ages), curve.mean_residual(ages, np.full(4, 12)), rtol=1e-12
    )
    # at age 5 three of six are left: one ends at 9, two reach 12
    assert signal.remaining(requests, ages)[2] == pytest.approx((4 + 7 + 7) / 3)
    assert signal.quantile(requests, ages, 0.3)[2] == 4
    assert signal.survival(requests, ages, np.full(4, 4.0))[2] == pytest.approx(2 / 3)


def test_age_km_falls_back_to_the_cap() -> None:
    """No run lasted that long, or the model is another one: nothing is known but the cap."""
    signal = AgeKmSettings().fit(_training([3, 5], cap_tokens=12))
    known = _request(12)
    stranger = replace(known, model="another/model")
    ages = np.array([7, 2])
    assert signal.remaining([known, stranger], ages).tolist() == [5.0, 10.0]
    assert signal.quantile([known, stranger], ages, 0.5).tolist() == [5.0, 10.0]
    assert signal.survival([known, stranger], ages, np.array([4.0, 10.0])).tolist() == [1.0, 0.0]


def test_countdown_counts_down_then_repairs_the_tail() -> None:
    training = training_set(synthetic_runs(num_prompts=60))
    signal = CountdownSettings().fit(training)
    request = training.requests[0]
    total = signal.totals([request])[0, 2]
    ages = np.array([0, 5, int(total) + 5])
    answers = signal.remaining([request] * 3, ages)
    assert answers[0] == pytest.approx(total)
    assert answers[1] == pytest.approx(total - 5)
    assert answers[2] == signal.tail.remaining([request], ages[2:])[0]


def test_features_of_a_prompt() -> None:
    run = make_run(prompt="List seven fruits,\nor 12?", prompt_id="p", natural_tokens=30)
    row = feature_matrix([signal_request(run)], np.array([17]))[0]
    value = dict(zip(FEATURE_NAMES, row.tolist(), strict=True))
    assert value["age"] == 17 and value["log_age"] == pytest.approx(np.log(18))
    assert value["prompt_words"] == 5 and value["prompt_lines"] == 2
    assert value["prompt_digits"] == 2 and value["prompt_numbers"] == 2
    assert value["log_largest_number"] == pytest.approx(np.log(13))
    assert value["is_question"] == 1 and value["cue_list"] == 1 and value["cue_code"] == 0
    assert value["num_records"] == 2
    assert value["num_newlines"] == pytest.approx(2.0)
    assert value["newlines_short_of_number"] == pytest.approx(10.0)


def test_features_of_what_is_absent_are_nan() -> None:
    request = replace(_request(12), prompt=None, progress=None)
    row = dict(zip(FEATURE_NAMES, feature_matrix([request], np.array([4]))[0], strict=True))
    assert np.isnan(row["prompt_words"]) and np.isnan(row["last_mean_entropy"])
    assert row["prompt_tokens"] == 1 and row["age"] == 4


def test_vectorised_progress_features_equal_a_plain_reading() -> None:
    runs = synthetic_runs(num_prompts=6, repeats=1)
    requests = [signal_request(run) for run in runs]
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(runs), 200)
    ages = rng.integers(0, 190, 200)
    matrix = feature_matrix([requests[i] for i in picks], ages)
    for row, pick, age in zip(matrix, picks, ages, strict=True):
        track = requests[pick].progress
        assert track is not None
        seen = track.seen(int(age))
        value = dict(zip(FEATURE_NAMES, row.tolist(), strict=True))
        if not len(seen):
            assert np.isnan(value["num_records"])
            continue
        assert value["num_records"] == len(seen)
        assert value["last_mean_entropy"] == seen[-1, 0]
        assert value["mean_mean_logprob"] == pytest.approx(seen[:, 1].mean())
        assert value["entropy_trend"] == pytest.approx(seen[-1, 0] - seen[:, 0].mean())


def test_features_are_found_by_name() -> None:
    assert feature_columns(["log_age", "age"]).tolist() == [1, 0]
    with pytest.raises(UnknownName, match="did you mean 'log_age'"):
        feature_columns(["log_aeg"])
    with pytest.raises(InvalidInput, match="twice"):
        feature_columns(["age", "age"])


def test_the_registry_offers_the_nearest_name() -> None:
    assert set(FAMILIES) == {
        "age-km", "countdown", "entropy-pool", "fused", "gbm-hazard", "gbm-rank", "gru-progress",
        "log-t", "past-future", "probe", "prompt-encoder", "text-progress",
    }  # fmt: skip
    with pytest.raises(UnknownName, match="did you mean 'gbm-hazard'"):
        find_family("gbm-hazzard")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: BoostingSettings(num_leaves=1), "num_leaves is 1"),
        (lambda: BoostingSettings(learning_rate=0.0), "learning_rate is 0.0"),
        (lambda: GbmHazardSettings(num_bins=0), "num_bins is 0"),
        (lambda: CountdownSettings(features=("age",)), "before the first token"),
        (lambda: GbmHazardSettings().fit(_training([99, 99])), "none of 2 training runs"),
    ],
)
def test_bad_settings_are_refused(build, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput, match=says):
        build()


def test_a_fit_gives_the_same_bytes_twice() -> None:
    training = training_set(synthetic_runs(num_prompts=30))
    settings = GbmHazardSettings(boosting=BoostingSettings(num_trees=20))
    first, second = (settings.fit(training, seed=4).tensors() for _ in range(2))
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name


def test_a_track_of_another_stride_is_read_by_its_own() -> None:
    track = ProgressTrack(4, np.full((10, 6), 0.5))
    request = replace(_request(100), progress=track)
    row = feature_matrix([request], np.array([STRIDE]))[0]
    assert row[FEATURE_NAMES.index("num_records")] == 2
