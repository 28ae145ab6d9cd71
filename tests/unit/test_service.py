"""Service scores: a cohort made by hand, laws, and slow twins; deadline classes."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidInput
from contracts.records import RequestRecord
from eval.outcomes import score_breach
from eval.service import jain_index, quantile, score_service, top_count
from tests.unit.test_outcomes import record

HORIZON_S = 100.0


def life(
    name: str, arrival_s: float, first_s: float | None, latency_s: float | None, **changes: object
) -> RequestRecord:
    """A tagged request that arrived, got its first token and ended so long after arriving."""
    state = changes.pop("state", "unfinished" if latency_s is None else "completed")
    base = record(state, latency_s, arrival_s=arrival_s, censor_s=arrival_s + HORIZON_S)  # type: ignore[arg-type]
    first = None if first_s is None else arrival_s + first_s
    return replace(base, request_id=name, first_token_s=first, **changes)  # type: ignore[arg-type]


def test_a_cohort_by_hand() -> None:
    lives = [
        life("a", 0.0, 1.0, 11.0, output_tokens=11, single_stream_s=11.0, num_preemptions=0),
        life("b", 10.0, 3.0, 23.0, output_tokens=11, single_stream_s=11.5, num_preemptions=2),
        life("c", 20.0, 5.0, None, output_tokens=20, single_stream_s=50.0, num_preemptions=4),
        life("d", 40.0, None, 2.0, state="failed", single_stream_s=2.0),
        life("e", 40.0, 1.0, 30.0, state="length_capped", single_stream_s=30.0),
        life("f", 40.0, None, None, state="rejected"),
        life("g", 30.0, 1.0, 2.0, state="withdrawn"),
    ]
    score = score_service(lives, 25.0, HORIZON_S)
    assert (score.offered, score.offered_per_s) == (7, pytest.approx(7 / 40.0))
    # first tokens after 1, 3, 5, never (100) and 1 s; the one that withdrew is outside
    assert score.ttft_mean_s == pytest.approx((1 + 3 + 5 + 100 + 1) / 5)
    assert (score.ttft_p50_s, score.ttft_p99_s) == (3.0, 100.0)
    # ends after 11, 23, never, never (it failed) and 30 s
    assert score.e2e_mean_s == pytest.approx((11 + 23 + 100 + 100 + 30) / 5)
    assert (score.e2e_p50_s, score.e2e_p99_s) == (30.0, 100.0)
    # 10 s / 10 tokens, 20 / 10, and 95 s watched / 19 tokens; the others wrote one
    assert score.tpot_mean_s == pytest.approx((1 + 2 + 5) / 3)
    assert (score.tpot_p50_s, score.tpot_p99_s) == (2.0, 5.0)
    assert score.goodput_per_s == pytest.approx(2 / 40.0)  # a and b
    assert (score.preemptions_per_request, score.preempted_share) == (6 / 5, 2 / 5)
    assert score.length_capped_share == 1 / 5
    slow = np.array([1.0, 2.0, 2.0, 50.0, 1.0])
    assert score.jain_fairness == pytest.approx(slow.sum() ** 2 / (5 * (slow**2).sum()))
    # the tenth of five is one: c, which takes 50 s alone
    assert (score.top_decile_breach, score.top_decile_floor) == (1.0, 1.0)
    assert score_service(lives, 60.0, HORIZON_S).top_decile_floor == 0.0


def test_who_scores_nothing_is_told() -> None:
    with pytest.raises(InvalidInput, match="horizon_s"):
        score_service([life("a", 0.0, 1.0, 2.0)], 5.0, 0.0)
    with pytest.raises(InvalidInput, match="none of 1 tagged"):
        score_service([life("a", 0.0, None, None, state="rejected")], 5.0, HORIZON_S)
    with pytest.raises(InvalidInput, match="no deadline of its own"):
        score_service([life("a", 0.0, 1.0, 2.0)], None, HORIZON_S)


def test_one_arrival_has_no_rate_and_no_second_token_no_pace() -> None:
    score = score_service([life("a", 0.0, 1.0, 2.0)], 5.0, HORIZON_S)
    assert math.isnan(score.goodput_per_s)
    assert math.isnan(score.tpot_mean_s)
    assert math.isnan(score.tpot_p99_s)


lives_strategy = st.lists(
    st.builds(
        lambda at, first, more, ends, alone, n: life(
            "x", at, first, first + more if ends else None, single_stream_s=alone, output_tokens=n
        ),
        st.floats(0, 50),
        st.floats(0, 40),
        st.floats(0, 55),
        st.booleans(),
        st.floats(0.1, 90),
        st.integers(1, 50),
    ),
    min_size=1,
    max_size=30,
)


@settings(deadline=None)
@given(lives_strategy, st.floats(0.5, 100))
def test_laws_of_any_cohort(lives: list[RequestRecord], deadline_s: float) -> None:
    score = score_service(lives, deadline_s, HORIZON_S)
    n = len(lives)
    assert 0 <= score.ttft_p50_s <= score.ttft_p99_s <= HORIZON_S
    assert 0 <= score.e2e_p50_s <= score.e2e_p99_s <= HORIZON_S
    assert score.e2e_mean_s >= score.ttft_mean_s - 1e-9
    assert math.isnan(score.jain_fairness) or 1 / n - 1e-9 <= score.jain_fairness <= 1 + 1e-9
    assert 0 <= score.top_decile_breach <= 1
    # nobody is late alone and in time together, unless the made-up times say so; the top tenth is
    # as long as any, so its floor is at least the cohort's
    breach = score_breach(lives, deadline_s)
    assert score.top_decile_floor >= breach.floor - 1e-12
    if not math.isnan(score.goodput_per_s):
        assert score.goodput_per_s <= score.offered_per_s + 1e-12
        assert score.goodput_per_s == pytest.approx(score.offered_per_s * breach.met / n)


@settings(deadline=None)
@given(lives_strategy, st.floats(0.5, 90))
def test_a_common_deadline_is_everybodys_own(lives: list[RequestRecord], due_s: float) -> None:
    own = [replace(one, deadline_s=due_s) for one in lives]
    assert asdict(score_breach(own, None)) == pytest.approx(
        asdict(score_breach(lives, due_s)), nan_ok=True
    )
    assert asdict(score_service(own, None, HORIZON_S)) == pytest.approx(
        asdict(score_service(lives, due_s, HORIZON_S)), nan_ok=True
    )


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40), st.floats(1e-3, 1e3))
def test_jain_knows_no_unit_and_is_the_textbooks(values: list[float], unit: float) -> None:
    x = np.array(values)
    textbook = math.fsum(values) ** 2 / (len(values) * math.fsum(v * v for v in values))
    assert jain_index(x) == pytest.approx(textbook, rel=1e-9)
    assert jain_index(unit * x) == pytest.approx(jain_index(x), rel=1e-9)


def test_jain_at_its_ends() -> None:
    assert jain_index(np.full(7, 3.0)) == pytest.approx(1.0)
    assert jain_index(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert math.isnan(jain_index(np.zeros(3)))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_quantile_is_the_smallest_value_that_enough_do_not_exceed(
    values: list[float], share: float
) -> None:
    enough = [
        v for v in sorted(values) if sum(w <= v for w in values) >= share * len(values) - 1e-9
    ]
    assert quantile(np.array(values), share) == enough[0]
    assert math.isnan(quantile(np.array([]), share))


@pytest.mark.parametrize(("count", "top"), [(1, 1), (9, 1), (10, 1), (200, 20)])
def test_a_top_decile_has_somebody(count: int, top: int) -> None:
    assert top_count(count) == top
