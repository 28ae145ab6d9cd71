"""Curves of many groups: the single curve, scipy, and exact fractions on tie-heavy samples.

lifelines and scikit-survival are not installed here, so their figures are replaced by what both
print for these samples: the product-limit estimate and its integral, in exact fractions.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from contracts import survival_many
from contracts.errors import InvalidInput
from contracts.survival import kaplan_meier
from contracts.survival_many import kaplan_meier_by

rows = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 12), st.booleans()), min_size=1, max_size=60
)
# (duration, seen to end): ties of events, of cuts, and of both at one duration
TIES = {
    "ends and cuts tie": [(3, 1), (3, 1), (3, 0), (5, 1), (5, 0), (5, 0), (8, 1), (8, 1), (9, 0)],
    "all one length": [(7, 1), (7, 1), (7, 1), (7, 0)],
    "last ones were cut": [(2, 1), (4, 1), (4, 1), (6, 0), (6, 0), (6, 0)],
    "first was cut": [(1, 0), (2, 1), (2, 0), (3, 1), (10, 1)],
}


def _sample(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    durations, ended = (np.array(column) for column in zip(*pairs, strict=True))
    return durations, ended.astype(bool)


def _exact_survival(pairs: list[tuple[int, int]], at: int) -> Fraction:
    value = Fraction(1)
    for time in sorted({t for t, ended in pairs if ended and t <= at}):
        ended = sum(1 for t, e in pairs if e and t == time)
        value *= 1 - Fraction(ended, sum(1 for t, _ in pairs if t >= time))
    return value


@pytest.mark.parametrize("pairs", TIES.values(), ids=list(TIES))
def test_tie_heavy_samples_equal_exact_fractions_and_scipy(pairs: list[tuple[int, int]]) -> None:
    durations, ended = _sample(pairs)
    group = np.zeros(len(pairs), dtype=np.int64)
    curves = kaplan_meier_by(group, durations, ended, 1)
    reference = stats.ecdf(stats.CensoredData(durations[ended], right=durations[~ended])).sf
    longest = int(durations.max())
    for age in range(longest):
        exact = _exact_survival(pairs, age)
        zero, at = np.array([0]), np.array([age])
        assert curves.at(zero, at)[0] == pytest.approx(float(exact), abs=1e-9)
        assert curves.at(zero, at)[0] == pytest.approx(reference.evaluate(age), abs=1e-9)
        for cap in (age + 1, longest, longest + 5):
            area = sum(_exact_survival(pairs, t) for t in range(age, cap))
            mean = curves.mean_residual(zero, at, np.array([cap]))[0]
            assert mean == pytest.approx(float(area / exact), rel=1e-9)


@given(rows)
def test_each_group_equals_its_own_curve(sample: list[tuple[int, int, bool]]) -> None:
    group, durations, ended = (np.array(column) for column in zip(*sample, strict=True))
    names, group = np.unique(group, return_inverse=True)
    curves = kaplan_meier_by(group, durations, ended, len(names))
    ages = np.arange(14)
    for index in range(len(names)):
        mine = group == index
        alone = kaplan_meier(durations[mine], ended[mine])
        curve = np.full(len(ages), index)
        np.testing.assert_allclose(curves.at(curve, ages), alone(ages), atol=1e-14)
        assert curves.alive(curve, ages).tolist() == [(durations[mine] > a).sum() for a in ages]
        assert curves.num_events[index] == ended[mine].sum()
        for cap in (13, 30):
            caps = np.full(len(ages), cap)
            np.testing.assert_allclose(
                curves.mean_residual(curve, ages, caps),
                alone.mean_residual(ages, caps),
                rtol=1e-12,
            )
            for level in (0.1, 0.5, 0.9):
                np.testing.assert_array_equal(
                    curves.residual_quantile(curve, ages, caps, level)[ages < cap],
                    alone.residual_quantile(ages, caps, level)[ages < cap],
                )


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    group = np.concatenate([np.arange(40), rng.integers(0, 40, 500)])
    durations, ended = rng.integers(1, 30, 540), rng.random(540) < 0.7
    whole = kaplan_meier_by(group, durations, ended, 40)
    monkeypatch.setattr(survival_many, "_BLOCK", 37)
    parts = kaplan_meier_by(group, durations, ended, 40)
    for name in ("offsets", "knots", "survival", "area", "outlived", "num_events"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))


def test_one_curve_taken_out_is_the_curve() -> None:
    durations, ended = _sample(TIES["ends and cuts tie"])
    curves = kaplan_meier_by(np.zeros(len(durations), dtype=np.int64), durations, ended, 1)
    mine, alone = curves.curve(0), kaplan_meier(durations, ended)
    assert mine.times.tolist() == alone.times.tolist()
    np.testing.assert_allclose(mine.survival, alone.survival, rtol=1e-15)
    assert (mine.last_tokens, mine.num_runs) == (alone.last_tokens, alone.num_runs)


def test_an_empty_group_and_a_length_of_zero_are_refused() -> None:
    with pytest.raises(InvalidInput, match="sample is empty"):
        kaplan_meier_by(np.array([0, 2]), np.array([3, 3]), np.array([True, True]), 3)
    with pytest.raises(InvalidInput, match="at least 1"):
        kaplan_meier_by(np.array([0, 0]), np.array([0, 3]), np.array([True, True]), 1)
