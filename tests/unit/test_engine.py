"""The step engine on cases small enough to follow by hand, and on bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import (
    ConformanceError,
    InvalidInput,
    LawViolation,
    NoProgressError,
    UnknownName,
)
from contracts.policy import Policy, RunningViews
from contracts.randomness import keyed_uniform
from contracts.signals import RemainingGrid
from serving_sim.config import EngineConfig
from serving_sim.decisions import driver_config, driver_profile, read_driver_file, step_writer
from serving_sim.engine import StepLog, simulate
from serving_sim.policies import get_policy
from serving_sim.profile import AffineProfile, StepWork
from tests.by_hand import workload
from traces.workload import Workload

SECOND = AffineProfile("one second a step", 1.0, 0.0, 0.0)


# Two requests of 8 + 20 tokens in 6 usable blocks of 8: each can have 4, both cannot.
PAIR = workload([8, 8], [20, 20], cap=20)
TIGHT = EngineConfig(num_blocks=7, block_size=8)


def test_the_younger_of_two_is_evicted_and_finds_its_soft_kv() -> None:
    steps: list[StepLog] = []
    result = simulate(PAIR, TIGHT, SECOND, on_step=steps.append)
    evictions = [(step.step, step.preempted) for step in steps if step.preempted]
    # both hold 3 blocks (24 tokens) at the end of step 17; "a" needs a fourth in step 18
    assert evictions == [(18, ("b",))]
    a, b = result.records
    assert (a.num_preemptions, a.end_s, a.first_token_s) == (0, 20.0, 1.0)
    # "a" took b's last full block; "b" returns after "a" ended, finds 16 tokens, computes 9
    assert (b.num_preemptions, b.cache_hit_tokens, b.recomputed_tokens) == (1, 16, 8)
    assert (b.preempted_s, b.end_s, b.queued_s) == (3.0, 23.0, 0.0)
    assert result.computed_tokens == 2 * 27 + 8


def test_without_soft_kv_everything_is_computed_again() -> None:
    result = simulate(PAIR, replace(TIGHT, enable_prefix_caching=False), SECOND)
    assert result.cache_hit_tokens == 0
    assert result.recomputed_tokens == 24


def test_a_victim_that_was_scheduled_already_is_taken_back() -> None:
    """fifo evicts "a", which stands before the cursor when "b" asks: its token is refunded."""
    steps: list[StepLog] = []
    policy = Policy("oldest id", lambda views: -views.request_id.astype(np.float64))
    # "a" fills its third block one step later than "b" needs a fourth
    pair = workload([7, 8], [20, 20], cap=20)
    result = simulate(pair, TIGHT, SECOND, policy, on_step=steps.append)
    (hit,) = [step for step in steps if step.preempted]
    assert hit.preempted == ("a",)
    assert hit.scheduled == {"b": 1}
    assert hit.waiting == ("a",)
    assert result.computed_tokens == 26 + 27 + result.recomputed_tokens


def test_what_a_withdrawn_victim_gives_back_goes_to_who_comes_after() -> None:
    """Step 11: "a" has its token, "b" needs its block, and "c" prefills with what is left of 9."""
    steps: list[StepLog] = []
    policy = Policy("oldest id", lambda views: -views.request_id.astype(np.float64))
    jobs = workload([7, 8, 40], [20, 20, 4], [0.0, 0.0, 7.0], cap=20)
    config = replace(TIGHT, num_blocks=9, max_num_batched_tokens=9, reserve_full_isl=False)
    simulate(jobs, config, SECOND, policy, on_step=steps.append)
    assert steps[9].scheduled == {"a": 1, "b": 1, "c": 7}
    assert steps[10].preempted == ("a",)
    assert steps[10].scheduled == {"b": 1, "c": 8}


AHEAD = replace(TIGHT, async_scheduling=True)


def test_async_plans_a_step_before_the_last_one_returned() -> None:
    steps: list[StepLog] = []
    result = simulate(PAIR, AHEAD, SECOND, on_step=steps.append)
    assert [step.start_s for step in steps[:4]] == [0.0, 0.0, 1.0, 2.0]
    # "b" is evicted with a token under way, which it still gets: it computes one more than in sync
    assert [(step.step, step.preempted) for step in steps if step.preempted] == [(18, ("b",))]
    a, b = result.records
    assert (a.end_s, b.end_s, b.preempted_s) == (20.0, 23.0, 4.0)
    assert (b.cache_hit_tokens, b.recomputed_tokens) == (16, 8)
    # the last token of "a" is under way in step 21: nobody has anything to compute
    assert steps[20].scheduled == {}
    assert steps[20].running == ("a",)
    assert steps[21].finished_before == ("a",)
    assert (result.computed_tokens, result.discarded_tokens) == (2 * 27 + 8, 0)


def test_async_notices_an_end_one_step_late() -> None:
    """ "a" stops before its cap: the step that was planned meanwhile computed a token in vain."""
    jobs = workload([8, 8], [4, 9], cap=20)
    result = simulate(jobs, replace(AHEAD, num_blocks=64), SECOND)
    assert [record.end_s for record in result.records] == [4.0, 9.0]
    assert result.discarded_tokens == 2
    assert result.computed_tokens == 11 + 16 + 2


def test_async_lets_a_request_end_while_it_is_preempted() -> None:
    """The token under way when "b" was evicted is its last: it never returns to the engine."""
    steps: list[StepLog] = []
    jobs = replace(
        workload([8, 8], [20, 17]), max_tokens=np.array([20, 17]), priority=np.array([0, 1])
    )
    for scheduling in ("fcfs", "priority"):
        config = replace(AHEAD, scheduling=scheduling)
        result = simulate(jobs, config, SECOND, on_step=steps.append)
        (hit,) = [step for step in steps if step.preempted]
        assert (hit.step, hit.preempted, hit.waiting) == (18, ("b",), ("b",))
        b = result.records[1]
        assert (b.state, b.end_s, b.output_tokens) == ("completed", 17.0, 17)
        assert (b.num_preemptions, b.preempted_s, b.recomputed_tokens) == (1, 1.0, 0)
        steps.clear()


def test_requests_with_the_same_start_share_its_blocks() -> None:
    jobs = replace(
        workload([32, 32, 32], [4, 4, 4], [0.0, 0.0, 9.0], cap=4),
        prefix_groups=np.array([[0, 24], [0, 20], [1, 24]]),
    )
    steps: list[StepLog] = []
    config = EngineConfig(num_blocks=64, block_size=8)
    result = simulate(jobs, config, SECOND, on_step=steps.append)
    # 20 tokens in common are two full blocks; "b" finds them in the step that fills them
    assert steps[0].scheduled == {"a": 32, "b": 16}
    assert steps[0].num_free_blocks == 63 - 4 - 2
    assert [record.cache_hit_tokens for record in result.records] == [0, 16, 0]
    apart = simulate(jobs, replace(config, enable_prefix_caching=False), SECOND)
    assert apart.cache_hit_tokens == 0


def test_shared_blocks_in_use_need_no_room() -> None:
    """Five usable blocks: "b" (4 blocks) fits beside "a" (4) only because 3 of them are one."""
    jobs = workload([24, 25], [8, 7], cap=8)
    shared = replace(jobs, prefix_groups=np.array([[0, 24], [0, 24]]))
    config = EngineConfig(num_blocks=6, block_size=8)
    assert simulate(jobs, config, SECOND).records[1].queued_s == 8.0
    result = simulate(shared, config, SECOND)
    assert result.records[1].queued_s == 0.0
    assert result.num_preemptions == 0


@pytest.mark.parametrize("groups", [[[0, -1]], [[-1, 0]], [[0, 9]]])
def test_a_bad_prefix_group_is_refused(groups: list[list[int]]) -> None:
    with pytest.raises(InvalidInput, match=r"prefix_groups is .* at least 0"):
        replace(workload([8], [4]), prefix_groups=np.array(groups))


def test_prefix_groups_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"prefix_groups has shape \(2,\); it must be \(1, 2\)"):
        replace(workload([8], [4]), prefix_groups=np.array([0, 8]))


def test_a_request_that_can_never_fit_is_refused_at_arrival() -> None:
    jobs = workload([8, 40, 8], [4, 4, 4], [0.0, 1.0, 2.0], cap=16)
    result = simulate(jobs, TIGHT, SECOND)
    assert [r.state for r in result.records] == ["completed", "rejected", "completed"]
    refused = result.records[1]
    assert (refused.end_reason, refused.accepted_s, refused.end_s) == ("infeasible_kv", None, 1.0)
    assert refused.first_scheduled_s is None
    assert result.drained


def test_a_request_cut_by_the_model_length() -> None:
    jobs = workload([8, 30], [30, 4], cap=30)
    result = simulate(jobs, replace(TIGHT, max_model_len=20), SECOND)
    cut, refused = result.records
    assert (cut.state, cut.end_reason, cut.output_tokens) == ("length_capped", "max_model_len", 12)
    assert (refused.state, refused.end_reason) == ("rejected", "exceeds_max_model_len")


def test_no_progress_is_explained() -> None:
    """Two prompts that do not fit together evict each other before either has a token."""
    jobs = workload([64, 64], [4, 4], cap=4)
    config = EngineConfig(
        num_blocks=11, block_size=8, max_num_batched_tokens=16, max_idle_steps=50,
        enable_prefix_caching=False, reserve_full_isl=False, long_prefill_token_threshold=8,
    )  # fmt: skip
    with pytest.raises(NoProgressError) as caught:
        simulate(jobs, config, SECOND, get_policy("fifo"))
    message = str(caught.value)
    for part in ("in 51 steps", "max_idle_steps = 50", "2 running [a (", "another policy"):
        assert part in message
    assert simulate(jobs, config, SECOND, get_policy("lifo")).drained


def test_waiting_fillers_do_not_keep_a_run_alive() -> None:
    jobs = replace(workload([8, 8], [4, 60], [0.0, 0.5]), cohort=np.array([1, 2]))
    result = simulate(jobs, EngineConfig(num_blocks=64), SECOND)
    assert result.drained
    assert [r.state for r in result.records] == ["completed", "unfinished"]
    assert result.records[1].censor_s == result.end_s == 4.0


def test_drain_bounds_the_wait() -> None:
    result = simulate(workload([8], [60]), EngineConfig(num_blocks=64, drain_s=9.5), SECOND)
    assert not result.drained
    (record,) = result.records
    assert (record.state, record.output_tokens, record.censor_s) == ("unfinished", 10, 10.0)


def test_waiting_is_counted_up_to_the_end_of_the_run() -> None:
    jobs = workload([8, 8, 8], [20, 20, 20], [0.0, 0.0, 5.0], cap=20)
    config = replace(TIGHT, max_num_seqs=2, drain_s=13.5)
    result = simulate(jobs, config, SECOND)
    _, evicted, queued = result.records
    assert result.end_s == 19.0
    assert (evicted.num_preemptions, evicted.preempted_s, evicted.queued_s) == (1, 2.0, 0.0)
    assert (queued.first_scheduled_s, queued.preempted_s, queued.queued_s) == (None, 0.0, 14.0)


def grid(jobs: Workload) -> RemainingGrid:
    left = jobs.output_tokens.astype(np.float64)
    return RemainingGrid(
        "flat", 64, np.arange(len(jobs) + 1), left, left * 2, 0.9, (frozenset(),),
        np.zeros(len(jobs), np.int64),
    )  # fmt: skip


def test_what_a_policy_is_shown() -> None:
    seen: list[RunningViews] = []

    def watch(views: RunningViews) -> np.ndarray:
        seen.append(views)
        return views.admission_seq.astype(np.float64)

    policy = Policy("watch", watch, reads_signal=True, reads_deadline=True)
    result = simulate(PAIR, TIGHT, SECOND, policy, signal=grid(PAIR), seed=5)
    (views,) = seen
    assert views.request_id.tolist() == views.admission_seq.tolist() == [0, 1]
    assert views.rank_from_youngest.tolist() == [1, 0]
    assert views.generated_tokens.tolist() == [17, 17]
    assert views.computed_tokens.tolist() == [24, 24]
    assert views.kv_blocks.tolist() == [3, 3]
    assert views.now_s.tolist() == [17.0, 17.0]
    assert views.deadline_s.tolist() == [10.0, 10.0]
    assert views.recent_tpot_s.tolist() == [1.0, 1.0]
    assert views.remaining.tolist() == [3.0, 3.0]
    assert views.remaining_upper.tolist() == [23.0, 23.0]
    assert views.draw.tolist() == [keyed_uniform(5, "policy-draw", name, 0) for name in "ab"]
    assert [record.deadline_seen for record in result.records] == [10.0, 10.0]


def test_a_request_draws_anew_after_each_preemption() -> None:
    rows: set[tuple[int, int, float]] = set()

    def watch(views: RunningViews) -> np.ndarray:
        names, preemptions = views.request_id.tolist(), views.num_preemptions.tolist()
        rows.update(zip(names, preemptions, views.draw.tolist(), strict=True))
        return views.draw

    simulate(workload([8] * 6, [30] * 6, cap=30), TIGHT, SECOND, Policy("watch", watch), seed=3)
    assert max(preemptions for _, preemptions, _ in rows) > 1
    for index, preemptions, draw in rows:
        assert draw == keyed_uniform(3, "policy-draw", "abcdef"[index], preemptions)


def test_an_undeclared_column_is_nan() -> None:
    seen: list[RunningViews] = []

    def watch(views: RunningViews) -> np.ndarray:
        seen.append(views)
        return views.draw

    simulate(PAIR, TIGHT, SECOND, Policy("watch", watch), signal=grid(PAIR))
    assert np.isnan(seen[0].remaining).all()
    assert np.isnan(seen[0].deadline_s).all()


def test_nan_is_never_chosen_unless_all_are_nan() -> None:
    def half(views: RunningViews) -> np.ndarray:
        return np.where(views.request_id == 1, np.nan, -np.inf)

    for score, victim in ((half, "a"), (lambda views: views.draw * np.nan, "b")):
        result = simulate(PAIR, TIGHT, SECOND, Policy("sick", score))
        evicted = [record.request_id for record in result.records if record.num_preemptions]
        assert evicted[0] == victim
        assert result.signal_fallbacks == result.num_preemptions > 0


def test_ties_go_to_the_youngest() -> None:
    flat = Policy("flat", lambda views: np.zeros(len(views.request_id)))
    assert simulate(PAIR, TIGHT, SECOND, flat) == simulate(PAIR, TIGHT, SECOND)


def test_a_policy_that_reads_a_signal_must_be_given_one() -> None:
    with pytest.raises(InvalidInput, match=r"'longest-remaining' reads a signal.*pass signal="):
        simulate(PAIR, TIGHT, SECOND, get_policy("longest-remaining"))


def test_scores_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ConformanceError, match=r"shape \(1,\) for 2 requests"):
        simulate(PAIR, TIGHT, SECOND, Policy("short", lambda views: views.draw[:1]))


@pytest.mark.parametrize("step_s", [-1.0, float("nan"), float("inf")])
def test_a_clock_that_runs_backwards_is_a_law_broken(step_s: float) -> None:
    class Broken:
        name = "broken"
        prefill_s_per_token = 0.0

        def step_s(self, work: StepWork) -> float:
            return step_s if work.num_requests else 0.0

    with pytest.raises(LawViolation, match="'broken' says a step"):
        simulate(PAIR, TIGHT, Broken())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 1}, "num_blocks is 1: give a whole number >= 2"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 1.5}, "max_num_seqs is 1.5"),
        ({"watermark": 1.0}, r"watermark is 1.0.*\[0, 1\)"),
        ({"drain_s": -1.0}, "drain_s is -1.0"),
        ({"drain_s": float("nan")}, "drain_s is nan"),
        ({"vllm_version": "0.20", "watermark": 0.1}, r"watermark is 0.1.*0.27.*set it to 0.0"),
        (
            {"vllm_version": "0.15"},
            "reserve_full_isl is True.*came with vLLM 0.20.*set it to False",
        ),
        ({"enable_chunked_prefill": False}, "set max_model_len to at most"),
    ],
)
def test_a_bad_setting_says_its_bound(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        EngineConfig(**{"num_blocks": 64, **settings})  # type: ignore[arg-type]


def test_an_unknown_version_names_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"vllm_version '0\.34'.*0\.33"):
        EngineConfig(num_blocks=64, vllm_version="0.34")  # type: ignore[arg-type]


def test_an_unknown_queue_order_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'fcfs'"):
        EngineConfig(num_blocks=64, scheduling="fcs")  # type: ignore[arg-type]


def test_a_decision_log_reads_back_as_the_workload_it_came_from(tmp_path: Path) -> None:
    requests = [{"id": "a", "prompt": 8, "output": 20}, {"id": "b", "prompt": 8, "output": 20}]
    header = {"engine": {"num_blocks": 7, "block_size": 8}, "requests": requests}
    (tmp_path / "w.json").write_text(json.dumps(header), encoding="utf-8")
    driver = read_driver_file(tmp_path / "w.json")
    assert list(driver.steps()) == []
    path = tmp_path / "log.jsonl"
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        result = simulate(
            driver.workload,
            driver_config(driver.engine),
            driver_profile(driver.engine),
            on_step=step_writer(file),
        )
    steps = list(read_driver_file(path).steps())
    assert len(steps) == result.num_steps
    assert steps[0] == {
        "step": 1, "t": 0.0, "sched": {"a": 8, "b": 8}, "preempted": [], "finished_before": [],
        "running": ["a", "b"], "waiting": [], "n_running": 2, "n_waiting": 0, "free": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "'requests' is None"),
        ('{"requests": [{"id": "a", "prompt": 3}]}', "request 0 has no 'output'"),
        ('{"requests": [{"id": "a", "prompt": 3, "output": 0}]}', "output_tokens is 0"),
    ],
)
def test_a_bad_driver_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "w.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        read_driver_file(tmp_path / "w.json")


def test_a_truncated_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(InvalidInput, match="may be truncated"):
        read_driver_file(tmp_path / "w.jsonl.gz")


def test_an_unknown_driver_setting_is_refused() -> None:
    with pytest.raises(InvalidInput, match="setting 'num_block': did you mean 'num_blocks'"):
        driver_config({"num_block": 3})
