"""Rescoring: equal to scoring afresh at each deadline, or refused; reversals only if known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidInput
from contracts.records import RequestRecord, State
from eval.lives import lives_of
from eval.outcomes import score_breach
from eval.rescoring import (
    BreachCurve,
    cumulative_incidence,
    difference_curve,
    incidence_of,
    rescore,
    rescore_own,
    reversals,
)
from tests.unit.test_outcomes import record

DEADLINES = np.arange(1.0, 9.0)
lives = st.builds(
    lambda state, latency, alone: record(
        state, None if state == "unfinished" else latency, single_s=alone
    ),
    st.sampled_from(["completed", "length_capped", "failed", "unfinished", "withdrawn"]),
    st.sampled_from([0.5, 1.0, 2.0, 2.0000004, 2.000001, 5.0, 9.5]),
    st.sampled_from([0.5, 3.0, 8.5]),
)


@given(st.lists(lives, min_size=1, max_size=12))
def test_a_curve_is_the_score_at_each_deadline(records: list[RequestRecord]) -> None:
    if all(r.state == "withdrawn" for r in records):
        with pytest.raises(InvalidInput, match="withdrawn"):
            rescore(records, DEADLINES)
        return
    curve = rescore(records, DEADLINES)
    for at, deadline in enumerate(DEADLINES):
        score = score_breach(records, float(deadline))
        assert curve.breach[at] == pytest.approx(score.breach, abs=1e-12)
        assert curve.floor[at] == pytest.approx(score.floor, abs=1e-12)
    assert np.all(np.diff(curve.breach) <= 0)


@given(
    st.lists(st.tuples(lives, st.sampled_from([1.0, 2.0, 4.0])), min_size=1, max_size=12),
    st.sampled_from([0.5, 1.0, 1.5]),
)
def test_multiples_of_own_deadlines_are_the_score_at_those(
    pairs: list[tuple[RequestRecord, float]], factor: float
) -> None:
    records = [replace(life, deadline_s=due_s) for life, due_s in pairs]
    if all(r.state == "withdrawn" for r in records):
        with pytest.raises(InvalidInput, match="withdrawn"):
            rescore_own(lives_of(records), [factor])
        return
    curve = rescore_own(lives_of(records), [0.25, factor])
    scaled = [replace(r, deadline_s=factor * (r.deadline_s or 0.0)) for r in records]
    score = score_breach(scaled, None)
    assert curve.breach[1] == pytest.approx(score.breach, abs=1e-12)
    assert curve.floor[1] == pytest.approx(score.floor, abs=1e-12)


def test_own_deadlines_must_be_there_unread_and_watched() -> None:
    def own(*changed: RequestRecord) -> object:
        return rescore_own(lives_of([*changed]), [1.0, 2.0])

    due = edited(deadline_s=4.0)
    with pytest.raises(InvalidInput, match="no deadline of its own: rescore at deadlines in sec"):
        own(due, edited())
    with pytest.raises(InvalidInput, match="can be scored at those only"):
        own(replace(due, deadline_seen=4.0))
    assert rescore_own(lives_of([replace(due, deadline_seen=4.0)]), [1.0]).breach.tolist() == [0.0]
    with pytest.raises(InvalidInput, match=r"watched for 6.0 s, less than .* 8.0 s"):
        own(edited("unfinished", None, end_s=None, censor_s=7.0, deadline_s=4.0))


def edited(
    state: State = "completed", latency: float | None = 1.0, **changes: Any
) -> RequestRecord:
    return replace(record(state, latency), **changes)


@pytest.mark.parametrize(
    ("life", "said"),
    [
        (edited(deadline_seen=4.0), "read the deadline of 4 s"),
        (edited("unfinished", None, end_s=None, censor_s=5.0), "watched for 4.0 s"),
        (edited("failed", 3.0, end_reason="patience"), "patience after 3.0 s"),
    ],
)
def test_what_cannot_be_rescored_is_refused(life: RequestRecord, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        rescore([record(), life], DEADLINES)


def test_a_deadline_that_was_read_can_be_scored_itself() -> None:
    assert rescore([edited(deadline_seen=4.0)], [4.0]).breach.tolist() == [0.0]


@pytest.mark.parametrize("bad", [[], [0.0], [2.0, 1.0], [1.0, 1.0], [float("nan")]])
def test_deadlines_are_positive_and_rise(bad: list[float]) -> None:
    with pytest.raises(InvalidInput, match="deadlines"):
        rescore([record()], bad)


def curves(breach: np.ndarray) -> list[BreachCurve]:
    zero = np.zeros(breach.shape[1])
    return [BreachCurve(np.arange(1.0, breach.shape[1] + 1), row, zero) for row in breach]


def test_a_reversal_needs_both_signs_known() -> None:
    rng = np.random.default_rng(0)
    slope = np.linspace(-0.05, 0.05, 9)
    noise = rng.normal(0, 0.01, size=(12, 1))
    half = curves(np.full((12, 9), 0.5))
    known = difference_curve(curves(0.5 + slope + noise), half)
    (found,) = reversals(known)
    assert found.negative_at_s < 5.0 < found.positive_at_s
    wide = rng.normal(0, 0.2, size=(12, 9))
    assert (
        reversals(difference_curve(curves(0.5 + slope + wide), curves(np.full((12, 9), 0.5)))) == []
    )


def test_the_band_covers_the_whole_curve_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        # a random walk over the deadlines: neighbours are alike, as rescored curves are
        noise = rng.normal(0, 0.01, size=(10, 12)).cumsum(axis=1)
        band = difference_curve(curves(noise), curves(np.zeros((10, 12))))
        inside += bool(np.all((band.low <= 0) & (band.high >= 0)))
    # 200 draws at 95 %: 3 standard errors are 4.6 points; bootstrap-t may cover somewhat more
    assert 0.904 <= inside / 200 <= 1.0


def test_equal_curves_give_a_band_of_zero_not_nan() -> None:
    same = curves(np.full((5, 3), 0.2))
    band = difference_curve(same, same)
    assert band.low.tolist() == band.high.tolist() == [0.0, 0.0, 0.0]
    assert reversals(band) == []


def test_incidence_is_the_share_where_all_is_seen_and_kaplan_meier_where_one_cause_is() -> None:
    stats = pytest.importorskip("scipy.stats")
    times, causes = [1.0, 2.0, 2.0, 2.0, 3.0, 5.0, 5.0], [1, 1, 2, 1, 2, 1, 2]
    assert cumulative_incidence(times, causes, [0.5, 2.0, 9.0]).tolist() == pytest.approx(
        [0.0, 3 / 7, 4 / 7]
    )
    causes = [1, 0, 1, 1, 0, 1, 0]
    sample = stats.CensoredData.right_censored(times, np.array(causes) == 0)
    expected = stats.ecdf(sample).cdf.evaluate([1.0, 2.0, 4.0, 6.0])
    ours = cumulative_incidence(times, causes, [1.0, 2.0, 4.0, 6.0])
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_incidence_equals_statsmodels_with_ties_between_causes() -> None:
    module = pytest.importorskip("statsmodels.duration.survfunc")
    rng = np.random.default_rng(2)
    times = rng.integers(1, 8, 60).astype(float)
    causes = rng.integers(0, 3, 60)
    theirs = module.CumIncidenceRight(times, causes)
    for cause in (1, 2):
        np.testing.assert_allclose(
            cumulative_incidence(times, causes, theirs.times, cause),
            theirs.cinc[cause - 1],
            rtol=1e-12,
        )


def test_failures_compete_and_unfinished_are_censored() -> None:
    cohort = [record("completed", 1.0), record("failed", 2.0), record("unfinished", None)]
    seen = incidence_of(cohort, [3.0])
    assert seen["completed"][0] == pytest.approx(1 / 3)
    assert seen["failed"][0] == pytest.approx(1 / 3)


def test_a_band_of_six_seeds_holds_and_is_no_wider_than_it_must_be() -> None:
    rng = np.random.default_rng(4)
    deadlines = np.arange(1.0, 13.0)
    zero = [BreachCurve(deadlines, np.zeros(12), np.zeros(12))] * 6
    holds, widths = [], []
    for _ in range(300):
        walk = 0.01 * rng.normal(size=(6, 12)).cumsum(axis=1)
        curve = difference_curve([BreachCurve(deadlines, row, 0 * row) for row in walk], zero)
        holds.append(bool(np.all((curve.low <= 0) & (curve.high >= 0))))
        error = 100 * walk.std(axis=0, ddof=1) / np.sqrt(6)
        widths.append(float(((curve.high - curve.mean) / error).mean()))
    assert np.mean(holds) > 0.91  # 95 % less three standard errors of 300
    assert max(widths) < 5.2  # Bonferroni takes 4.98 standard errors; the quantile is simulated
