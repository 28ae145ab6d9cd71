"""Oracle-K: the ladder, its provenance, and the rule that truth and oracle never share a run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from contracts.conformance import check_signal
from contracts.errors import InvalidInput, LeakageError
from contracts.runs import DecodeRun
from contracts.signals import build_grid, signal_request
from eval.signal_sources import check_pairing
from oracles.empirical import LEVELS, Clairvoyant, EmpiricalOracle, leave_one_out
from tests.synthetic_runs import synthetic_runs

RUNS = synthetic_runs(num_prompts=24, repeats=5, seed=1)


def _of_prompt(prompt_id: str) -> list[DecodeRun]:
    return [run for run in RUNS if run.prompt_id == prompt_id]


def _at(age: int, n: int = 1) -> np.ndarray:
    return np.full(n, age, dtype=np.int64)


def test_oracle_and_clairvoyant_conform() -> None:
    check_signal(leave_one_out(RUNS, 0), [run for run in RUNS if run.repeat == 0])
    check_signal(Clairvoyant(RUNS), RUNS)


def test_known_prompt_answers_with_its_own_runs() -> None:
    group = _of_prompt(RUNS[0].prompt_id)
    oracle = EmpiricalOracle(group[1:])
    answer = oracle.answer([signal_request(group[0])], _at(0))
    assert LEVELS[answer.level[0]] == "prompt"
    assert answer.num_runs[0] == len(group) - 1
    cap = group[0].max_new_tokens
    mean = np.mean([min(run.output_tokens, cap) for run in group[1:]])
    assert answer.remaining[0] == pytest.approx(mean)
    assert oracle.name == f"oracle-{len(group) - 1}"


def test_exhausted_prompt_falls_back_to_its_family_and_says_so() -> None:
    run = replace(RUNS[0], output_tokens=5, finish_reason="stop", event_observed=True)
    longer = replace(
        RUNS[0],
        request_key="other",
        run_id="other",
        prompt="Another prompt.",
        output_tokens=50,
        event_observed=True,
    )
    answer = EmpiricalOracle([run, longer]).answer([signal_request(RUNS[0])], _at(20))
    assert LEVELS[answer.level[0]] == "family"
    assert answer.exhausted[0]
    assert answer.remaining[0] == pytest.approx(30.0)


def test_ladder_ends_at_the_cap_and_never_at_zero_or_infinity() -> None:
    run = replace(RUNS[0], output_tokens=5, finish_reason="stop", event_observed=True)
    request = signal_request(RUNS[0])
    for age in (6, request.max_tokens - 1):
        answer = EmpiricalOracle([run]).answer([request], _at(age))
        assert LEVELS[answer.level[0]] == "cap"
        assert answer.remaining[0] == request.max_tokens - age


def test_unseen_prompt_backs_off_visibly() -> None:
    stranger = replace(RUNS[0], request_key="never seen", prompt="Never seen.")
    answer = EmpiricalOracle(RUNS).answer([signal_request(stranger)], _at(0))
    assert LEVELS[answer.level[0]] == "family"
    assert not answer.exhausted[0]
    alien = replace(stranger, model="never seen")
    answer = EmpiricalOracle(RUNS).answer([signal_request(alien)], _at(3))
    assert LEVELS[answer.level[0]] == "cap"


def test_k_of_one_works_and_is_exhausted_about_half_of_the_time() -> None:
    """A fresh run outlives a single earlier one with probability 1/2 (exchangeability)."""
    runs = synthetic_runs(num_prompts=400, repeats=2, seed=3, cap_tokens=4000)
    oracle = EmpiricalOracle([run for run in runs if run.repeat == 0])
    assert oracle.name == "oracle-1"
    truth = [run for run in runs if run.repeat == 1 and run.output_tokens > 1]
    last_ages = np.array([run.output_tokens - 1 for run in truth])
    answer = oracle.answer([signal_request(run) for run in truth], last_ages)
    # 400 draws of probability about 1/2: four standard deviations are 0.1
    assert abs(answer.exhausted.mean() - 0.5) < 0.1
    assert np.isfinite(answer.remaining).all()
    assert (answer.remaining >= 1).all()


def test_no_request_gives_no_answer() -> None:
    nothing = np.array([], dtype=np.int64)
    for signal in (EmpiricalOracle(RUNS), Clairvoyant(RUNS)):
        assert signal.remaining([], nothing).shape == (0,)
    assert EmpiricalOracle(RUNS).quantile([], nothing, 0.5).shape == (0,)
    assert EmpiricalOracle(RUNS).answer([], nothing).exhausted.shape == (0,)


def test_without_runs_there_is_no_oracle() -> None:
    with pytest.raises(InvalidInput, match="at least one decode run"):
        EmpiricalOracle([])


def test_pairing_an_oracle_with_its_own_runs_is_refused() -> None:
    truth = [run for run in RUNS if run.repeat == 0]
    requests = [signal_request(run) for run in truth]
    honest = build_grid(leave_one_out(RUNS, 0), requests)
    check_pairing(requests, honest)
    with pytest.raises(LeakageError, match="also the truth"):
        check_pairing(requests, build_grid(EmpiricalOracle(RUNS), requests))
    check_pairing(requests, build_grid(Clairvoyant(truth), requests))


def test_clairvoyant_is_exact_at_every_age_whatever_the_stride() -> None:
    truth = [run for run in RUNS if run.repeat == 0][:6]
    requests = [signal_request(run) for run in truth]
    for stride in (1, 8, 50):
        grid = build_grid(Clairvoyant(truth), requests, stride=stride)
        for index, run in enumerate(truth):
            for age in range(run.output_tokens):
                assert grid.read(index, age)[0] == run.output_tokens - age


def test_clairvoyant_without_the_run_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="holds no run"):
        Clairvoyant(RUNS[:1]).remaining([signal_request(RUNS[-1])], _at(0))
