"""Streaming answers equal the batch grid, in constant space, whatever comes in which order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.progress import ProgressTracker
from contracts.signals import ProgressTrack, SignalRequest, build_grid, signal_request
from predictors.age_km import AgeKmSettings
from predictors.base import Predictor
from predictors.boosting import BoostingSettings
from predictors.calibrated import Calibrated
from predictors.countdown import CountdownSettings
from predictors.features import TrackSummary
from predictors.gbm_hazard import GbmHazardSettings
from predictors.online import OnlinePredictor
from predictors.targets import reach_cap
from tests.synthetic_runs import STRIDE, synthetic_runs
from training.calibrate import cross_calibrate
from training.rows import training_set

RUNS = synthetic_runs(num_prompts=40)
_FEW = BoostingSettings(num_trees=20)
_SETTINGS = {
    "age-km": AgeKmSettings(),
    "countdown": CountdownSettings(boosting=_FEW),
    "gbm-hazard": GbmHazardSettings(num_landmarks=6, boosting=_FEW),
}
_PIECES = ("a", "\n", " wait", "b")
TOKENS = 60


# two models, one of which writes at length: the predictor tells them apart
TWO_MODELS = [
    replace(run, model="terse" if len(run.prompt_id) % 2 or run.output_tokens < 40 else run.model)
    for run in RUNS
]


@pytest.fixture(scope="module", params=[*_SETTINGS, "calibrated", "two models"])
def predictor(request: pytest.FixtureRequest) -> Predictor:
    if request.param == "two models":
        return _SETTINGS["gbm-hazard"].fit(training_set(TWO_MODELS), seed=1)
    if request.param != "calibrated":
        return _SETTINGS[request.param].fit(training_set(RUNS), seed=1)
    how = _SETTINGS["gbm-hazard"]
    return cross_calibrate(how.fit(training_set(RUNS)), RUNS, how, num_folds=2, num_groups=3)


def _drawn(seed: int) -> tuple[list[int], list[str], FloatArray, FloatArray]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 6, TOKENS).tolist()
    return ids, [_PIECES[i % 4] for i in ids], rng.exponential(1.0, TOKENS), -rng.random(TOKENS)


def _batch(request: SignalRequest, seed: int) -> SignalRequest:
    tracker = ProgressTracker(STRIDE, 4, 5)
    for token in zip(*_drawn(seed), strict=True):
        tracker.update(*token)
    return replace(request, progress=ProgressTrack(STRIDE, np.array(tracker.records)))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 50),
    cuts=st.lists(st.integers(0, TOKENS), max_size=6),
    stride=st.sampled_from([1, 5, 8, 16]),
)
def test_every_answer_is_the_grids(
    predictor: Predictor, seed: int, cuts: list[int], stride: int
) -> None:
    """Two requests, fed in pieces of any size and in turns, asked or not asked in between."""
    online = OnlinePredictor(predictor, stride=stride, think_open=4, think_close=5)
    requests = [replace(signal_request(RUNS[i]), run_id=f"r{i}") for i in (0, 7)]
    requests[1] = replace(requests[1], model="terse")
    grid = build_grid(
        predictor, [_batch(r, seed + i) for i, r in enumerate(requests)], stride=stride,
        horizons=np.full(2, TOKENS),
    )  # fmt: skip
    for request in requests:
        online.start(request)
    names = [request.run_id for request in requests]
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), TOKENS], strict=True):
        for index, name in enumerate(names):
            ids, pieces, entropies, logprobs = _drawn(seed + index)
            part = slice(begin, end)
            online.update(name, ids[part], pieces[part], entropies[part], logprobs[part])
        expected = np.array([grid.read(index, end) for index in range(2)])
        np.testing.assert_allclose(online.remaining(names), expected[:, 0], rtol=1e-9)
        np.testing.assert_allclose(online.upper(names), expected[:, 1], rtol=1e-9)


def test_the_chance_of_the_cap_grows_as_a_run_goes_on(predictor: Predictor) -> None:
    online, request = OnlinePredictor(predictor), replace(signal_request(RUNS[2]), run_id="a")
    online.start(request)
    at_start = reach_cap(predictor, [replace(request, progress=None)], np.array([0]))
    assert online.reach_cap(["a"]) == pytest.approx(at_start, rel=1e-9)
    chances = [float(online.reach_cap(["a"])[0])]
    for token in zip(*_drawn(3), strict=True):
        online.update("a", *([part] for part in token))
        if len(chances) % STRIDE == 0:
            break
        chances.append(float(online.reach_cap(["a"])[0]))  # same evidence, one token more survived
    assert chances == sorted(chances) and chances[-1] <= 1.0


def test_state_is_constant_and_places_are_used_again(predictor: Predictor) -> None:
    online = OnlinePredictor(predictor)
    for wave in range(3):
        for i in range(70):
            online.start(replace(signal_request(RUNS[i]), run_id=f"{wave}-{i}"))
        online.update(f"{wave}-0", *_drawn(0))
        assert not online._running[f"{wave}-0"].tracker.records
        answers = online.remaining([f"{wave}-{i}" for i in range(70)])
        fresh = build_grid(predictor, [replace(signal_request(RUNS[1]), progress=None)])
        assert answers[1] == pytest.approx(fresh.read(0, 0)[0], rel=1e-9)
        for i in range(70):
            online.forget(f"{wave}-{i}")
    assert len(online) == 0 and len(online._age) == 128


def test_bad_calls_say_what_to_do() -> None:
    online = OnlinePredictor(AgeKmSettings().fit(training_set(RUNS)))
    online.start(replace(signal_request(RUNS[0]), run_id="a"))
    with pytest.raises(InvalidInput, match="already runs"):
        online.start(replace(signal_request(RUNS[0]), run_id="a"))
    for call in (lambda: online.remaining(["b"]), lambda: online.forget("b")):
        with pytest.raises(InvalidInput, match="start it first"):
            call()
    with pytest.raises(InvalidInput, match="one each a token"):
        online.update("a", [1], [], [0.1], [0.1])
    with pytest.raises(InvalidInput, match="at least 1 token"):
        OnlinePredictor(online.predictor, stride=0)
    with pytest.raises(InvalidInput, match="summed up as they came"):
        TrackSummary(8, np.zeros((1, 6)), np.zeros(6), 1).seen(8)
    assert isinstance(online.predictor, Predictor) and not isinstance(online.predictor, Calibrated)
