"""Kaplan-Meier and its residuals, against scipy's estimator and against plain averages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from contracts.errors import InvalidInput
from contracts.survival import kaplan_meier

samples = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=30)


@given(samples)
def test_curve_equals_scipy(sample: list[tuple[int, bool]]) -> None:
    times, events = (np.array(column) for column in zip(*sample, strict=True))
    curve = kaplan_meier(times, events)
    data = stats.CensoredData(uncensored=times[events], right=times[~events])
    expected = stats.ecdf(data).sf
    at = np.arange(0, 42)
    np.testing.assert_allclose(curve(at), expected.evaluate(at), atol=1e-12)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(0, 59))
def test_without_censoring_the_residual_is_the_mean_of_those_alive(
    lengths: list[int], age: int
) -> None:
    sample = np.array(lengths)
    curve = kaplan_meier(sample, np.ones(len(sample), dtype=bool))
    answer = curve.mean_residual(np.array([age]), np.array([100]))[0]
    alive = sample[sample > age]
    if alive.size:
        assert answer == pytest.approx(float((alive - age).mean()), rel=1e-9)
        median = curve.residual_quantile(np.array([age]), np.array([100]), 0.5)[0]
        assert median == np.sort(alive - age)[(len(alive) + 1) // 2 - 1]
    else:
        assert np.isnan(answer)


def test_a_capped_run_is_not_a_length() -> None:
    """Two runs cut at 10 and one that ended at 4: the mean is restricted to the cap asked for."""
    curve = kaplan_meier(np.array([4, 10, 10]), np.array([True, False, False]))
    assert curve(np.array([3, 4, 10])).tolist() == pytest.approx([1, 2 / 3, 2 / 3])
    at_zero = curve.mean_residual(np.array([0]), np.array([10]))[0]
    assert at_zero == pytest.approx(4 + 6 * 2 / 3)
    assert curve.mean_residual(np.array([5]), np.array([10]))[0] == pytest.approx(5.0)
    assert np.isnan(curve.mean_residual(np.array([10]), np.array([20]))[0])


def test_empty_and_broken_samples_are_refused() -> None:
    with pytest.raises(InvalidInput, match="sample is empty"):
        kaplan_meier(np.array([], dtype=np.int64), np.array([], dtype=bool))
    with pytest.raises(InvalidInput, match="at least 1"):
        kaplan_meier(np.array([0, 3]), np.array([True, True]))
