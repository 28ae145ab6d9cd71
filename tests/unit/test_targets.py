"""Whether a run comes to its cap, and natural lengths: two readings of one distribution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from contracts.policy import IntArray
from contracts.signals import RemainingSignal, SignalRequest, signal_request
from eval.signal_report import report_signals
from predictors import base
from predictors.age_km import AgeKmSettings
from predictors.base import HorizonPredictor, Predictor, room
from predictors.targets import Natural, reach_cap
from tests.quick_families import QUICK
from tests.synthetic_runs import synthetic_runs
from training.rows import training_set

TRAIN = synthetic_runs(num_prompts=40)
HELD_OUT = synthetic_runs(num_prompts=60, seed=9)
PLAIN = ("age-km", "countdown", "fused", "gbm-hazard", "gbm-rank", "log-t", "past-future")


@pytest.fixture(scope="module", params=PLAIN)
def predictor(request: pytest.FixtureRequest) -> Predictor:
    return QUICK[request.param].fit(training_set(TRAIN), seed=1)


def _asked(cap_tokens: int | None = None) -> tuple[list[SignalRequest], IntArray]:
    requests, ages = [], []
    for number, run in enumerate(HELD_OUT[:60]):
        request = signal_request(run)
        if cap_tokens is not None:
            request = replace(request, max_tokens=cap_tokens)
        for age in (0, 3 + number % 7, 17, request.max_tokens - 1):
            if age < request.max_tokens:
                requests.append(request)
                ages.append(age)
    return requests, np.array(ages, dtype=np.int64)


def test_the_chance_of_the_cap_fits_the_quantiles(predictor: Predictor) -> None:
    asked, ages = _asked()
    reached, left = reach_cap(predictor, asked, ages), room(asked, ages)
    assert ((reached >= 0.0) & (reached <= 1.0)).all()
    assert (reached[left == 1] == 1.0).all()  # the last token is the cap's
    for level in (0.1, 0.5, 0.9):
        at_cap = predictor.quantile(asked, ages, level) >= left
        sure = np.abs(reached - (1.0 - level)) > 1e-6  # a tie of the two is either
        assert (at_cap == (reached > 1.0 - level))[sure].all()


def test_natural_lengths_do_not_know_the_request_s_own_cap(predictor: Predictor) -> None:
    natural = Natural(predictor)
    short, ages = _asked(cap_tokens=40)
    long = [replace(request, max_tokens=natural.cap_tokens) for request in short]
    horizon = np.full(len(ages), 5.0)
    for asked in (short, long):
        assert np.array_equal(natural.remaining(asked, ages), predictor.remaining(long, ages))
        assert np.array_equal(
            natural.survival(asked, ages, horizon), predictor.survival(long, ages, horizon)
        )
    assert (natural.remaining(short, ages) >= predictor.remaining(short, ages) - 1e-9).all()
    high = natural.quantile(short, ages, 0.99)
    reached = reach_cap(predictor, long, ages)
    assert np.isinf(high[reached > 0.01 + 1e-6]).all()
    assert np.isfinite(high[reached < 0.01 - 1e-6]).all()
    beyond = natural.survival(short, ages, np.full(len(ages), 1e6))
    assert np.array_equal(beyond, reached)  # the last value known


def test_a_served_mean_is_the_natural_curve_up_to_the_cap(predictor: Predictor) -> None:
    """E[min(N, c)] is the sum of P(N > h) over h below c. 1e-6: sums of forty terms."""
    if not isinstance(predictor, HorizonPredictor) or predictor.family == "countdown":
        pytest.skip("answers a median, or a mean of its own")
    asked, ages = _asked(cap_tokens=40)
    natural, left = Natural(predictor), room(asked, ages)
    steps = range(int(left.max()))
    alive = [natural.survival(asked, ages, np.full(len(ages), float(h))) for h in steps]
    inside = np.arange(len(alive))[:, None] < left[None, :]
    total = np.where(inside, np.array(alive), 0.0).sum(axis=0)
    np.testing.assert_allclose(predictor.remaining(asked, ages), total, rtol=1e-6)


def test_it_is_named_and_keeps_what_it_was_trained_on(predictor: Predictor) -> None:
    natural = Natural(predictor)
    assert isinstance(natural, RemainingSignal) and natural.name.startswith(predictor.name)
    assert str(predictor.provenance.cap_tokens) in natural.name
    assert set(predictor.provenance.run_ids) == set(natural.source_run_ids)  # type: ignore[call-overload]


def test_the_report_says_how_often_the_cap_was_expected_and_reached() -> None:
    """age-km of one model expects what its training runs did; on held-out runs of the same law the
    two shares differ by sampling only: four standard errors of 60 prompts."""
    training = synthetic_runs(num_prompts=200, seed=4, cap_tokens=60)
    runs = synthetic_runs(num_prompts=60, seed=9, cap_tokens=60)
    signals = [("signal", AgeKmSettings().fit(training_set(training)))]
    (row,) = [r for r in report_signals(runs, signals, num_bootstraps=5) if r.role == "signal"]
    said, seen, brier = (row.metrics[f"cap_{name}"].value for name in ("said", "seen", "brier"))
    cut = np.mean([run.output_tokens >= run.max_new_tokens for run in runs])
    assert 0.05 < cut < 0.95 and seen == pytest.approx(cut)
    assert abs(said - seen) < 4 * np.sqrt(seen * (1 - seen) / 60)
    assert brier <= seen * (1 - seen) + 0.05  # about that of the share itself, or better


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
def test_answers_do_not_depend_on_how_many_rows_are_asked_at_once(
    predictor: Predictor, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1e-12: a network multiplies matrices of another height, which may round otherwise."""
    asked, ages = _asked()
    horizon = ages % 13 + 0.5
    whole = (
        predictor.remaining(asked, ages),
        predictor.quantile(asked, ages, 0.9),
        predictor.survival(asked, ages, horizon),
    )
    monkeypatch.setattr(base, "CHUNK_ROWS", chunk_rows)
    parts = (
        predictor.remaining(asked, ages),
        predictor.quantile(asked, ages, 0.9),
        predictor.survival(asked, ages, horizon),
    )
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
