"""The nouns: keyed randomness, progress signals against a slow twin, grids, conformance."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import conformance
from contracts.errors import ConformanceError, InvalidInput, unknown_name
from contracts.policy import Policy, RunningView, from_rows, views_from_rows
from contracts.progress import REPETITION_NGRAM, REPETITION_WINDOW_TOKENS, ProgressTracker
from contracts.randomness import keyed_generator, keyed_uniform
from contracts.runs import by_request
from contracts.settings import require, require_at_least
from contracts.signals import SignalRequest, age_rows, build_grid, signal_request
from tests.synthetic_runs import synthetic_runs

RUNS = synthetic_runs(num_prompts=10, repeats=2, seed=5)


def test_keyed_draws_do_not_depend_on_order_or_hash_seed() -> None:
    code = "from contracts.randomness import *; print(keyed_uniform(1, 'x', 'r7', 3), "
    code += "keyed_generator(1, 'x', 2).integers(0, 10**9))"
    outs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    here = f"{keyed_uniform(1, 'x', 'r7', 3)} {keyed_generator(1, 'x', 2).integers(0, 10**9)}\n"
    assert outs == {here}


def test_keyed_uniform_is_uniform_and_keys_are_apart() -> None:
    draws = np.array([keyed_uniform(0, "u", i) for i in range(20_000)])
    # the mean of n uniforms has a standard deviation of 0.2887 / sqrt(n) = 0.002; five of them
    assert abs(draws.mean() - 0.5) < 0.0102
    assert ((draws >= 0) & (draws < 1)).all()
    assert keyed_uniform(0, "a", "b") != keyed_uniform(0, "ab") != keyed_uniform(0, "a", "b", "")


tokens = st.tuples(
    st.integers(0, 5),
    st.sampled_from([" the", "\n", " Wait", "actually", "</think>", "x\n\n"]),
    st.floats(0, 5),
    st.floats(-9, 0),
)


@given(st.lists(tokens, max_size=150), st.integers(1, 9))
def test_progress_equals_its_slow_definition(
    run: list[tuple[int, str, float, float]], stride: int
) -> None:
    tracker = ProgressTracker(stride, think_open=0, think_close=1)
    for token in run:
        tracker.update(*token)
    assert len(tracker.records) == len(run) // stride
    for j, record in enumerate(tracker.records):
        window = run[j * stride : (j + 1) * stride]
        so_far = [token[0] for token in run[: (j + 1) * stride]]
        grams = [
            tuple(so_far[i : i + REPETITION_NGRAM])
            for i in range(len(so_far) - REPETITION_NGRAM + 1)
        ][-REPETITION_WINDOW_TOKENS:]
        assert record.mean_entropy == pytest.approx(sum(t[2] for t in window) / stride)
        assert record.mean_logprob == pytest.approx(sum(t[3] for t in window) / stride)
        assert record.newline_rate == sum("\n" in t[1] for t in window) / stride
        hesitant = sum(t[1].strip().lower() in ("wait", "actually") for t in window)
        assert record.hesitation_rate == hesitant / stride
        expected = 1 - len(set(grams)) / len(grams) if grams else 0.0
        assert record.repetition == pytest.approx(expected)
        marks = [token for token in so_far if token in (0, 1)]
        assert record.in_thinking == float(bool(marks) and marks[-1] == 0)


def test_a_prompt_that_ends_thinking_starts_thinking() -> None:
    tracker = ProgressTracker(2, think_open=0, think_close=1, starts_thinking=True)
    for token in (5, 6, 1, 7):
        tracker.update(token, "x", 0.0, 0.0)
    assert [record.in_thinking for record in tracker.records] == [1.0, 0.0]
    assert tracker.thinking_tokens == 3


def test_progress_stride_must_be_positive() -> None:
    with pytest.raises(InvalidInput, match="stride is 0"):
        ProgressTracker(0)


def test_unknown_name_offers_the_nearest() -> None:
    assert "did you mean 'lifo'?" in str(unknown_name("policy", "lifoo", ["fifo", "lifo"]))


def test_views_round_trip_between_scalar_and_array_form() -> None:
    views = conformance.random_views(np.random.default_rng(0), with_signal=True)
    rows = [views.row(i) for i in range(len(views.request_id))]
    back = views_from_rows(rows)
    for name in RunningView._fields:
        np.testing.assert_array_equal(getattr(back, name), getattr(views, name))
        assert getattr(back, name).dtype == getattr(views, name).dtype, name


def test_conformance_accepts_a_sound_policy_and_names_each_fault() -> None:
    conformance.check_policy(from_rows("ok", lambda view: float(view.computed_tokens)))
    state = iter(range(10**6))
    faults = {
        "finite": Policy("nan", lambda v: np.full(len(v.request_id), np.nan)),
        "pure function": from_rows("counter", lambda view: float(next(state))),
        "own row only": Policy("rank", lambda v: np.argsort(v.computed_tokens).astype(float)),
        "reads_signal=True": from_rows("peek", lambda view: view.remaining),
        "reads_deadline=True": from_rows("clock", lambda view: view.deadline_s),
        "float array of shape": Policy("scalar", lambda v: np.float64(1.0)),  # type: ignore[arg-type,return-value]
    }
    for message, policy in faults.items():
        with pytest.raises(ConformanceError, match=message):
            conformance.check_policy(policy)


class _Broken:
    """A signal with one fault at a time."""

    name, source_run_ids, clairvoyant = "broken", frozenset[str](), False

    def __init__(self, fault: str) -> None:
        self.fault, self.calls = fault, 0

    def remaining(self, requests: Sequence[SignalRequest], ages: np.ndarray) -> np.ndarray:
        self.calls += 1
        room = np.array([r.max_tokens for r in requests]) - ages.astype(float)
        answer = np.maximum(1.0, room / 2)
        if self.fault == "future":
            seen = [0 if r.progress is None else len(r.progress.values) for r in requests]
            return np.maximum(1.0, answer / (1 + np.array(seen)))
        if self.fault == "late future":
            seen = [0 if r.progress is None else len(r.progress.values) for r in requests]
            return np.where(ages >= 32, np.maximum(1.0, answer / (1 + np.array(seen))), answer)
        if self.fault == "zero":
            return answer * 0
        if self.fault == "state":
            return np.maximum(1.0, answer - self.calls)
        if self.fault == "order":
            return np.maximum(1.0, answer - np.arange(len(answer)))
        return answer


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("future", "reads the future"),
        ("late future", "reads the future"),
        ("zero", "must lie between"),
        ("state", "answered twice differently"),
        ("order", "depends on the order"),
    ],
)
def test_conformance_names_each_fault_of_a_signal(fault: str, message: str) -> None:
    conformance.check_signal(_Broken("none"), RUNS)
    with pytest.raises(ConformanceError, match=message):
        conformance.check_signal(_Broken(fault), RUNS)


class _Nan(_Broken):
    def remaining(self, requests: Sequence[SignalRequest], ages: np.ndarray) -> np.ndarray:
        return np.full(len(requests), np.nan)


def test_a_nan_signal_is_refused_when_the_grid_is_built() -> None:
    with pytest.raises(InvalidInput, match="answers nan for request 0"):
        build_grid(_Nan("none"), [signal_request(run) for run in RUNS])


def test_a_longer_horizon_only_appends_to_a_grid() -> None:
    requests = [signal_request(run) for run in RUNS[:3]]
    short = build_grid(_Broken("none"), requests, stride=4, horizons=np.array([0, 9, 20]))
    long = build_grid(_Broken("none"), requests, stride=4)
    assert np.diff(short.offsets).tolist() == [1, 3, 6]
    for i in range(3):
        part = short.remaining[short.offsets[i] : short.offsets[i + 1]]
        np.testing.assert_array_equal(part, long.remaining[long.offsets[i] :][: len(part)])


def test_a_request_says_nothing_of_how_its_run_ended() -> None:
    run = RUNS[0]
    other = replace(run, output_tokens=1, finish_reason="abort", text="gone", wall_s=9.0)
    for name in SignalRequest.__slots__:
        if name not in ("progress", "text"):  # tracks: read up to an age, by their own tests
            assert getattr(signal_request(run), name) == getattr(signal_request(other), name)


def test_repeats_by_request_lose_no_run_and_keep_their_order() -> None:
    groups = by_request(RUNS)
    assert list(groups) == list(dict.fromkeys(run.request_key for run in RUNS))
    assert all([run.repeat for run in group] == [0, 1] for group in groups.values())
    assert {run.run_id for group in groups.values() for run in group} == {r.run_id for r in RUNS}
    assert by_request([]) == {}


@pytest.mark.parametrize(
    ("tokens", "ended", "known"),
    [(9, True, True), (9, False, False), (9, None, False), (10, False, True), (10, None, True)],
)
def test_a_served_length_is_known_at_the_end_or_at_the_cap(
    tokens: int, ended: bool | None, known: bool
) -> None:
    run = replace(RUNS[0], output_tokens=tokens, max_new_tokens=10, event_observed=ended)
    assert run.has_known_length is known


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 9))
def test_age_rows_are_every_stride_below_the_length(lengths: list[int], stride: int) -> None:
    offsets, owner, ages = age_rows(np.array(lengths), stride)
    expected = [(i, age) for i, n in enumerate(lengths) for age in range(0, n, stride)]
    assert list(zip(owner.tolist(), ages.tolist(), strict=True)) == expected
    assert offsets.tolist() == [sum(i < j for i, _ in expected) for j in range(len(lengths) + 1)]


def test_the_first_rule_that_fails_is_said() -> None:
    @dataclass
    class Knobs:
        size: int = 3
        name: str = "x"

    require_at_least(Knobs(), size=3)
    require(Knobs(), ("size", True, "odd"))
    with pytest.raises(InvalidInput, match="size is 3: it must be at least 4"):
        require_at_least(Knobs(), size=4)
    with pytest.raises(InvalidInput, match="name is 'x': it must be longer"):
        require(Knobs(), ("size", True, "odd"), ("name", False, "longer"), ("size", False, "even"))
