"""Breach and paired differences: every state of a record, the sum that must hold, the gap."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from contracts.errors import InvalidInput, LawViolation
from contracts.records import RequestRecord, State
from eval.outcomes import BreachScore, accepted_digest, outcome, score_breach
from eval.statistics import paired_difference


def record(
    state: State = "completed",
    latency_s: float | None = 5.0,
    *,
    arrival_s: float = 1.0,
    censor_s: float = 100.0,
    single_s: float = 1.0,
    cohort: str = "tagged",
) -> RequestRecord:
    ended = None if latency_s is None else arrival_s + latency_s
    return RequestRecord(
        request_id="r",
        run_id=None,
        cohort=cohort,  # type: ignore[arg-type]
        arrival_s=arrival_s,
        accepted_s=arrival_s,
        first_scheduled_s=arrival_s,
        first_token_s=arrival_s,
        end_s=ended,
        state=state,
        end_reason="",
        censor_s=censor_s,
        prompt_tokens=1,
        output_tokens=1,
        max_tokens=1,
        num_preemptions=0,
        recomputed_tokens=0,
        cache_hit_tokens=0,
        queued_s=0.0,
        preempted_s=0.0,
        single_stream_s=single_s,
        deadline_seen=None,
    )


@pytest.mark.parametrize(
    ("life", "expected"),
    [
        (record(latency_s=10.0), "met"),
        (record(latency_s=10.0 + 4e-7), "met"),  # rounds to the deadline: a tie is met
        (record(latency_s=10.0 + 2e-6), "late"),
        (record("length_capped", 3.0), "met"),
        (record("length_capped", 30.0), "late"),
        (record("failed", 2.0), "failed"),
        (record("withdrawn", 2.0), "withdrawn"),
        (record("unfinished", None, censor_s=11.0), "unfinished"),
        (record("unfinished", None, censor_s=10.9), "undetermined"),
    ],
)
def test_outcome_of_every_state(life: RequestRecord, expected: str) -> None:
    assert outcome(life, 10.0) == expected


def test_rejected_requests_stand_beside_the_score() -> None:
    score = score_breach([record(), record("rejected", None)], 10.0)
    assert (score.accepted, score.rejected, score.breach) == (1, 1, 0.0)
    with pytest.raises(InvalidInput, match="was rejected"):
        outcome(record("rejected", None), 10.0)
    with pytest.raises(InvalidInput, match="none of 1 tagged"):
        score_breach([record("rejected", None)], 10.0)


def test_completed_only_hides_what_never_ended() -> None:
    lives = [record(latency_s=2.0)] * 6 + [record("unfinished", None)] * 3 + [record("failed")]
    score = score_breach(lives, 10.0)
    assert score.breach == pytest.approx(0.4)
    assert score.completed_only == 0.0


def test_undetermined_requests_give_bounds_and_no_point() -> None:
    score = score_breach([record(), record("unfinished", None, censor_s=2.0)], 10.0)
    assert math.isnan(score.breach)
    assert (score.breach_low, score.breach_high) == (0.0, 0.5)


def test_only_the_tagged_cohort_is_scored() -> None:
    lives = [record(), record(latency_s=99.0, cohort="warmup"), record("failed", cohort="filler")]
    assert score_breach(lives, 10.0).breach == 0.0


def test_outcomes_that_do_not_add_up_are_a_law_violation() -> None:
    good = score_breach([record()], 10.0)
    fields = {name: getattr(good, name) for name in BreachScore.__slots__}
    with pytest.raises(LawViolation, match="add up to"):
        BreachScore(**(fields | {"accepted": 2}))


states = st.sampled_from(["completed", "length_capped", "failed", "withdrawn", "unfinished"])
lives = st.builds(
    lambda state, latency, single: record(
        state, None if state == "unfinished" else latency, single_s=min(single, latency)
    ),
    states,
    st.floats(0.1, 50),
    st.floats(0.1, 50),
)


@given(st.lists(lives, min_size=1, max_size=30), st.lists(st.floats(1, 60), min_size=2, max_size=6))
def test_breach_never_rises_with_the_deadline_and_stays_above_the_floor(
    cohort: list[RequestRecord], deadlines: list[float]
) -> None:
    scores = [score_breach(cohort, d) for d in sorted(deadlines)]
    rates = [score.breach_low for score in scores]
    assert rates == sorted(rates, reverse=True)
    for score in scores:
        judged = [s for s in cohort if s.state not in ("withdrawn", "unfinished")]
        if len(judged) == len(cohort):
            assert score.breach >= score.floor - 1e-12


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=20))
def test_paired_interval_equals_scipy(pairs: list[tuple[float, float]]) -> None:
    x, y = zip(*pairs, strict=True)
    d = paired_difference(x, y)
    differences = [a - b for a, b in pairs]
    if d.sd > 1e-9:
        expected = stats.ttest_rel(x, y).confidence_interval(0.95)
        assert (d.low, d.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert d.mean == pytest.approx(sum(differences) / len(differences), abs=1e-12)


def test_paired_difference_refuses_what_it_cannot_pair() -> None:
    with pytest.raises(InvalidInput, match="needs the same"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(InvalidInput, match="at least 2"):
        paired_difference([1.0], [1.0])
    with pytest.raises(InvalidInput, match="undetermined"):
        paired_difference([1.0, float("nan")], [1.0, 1.0])


IDS = st.sets(st.text("abc'", min_size=1, max_size=3), max_size=6)


@given(IDS, IDS, IDS, st.randoms())
def test_the_digest_names_the_set_of_accepted_requests(
    accepted: set[str], others: set[str], rejected: set[str], rng: random.Random
) -> None:
    def lives(ids: set[str]) -> list[RequestRecord]:
        found = [replace(record(), request_id=name) for name in ids]
        found += [replace(record("rejected", None), request_id=name) for name in rejected - ids]
        found.append(replace(record(cohort="warmup"), request_id="z"))
        rng.shuffle(found)
        return found

    assert accepted_digest(lives(accepted)) == accepted_digest(lives(accepted))
    same = accepted_digest(lives(accepted)) == accepted_digest(lives(others))
    assert same == (accepted == others)
