"""What must hold for oracle-K on any log, however tied, cut or short."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.runs import DecodeRun
from contracts.signals import signal_request
from oracles.empirical import LEVELS, EmpiricalOracle
from tests.synthetic_runs import make_run

CAP = 40
# (prompt, family, natural length): few values, so that ties, cuts and exhaustion all happen
logs = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["a", "b"]), st.integers(1, 50)),
    min_size=1,
    max_size=25,
)


def _runs(rows: list[tuple[int, str, int]]) -> list[DecodeRun]:
    return [
        make_run(
            prompt=f"{family} {prompt}",
            prompt_id=f"{family} {prompt}",
            natural_tokens=natural,
            family=family,
            repeat=repeat,
            cap_tokens=CAP,
        )
        for repeat, (prompt, family, natural) in enumerate(rows)
    ]


@settings(max_examples=40)
@given(logs)
def test_answers_are_bounded_consistent_and_blind_to_order_and_names(
    rows: list[tuple[int, str, int]],
) -> None:
    runs = _runs(rows)
    oracle = EmpiricalOracle(runs)
    asked = [run for run in runs for _ in range(CAP)]
    requests = [signal_request(run) for run in asked]
    ages = np.tile(np.arange(CAP), len(runs))
    answer = oracle.answer(requests, ages)
    assert ((answer.remaining >= 1.0) & (answer.remaining <= CAP - ages)).all()
    assert (answer.effective_k <= answer.num_runs).all()
    assert ((answer.effective_k > 0) == (answer.level < len(LEVELS) - 1)).all()
    # natural answers know no cap: they are never shorter than served ones, where both are known
    natural = oracle.answer(requests, ages, natural=True)
    curves = np.array([LEVELS[i] not in ("log-t", "cap") for i in answer.level])
    assert (natural.remaining >= answer.remaining - 1e-9)[curves].all()
    low, high = (oracle.quantile(requests, ages, level) for level in (0.2, 0.8))
    assert (low <= high).all()
    total = np.zeros(len(asked))
    for horizon in range(CAP):
        total += oracle.survival(requests, ages, np.full(len(asked), float(horizon)))
    # the sum of P(remaining > h) is the mean; on log-t the mean is a trapezoid, on a lower bound
    # the survival goes on to the cap
    exact = curves & ~answer.lower_bound
    np.testing.assert_allclose(total[exact], answer.remaining[exact], rtol=1e-9)
    assert np.allclose(
        oracle.reach_cap(requests, ages),
        oracle.survival(requests, ages, np.maximum(1, CAP - ages) - 1.0),
    )
    turned = EmpiricalOracle(runs[::-1]).answer(requests, ages)
    # sums in another order differ in their last digits
    np.testing.assert_allclose(turned.remaining, answer.remaining, rtol=1e-9)
    renamed = EmpiricalOracle([replace(run, run_id=f"x{run.run_id}") for run in runs])
    np.testing.assert_array_equal(renamed.answer(requests, ages).remaining, answer.remaining)


@settings(max_examples=40)
@given(logs, st.integers(0, CAP - 1))
def test_an_answer_is_exhausted_exactly_when_no_own_run_outlived_the_age(
    rows: list[tuple[int, str, int]], age: int
) -> None:
    runs = _runs(rows)
    oracle = EmpiricalOracle(runs)
    answer = oracle.answer([signal_request(run) for run in runs], np.full(len(runs), age))
    for index, run in enumerate(runs):
        own = [r.output_tokens for r in runs if r.request_key == run.request_key]
        alive = [tokens for tokens in own if tokens > age]
        assert answer.exhausted[index] == (not alive)
        if alive:
            assert answer.effective_k[index] == len(alive)
