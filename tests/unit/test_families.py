"""What each predictor family promises of its own: its law, its censoring, its refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contracts.conformance import check_signal
from contracts.errors import InvalidInput
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun, ProgressRecord
from contracts.signals import ProgressTrack, SignalRequest, signal_request, text_track
from eval.signal_quality import SignalQuality, held_out, score_signal
from predictors.age_km import AgeKmSettings
from predictors.base import Predictor
from predictors.boosting import BoostingSettings
from predictors.features import FEATURE_NAMES
from predictors.fused import Fused, FusedSettings
from predictors.gbm_rank import GbmRank, GbmRankSettings, co_running_sets
from predictors.gru_progress import GruProgress, GruProgressSettings
from predictors.log_t import LogT, LogTSettings, log_t_losses
from predictors.neural import Scaler, new_perceptron, perceptron
from predictors.past_future import PastFutureSettings
from predictors.text_progress import TextProgressSettings, bag_of_words
from predictors.torch_loop import STATE_FILE, LoopSettings
from tests.hidden_runs import with_hidden
from tests.quick_families import FEW_TREES, QUICK
from tests.synthetic_runs import STRIDE, make_run, synthetic_runs
from training.evaluate import LeaveOneOut
from training.rows import training_set

RUNS = with_hidden(synthetic_runs(num_prompts=80))
TRAIN, TEST = RUNS[:180], RUNS[180:]
LEARNED = {
    "fused": FusedSettings(num_landmarks=6, boosting=FEW_TREES),
    "gbm-rank": GbmRankSettings(num_sets=400, boosting=FEW_TREES),
    "gru-progress": GruProgressSettings(
        num_landmarks=6, hidden=12, loop=LoopSettings(num_epochs=30, learning_rate=0.02)
    ),
    "log-t": LogTSettings(num_landmarks=6, loop=LoopSettings(num_epochs=14, learning_rate=0.01)),
}


@pytest.fixture(scope="module")
def scores() -> dict[str, SignalQuality]:
    """The held-out quality of age-km and of each family that can learn this law."""
    rows = held_out(TEST, num_sets=200)
    training = training_set(TRAIN)
    fits = {"age-km": AgeKmSettings()} | LEARNED
    return {name: score_signal(fit.fit(training), rows) for name, fit in fits.items()}


@pytest.mark.parametrize("family", sorted(LEARNED))
def test_what_is_learned_beats_what_is_not(family: str, scores: dict[str, SignalQuality]) -> None:
    """Entropy rises towards the end of these runs: a third of age-km's log-MAE goes, and more."""
    assert scores[family].log_mae < 0.67 * scores["age-km"].log_mae
    assert scores[family].concordance > scores["age-km"].concordance + 0.15


@pytest.mark.parametrize("family", sorted(set(QUICK) - {"age-km", "countdown", "gbm-hazard"}))
def test_the_same_seed_gives_the_same_weights(family: str) -> None:
    training = training_set(RUNS[:60])
    ours, again = (QUICK[family].fit(training, seed=3).tensors() for _ in range(2))
    assert ours.keys() == again.keys()
    assert all(ours[name].tobytes() == again[name].tobytes() for name in ours)


def _alike(cap_tokens: int) -> list[DecodeRun]:
    """400 runs, two of each prompt, whose lengths are log-normal whatever the prompt; 0.38 of them
    pass 60 tokens."""
    rng = keyed_generator(0, "alike")
    natural = np.ceil(np.exp(3.9 + 0.6 * rng.standard_normal(400))).astype(int)
    return [
        make_run(
            prompt=f"Say {i // 2}.",
            prompt_id=f"{i // 2}",
            repeat=i % 2,
            natural_tokens=int(n),
            cap_tokens=cap_tokens,
        )
        for i, n in enumerate(natural)
    ]


@pytest.mark.parametrize("family", ["past-future", *sorted(LEARNED)])
def test_a_cap_does_not_make_answers_short(family: str) -> None:
    """With 38 % of the training runs cut at 60 tokens the mean answer at age 0 is within 6 % of the
    mean of min(length, 60) (its standard error is 1.7 %, the rest is fitting); with the cut runs
    dropped, it is shorter by 7 points or more."""
    runs = _alike(60)
    enough = FusedSettings(num_landmarks=4, boosting=BoostingSettings(num_trees=120))
    settings = (LEARNED | {"past-future": PastFutureSettings(), "fused": enough})[family]
    requests, start = [signal_request(run) for run in runs], np.zeros(len(runs), dtype=np.int64)
    truth = np.mean([run.output_tokens for run in runs])

    def bias(train: list[DecodeRun]) -> float:
        return float(
            settings.fit(training_set(train)).remaining(requests, start).mean() / truth - 1
        )

    whole = bias(runs)
    assert abs(whole) < 0.06
    assert bias([run for run in runs if run.event_observed]) < whole - 0.07


def test_past_future_without_cuts_is_age_km_and_a_window_forgets() -> None:
    runs = [run for run in RUNS if run.event_observed]
    training = training_set(runs)
    requests, ages = [signal_request(run) for run in runs[:40]], np.arange(40, dtype=np.int64)
    ours = PastFutureSettings().fit(training).remaining(requests, ages)
    np.testing.assert_array_equal(ours, AgeKmSettings().fit(training).remaining(requests, ages))
    last = PastFutureSettings(window_runs=30).fit(training).remaining(requests, ages)
    expected = PastFutureSettings().fit(training_set(runs[-30:])).remaining(requests, ages)
    np.testing.assert_array_equal(last, expected)


def test_past_future_leaves_out_what_is_in_flight() -> None:
    """A run aborted at 20 tokens is no finished length, and no censored one either."""
    runs = [make_run(prompt=f"q {i}", prompt_id=f"{i}", natural_tokens=50) for i in range(10)]
    aborted = replace(
        make_run(prompt="late", prompt_id="late", natural_tokens=20),
        event_observed=False,
        finish_reason="abort",
    )
    request = [signal_request(runs[0])]
    signal = PastFutureSettings().fit(training_set([*runs, aborted]))
    assert signal.remaining(request, np.array([30]))[0] == 20.0


def test_log_t_recovers_a_law_from_cut_runs() -> None:
    """Lengths exp(3 + 0.5 t) with half of them cut: location and scale come back within 0.1, three
    standard errors of 600 runs at this censoring."""
    rng = keyed_generator(0, "log-t-law")
    natural = np.ceil(np.exp(3.0 + 0.5 * rng.standard_t(3.5, 600))).astype(int)
    runs = [
        make_run(
            prompt=f"q {i}", prompt_id=f"{i}", natural_tokens=int(min(n, 10_000)), cap_tokens=20
        )
        for i, n in enumerate(natural)
    ]
    assert 0.4 < np.mean([not run.event_observed for run in runs]) < 0.6
    loop = LoopSettings(num_epochs=60, learning_rate=0.02)
    settings = LogTSettings(num_landmarks=0, features=("log_age",), hidden=(), loop=loop)
    location, scale = settings.fit(training_set(runs)).located(
        [signal_request(runs[0])], np.array([0])
    )
    assert abs(location[0] - 3.0) < 0.1 and abs(scale[0] - 0.5) < 0.1


def test_the_log_t_loss_is_the_negative_log_likelihood_and_its_gradient_its_slope() -> None:
    import torch
    from scipy.stats import t as student

    heads = torch.tensor([[1.0, 0.3], [2.0, -0.4], [0.5, 1.0]], dtype=torch.float64)
    log_left = torch.tensor([1.5, 2.5, 4.0], dtype=torch.float64)
    observed = torch.tensor([True, False, False])

    def losses(values: torch.Tensor) -> torch.Tensor:
        batch = {"inputs": values, "log_left": log_left, "observed": observed}
        return log_t_losses(3.5)(torch.nn.Identity(), batch)

    scale = 0.05 + np.logaddexp(0.0, heads[:, 1].numpy())
    law = student(3.5, heads[:, 0].numpy(), scale)
    expected = np.where(observed, -law.logpdf(log_left), -law.logsf(log_left))
    np.testing.assert_allclose(losses(heads).numpy(), expected, rtol=1e-10)
    assert torch.autograd.gradcheck(losses, heads.requires_grad_())


def test_inference_in_numpy_equals_torch() -> None:
    """Perceptron and GRU: the same numbers as torch in double precision."""
    import torch

    module = new_perceptron((5, 7, 3)).double()
    torch.nn.init.normal_(module[-1].weight)  # type: ignore[index]
    layers = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    rows = keyed_generator(0, "rows").standard_normal((11, 5))
    expected = module(torch.as_tensor(rows)).detach().numpy()
    np.testing.assert_allclose(perceptron(layers, rows), expected, rtol=1e-12)

    signal = QUICK["gru-progress"].fit(training_set(TRAIN[:60]))
    assert isinstance(signal, GruProgress)
    cell = torch.nn.GRUCell(12, 8).double()
    cell.load_state_dict(
        {
            name.removeprefix("cell."): torch.as_tensor(array)
            for name, array in signal.weights.items()
            if name.startswith("cell.")
        }
    )
    records = keyed_generator(0, "records").uniform(0, 1, (4, 6))
    state = np.tanh(keyed_generator(0, "state").standard_normal((4, 8)))
    inputs = torch.as_tensor(signal.scalers["record"](records))
    expected = cell(inputs, torch.as_tensor(state)).detach().numpy()
    np.testing.assert_allclose(signal.next_state(state, records), expected, rtol=1e-10)


def test_a_gru_state_fed_record_by_record_is_the_grid() -> None:
    """What an engine does, one update a record, answers as the batch over all ages does."""
    signal = QUICK["gru-progress"].fit(training_set(TRAIN[:60]))
    assert isinstance(signal, GruProgress)
    request = next(signal_request(run) for run in TEST if run.output_tokens > 10 * STRIDE)
    assert request.progress is not None
    ages = np.arange(0, 10 * STRIDE, STRIDE)
    batch = signal.residual_survival([request] * len(ages), ages)
    from predictors.features import PROMPT_FEATURES, feature_columns, feature_matrix

    prompt = feature_matrix([request], np.array([0]))[:, feature_columns(PROMPT_FEATURES)]
    state = signal.first_state(prompt)
    for index, age in enumerate(ages):
        np.testing.assert_allclose(
            signal.survival_of(state, np.array([age]))[0], batch[index], rtol=1e-9
        )
        state = signal.next_state(state, request.progress.values[index : index + 1])


def test_gbm_rank_orders_by_score_and_says_longer_at_every_horizon() -> None:
    signal = LEARNED["gbm-rank"].fit(training_set(TRAIN))
    assert isinstance(signal, GbmRank)
    requests = [signal_request(run) for run in TEST]
    ages = np.array([run.output_tokens // 2 for run in TEST], dtype=np.int64)
    order = np.argsort(signal.scores(requests, ages))
    alive = signal.residual_survival(requests, ages)[order]
    assert (np.diff(alive, axis=0) >= -1e-12).all() and alive[-1, 5] > alive[0, 5] + 0.2


def test_running_sets_hold_one_model_and_no_unknown_length() -> None:
    other = synthetic_runs(num_prompts=6, model="other/model")
    aborted = replace(RUNS[0], run_id="x", event_observed=False, finish_reason="abort")
    training = training_set([*RUNS[1:40], *other, aborted])
    usable = np.ones(len(training.requests), dtype=bool)
    seen = set()
    for members, ages in co_running_sets(training, usable, 60, 5, seed=0):
        assert len(set(members.tolist())) == 5
        assert len({training.requests[i].model for i in members.tolist()}) == 1
        assert (ages < training.output_tokens[members]).all()
        seen |= set(members.tolist())
    assert len(training.requests) - 1 not in seen and len(seen) > 40


@pytest.fixture(scope="module")
def fused() -> Fused:
    signal = LEARNED["fused"].fit(training_set(TRAIN))
    assert isinstance(signal, Fused)
    return signal


def test_fused_is_better_than_its_prior_and_than_its_evidence(fused: Fused) -> None:
    """Prompt and run together: 10 % less log-MAE than oracle-2, and than progress alone."""
    rows = held_out(TEST, num_sets=200)
    prior = LeaveOneOut(RUNS)
    both = score_signal(fused.with_prior(prior), rows)
    assert both.log_mae < 0.9 * score_signal(prior, rows).log_mae
    assert both.log_mae < 0.9 * score_signal(fused, rows).log_mae
    assert both.concordance > score_signal(fused, rows).concordance


def test_fused_with_a_prior_is_a_signal_of_both(fused: Fused) -> None:
    prior = LeaveOneOut(RUNS)
    both = fused.with_prior(prior)
    assert both.name == "fused(oracle-2 (ceiling))" and fused.name == "fused"
    assert all(run.run_id in both.source_run_ids for run in RUNS)
    assert "another run" not in both.source_run_ids
    assert fused.source_run_ids == {run.run_id for run in TRAIN}
    check_signal(both, [run for run in TEST if run.output_tokens >= 3 * STRIDE][:5])


class _Point:
    """A prior that only has a mean."""

    name, source_run_ids, clairvoyant = "point", frozenset({"p"}), False

    def remaining(self, requests: Sequence[SignalRequest], ages: np.ndarray) -> np.ndarray:
        return np.full(len(requests), 40.0)


def test_fused_without_trust_is_the_smoothed_prior(fused: Fused) -> None:
    """Trust 0 leaves the prior: one point of 40 tokens, its kernel narrow, answers 40 - age."""
    blind = Fused(fused.evidence, fused.base, trust=0.0, width=0.02).with_prior(_Point())
    requests = [signal_request(run) for run in TEST[:5]]
    ages = np.array([0, 5, 10, 20, 30])
    # cells of total length and of remaining life are 3 % and 20 % wide
    np.testing.assert_allclose(blind.remaining(requests, ages), 40.0 - ages, rtol=0.15)
    late = blind.remaining(requests[:1], np.array([80]))[0]
    assert 1.0 < late < 120.0  # past the point, the tail answers: neither 0 nor the cap


def _with_text(runs: Sequence[DecodeRun]) -> list[DecodeRun]:
    """Runs that count down aloud in their last 24 tokens, and say so."""
    out = []
    for run in runs:
        words = ["thinking"] * max(0, run.output_tokens - 24) + ["finally"] * 24
        out.append(replace(run, text=" ".join(words[-run.output_tokens :]), progress=None))
    return out


def test_text_progress_reads_what_was_written_and_nothing_later() -> None:
    runs = [run for run in _with_text(RUNS) if run.event_observed and run.output_tokens > 60]
    loop = LoopSettings(num_epochs=20, learning_rate=0.01)
    settings = TextProgressSettings(buckets=32, recent_chars=60, loop=loop)
    signal = settings.fit(training_set(runs))
    requests = [signal_request(run) for run in runs[:20]]
    lengths = np.array([run.output_tokens for run in runs[:20]])
    late = signal.remaining(requests, lengths - 2)
    assert np.median(late) < 0.5 * np.median(signal.remaining(requests, lengths - 40))

    age = 48
    for request in requests[:5]:
        assert request.text is not None
        seen = len(request.text.seen(age))
        edited = replace(request.text, text=request.text.text[:seen] + "finally " * 20)
        both = signal.remaining([request, replace(request, text=edited)], np.array([age, age]))
        assert both[0] == both[1]
    assert bag_of_words("", 8).sum() == 0.0


def test_a_text_track_closes_by_stride() -> None:
    track = text_track("abcdefghij", 5, 2)
    assert [track.seen(age) for age in (0, 1, 2, 3, 4, 5, 9)] == [
        "", "", "abcd", "abcd", "abcdefgh", "abcdefgh", "abcdefgh"
    ]  # fmt: skip


def test_an_interrupted_training_resumes_to_the_same_weights(tmp_path: Path) -> None:
    training = training_set(RUNS[:60])

    def fit(num_epochs: int, state_dir: str = "") -> dict[str, np.ndarray]:
        loop = LoopSettings(num_epochs=num_epochs, state_dir=state_dir)
        return LogTSettings(num_landmarks=3, loop=loop).fit(training).tensors()

    straight = fit(6)
    fit(2, str(tmp_path))
    resumed = fit(6, str(tmp_path))
    assert all(resumed[name].tobytes() == straight[name].tobytes() for name in straight)
    assert any((fit(2)[name] != straight[name]).any() for name in straight)
    with pytest.raises(InvalidInput, match="other rows, settings or seed"):
        LogTSettings(num_landmarks=4, loop=LoopSettings(state_dir=str(tmp_path))).fit(training)
    path = tmp_path / STATE_FILE
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InvalidInput, match="delete it"):
        fit(6, str(tmp_path))


def test_bfloat16_trains_to_nearly_the_same_law() -> None:
    """Eight bits of mantissa: answers within 15 % at the median of those of single precision."""
    training = training_set(RUNS[:60])
    answers = []
    for precision in ("no", "bf16"):
        loop = LoopSettings(num_epochs=5, mixed_precision=precision)
        signal = LogTSettings(num_landmarks=3, loop=loop).fit(training)
        answers.append(signal.remaining(training.requests, np.full(60, 8)))
    assert (answers[0] != answers[1]).any()
    assert np.median(np.abs(np.log(answers[0] / answers[1]))) < 0.15


def test_a_tracker_hears_every_epoch_and_changes_nothing() -> None:
    from accelerate import tracking

    heard: list[tuple[int, float]] = []

    class Listener(tracking.GeneralTracker):
        name, requires_logging_directory, main_process_only = "listener", False, True
        tracker = None

        def __init__(self, run_name: str, **_: object) -> None:
            super().__init__()

        def store_init_configuration(self, values: dict[str, object]) -> None:
            assert values["num_epochs"] == 3

        def log(self, values: dict[str, float], step: int, **_: object) -> None:
            heard.append((step, values["held_out_loss"]))

    tracking.register_tracker_class(Listener)
    training = training_set(TRAIN[:60])
    plain = LoopSettings(num_epochs=3)
    quiet, loud = (
        LogTSettings(num_landmarks=3, loop=loop).fit(training).tensors()
        for loop in (plain, replace(plain, tracker="listener"))
    )
    assert [step for step, _ in heard] == [1, 2, 3]
    assert np.isfinite([loss for _, loss in heard]).all()
    assert all(quiet[name].tobytes() == loud[name].tobytes() for name in quiet)
    with pytest.raises(InvalidInput, match="tracker 'pigeon'"):
        LogTSettings(loop=replace(plain, tracker="pigeon")).fit(training)


def test_a_scaler_knows_absent_constant_and_wild_values() -> None:
    nan = float("nan")
    rows = np.array([[1.0, 5.0, nan], [3.0, 5.0, nan]])
    scaled = Scaler.of(rows)(np.array([[1e300, 5.0, nan], [nan, float("inf"), 2.0]]))
    np.testing.assert_array_equal(scaled[0], [8.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    np.testing.assert_array_equal(scaled[1], [0.0, 0.0, 2.0, 1.0, 1.0, 0.0])


_COUNTED = {"age-km", "countdown"}  # they answer with the cap where no run ended
_CUT = with_hidden(
    [run for run in synthetic_runs(num_prompts=60, cap_tokens=12) if not run.event_observed]
)
_BARE = [replace(run, progress=None, progress_stride=None) for run in RUNS[:30]]
_MUTE = [replace(run, prompt=None) for run in _BARE]
_ONE = [run for run in RUNS if run.prompt_id == "p1"]
_ONCE = [run for run in RUNS if run.repeat == 0]
_MIXED = [RUNS[0], replace(RUNS[5], progress_stride=STRIDE * 2)]


@pytest.mark.parametrize(
    ("family", "runs", "says"),
    [
        *((name, _CUT, "end below its cap") for name in sorted(QUICK.keys() - _COUNTED)),
        *(
            (name, _ONE, "at least 2 are needed")
            for name in ("fused", "gbm-rank", "gru-progress", "log-t", "text-progress")
        ),
        ("fused", _BARE, "no training run has progress"),
        ("gru-progress", _BARE, r"strides \(none\)"),
        ("gru-progress", _MIXED, r"strides \[8, 16\]"),
        ("text-progress", _MUTE, "has a prompt or a text"),
        ("fused", _ONCE, "run twice"),
    ],
)  # fmt: skip
def test_unfit_logs_are_refused(family: str, runs: list[DecodeRun], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        QUICK[family].fit(training_set(runs))


def test_log_t_refuses_a_log_without_any_of_its_features() -> None:
    settings = LogTSettings(features=("mean_repetition",))
    with pytest.raises(InvalidInput, match="has any of the features mean_repetition"):
        settings.fit(training_set(_BARE))


@pytest.mark.parametrize("family", sorted(QUICK))
def test_progress_of_nan_is_absent_not_an_answer(family: str) -> None:
    """Records of NaN (an import without entropies) neither break a fit nor an answer."""
    nan = float("nan")
    runs = [
        replace(run, progress=tuple(ProgressRecord(nan, nan, *r[2:]) for r in run.progress))
        for run in RUNS[:90]
        if run.progress is not None
    ]  # fmt: skip
    predictor: Predictor = QUICK[family].fit(training_set(runs))
    requests = [signal_request(run) for run in runs[:10]]
    blank = [
        replace(request, progress=ProgressTrack(STRIDE, np.full((3, 6), nan)))
        for request in requests
    ]
    answers = predictor.remaining([*requests, *blank], np.full(20, 40))
    assert np.isfinite(answers).all()


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: PastFutureSettings(window_runs=0), "window_runs is 0"),
        (lambda: LogTSettings(features=()), "features are empty"),
        (lambda: LogTSettings(hidden=(0,)), "hidden"),
        (lambda: LoopSettings(mixed_precision="int3"), "no or bf16"),
        (lambda: LoopSettings(held_out_share=1.0), "held_out_share is 1.0"),
        (lambda: GbmRankSettings(set_size=1), "set_size is 1"),
        (lambda: GbmRankSettings(features=()), "needs features"),
        (lambda: FusedSettings(features=("age", "prompt_tokens")), "fused features prompt_tokens"),
        (lambda: FusedSettings(features=("age",)), "no progress"),
        (lambda: GruProgressSettings(hidden=0), "hidden is 0"),
        (lambda: TextProgressSettings(buckets=0), "buckets 0"),
    ],
)
def test_settings_check_themselves(build: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        build()


def test_a_gru_refuses_records_of_another_stride() -> None:
    signal = QUICK["gru-progress"].fit(training_set(TRAIN[:60]))
    request = signal_request(TEST[0])
    wide = replace(request, progress=ProgressTrack(2 * STRIDE, np.zeros((2, 6))))
    with pytest.raises(InvalidInput, match="trained on records of 8"):
        signal.remaining([wide], np.array([20]))


def test_log_t_names_its_features_in_the_checkpoint() -> None:
    signal = QUICK["log-t"].fit(training_set(TRAIN[:60]))
    assert isinstance(signal, LogT) and signal.settings()["features"] == list(FEATURE_NAMES)
