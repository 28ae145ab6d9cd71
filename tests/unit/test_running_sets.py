"""Signals on a study's own running sets: the sets are those of the engine, the numbers textbook."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from eval.matrix import prepare_seed, run_cell, source_runs
from eval.matrix_config import MatrixConfig, Pressure
from eval.running_sets import judge_signals, met_sets, read_all, score_sets
from eval.signal_sources import SignalSource
from eval.surrogates import SURROGATES
from serving_sim.config import EngineConfig
from serving_sim.engine import StepLog
from tests.synthetic_runs import synthetic_runs
from traces.runlog import write_runs

SIGNALS = ("none", "oracle", "clairvoyant", *SURROGATES)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MatrixConfig:
    path = tmp_path_factory.mktemp("sets") / "runs.parquet"
    write_runs(synthetic_runs(num_prompts=25, repeats=3, seed=4, cap_tokens=300), path, {})
    return MatrixConfig(
        runs=path,
        policies=("lifo", "longest-remaining"),
        signals=tuple(SignalSource(name) for name in SIGNALS),
        pressures=(Pressure("tight", 70), Pressure("wide", 90)),
        engine=EngineConfig(num_blocks=70),
        profile="rtx4090-llama-3.1-8b",
        rate_per_s=15.0,
        num_warmup=20,
        num_tagged=60,
        deadline_s=10.0,
    )


def test_the_sets_are_those_in_which_lifo_chose(config: MatrixConfig) -> None:
    inputs = prepare_seed(config, source_runs(config), 0)
    pressure = config.pressures[0]
    sets = met_sets(config, inputs, pressure, 0, 10**6)
    evicted: list[tuple[int, int]] = []

    def note(log: StepLog) -> None:
        for one in log.evictions:
            index = inputs.workload.request_ids.index(one.request_id)
            evicted.append((index, one.generated_tokens))

    run_cell(config, inputs, pressure, "lifo", "none", 0, note)
    # each set holds LIFO's victim in its last place; a set of one alone is left out
    last = [(int(s.request[-1]), int(s.age[-1])) for s in sets]
    assert len(last) > 20
    assert set(last) <= set(evicted)
    for one in sets:
        assert len(one.request) > 1
        assert (one.age >= 0).all() and (one.remaining >= 1).all()
        total = inputs.workload.output_tokens[one.request]
        assert np.array_equal(one.age + one.remaining, total)
    few = met_sets(config, inputs, pressure, 0, 7)
    assert len(few) == 7
    assert np.array_equal(few[0].request, sets[0].request)
    assert np.array_equal(few[-1].age, sets[-1].age)


def test_answers_are_read_as_the_engine_reads_them(config: MatrixConfig) -> None:
    inputs = prepare_seed(config, source_runs(config), 0)
    grid = inputs.grids["oracle"]
    assert grid is not None
    for one in met_sets(config, inputs, config.pressures[0], 0, 20):
        pairs = zip(one.request.tolist(), one.age.tolist(), strict=True)
        assert read_all(grid, one.request, one.age).tolist() == [grid.read(*p)[0] for p in pairs]


def test_clairvoyant_is_perfect_and_surrogates_are_not(config: MatrixConfig) -> None:
    found = {row.signal: row for row in judge_signals(config, [0, 1], 100)}
    assert list(found) == [name for name in SIGNALS if name != "none"]
    best = found["clairvoyant"]
    assert (best.concordance, best.kendall_tau, best.log_mae) == (1.0, 1.0, 0.0)
    assert best.num_sets > 100
    for name in SURROGATES:
        assert 0.4 < found[name].concordance < 0.9
        assert found[name].log_mae > 0.3
    weak, strong = (found[name].concordance for name in ("surrogate-gbm", "surrogate-gbm-maths"))
    assert weak < strong < found["clairvoyant"].concordance


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=12).filter(
        lambda pairs: len({left for _, left in pairs}) > 1
    )
)
def test_the_numbers_of_a_set_are_the_textbooks(pairs: list[tuple[int, int]]) -> None:
    said = np.array([a for a, _ in pairs], dtype=np.float64)
    left = np.array([b for _, b in pairs])
    score = score_sets("s", [said], [left])
    tau = kendalltau(said, left).statistic
    assert score.kendall_tau == pytest.approx(0.0 if np.isnan(tau) else tau)
    right = total = 0.0
    for i in range(len(pairs)):
        for j in range(i):
            if left[i] != left[j]:
                total += 1
                same = (said[i] - said[j]) * (left[i] - left[j])
                right += 1.0 if same > 0 else 0.5 if same == 0 else 0.0
    assert score.concordance == pytest.approx(right / total)
    assert score.log_mae == pytest.approx(np.mean(np.abs(np.log((1 + said) / (1 + left)))))


def test_sets_without_an_order_are_left_out() -> None:
    score = score_sets("s", [np.array([1.0, 2.0])], [np.array([3, 3])])
    assert score.num_sets == 0
    assert np.isnan(score.concordance)
