"""Each kind of fault on a case small enough to follow by hand, and bad fault files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.errors import InvalidInput, UnknownName
from contracts.policy import Policy
from contracts.records import RequestRecord
from contracts.signals import RemainingGrid
from eval.outcomes import score_breach
from serving_sim.config import EngineConfig
from serving_sim.engine import StepLog, simulate
from serving_sim.fault_rates import FaultRate, FaultSource, faults_from_table, read_faults
from serving_sim.faults import (
    Capacity,
    Disconnect,
    Failure,
    Fault,
    FaultPlan,
    Patience,
    SignalOutage,
    Slow,
    Stall,
    WorkerLoss,
)
from serving_sim.jump import simulate_fast, unsupported
from serving_sim.policies import get_policy
from serving_sim.profile import AffineProfile
from tests.by_hand import workload
from traces.workload import Workload

SECOND = AffineProfile("one second a step", 1.0, 0.0, 0.0)
# Two requests of 8 + 20 tokens in 6 usable blocks of 8: each can have 4, both cannot.
PAIR = workload([8, 8], [20, 20], cap=20)
TIGHT = EngineConfig(num_blocks=7, block_size=8, enable_prefix_caching=False)
AMPLE = replace(TIGHT, num_blocks=100)


def records(
    faults: list[Fault], jobs: Workload = PAIR, config: EngineConfig = AMPLE, **kwargs: Any
) -> tuple[RequestRecord, ...]:
    return simulate(jobs, config, SECOND, faults=FaultPlan(tuple(faults)), **kwargs).records


def test_a_request_fails_at_the_first_boundary_and_frees_its_kv_for_the_next_step() -> None:
    steps: list[StepLog] = []
    a, b = records([Failure(at_s=3.5, request_id="a")], on_step=steps.append)
    assert (a.state, a.end_reason, a.end_s, a.output_tokens) == ("failed", "request_failed", 4.0, 4)
    assert (b.state, b.end_s) == ("completed", 20.0)
    assert steps[3].num_free_blocks == 99 - 4  # both hold 11 tokens
    assert steps[4].num_free_blocks == 99 - 2  # "b" holds 12
    assert steps[4].finished_before == ("a",)


def test_a_last_token_that_returns_at_the_boundary_was_still_written() -> None:
    assert records([Failure(at_s=19.5, request_id="a")])[0].state == "completed"
    assert records([Failure(at_s=19.0, request_id="a")])[0].state == "failed"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("at_s", [0.0, 3.5, 17.5, 18.5, 19.0, 40.0])
def test_a_client_leaves_in_any_state_and_leaving_twice_changes_nothing(
    ahead: bool, at_s: float
) -> None:
    """At 0 s "b" waits or runs, at 18 s it was preempted; with steps in flight or without."""
    config = replace(TIGHT, async_scheduling=ahead)
    once = records([Disconnect(at_s=at_s, request_id="b")], config=config)
    twice = records([Disconnect(at_s=at_s, request_id="b")] * 2, config=config)
    assert once == twice
    gone = once[1]
    if at_s == 40.0:
        assert gone.state == "completed"
    else:
        assert (gone.state, gone.end_reason) == ("withdrawn", "client_disconnect")
        assert gone.end_s is not None and at_s <= gone.end_s < at_s + 1.0
    assert once[0].state == "completed"


def test_who_waits_can_leave() -> None:
    jobs = workload([8, 8, 8], [20, 20, 20], cap=20)
    _, b, c = records([Disconnect(at_s=2.0, request_id="c")], jobs, replace(TIGHT, max_num_seqs=1))
    assert (c.state, c.first_scheduled_s, c.end_s, c.queued_s) == ("withdrawn", None, 2.0, 2.0)
    assert b.state == "completed"


def test_patience_is_a_breach_and_a_disconnect_is_not_counted() -> None:
    kept = records([Patience(patience_s=5.0, request_id="a")])
    assert (kept[0].state, kept[0].end_reason, kept[0].end_s) == ("failed", "patience", 5.0)
    assert score_breach(kept, 30.0).breach == 0.5
    left = records([Disconnect(at_s=5.0, request_id="a")])
    score = score_breach(left, 30.0)
    assert (score.breach, score.withdrawn) == (0.0, 1)
    assert (score.breach_low, score.breach_high) == (0.0, 0.5)
    assert [r.state for r in records([Patience(patience_s=5.0)])] == ["failed", "failed"]


def test_a_lost_worker_keeps_arrivals_and_written_tokens() -> None:
    """5 tokens each are written at 5 s; the worker is back at 15 s, and 12 + 1 tokens each are
    computed again in one step that also writes the sixth."""
    steps: list[StepLog] = []
    result = simulate(
        PAIR, AMPLE, SECOND, on_step=steps.append,
        faults=FaultPlan((WorkerLoss(at_s=5.0, restart_s=10.0),)),
    )  # fmt: skip
    for record in result.records:
        assert (record.arrival_s, record.end_s, record.output_tokens) == (0.0, 30.0, 20)
        assert (record.num_preemptions, record.recomputed_tokens) == (0, 12)
        assert record.preempted_s == 10.0 and record.first_token_s == 1.0
    assert steps[5].lost == ("a", "b")
    assert steps[5].scheduled == {"a": 13, "b": 13} and steps[5].start_s == 15.0
    assert result.num_preemptions == 0 and result.num_faults == 1


def test_a_lost_worker_may_take_those_that_run_or_wait_along() -> None:
    jobs = workload([8, 8, 8], [20, 20, 20], [0.0, 0.0, 9.0], cap=20)
    alone = replace(AMPLE, max_num_seqs=1)

    def states(**options: Any) -> list[str]:
        loss = WorkerLoss(at_s=5.0, restart_s=10.0, **options)
        return [f"{r.state} {r.end_reason}" for r in records([loss], jobs, alone)]

    lost, done = "failed worker_lost", "completed stop"
    assert states() == [done, done, done]
    assert states(running="failed") == [lost, done, done]
    assert states(queue="lost") == [done, lost, done]
    assert states(running="failed", queue="lost") == [lost, lost, done]


def test_a_lost_worker_takes_the_steps_in_flight_along() -> None:
    """Step 6 was planned when step 5 returned, and never returns."""
    config = replace(AMPLE, async_scheduling=True)
    loss = FaultPlan((WorkerLoss(at_s=5.0, restart_s=10.0),))
    result = simulate(PAIR, config, SECOND, faults=loss)
    assert [(r.end_s, r.output_tokens) for r in result.records] == [(30.0, 20), (30.0, 20)]
    first_time = 2 * 27
    assert result.computed_tokens == first_time + result.recomputed_tokens


def test_a_stall_delays_what_comes_next() -> None:
    for record in records([Stall(at_s=3.5, extra_s=7.0)]):
        assert (record.first_token_s, record.end_s) == (1.0, 27.0)
    late = workload([8], [3], [10.0], cap=20)
    (record,) = records([Stall(at_s=8.0, extra_s=5.0)], late)  # an idle engine stands still, too
    assert (record.first_scheduled_s, record.end_s) == (13.0, 16.0)


def test_a_slow_window_covers_the_steps_that_begin_in_it() -> None:
    slow = Slow(at_s=5.0, until_s=7.5, factor=2.0)  # steps that begin at 5 s and 7 s
    assert records([slow])[0].end_s == 22.0
    assert records([slow, slow])[0].end_s == 23.0  # 5 to 9 s, then as ever


def test_a_shrinking_pool_takes_free_blocks_first_then_evicts_until_it_fits() -> None:
    steps: list[StepLog] = []
    half = Capacity(at_s=10.0, blocks_share=0.67, until_s=12.0)  # 4 of 6 blocks
    a, b = records([half], config=TIGHT, on_step=steps.append)
    # both hold 17 tokens, 3 blocks, at 10 s: "b" goes, in a step that admits nobody
    assert steps[10].preempted == ("b",) and steps[10].waiting == ("b",)
    assert steps[10].num_free_blocks == 4 - 3
    assert steps[12].num_free_blocks == 6 - 3 - 3  # whole again, and "b" is back
    assert (a.state, b.state, b.num_preemptions) == ("completed", "completed", 2)
    small = Capacity(at_s=1.0, blocks_share=0.67)
    assert simulate(PAIR, AMPLE, SECOND, faults=FaultPlan((small,))).num_preemptions == 0


def test_who_can_never_fit_again_fails() -> None:
    jobs = workload([8, 8, 8], [4, 20, 20], [0.0, 0.0, 5.0], cap=[4, 20, 20])
    a, b, c = records([Capacity(at_s=2.0, blocks_share=0.5)], jobs, TIGHT)  # 3 blocks of 8
    assert (a.state, a.end_s) == ("completed", 4.0)
    assert (b.state, b.end_reason, b.end_s) == ("failed", "kv_shrunk", 2.0)
    # accepted as under any other policy, and given up at once
    assert (c.state, c.end_reason, c.end_s) == ("failed", "kv_shrunk", 5.0)


def test_a_growing_pool_ends_the_pressure() -> None:
    grown = Capacity(at_s=1.0, blocks_share=2.0)
    assert simulate(PAIR, TIGHT, SECOND).num_preemptions == 1
    assert simulate(PAIR, TIGHT, SECOND, faults=FaultPlan((grown,))).num_preemptions == 0


GRID = RemainingGrid(  # "a" has more to write than "b", whatever its age
    "by hand", 64, np.array([0, 1, 2]), np.array([100.0, 70.0]), np.array([100.0, 70.0]), 0.9,
    (frozenset(),), np.zeros(2, np.int64),
)  # fmt: skip


@pytest.mark.parametrize("answer", ["nan", "inf", "negative"])
def test_garbage_means_lifo_order_and_is_counted(answer: Any) -> None:
    policy = get_policy("longest-remaining")
    sound = simulate(PAIR, TIGHT, SECOND, policy, signal=GRID)
    assert [r.num_preemptions for r in sound.records] == [1, 0]
    outage = FaultPlan((SignalOutage(at_s=0.0, until_s=99.0, answer=answer),))
    broken = simulate(PAIR, TIGHT, SECOND, policy, signal=GRID, faults=outage)
    assert broken.records == simulate(PAIR, TIGHT, SECOND, get_policy("lifo")).records
    assert (sound.signal_fallbacks, broken.signal_fallbacks) == (0, 1)
    elsewhere = FaultPlan((SignalOutage(at_s=0.0, until_s=17.0, answer=answer),))
    assert simulate(PAIR, TIGHT, SECOND, policy, signal=GRID, faults=elsewhere) == sound


def test_a_policy_that_cannot_bear_garbage_is_not_asked() -> None:
    def score(views: Any) -> np.ndarray:
        if not np.isfinite(views.remaining).all():
            raise ZeroDivisionError("garbage")
        return np.asarray(views.remaining)

    outage = FaultPlan((SignalOutage(at_s=0.0, until_s=99.0, answer="inf"),))
    policy = Policy("fragile", score, reads_signal=True)
    result = simulate(PAIR, TIGHT, SECOND, policy, signal=GRID, faults=outage)
    assert result.signal_fallbacks == 1


def test_a_stale_signal_says_what_it_said_at_age_0() -> None:
    """ "b" counts down from 30 and "a" from 25, until the grid's next answers turn the order."""
    grid = RemainingGrid(
        "by hand", 8, np.arange(0, 7, 3), np.array([25.0, 90.0, 90.0, 30.0, 9.0, 9.0]),
        np.full(6, np.nan), 0.9, (frozenset(),), np.zeros(2, np.int64),
    )  # fmt: skip
    policy = get_policy("longest-remaining")
    fresh = simulate(PAIR, TIGHT, SECOND, policy, signal=grid)
    stale = simulate(
        PAIR, TIGHT, SECOND, policy, signal=grid,
        faults=FaultPlan((SignalOutage(at_s=0.0, until_s=99.0, answer="stale"),)),
    )  # fmt: skip
    assert [r.num_preemptions for r in fresh.records] == [1, 0]
    assert [r.num_preemptions for r in stale.records] == [0, 1]
    assert stale.signal_fallbacks == 0


def test_the_jump_engine_hands_faults_to_the_step_engine() -> None:
    plan = FaultPlan((Stall(at_s=3.5, extra_s=7.0),))
    assert unsupported(PAIR, AMPLE, SECOND, faults=plan) is not None
    assert unsupported(PAIR, AMPLE, SECOND, faults=FaultPlan()) is None
    assert simulate_fast(PAIR, AMPLE, SECOND, faults=plan) == simulate(
        PAIR, AMPLE, SECOND, faults=plan
    )


SCRIPT = """
swarm = 0.5
[[fault]]
kind = "worker_loss"
at_s = 30
restart_s = 5
queue = "lost"
[[rate]]
kind = "failure"
probability = 0.1
mean_after_s = 2.0
[[rate]]
kind = "capacity"
per_hour = 6
mean_duration_s = 30
blocks_share = 0.5
"""


def test_a_file_says_the_same_in_toml_and_json(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(SCRIPT)
    source = read_faults(tmp_path / "f.toml")
    assert source == FaultSource(
        (WorkerLoss(at_s=30, restart_s=5, queue="lost"),),
        (
            FaultRate(kind="failure", probability=0.1, mean_after_s=2.0),
            FaultRate(
                kind="capacity", per_hour=6, mean_duration_s=30, settings={"blocks_share": 0.5}
            ),
        ),
        0.5,
    )
    table = {
        "swarm": 0.5,
        "fault": [{"kind": "worker_loss", "at_s": 30, "restart_s": 5, "queue": "lost"}],
        "rate": [
            {"kind": "failure", "probability": 0.1, "mean_after_s": 2.0},
            {"kind": "capacity", "per_hour": 6, "mean_duration_s": 30, "blocks_share": 0.5},
        ],
    }
    (tmp_path / "f.json").write_text(json.dumps(table))
    assert read_faults(tmp_path / "f.json") == source


def test_rates_are_met_on_average() -> None:
    """400 requests x 20 seeds at 0.1: 800 expected, standard deviation 26.8; four of them either
    way. 100 s at 360 an hour x 20 seeds: 200 expected, 14.1."""
    count = 400
    jobs = Workload(
        "many", tuple(map(str, range(count))), np.linspace(0.0, 100.0, count),
        *(np.full(count, value) for value in (8, 4, 4, 0)),
        np.full(count, 10.0), np.ones(count, np.int64), np.zeros(count, bool),
    )  # fmt: skip
    source = FaultSource(
        rates=(
            FaultRate(kind="disconnect", probability=0.1, mean_after_s=3.0),
            FaultRate(kind="stall", per_hour=360.0, settings={"extra_s": 1.0}),
        )
    )
    faults = [f for seed in range(20) for f in source.plan(jobs, seed).faults]
    left = [f for f in faults if isinstance(f, Disconnect)]
    assert abs(len(left) - 800) < 4 * 26.8
    assert abs(sum(isinstance(f, Stall) for f in faults) - 200) < 4 * 14.1
    waits = [f.at_s - float(jobs.arrival_s[int(f.request_id)]) for f in left]
    assert abs(float(np.mean(waits)) - 3.0) < 4 * 3.0 / 800**0.5


BAD_TABLES: list[tuple[Any, str]] = [
    ({"fault": [{"kind": "worker_los", "at_s": 1}]}, "did you mean 'worker_loss'"),
    ({"fault": [{"at_s": 1}]}, "kind is None; give one of failure"),
    ({"faults": []}, "did you mean 'fault'"),
    ({"fault": {"kind": "stall"}}, "must be a list of tables"),
    ([], "write a table"),
    ({"fault": [{"kind": "stall", "at_s": 1.0}]}, "also needs extra_s"),
    ({"fault": [{"kind": "stall", "at_s": 1.0, "extras_s": 2}]}, "did you mean 'extra_s'"),
    ({"fault": [{"kind": "stall", "at_s": -1.0, "extra_s": 2}]}, "at_s is -1.0 s"),
    ({"fault": [{"kind": "stall", "at_s": float("nan"), "extra_s": 2}]}, "finite number"),
    ({"fault": [{"kind": "stall", "at_s": "soon", "extra_s": 2}]}, "'soon'"),
    ({"fault": [{"kind": "stall", "at_s": True, "extra_s": 2}]}, "True; give a finite"),
    ({"fault": [{"kind": "failure", "at_s": 1.0, "request_id": 7}]}, "as text"),
    (
        {"fault": [{"kind": "slow", "at_s": 5, "until_s": 4, "factor": 2}]},
        "until_s is 4 s; it must be after at_s = 5 s",
    ),
    ({"fault": [{"kind": "slow", "at_s": 5, "until_s": 6, "factor": 0}]}, "factor is 0"),
    ({"fault": [{"kind": "capacity", "at_s": 5, "blocks_share": -1}]}, "blocks_share is -1"),
    (
        {"fault": [{"kind": "signal", "at_s": 5, "until_s": 6, "answer": "nam"}]},
        "did you mean 'nan'",
    ),
    (
        {"fault": [{"kind": "worker_loss", "at_s": 5, "restart_s": 6, "queue": "keep"}]},
        "did you mean 'kept'",
    ),
    ({"rate": [{"kind": "failure", "probability": 1.5}]}, "probability is 1.5"),
    ({"rate": [{"kind": "failure", "probability": "high"}]}, "'high'; give a number"),
    ({"rate": [{"kind": "failure", "per_hour": 5}]}, "per_hour has no meaning"),
    ({"rate": [{"kind": "stall", "per_hour": -5, "extra_s": 1}]}, "per_hour is -5"),
    ({"rate": [{"kind": "stall", "probability": 0.5, "extra_s": 1}]}, "give per_hour"),
    ({"rate": [{"kind": "stall", "per_hour": 5}]}, "also needs extra_s"),
    ({"rate": [{"kind": "slow", "per_hour": 5, "factor": -2}]}, "factor is -2"),
    ({"swarm": 2}, "swarm is 2.0"),
    ({"swarm": "all"}, "swarm is 'all'"),
]


@pytest.mark.parametrize(("table", "message"), BAD_TABLES)
def test_a_bad_table_is_one_clear_error(table: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        faults_from_table(table, "faults f.toml")
    assert message in str(caught.value)


def test_a_bad_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_faults(tmp_path / "absent.toml")
    for name, text in (("a.toml", "= 1"), ("a.json", "{"), ("b.json", "[" * 100_000)):
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidInput, match="are not"):
            read_faults(tmp_path / name)


def test_a_plan_that_does_not_fit_its_run_is_refused() -> None:
    with pytest.raises(UnknownName, match="target of fault 'failure'"):
        records([Failure(at_s=1.0, request_id="z")])
    late = workload([8], [3], [10.0], cap=20)
    with pytest.raises(InvalidInput, match=r"arrives at 10\.0 s only"):
        records([Disconnect(at_s=1.0, request_id="a")], late)
    with pytest.raises(InvalidInput, match="of 6 usable blocks leaves none"):
        records([Capacity(at_s=1.0, blocks_share=0.1)], config=TIGHT)
