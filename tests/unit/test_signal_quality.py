"""The metrics against plain loops, and signals whose score is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest
from eval.signal_quality import (
    HeldOut,
    draw_running_sets,
    held_out,
    quality_table,
    score_floors,
    score_signal,
)
from predictors.age_km import AgeKmSettings
from tests.synthetic_runs import make_run, synthetic_runs
from training.rows import training_set

RUNS = synthetic_runs(num_prompts=12, repeats=2)
LENGTH = {run.run_id: run.output_tokens for run in RUNS}


class _Scaled:
    """Knows the truth, times ``factor`` to the power ``power`` (for tests of metrics only)."""

    source_run_ids: frozenset[str] = frozenset()
    clairvoyant = True
    name = "scaled"

    def __init__(self, factor: float = 1.0, power: float = 1.0) -> None:
        self.factor, self.power = factor, power

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        lengths = np.array([LENGTH[request.run_id] for request in requests])
        return np.asarray(self.factor * (lengths - ages).astype(np.float64) ** self.power)


@pytest.fixture(scope="module")
def rows() -> HeldOut:
    return held_out(RUNS, num_sets=150, set_size=5, seed=3)


def test_the_truth_scores_perfectly(rows: HeldOut) -> None:
    score = score_signal(_Scaled(), rows)
    assert score.log_mae == score.mae == score.victim_regret == score.early_kills == 0.0
    assert score.kendall_tau == pytest.approx(1.0)
    assert score.concordance == score.top1 == 1.0
    assert np.isnan(score.cover80)


def test_a_monotone_change_costs_error_but_no_order(rows: HeldOut) -> None:
    score = score_signal(_Scaled(2.0), rows)
    assert score.mae > 10 and score.concordance == score.top1 == 1.0
    upside_down = score_signal(_Scaled(1000.0, -1.0), rows)
    assert upside_down.concordance == 0.0 and upside_down.top1 == 0.0
    assert upside_down.kendall_tau == pytest.approx(-1.0)


def test_errors_are_means_of_request_means(rows: HeldOut) -> None:
    score = score_signal(_Scaled(2.0), rows)
    mae, log_mae = [], []
    for run in RUNS:
        left = run.output_tokens - np.arange(0, run.output_tokens, rows.stride)
        asked = np.maximum(1.0, 2.0 * left)
        mae.append(np.abs(asked - left).mean())
        log_mae.append(np.abs(np.log1p(asked) - np.log1p(left)).mean())
    assert score.mae == pytest.approx(np.mean(mae), rel=1e-12)
    assert score.log_mae == pytest.approx(np.mean(log_mae), rel=1e-12)


def test_set_metrics_equal_a_plain_loop(rows: HeldOut) -> None:
    """LIFO, FIFO and random, pair by pair and pick by pick, ties shared."""
    sets = rows.sets
    for score in score_floors(rows):
        regret, hit, early, pairs = [], [], [], []
        for age, left, draw in zip(sets.age, sets.remaining, sets.draw, strict=True):
            key = {"lifo": [-a for a in age], "fifo": list(age), "random": list(draw)}[score.signal]
            best = [i for i in range(len(key)) if key[i] == max(key)]
            regret.append(np.mean([(max(left) - left[i]) / max(left) for i in best]))
            hit.append(np.mean([left[i] == max(left) for i in best]))
            early.append(np.mean([left[i] < np.median(left) for i in best]))
            ordered = [
                0.5 if key[i] == key[j] else float((key[i] > key[j]) == (left[i] > left[j]))
                for i, j in combinations(range(len(key)), 2)
                if left[i] != left[j]
            ]
            if ordered:
                pairs.append(np.mean(ordered))
        assert score.victim_regret == pytest.approx(np.mean(regret))
        assert score.top1 == pytest.approx(np.mean(hit))
        assert score.early_kills == pytest.approx(np.mean(early))
        assert score.concordance == pytest.approx(np.mean(pairs))


def test_floors_mirror_each_other_and_random_is_in_between(rows: HeldOut) -> None:
    lifo, fifo, random = score_floors(rows)
    assert lifo.concordance + fifo.concordance == pytest.approx(1.0)
    assert random.concordance == pytest.approx(0.5, abs=0.05)
    assert np.isnan(random.log_mae)


def test_coverage_by_hand(rows: HeldOut) -> None:
    signal = AgeKmSettings().fit(training_set(synthetic_runs(num_prompts=40, seed=9)))
    shares = []
    for run, request in zip(RUNS, rows.requests, strict=True):
        ages = np.arange(0, run.output_tokens, rows.stride)
        bound = signal.quantile([request] * len(ages), ages, 0.8)
        shares.append((run.output_tokens - ages <= bound).mean())
    assert score_signal(signal, rows).cover80 == pytest.approx(np.mean(shares))


def test_sets_are_length_biased_without_repeats() -> None:
    lengths = np.array([10, 30, 60, 100])
    sets = draw_running_sets(lengths, 4000, 2, seed=0)
    assert (sets.run[:, 0] != sets.run[:, 1]).all()
    assert ((sets.age >= 0) & (sets.age < lengths[sets.run])).all()
    np.testing.assert_array_equal(sets.remaining, lengths[sets.run] - sets.age)
    single = draw_running_sets(lengths, 4000, 1, seed=0)
    shares = np.bincount(single.run.ravel(), minlength=4) / 4000
    np.testing.assert_allclose(shares, lengths / lengths.sum(), atol=0.03)
    relative = single.age / lengths[single.run]
    assert relative.mean() == pytest.approx(0.5, abs=0.03)


def test_the_same_seed_draws_the_same_sets() -> None:
    first, again, other = (held_out(RUNS, num_sets=20, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.sets.run, again.sets.run)
    np.testing.assert_array_equal(first.sets.age, again.sets.age)
    assert not np.array_equal(first.sets.age, other.sets.age)


def test_a_run_of_unknown_length_is_refused() -> None:
    lost = replace(RUNS[0], output_tokens=1, finish_reason="abort", event_observed=False)
    with pytest.raises(InvalidInput, match="its served length is unknown"):
        held_out([*RUNS[1:], lost])
    capped = make_run(prompt="p", prompt_id="p", natural_tokens=900)
    assert len(held_out([*RUNS, capped]).requests) == len(RUNS) + 1
    with pytest.raises(InvalidInput, match="at least 2"):
        held_out(RUNS[:1])


def test_an_answer_that_is_no_number_is_refused(rows: HeldOut) -> None:
    with pytest.raises(InvalidInput, match="must be finite"):
        score_signal(_Scaled(float("nan")), rows)


def test_the_table_has_a_line_a_signal(rows: HeldOut) -> None:
    lines = quality_table([*score_floors(rows), score_signal(_Scaled(), rows)]).splitlines()
    assert len(lines) == 5 and lines[0].split()[:2] == ["signal", "log_mae"]
    assert lines[1].split()[:2] == ["lifo", "-"] and lines[4].split()[1] == "0.000"
