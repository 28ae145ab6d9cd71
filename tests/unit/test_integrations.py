"""What stands between vLLM and a policy, without vLLM: settings, estimates, choices, counters."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidInput, UnknownName
from contracts.policy import FloatArray, IntArray, RunningViews, from_rows
from contracts.progress import ProgressTracker
from contracts.randomness import keyed_generator
from contracts.signals import SignalRequest
from integrations import chooser as chooser_module
from integrations.chooser import Chooser
from integrations.counters import Counters
from integrations.estimates import Estimates, known_model
from integrations.sampled import entropy_of_listed, signals_of
from integrations.settings import DeploySettings, read_settings
from integrations.versions import check_version, policy_reads_tell
from integrations.visible import SAMPLED_FIELDS, UNSEEN_FIELDS, VisibleProgress
from predictors import trees
from predictors.age_km import AgeKm, AgeKmSettings
from predictors.boosting import BoostingSettings
from predictors.gbm_hazard import GbmHazardSettings
from serving_sim.policies import get_policy, list_policies
from tests.synthetic_runs import MODEL, synthetic_runs
from training.rows import training_set


@dataclass
class Request:
    """The fields of vLLM's Request that are read."""

    request_id: str
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 10
    max_tokens: int = 200
    num_preemptions: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    output_token_ids: list[int] = field(default_factory=list)


def requests(*ages: int) -> list[Request]:
    return [
        Request(f"r{i}", age, 10 + age, output_token_ids=[7] * age) for i, age in enumerate(ages)
    ]


@pytest.fixture(scope="module")
def age_km() -> AgeKm:
    return AgeKmSettings().fit(training_set(synthetic_runs()))


@pytest.fixture
def checkpoint(age_km: AgeKm, tmp_path: Path) -> str:
    age_km.save_pretrained(tmp_path / "checkpoint")
    return str(tmp_path / "checkpoint")


def chooser_of(checkpoint: str = "", **settings: object) -> Chooser:
    given = {"policy": "longest-remaining" if checkpoint else "lifo"} | settings
    return Chooser(DeploySettings(checkpoint=checkpoint, **given), MODEL)  # type: ignore[arg-type]


def blocks(_: str) -> int:
    return 1


# --- settings


def test_the_environment_overrides_additional_config() -> None:
    table = {"preemptbench": {"policy": "fifo", "budget_us": 7, "upper_level": 0.9}}
    environ = {"PREEMPTBENCH_POLICY": "random", "PREEMPTBENCH_REFRESH_TOKENS": "16"}
    found = read_settings(table, environ)
    assert (found.policy, found.budget_us, found.refresh_tokens) == ("random", 7, 16)
    assert found.upper_level == 0.9
    assert read_settings(None, {}) == DeploySettings()


@pytest.mark.parametrize(
    ("table", "environ", "said"),
    [
        ({"preemptbench": {"polcy": "fifo"}}, {}, "polcy"),
        ({"preemptbench": {"budget_us": "7"}}, {}, "budget_us"),
        ({"preemptbench": [1]}, {}, "must be an object"),
        ({}, {"PREEMPTBENCH_BUDGET_US": "soon"}, "PREEMPTBENCH_BUDGET_US is 'soon'"),
        ({}, {"PREEMPTBENCH_REFRESH_TOKENS": "0"}, "refresh_tokens is 0"),
        ({}, {"PREEMPTBENCH_UPPER_LEVEL": "1"}, "upper_level is 1.0"),
    ],
)
def test_bad_settings_are_named(table: dict, environ: dict, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(InvalidInput, match=said):
        read_settings(table, environ)


def test_what_cannot_work_is_refused_at_the_start(checkpoint: str) -> None:
    with pytest.raises(UnknownName, match="longest-remaining"):
        chooser_of(policy="longest-remainin")
    with pytest.raises(InvalidInput, match="PREEMPTBENCH_CHECKPOINT"):
        chooser_of(policy="longest-remaining")
    with pytest.raises(InvalidInput, match="fallback 'shortest-remaining' reads a signal"):
        chooser_of(fallback="shortest-remaining")
    with pytest.raises(InvalidInput, match="cannot be read"):
        chooser_of(checkpoint + "-absent")


def test_a_model_the_checkpoint_does_not_know(age_km: AgeKm) -> None:
    assert known_model(age_km, "/models/served") == MODEL
    both = AgeKmSettings().fit(
        training_set(synthetic_runs(num_prompts=2) + synthetic_runs(num_prompts=2, model="b"))
    )
    assert known_model(both, "b") == "b"
    with pytest.raises(InvalidInput, match="trained on b, synthetic/model; the engine serves 'c'"):
        known_model(both, "c")


# --- choices


@pytest.mark.parametrize("name", [n.replace("(depth)", "(0.5)") for n in list_policies()])
def test_lazy_columns_score_as_whole_views(name: str, checkpoint: str) -> None:
    """The columns that a policy reads one by one are those of RunningViews."""
    reads = get_policy(name).reads_signal
    chooser = chooser_of(checkpoint if reads else "", policy=name)
    running = requests(5, 90, 40, 150)
    for request in running:
        chooser.arrived(request, 3.0)
    if chooser.estimates is not None:
        chooser.estimates.refresh(running, chooser.arrived)
    views = chooser._views(running, blocks)
    whole = RunningViews(*views)
    policy = get_policy(name)
    assert np.array_equal(policy.score(views), policy.score(whole))
    by_rows = from_rows(name, policy.row) if policy.row is not None else policy
    assert np.array_equal(by_rows.score(views), policy.score(whole))
    np.testing.assert_array_equal(views.row(1), whole.row(1))  # NaN equals NaN here


def test_answers_are_the_predictors_at_the_stride_counted_down(
    age_km: AgeKm, checkpoint: str
) -> None:
    chooser = chooser_of(checkpoint, refresh_tokens=16)
    running = requests(0, 15, 16, 37)
    chooser.choose(running, blocks)
    views = chooser._views(running, blocks)
    asked = [SignalRequest("", "", "", "", "", "", MODEL, 10, 200)] * 4
    at_stride = age_km.remaining(asked, np.array([0, 0, 16, 32]))
    assert np.array_equal(views.remaining, np.maximum(1.0, at_stride - [0, 15, 0, 5]))
    calls = chooser.counters.predictor_calls
    chooser.choose(running, blocks)
    assert chooser.counters.predictor_calls == calls  # all answers were fresh


def test_state_is_forgotten_at_the_end_and_recompute_is_counted(checkpoint: str) -> None:
    chooser = chooser_of(checkpoint)
    running = requests(30, 50)
    chooser.choose(running, blocks)
    chooser.preempted(running[1], 60)
    running[1].num_computed_tokens = 40
    chooser.planned({"r1": 40}, {"r1": running[1]})
    running[1].num_computed_tokens = 70
    chooser.planned({"r1": 30}, {"r1": running[1]})
    running[1].num_computed_tokens = 71
    chooser.planned({"r1": 1}, {"r1": running[1]})
    assert chooser.counters.recomputed_tokens == 60
    assert (chooser.counters.preemptions, chooser.counters.steps) == (1, 3)
    for request in running:
        chooser.ended(request.request_id)
    assert not chooser.tracked
    assert not chooser._returning


class Broken(AgeKm):
    """A predictor whose next answers are given, or raised, in so many seconds."""

    answer: float | Exception = math.nan
    clock_s = 0.0
    takes_s = 0.0

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        self.clock_s += self.takes_s
        if isinstance(self.answer, Exception):
            raise self.answer
        return np.full(len(requests), self.answer)


def broken(age_km: AgeKm, **settings: object) -> tuple[Chooser, Broken]:
    predictor = Broken(age_km.provenance, age_km.curves)
    chooser = chooser_of(**settings)
    chooser.policy = get_policy("longest-remaining")
    chooser.estimates = Estimates(
        predictor, MODEL, chooser.settings, chooser.counters, lambda: predictor.clock_s
    )
    return chooser, predictor


@pytest.mark.parametrize("answer", [math.nan, math.inf, 0.5, -3.0])
def test_an_unsound_answer_leaves_the_choice_to_lifo(
    answer: float, age_km: AgeKm, caplog: pytest.LogCaptureFixture
) -> None:
    chooser, predictor = broken(age_km)
    predictor.answer = answer
    with caplog.at_level(logging.WARNING):
        assert [chooser.choose(requests(9, 80, 30), blocks) for _ in range(3)] == [2, 2, 2]
    assert chooser.counters.fallback_unsound == chooser.counters.fallbacks == 3
    assert len(caplog.records) == 1


def test_a_predictor_that_raises_is_counted_and_said_once(
    age_km: AgeKm, caplog: pytest.LogCaptureFixture
) -> None:
    chooser, predictor = broken(age_km, fallback="fifo")
    predictor.answer = RuntimeError("no weights")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            chooser.prepare(requests(9, 80), 0)
            assert chooser.choose(requests(9, 80), blocks) == 0
    assert chooser.counters.fallback_error == 3
    assert [r.message for r in caplog.records if "RuntimeError: no weights" in r.message]
    assert len(caplog.records) == 1


def test_a_slow_predictor_costs_a_bounded_share_of_time(age_km: AgeKm) -> None:
    """Longer than the budget for one call: the call is followed by twenty times its own rest."""
    chooser, predictor = broken(age_km, budget_us=1000)
    predictor.answer, predictor.takes_s = 50.0, 0.1
    running = requests(*range(0, 2000, 100))
    in_predictor_s = 0.0
    for _ in range(1000):
        before_s = predictor.clock_s
        chooser.prepare(running, 0)
        chooser.choose(running, blocks)
        in_predictor_s += predictor.clock_s - before_s
        for request in running:
            request.num_output_tokens += 64
        predictor.clock_s += 0.01
    assert chooser.counters.fallback_late > 900
    assert in_predictor_s <= predictor.clock_s / 20


def test_a_budget_is_for_the_step_and_answers_accumulate(age_km: AgeKm) -> None:
    chooser, predictor = broken(age_km, budget_us=1000)
    predictor.answer, predictor.takes_s = 50.0, 0.0006
    running = requests(*range(0, 2000, 100))  # five chunks: two fit in a step's budget
    positions = []
    for _ in range(4):
        chooser.prepare(running, 0)
        positions.append(chooser.choose(running, blocks))
    assert chooser.counters.fallback_late == 2
    assert chooser.counters.predictor_calls == 5
    oldest_answer = [request.num_output_tokens % 64 for request in running]
    assert positions == [19, 19, *[len(running) - 1 - oldest_answer[::-1].index(0)] * 2]


def test_an_answer_one_refresh_old_still_counts_and_an_older_one_does_not(age_km: AgeKm) -> None:
    chooser, predictor = broken(age_km, budget_us=1000)
    predictor.answer = 50.0
    running = requests(*range(0, 800, 100))
    assert chooser.choose(running, blocks) == 0  # age 0 has most to come: the others count down
    predictor.takes_s = 0.002  # from now on one call, of four requests, uses the budget up
    for expected in ((1, 0), (2, 0), (3, 0)):
        for request in running:
            request.num_output_tokens += 64
        assert chooser.estimates is not None
        chooser.estimates.new_step()
        chooser.choose(running, blocks)
        assert (chooser.counters.old_answers, chooser.counters.fallback_late) == expected
    for request in running:
        request.num_output_tokens += 128
    chooser.estimates.new_step()
    assert chooser.choose(running, blocks) == len(running) - 1
    assert chooser.counters.fallback_late == 1


def test_a_policy_that_raises_or_scores_nan_falls_back() -> None:
    chooser = chooser_of()
    chooser.policy = from_rows("broken", lambda view: 1 / 0)
    assert chooser.choose(requests(1, 2), blocks) == 1
    chooser.policy = from_rows("nan", lambda view: math.nan)
    assert chooser.choose(requests(1, 2), blocks) == 1
    assert (chooser.counters.fallback_error, chooser.counters.fallback_unsound) == (1, 1)


def test_an_ample_pool_costs_no_prediction(checkpoint: str) -> None:
    chooser = chooser_of(checkpoint)
    chooser.prepare(requests(9, 80), chooser_module.PREPARE_BLOCKS * 2)
    assert chooser.counters.predictor_calls == 0
    chooser.prepare(requests(9, 80), chooser_module.PREPARE_BLOCKS * 2 - 1)
    assert chooser.counters.predictor_rows == 2


# --- progress


@pytest.mark.parametrize("told", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("vocabulary", [2, 9, 150_000])
@pytest.mark.parametrize("stride", [1, 3, 8, 100])
def test_visible_progress_is_the_trackers(vocabulary: int, stride: int, told: float) -> None:
    """Fed in pieces of any size, it closes the records that the tracker does; a token that nobody
    told of leaves its record without entropy and log-probability."""
    rng = keyed_generator(vocabulary, "visible", stride)
    tokens = rng.integers(0, vocabulary, 400).tolist()
    drawn = np.where(rng.random((400, 1)) < told, rng.random((400, 2)), math.nan)
    tracker = ProgressTracker(stride, 0, 1)
    for token, (entropy, logprob) in zip(tokens, drawn.tolist(), strict=True):
        tracker.update(token, "", entropy, logprob)
    wanted = np.array(tracker.records)
    visible = VisibleProgress(stride, 0, 1)
    for number, (entropy, logprob) in enumerate(drawn.tolist()):
        if entropy == entropy:
            visible.tell(number, [(entropy, logprob)])
        if rng.random() < 0.05 or number == 399:
            found = visible.read(tokens[: number + 1], number + 1)
            assert len(found) == (number + 1) // stride
    fields = list(type(tracker.records[0])._fields)
    for index, name in enumerate(fields):
        if name in UNSEEN_FIELDS:
            assert np.isnan(found[:, index]).all()
        else:
            assert np.array_equal(found[:, index], wanted[:, index], equal_nan=True), name
    missing = np.isnan(found[:, fields.index(SAMPLED_FIELDS[0])])
    assert missing.all() if told == 0.0 else not (told == 1.0 and missing.any())


@given(st.lists(st.floats(-12.0, 12.0), min_size=2, max_size=30), st.data())
def test_the_entropy_of_what_is_listed_is_a_lower_bound(
    logits: list[float], data: st.DataObject
) -> None:
    """Exact with the whole vocabulary listed, never above it, rising with what is listed."""
    scores = np.array(logits)
    logprobs = scores - np.logaddexp.reduce(scores)
    exact = float(-(np.exp(logprobs) * logprobs).sum())
    drawn = data.draw(st.integers(0, len(logits) - 1))
    ranked = np.sort(logprobs)[::-1]
    given_drawn = logprobs[[drawn]]
    found = [
        float(entropy_of_listed(ranked[None, :count], given_drawn)[0])
        for count in range(len(logits) + 1)
    ]
    assert math.isnan(found[0])
    assert found[-1] == pytest.approx(exact, abs=1e-9)
    assert all(a <= b + 1e-9 for a, b in zip(found[1:], [*found[2:], exact], strict=True))


def test_a_requests_signals_do_not_depend_on_who_runs_beside_it() -> None:
    """A batch lists as many log-probabilities as its hungriest request asked for."""
    logprobs = np.log(np.array([[0.1, 0.6, 0.2, 0.1]], dtype=np.float32))  # drawn, then likeliest
    for width in (3, 4):
        entropy, drawn = signals_of(logprobs[:, :width], 2)
        assert drawn[0] == pytest.approx(math.log(0.1))
        parts = np.array([0.6, 0.2, 0.1, 0.1])  # the two listed, the drawn one, the rest
        assert entropy[0] == pytest.approx(-(parts * np.log(parts)).sum(), rel=1e-6)
    assert np.isnan(signals_of(logprobs, 0)[0]).all()
    assert signals_of(logprobs, -1)[0][0] == pytest.approx(signals_of(logprobs, 3)[0][0])


def test_sampling_reaches_the_predictor_and_its_absence_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two requests alike but for what their tokens were drawn from get different answers."""
    features = ("age", "prompt_tokens", "last_mean_entropy", "mean_mean_logprob")
    settings = GbmHazardSettings(features=features, boosting=BoostingSettings(num_trees=20))
    settings.fit(training_set(synthetic_runs())).save_pretrained(tmp_path / "gbm")
    with caplog.at_level(logging.WARNING):
        chooser = chooser_of(str(tmp_path / "gbm"))
        assert not caplog.records  # nothing it reads is hidden from every request
        for _ in range(3):
            chooser.unsampled()
    assert [record.getMessage() for record in caplog.records] == [
        "a request asks for no log-probabilities: last_mean_entropy, mean_mean_logprob are missing "
        "for it; counted from now on, not said again"
    ]
    assert chooser.counters.without_logprobs == 3
    assert chooser.reads_sampling
    running = requests(64, 64)
    assert chooser.estimates is not None
    for request, entropy in zip(running, (0.5, 1.5), strict=True):
        visible = chooser.estimates.visible(chooser.arrived(request))
        visible.tell(0, [(entropy, -0.5)] * 64)
    chooser.choose(running, blocks)
    young, old = chooser._views(running, blocks).remaining.tolist()
    assert young > old  # in these runs, entropy rises towards the end


# --- counters and log


def test_counters_as_prometheus_text(tmp_path: Path) -> None:
    chooser = chooser_of(metrics=str(tmp_path / "metrics.prom"))
    chooser.choose(requests(1, 2), blocks)
    chooser.report()
    lines = (tmp_path / "metrics.prom").read_text(encoding="utf-8").splitlines()
    assert 'preemptbench_decisions_total{policy="lifo"} 1' in lines
    assert len([line for line in lines if line.startswith("# TYPE")]) == 15
    assert "2 preemptions in 9 steps" in Counters(preemptions=2, steps=9).line("lifo")
    assert json.loads(json.dumps(Counters().as_dict()))["steps"] == 0


def test_metrics_that_cannot_be_written_stop_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    chooser = chooser_of(metrics=str(tmp_path / "file" / "metrics.prom"))
    with caplog.at_level(logging.WARNING):
        chooser.report()
        chooser.report()
    assert sum("counters cannot be written" in r.message for r in caplog.records) == 1


# --- where it is loaded


@pytest.mark.parametrize("version", ["0.33.0", "0.15.1", "0.27"])
def test_known_series_are_taken(version: str) -> None:
    check_version(version)


def test_the_policy_read_tells_in_the_newest_series_only() -> None:
    assert policy_reads_tell("0.33.0")
    assert not any(policy_reads_tell(old) for old in ("0.15.1", "0.20.2", "0.27.1", "0.330.0"))


@pytest.mark.parametrize("version", ["0.34.0", "0.3.3", "0.330.1", "1.0"])
def test_other_series_are_refused_by_name(version: str) -> None:
    with pytest.raises(InvalidInput, match=f"vLLM {version} is not one of 0.15, 0.20, 0.27, 0.33"):
        check_version(version)


def test_a_serving_engine_loads_nothing_heavy() -> None:
    """Beyond numpy and safetensors only numba (which loads scipy itself), where it is installed."""
    code = "import integrations.chooser, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    heavy = {"torch", "pyarrow", "lightgbm", "sklearn", "transformers", "matplotlib"}
    assert not loaded & heavy
    assert "serving_sim.engine" not in loaded


def test_trees_answer_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numpy twins answer as the compiled walk does; 1e-12: they add leaves in another order."""
    settings = GbmHazardSettings(boosting=BoostingSettings(num_trees=12))
    fitted = settings.fit(training_set(synthetic_runs()))
    asked = [SignalRequest("", "", "", "", "", "", MODEL, 10 + i, 200) for i in range(9)]
    ages = np.arange(9) * 11
    compiled = fitted.remaining(asked, ages)
    monkeypatch.setattr(trees, "numba", None)
    np.testing.assert_allclose(fitted.remaining(asked, ages), compiled, rtol=1e-12)
