"""The log-t law against scipy's Student t and adaptive quadrature."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from contracts.log_t import (
    DEGREES_OF_FREEDOM,
    log_t_mean_residual,
    log_t_residual_quantile,
    log_t_residual_survival,
    student_t_survival,
)

CASES = [(6.0, 0.3, 500, 4096), (7.0, 0.05, 3000, 32768), (5.0, 1.0, 5000, 30000), (6, 0.4, 1, 99)]


def _sf(tokens: float, location: float, scale: float) -> float:
    return float(stats.t.sf((np.log(tokens) - location) / scale, DEGREES_OF_FREEDOM))


def test_survival_of_student_t_equals_scipy() -> None:
    x = np.concatenate([np.linspace(-200, 200, 4001), [1e-9, -1e-9]])
    expected = stats.t.sf(x, DEGREES_OF_FREEDOM)
    # both are evaluated to a few units in the last place
    np.testing.assert_allclose(student_t_survival(x), expected, rtol=1e-13)
    assert student_t_survival(np.array([-np.inf, np.inf])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("location", "scale", "age", "cap"), CASES)
def test_restricted_mean_equals_adaptive_quadrature(
    location: float, scale: float, age: int, cap: int
) -> None:
    knots = [u for u in np.exp(location + scale * np.array([-5, -2, 0, 2, 5])) if age < u < cap]
    area, _ = quad(
        _sf, age, cap, (location, scale), points=knots or None, limit=500, epsabs=0, epsrel=1e-12
    )
    mean = log_t_mean_residual(*_row(location, scale, age, cap))[0]
    now, end = _sf(age, location, scale), _sf(cap, location, scale)
    # the error bound that contracts.log_t states
    assert mean == pytest.approx((area + (now - end) / 2) / now, rel=1e-8)


def test_mean_is_the_sum_of_survival_over_whole_tokens() -> None:
    for row in (_row(4.0, 0.2, 60, 400), _row(6.0, 0.3, 0, 900)):
        location, scale, age, cap = row
        horizon = np.arange(cap[0] - age[0])
        n = len(horizon)
        alive = log_t_residual_survival(location.repeat(n), scale.repeat(n), age.repeat(n), horizon)
        # what the trapezoid leaves out: a twelfth of the change of slope (Euler-Maclaurin)
        assert log_t_mean_residual(*row)[0] == pytest.approx(alive.sum(), abs=0.05)


@pytest.mark.parametrize(("location", "scale", "age", "cap"), CASES)
@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_quantile_is_the_first_token_that_reaches_its_level(
    location: float, scale: float, age: int, cap: int, level: float
) -> None:
    row = _row(location, scale, age, cap)
    reach = int(log_t_residual_quantile(*row, level)[0])

    def ended_by(tokens: int) -> float:
        horizon = np.array([tokens])
        return 1.0 - float(log_t_residual_survival(row[0], row[1], row[2], horizon)[0])

    assert reach == cap - age or ended_by(reach) >= level
    assert reach == 1 or ended_by(reach - 1) < level


def _row(
    location: float, scale: float, age: int, cap: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return np.array([location]), np.array([scale]), np.array([age]), np.array([cap])
