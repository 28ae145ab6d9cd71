"""Calibrated bounds hold as often as they say: by age, with cut runs, after a shift, reloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contracts.conformance import check_signal
from contracts.errors import CheckpointError, InvalidInput, LeakageError
from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun
from contracts.signals import SignalRequest, signal_request
from contracts.survival import kaplan_meier
from predictors.adaptive import AdaptiveBound, AdaptiveSettings
from predictors.age_km import AgeKm, AgeKmSettings
from predictors.base import room
from predictors.calibrated import Calibrated
from predictors.conformal import (
    LEVELS,
    CalibrationTable,
    ConformalRows,
    fit_table,
    product_limit,
    table_from_json,
)
from predictors.registry import load_predictor
from tests.synthetic_runs import STRIDE, make_run, synthetic_runs
from training.calibrate import calibrate, calibrate_folds, conformal_rows, cross_calibrate
from training.crossfit import crossfit, save_crossfit
from training.rows import training_set

RUNS = synthetic_runs(num_prompts=60, repeats=2)
CAP = 4000


class _Exponential:
    """Says that every remaining length is exponential with one mean, right or wrong."""

    name, source_run_ids, clairvoyant = "exponential", frozenset[str](), False

    def __init__(self, mean_tokens: float) -> None:
        self.mean = mean_tokens

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        return np.clip(self.mean, 1.0, room(requests, ages))

    def quantile(
        self, requests: Sequence[SignalRequest], ages: IntArray, level: float
    ) -> FloatArray:
        reach = np.ceil(-self.mean * np.log1p(-level) - 1e-9)
        return np.clip(reach, 1.0, room(requests, ages))

    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        alive = np.exp(-np.floor(horizon) / self.mean)
        return np.where(horizon < room(requests, ages), alive, 0.0)


def _runs(count: int, mean_tokens: float, seed: int) -> list[DecodeRun]:
    lengths = keyed_generator(seed, "exponential-runs").exponential(mean_tokens, count)
    return [
        make_run(prompt=f"{seed}-{i}", prompt_id=f"{seed}-{i}", natural_tokens=int(n) + 1,
                 cap_tokens=CAP)
        for i, n in enumerate(lengths)
    ]  # fmt: skip


def _cover(rows: ConformalRows, held: np.ndarray) -> float:
    return float(np.average(held, weights=rows.weight))


def _asked(runs: Sequence[DecodeRun], rows: ConformalRows) -> list[SignalRequest]:
    counts = [-(-run.output_tokens // STRIDE) for run in runs]
    requests = [signal_request(run) for run in runs]
    return [requests[i] for i in np.repeat(np.arange(len(runs)), counts).tolist()]


def test_the_product_limit_is_kaplan_meier() -> None:
    rng = np.random.default_rng(0)
    durations, observed = rng.integers(1, 30, 200), rng.random(200) < 0.7
    curve = kaplan_meier(durations, observed)
    values, share = product_limit(durations / 30.0, observed, np.ones(200))
    np.testing.assert_allclose(values, curve.times / 30.0)
    np.testing.assert_allclose(share, 1.0 - curve.survival, atol=1e-12)
    doubled = product_limit(durations / 30.0, observed, np.full(200, 2.0))
    np.testing.assert_allclose(doubled[1], share, atol=1e-12)


@pytest.mark.parametrize("belief", [20.0, 100.0, 400.0])
def test_a_wrong_predictor_gets_honest_bounds(belief: float) -> None:
    """Five times too short, right, four times too long: bounds hold as often as they say.

    500 prompts on each side; a row of a long run is met more often, so they are worth half as many:
    with both sides' chance three standard errors of a coverage of .9 are .08. An exponential
    forgets its age, so every age group sees the same law.
    """
    signal = _Exponential(belief)
    table = fit_table(conformal_rows(signal, _runs(500, 100.0, 1)))
    test = _runs(500, 100.0, 2)
    rows = conformal_rows(signal, test)
    asked, left = _asked(test, rows), np.array([r.output_tokens for r in test])
    remaining = np.repeat(left, [-(-n // STRIDE) for n in left]) - rows.age
    calibrated = _calibrated(signal, table)
    high = calibrated.quantile(asked, rows.age, 0.9)
    low = calibrated.quantile(asked, rows.age, 0.1)
    inner = calibrated.interval(asked, rows.age, 0.9)
    assert _cover(rows, remaining <= high) == pytest.approx(0.9, abs=0.08)
    assert _cover(rows, remaining >= low) == pytest.approx(0.9, abs=0.08)
    both = (inner[0] <= remaining) & (remaining <= inner[1])
    assert _cover(rows, both) == pytest.approx(0.9, abs=0.08)
    raw = signal.quantile(asked, rows.age, 0.9)
    assert belief == 100.0 or abs(_cover(rows, remaining <= raw) - 0.9) > 0.095


def _calibrated(signal: _Exponential, table: CalibrationTable) -> Calibrated:
    any_fit = AgeKmSettings().fit(training_set(RUNS[:2]))
    wrapped = Calibrated(any_fit, table)
    wrapped.base = signal  # type: ignore[assignment]  # a signal without a checkpoint
    return wrapped


def test_a_cut_run_is_longer_than_it_was_seen() -> None:
    """Two in five runs are aborted early: scores enter as censored, and the bound still holds.

    Reading the cut as the end would lower the 0.9 bound from 230 tokens to about 150.
    """
    signal, rng = _Exponential(100.0), keyed_generator(0, "cuts")
    whole = _runs(800, 100.0, 3)
    cuts = np.ceil(rng.exponential(150.0, len(whole))).astype(int)
    cut = [
        replace(run, output_tokens=int(c), finish_reason="abort", event_observed=False)
        if c < run.output_tokens
        else run
        for run, c in zip(whole, cuts, strict=True)
    ]
    assert 0.3 < np.mean([run.event_observed is False for run in cut]) < 0.5
    one, age = signal_request(_runs(1, 1.0, 9)[0]), np.array([0])
    bounds = []
    for runs in (cut, [replace(run, event_observed=True) for run in cut]):
        calibrated = _calibrated(signal, fit_table(conformal_rows(signal, runs), 1))
        bounds.append(calibrated.quantile([one], age, 0.9)[0])
    assert bounds[0] == pytest.approx(230.0, rel=0.15)  # three standard errors of 800 runs
    assert bounds[1] < 170.0


def test_too_few_prompts_give_the_cap_and_one_token() -> None:
    signal = _Exponential(100.0)
    table = fit_table(conformal_rows(signal, _runs(5, 100.0, 4)), 1)
    calibrated, one = _calibrated(signal, table), signal_request(_runs(1, 1.0, 9)[0])
    assert calibrated.quantile([one], np.array([0]), 0.9)[0] == CAP
    assert calibrated.quantile([one], np.array([0]), 0.1)[0] == 1.0
    with pytest.raises(InvalidInput, match="no row to calibrate"):
        fit_table(conformal_rows(signal, []))


def test_a_calibrated_predictor_keeps_the_contract_and_its_file(tmp_path: Path) -> None:
    train, test = RUNS[:90], RUNS[90:]
    settings = AgeKmSettings()
    raw = settings.fit(training_set(train))
    calibrated = cross_calibrate(raw, train, settings, num_folds=3, num_groups=4)
    check_signal(calibrated, [run for run in test if run.output_tokens >= 3 * STRIDE])
    calibrated.save_pretrained(tmp_path)
    loaded = load_predictor(tmp_path)
    requests, ages = [signal_request(run) for run in test], np.zeros(len(test), np.int64)
    for level in (0.05, 0.5, 0.9):
        ours = calibrated.quantile(requests, ages, level)
        np.testing.assert_array_equal(loaded.quantile(requests, ages, level), ours)
    np.testing.assert_array_equal(
        loaded.survival(requests, ages, np.full(len(test), 30.0)),
        calibrated.survival(requests, ages, np.full(len(test), 30.0)),
    )
    assert isinstance(loaded, Calibrated) and loaded.name == "age-km"
    assert isinstance(AgeKm.from_pretrained(tmp_path), AgeKm)
    assert "| ages |" in (tmp_path / "README.md").read_text()
    with pytest.raises(CheckpointError, match="holds a 'age-km' predictor"):
        Calibrated.from_pretrained(tmp_path)
    with pytest.raises(LeakageError, match="was trained on prompt"):
        calibrate(raw, train)
    assert isinstance(calibrate(raw, test), Calibrated)


def test_folds_are_calibrated_on_the_other_folds(tmp_path: Path) -> None:
    signal = crossfit(RUNS, "age-km", num_folds=3)
    folds = calibrate_folds(signal, RUNS)
    by_hand = [run for run in RUNS if signal.fold_of[run.prompt_sha256] != 1]
    expected = fit_table(conformal_rows(signal, by_hand))
    second = folds.signals[1]
    assert isinstance(second, Calibrated)
    np.testing.assert_array_equal(second.table.asked, expected.asked)
    save_crossfit(folds, tmp_path, ())
    assert isinstance(load_predictor(tmp_path / "fold-1"), Calibrated)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("method", "guess", "reads the method"),
        ("levels", [0.5, 0.4], "must rise|shape"),
        ("asked", [[0.9, 0.1]], "shape|falling"),
        ("asked", "all", "numbers only"),
        ("age_edges", [True], "numbers only"),
        ("num_prompts", [], "shape"),
        ("raw_cover90", [float("inf")], "finite"),
    ],
)
def test_a_damaged_table_is_refused(key: str, value: object, says: str) -> None:
    good = fit_table(conformal_rows(_Exponential(100.0), _runs(60, 100.0, 5)), 2).to_json()
    again = table_from_json(json.loads(json.dumps(good)))
    assert again is not None and again.to_json() == good and len(again.levels) == len(LEVELS)
    with pytest.raises(CheckpointError, match=says):
        table_from_json({**good, key: value})  # type: ignore[dict-item]
    assert table_from_json(None) is None


def _stream(bound: AdaptiveBound, mean_tokens: float, count: int, seed: int) -> FloatArray:
    """Return (count, 2): tokens of each run, and at how many of them the bound held."""
    out = []
    for run in _runs(count, mean_tokens, seed):
        held = bound.complete(signal_request(run), run.output_tokens)
        out.append((run.output_tokens, held * run.output_tokens))
    return np.array(out)


@pytest.mark.parametrize(("level", "after"), [(0.9, 600.0), (0.1, 100.0 / 6.0)])
def test_coverage_returns_after_a_shift(level: float, after: float) -> None:
    """Lengths grow (upper bound) or shrink (lower bound) sixfold: without adaptation coverage stays
    away for good, with it completions 200 to 300 after the shift are covered again. Four streams:
    400 runs worth about 200, three standard errors are .064."""
    signal = _Exponential(100.0)
    table = fit_table(conformal_rows(signal, _runs(400, 100.0, 6)), 1)
    covered = {}
    for name, how in (
        ("fixed", AdaptiveSettings(step=0.0, refresh_every=0)),
        ("fast", AdaptiveSettings(refresh_every=0)),
        ("slow", AdaptiveSettings(step=0.0)),
        ("both", AdaptiveSettings()),
    ):
        late = []
        for seed in range(4):
            bound = AdaptiveBound(signal, table, level, how)
            _stream(bound, 100.0, 100, 100 + seed)
            late.append(_stream(bound, after, 300, 200 + seed)[200:])
        tokens, held = np.concatenate(late).sum(axis=0)
        covered[name] = held / tokens
    assert covered["fixed"] < 0.7
    assert covered["fast"] > covered["fixed"] and covered["slow"] > covered["fixed"]
    assert covered["both"] == pytest.approx(0.9, abs=0.064), covered


def test_what_still_runs_counts_when_the_table_is_refreshed() -> None:
    """The short half of a batch is done, the long half still runs at 300 tokens: a refresh on
    completions alone says that all is short."""
    signal = _Exponential(100.0)
    start = fit_table(conformal_rows(signal, _runs(100, 100.0, 6)), 1)
    one = signal_request(make_run(prompt="q", prompt_id="q", natural_tokens=1, cap_tokens=CAP))
    bounds = []
    for running in ([], [one] * 30):
        bound = AdaptiveBound(signal, start, settings=AdaptiveSettings(refresh_every=0))
        for run in _runs(30, 20.0, 11):
            bound.complete(signal_request(run), run.output_tokens)
        bound.refresh(running, np.full(len(running), 300))
        bounds.append(bound.bound([one], np.array([0]))[0])
    assert bounds[0] < 120.0 and bounds[1] > 300.0


def test_bad_settings_are_refused() -> None:
    for change in ({"step": 1.0}, {"window": 3}, {"refresh_every": -1}, {"num_groups": 0}):
        with pytest.raises(InvalidInput, match=next(iter(change))):
            AdaptiveSettings(**change)  # type: ignore[arg-type]
