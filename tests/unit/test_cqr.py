"""CQR: the widening is the score's conformal quantile, it holds, and cut rows do not shrink it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from contracts.errors import InvalidInput
from contracts.signals import signal_request
from eval.calibration_metrics import coverage
from predictors.age_km import AgeKmSettings
from predictors.cqr import CqrRows, CqrTable, cqr_interval, fit_cqr
from tests.synthetic_runs import synthetic_runs
from training.calibrate import cqr_rows
from training.rows import training_set

COUNT = 400
RNG = np.random.default_rng(0)
LEFT = np.rint(np.exp(4.0 + 0.8 * RNG.normal(size=COUNT))) + 1.0
ROWS = CqrRows(
    age=np.zeros(COUNT, dtype=np.int64),
    low=np.full(COUNT, 40.0),
    high=np.full(COUNT, 60.0),
    left=LEFT,
    observed=np.ones(COUNT, dtype=bool),
    prompt=np.arange(COUNT),
    weight=np.ones(COUNT),
)


def test_the_widening_is_the_conformal_quantile_of_the_scores() -> None:
    table = fit_cqr(ROWS, 0.9, num_groups=1)
    scores = np.sort(np.maximum(40.0 - LEFT, LEFT - 60.0))
    rank = int(np.ceil(0.9 * (COUNT + 1)))  # Romano et al. 2019, (1 - alpha)(1 + 1/n)
    assert table.widening_tokens.tolist() == [scores[rank - 1]]
    held = (40.0 - scores[rank - 1] <= LEFT) & (60.0 + scores[rank - 1] >= LEFT)
    assert held.mean() >= 0.9


def test_too_few_prompts_answer_with_everything() -> None:
    few = CqrRows(**{name: getattr(ROWS, name)[:5] for name in CqrRows.__slots__})
    assert fit_cqr(few, 0.9, num_groups=1).widening_tokens.tolist() == [np.inf]
    with pytest.raises(InvalidInput, match="no row to calibrate"):
        fit_cqr(CqrRows(**{name: getattr(ROWS, name)[:0] for name in CqrRows.__slots__}), 0.9)


def test_a_cut_row_counts_as_longer_than_seen() -> None:
    cut = LEFT > 100.0
    seen = replace(ROWS, left=np.minimum(LEFT, 100.0), observed=~cut)
    honest = fit_cqr(seen, 0.8, num_groups=1).widening_tokens[0]
    blind = fit_cqr(replace(seen, observed=np.ones(COUNT, bool)), 0.8, num_groups=1)
    assert blind.widening_tokens[0] <= 40.0 < honest


def test_an_interval_stays_within_one_token_and_the_cap_and_holds() -> None:
    runs = synthetic_runs(num_prompts=120, repeats=2)
    fit, tune, test = runs[:80], runs[80:160], runs[160:]
    predictor = AgeKmSettings().fit(training_set(fit))
    table = fit_cqr(cqr_rows(predictor, tune, 0.9), 0.9, num_groups=3)
    rows = cqr_rows(predictor, test, 0.9)
    owner = np.repeat(np.arange(len(test)), [-(-run.output_tokens // 8) for run in test])
    asked = [signal_request(test[i]) for i in owner.tolist()]
    low, high = cqr_interval(predictor, table, asked, rows.age)
    caps = np.array([request.max_tokens for request in asked])
    assert (low >= 1.0).all() and (high <= caps - rows.age).all() and (low <= high).all()
    left = rows.left.astype(np.int64)
    found = coverage("central", low, high, rows.age, left, caps, owner=owner)
    assert found.overall > 0.8
    narrow = CqrTable(0.9, np.zeros(0, np.int64), np.array([-1e9]))
    low, high = cqr_interval(predictor, narrow, asked, rows.age)
    assert np.allclose(low, high)  # past itself: the middle


def test_by_request_is_the_mean_of_the_requests_own_shares() -> None:
    owner = np.array([0, 0, 0, 0, 1])
    left, ages = np.array([4, 3, 2, 1, 9]), np.array([0, 1, 2, 3, 0])
    high = np.array([4.0, 3.0, 0.0, 0.0, 5.0])
    found = coverage("x", np.ones(5), high, ages, left, np.full(5, 20), num_groups=1, owner=owner)
    assert found.overall == pytest.approx(2 / 5)
    assert found.by_request == pytest.approx((0.5 + 0.0) / 2)
    twice = coverage("x", np.ones(5), high, ages, left, np.full(5, 20),
                     np.array([1.0, 1.0, 1.0, 1.0, 2.0]), num_groups=1, owner=owner)  # fmt: skip
    assert twice.by_request == pytest.approx((0.5 * 1 + 0.0 * 2) / 3)
