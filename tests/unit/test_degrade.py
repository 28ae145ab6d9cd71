"""The degradation ladder: every axis obeys the law of signals and does what its name says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import kendalltau

from contracts.conformance import check_signal
from contracts.errors import InvalidInput, UnknownName
from contracts.policy import FloatArray
from contracts.signals import RemainingSignal, RoutedSignal, build_grid, signal_request
from eval.degradation import STANDARD_LADDER, degradation_ladder
from eval.signal_quality import held_out
from eval.signal_sources import SignalSource, check_pairing, split_truth
from oracles.degrade import AXES, degrade, label, parse_degradations
from oracles.empirical import Clairvoyant, leave_one_out
from tests.synthetic_runs import make_run, synthetic_runs
from training.crossfit import crossfit

RUNS = synthetic_runs(num_prompts=300, repeats=1, seed=4, cap_tokens=2000)
REQUESTS = [signal_request(run) for run in RUNS]
LENGTHS = np.array([run.output_tokens for run in RUNS])
ROWS = held_out(RUNS, num_sets=400)


def _degraded(spec: str, seed: int = 0) -> RemainingSignal:
    _, steps = parse_degradations(f"| {spec}")
    return degrade(Clairvoyant(RUNS), steps, REQUESTS, ROWS.single_age, seed)


def _answers(spec: str, ages: np.ndarray | None = None, seed: int = 0) -> FloatArray:
    at = np.zeros(len(RUNS), dtype=np.int64) if ages is None else ages
    return _degraded(spec, seed).remaining(REQUESTS, at)


@pytest.mark.parametrize("rung", [*STANDARD_LADDER, "missing(0.5, 64)", "noise(1) | stale(16)"])
def test_every_rung_obeys_the_law_of_signals(rung: str) -> None:
    runs = [run for run in RUNS if run.output_tokens < run.max_new_tokens][:40]
    _, steps = parse_degradations(f"| {rung}")
    for base in (Clairvoyant(runs), leave_one_out(synthetic_runs(repeats=2), 0)):
        signal = degrade(
            base,
            steps,
            [signal_request(run) for run in runs],
            np.zeros(len(runs), dtype=np.int64),
        )
        check_signal(signal, runs)
        assert signal.name == f"{base.name} | {rung}"


def test_the_standard_ladder_walks_every_axis() -> None:
    walked = {step.axis for rung in STANDARD_LADDER for step in parse_degradations(f"|{rung}")[1]}
    assert walked == set(AXES)


def test_noise_is_two_sided_and_the_same_all_life_long() -> None:
    wide = [replace(request, max_tokens=10**9) for request in REQUESTS]
    _, steps = parse_degradations("| noise(0.5)")
    signal = degrade(Clairvoyant(RUNS), steps, wide, LENGTHS * 0)
    ratio = np.log(signal.remaining(wide, LENGTHS * 0) / LENGTHS)
    ratio = ratio[LENGTHS > 50]  # short ones are held at 1 token
    # 200-odd normal draws: mean within 4 standard errors of 0, deviation within 15 %
    assert abs(ratio.mean()) < 4 * 0.5 / math.sqrt(len(ratio))
    assert ratio.std() == pytest.approx(0.5, rel=0.15)
    later = np.log(signal.remaining(wide, LENGTHS // 2) / (LENGTHS - LENGTHS // 2))
    held = (LENGTHS > 400) & (later > -5)
    np.testing.assert_allclose(
        later[held], np.log(signal.remaining(wide, LENGTHS * 0) / LENGTHS)[held], rtol=1e-9
    )
    assert not np.array_equal(_answers("noise(0.5)"), _answers("noise(0.5)", seed=1))


def test_wander_forgets_and_noise_does_not() -> None:
    run = make_run(prompt="p", prompt_id="p", natural_tokens=100_000, cap_tokens=200_000)
    request, ages = replace(signal_request(run), max_tokens=10**9), np.arange(0, 90_000, 32)
    asked = [request] * len(ages)
    _, steps = parse_degradations("| wander(0.3, 256)")
    signal = degrade(Clairvoyant([run]), steps, asked, ages)
    z = np.log(signal.remaining(asked, ages) / (100_000 - ages)) / 0.3
    # about 350 independent stretches: a standard deviation of 1 within 15 %, a mean near 0
    assert z.std() == pytest.approx(1.0, rel=0.15)
    assert abs(z.mean()) < 0.25
    lag = np.corrcoef(z[:-8], z[8:])[0, 1]  # 8 x 32 tokens apart: the memory
    assert lag == pytest.approx(math.exp(-1), abs=0.12)
    alone = signal.remaining([request], np.array([640]))
    assert alone[0] == signal.remaining(asked, ages)[20]


@pytest.mark.parametrize("tau", [0.9, 0.5, 0.0, -0.5])
def test_swap_reaches_its_tau_and_keeps_the_distribution(tau: float) -> None:
    runs = synthetic_runs(num_prompts=1500, repeats=1, seed=5, cap_tokens=100_000)
    requests = [signal_request(run) for run in runs]
    base, ages = Clairvoyant(runs), np.zeros(len(runs), dtype=np.int64)
    _, steps = parse_degradations(f"| swap({tau})")
    truth = base.remaining(requests, ages)
    swapped = degrade(base, steps, requests, ages).remaining(requests, ages)
    # the standard error of tau over 1,500 rows is below 0.02
    assert kendalltau(truth, swapped).statistic == pytest.approx(tau, abs=0.05)
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(swapped, share) == pytest.approx(np.quantile(truth, share), rel=0.15)


def test_bias_keeps_the_order_and_one_sided_noise_keeps_its_side() -> None:
    truth = _answers("bias(1)")
    assert np.array_equal(truth, LENGTHS)
    np.testing.assert_allclose(_answers("bias(0.5)"), np.maximum(1.0, truth / 2))
    assert (_answers("optimistic(1)") <= truth).all()
    assert (_answers("pessimistic(1)") >= truth).all()
    assert (_answers("noise(1)") > truth).any() and (_answers("noise(1)") < truth).any()


def test_buckets_leave_that_many_answers() -> None:
    runs = [replace(run, max_new_tokens=4096) for run in RUNS]
    requests = [signal_request(run) for run in runs]
    for count in (1, 2, 5):
        _, steps = parse_degradations(f"| buckets({count})")
        answers = degrade(Clairvoyant(runs), steps, requests, LENGTHS * 0).remaining(
            requests, LENGTHS * 0
        )
        assert 1 <= len(set(answers.tolist())) <= count
    assert np.allclose(answers[LENGTHS < 5], 4096**0.1)


def test_stale_and_refresh_differ_in_counting_down() -> None:
    ages = LENGTHS // 2
    old = np.maximum(0, ages - 16)
    np.testing.assert_array_equal(_answers("stale(16)", ages), LENGTHS - old)
    # the clairvoyant signal counts down by itself: refreshing it late changes nothing
    np.testing.assert_array_equal(_answers("refresh(32)", ages), np.maximum(1, LENGTHS - ages))


def test_missing_answers_are_the_cap_for_about_their_share() -> None:
    absent = _answers("missing(0.3)") == 2000
    capped = LENGTHS == 2000
    # 300 runs: four standard errors of a share of 0.3 are 0.106
    assert absent[~capped].mean() == pytest.approx(0.3, abs=0.106)
    early = _answers("missing(0.3, 8)", LENGTHS * 0) == 2000
    late = _answers("missing(0.3, 8)", LENGTHS // 2) == 2000 - LENGTHS // 2
    assert (early != late)[LENGTHS > 100].any()


def test_the_ladder_reports_what_it_achieved() -> None:
    scores = {row.signal: row for row in degradation_ladder(Clairvoyant(RUNS), ROWS)}
    best, anti = scores["clairvoyant"], scores["clairvoyant | anti"]
    assert best.kendall_tau == 1.0 and best.log_mae == 0.0 and best.concordance == 1.0
    assert anti.concordance < 0.2 < 0.8 < scores["clairvoyant | swap(0.9)"].concordance
    noise = [scores[f"clairvoyant | noise({s})"] for s in ("0.25", "0.5", "1", "2")]
    assert np.all(np.diff([row.log_mae for row in noise]) > 0)
    assert np.all(np.diff([row.concordance for row in noise]) < 0)
    swaps = [scores[f"clairvoyant | swap({t})"].kendall_tau for t in ("0.9", "0.7", "0.5", "0.3")]
    # 300 rows, each once: the standard error of tau is about 0.04
    np.testing.assert_allclose(swaps, [0.9, 0.7, 0.5, 0.3], atol=0.12)
    assert abs(scores["clairvoyant | swap(0)"].concordance - 0.5) < 0.06


def test_specs_are_read_back_as_they_are_written() -> None:
    base, steps = parse_degradations("oracle-4|noise( 0.50 )| missing(0.1)|anti")
    assert base == "oracle-4"
    assert [label(step) for step in steps] == ["noise(0.5)", "missing(0.1)", "anti"]
    for bad, said in (
        ("x | nois(1)", "did you mean 'noise'"),
        ("x | noise", "not of the form noise"),
        ("x | noise(1, 2)", "not of the form noise"),
        ("x | noise(1", "not of the form noise"),
        ("x | stale(1.5)", "not of the form stale"),
        ("x | noise(-1)", "sigma must be at least 0"),
        ("x | swap(2)", "between -1 and 1"),
        ("x | missing(2)", "between 0 and 1"),
        ("x | buckets(0)", "count must be at least 1"),
        ("x |", "unknown degradation"),
    ):
        with pytest.raises(InvalidInput, match=said):
            parse_degradations(bad)
    assert issubclass(UnknownName, InvalidInput)


def test_a_signal_source_carries_its_degradations() -> None:
    runs = synthetic_runs(repeats=3)
    truth, others = split_truth(runs, 0)
    source = SignalSource.parse("oracle-2 |noise(0.5)|stale( 8 )")
    assert source.name == "oracle-2 | noise(0.5) | stale(8)"
    signal = source.build(truth, others, seed=3)
    assert signal is not None and signal.name == source.name
    requests = [signal_request(run) for run in truth]
    check_pairing(requests, build_grid(signal, requests))
    seer = SignalSource.parse("clairvoyant | swap(0.5)").build(truth, others)
    assert seer is not None and seer.clairvoyant
    check_pairing(requests, build_grid(seer, requests))
    with pytest.raises(InvalidInput, match="no signal to degrade"):
        SignalSource.parse("none | noise(1)")


def test_a_degraded_cross_fit_still_leans_on_its_own_fold_only() -> None:
    runs = synthetic_runs(repeats=2)
    signal = crossfit(runs, "age-km", num_folds=2)
    assert isinstance(signal, RoutedSignal)
    requests = [signal_request(run) for run in runs]
    _, steps = parse_degradations("| noise(0.5)")
    noisy = degrade(signal, steps, requests, np.zeros(len(runs), dtype=np.int64))
    check_pairing(requests, build_grid(noisy, requests, stride=64))


def test_shrink_draws_answers_to_what_is_usual_at_that_age() -> None:
    runs = synthetic_runs(num_prompts=300, repeats=1, seed=5, cap_tokens=100_000)
    requests = [signal_request(run) for run in runs]
    base, zero = Clairvoyant(runs), np.zeros(len(runs), dtype=np.int64)
    lengths = np.array([run.output_tokens for run in runs])
    middle = int(np.median(lengths))
    alive = np.flatnonzero(lengths > middle)
    asked, ages = [requests[i] for i in alive], np.full(len(alive), middle)
    truth = np.log(base.remaining(asked, ages))

    def shrunk(share: float) -> np.ndarray:
        _, steps = parse_degradations(f"| shrink({share})")
        return np.log(degrade(base, steps, requests, zero).remaining(asked, ages))

    np.testing.assert_allclose(shrunk(1.0), truth, rtol=1e-9)
    # the usual is the mean over those still running at that age, which they all are
    np.testing.assert_allclose(shrunk(0.0), truth.mean(), rtol=1e-9)
    np.testing.assert_allclose(
        shrunk(0.25), truth.mean() + 0.25 * (truth - truth.mean()), rtol=1e-9
    )


def test_beyond_all_that_is_known_shrink_keeps_the_answer() -> None:
    run = make_run(prompt="p", prompt_id="p", natural_tokens=900, cap_tokens=1000)
    short = make_run(prompt="q", prompt_id="q", natural_tokens=90, cap_tokens=1000)
    _, steps = parse_degradations("| shrink(0)")
    base = Clairvoyant([run, short])
    signal = degrade(base, steps, [signal_request(short)], np.zeros(1, dtype=np.int64))
    asked, ages = [signal_request(run)] * 2, np.array([0, 90])
    assert signal.remaining(asked, ages).tolist() == pytest.approx([90.0, 810.0])
