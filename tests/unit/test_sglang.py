"""SGLang mode, rule by rule, on cases small enough to follow by hand (docs/sglang.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.errors import InvalidInput
from contracts.policy import Policy
from eval.matrix import run_matrix, task_key
from eval.matrix_config import Pressure
from preemptbench.demo import demo_matrix
from serving_sim.config import EngineConfig, SglangSettings
from serving_sim.engine import Run, SimResult, StepLog, simulate
from serving_sim.jump import simulate_fast, unsupported
from serving_sim.policies import get_policy
from serving_sim.profile import AffineProfile
from serving_sim.scheduler import Scheduler
from serving_sim.sglang import NewTokenRatio, SglangScheduler
from serving_sim.victims import least_decoded
from tests.by_hand import workload
from tests.synthetic_runs import synthetic_runs
from traces.runlog import write_runs
from traces.workload import Workload

SECOND = AffineProfile("one second a step", 1.0, 0.0, 0.0)
HOPEFUL = SglangSettings(schedule_conservativeness=0.1)
# reserves one token a request: everybody is let in, and must be retracted later
EAGER = SglangSettings(clip_max_new_tokens_estimation=1)


def config(usable_tokens: int, settings: SglangSettings = HOPEFUL, **changes: Any) -> EngineConfig:
    """Return an engine with pages of one token, as SGLang's default is."""
    return EngineConfig(num_blocks=usable_tokens + 1, block_size=1, sglang=settings, **changes)


def logged(
    jobs: Workload, engine: EngineConfig, policy: Policy | None = None
) -> tuple[SimResult, list[StepLog]]:
    steps: list[StepLog] = []
    return simulate(jobs, engine, SECOND, policy, on_step=steps.append), steps


def retractions(steps: list[StepLog]) -> list[tuple[int, tuple[str, ...]]]:
    return [(step.step, step.preempted) for step in steps if step.preempted]


# --- prefill ahead of decode ---


def test_a_prefill_batch_runs_alone_ahead_of_decode() -> None:
    jobs = workload([8, 8, 8], [4, 4, 4], [0.0, 0.0, 2.0], cap=4)
    _, steps = logged(jobs, config(100))
    assert [step.scheduled for step in steps[:4]] == [
        {"a": 8, "b": 8}, {"a": 1, "b": 1}, {"c": 8}, {"a": 1, "b": 1, "c": 1},
    ]  # fmt: skip


def test_a_long_prompt_is_cut_and_holds_up_decodes_until_it_is_done() -> None:
    jobs = workload([4, 20, 5], [4, 2, 2], [0.0, 1.0, 1.0], cap=4)
    _, steps = logged(jobs, config(100, max_num_batched_tokens=8))
    assert [step.scheduled for step in steps[:5]] == [
        {"a": 4}, {"b": 8}, {"b": 8}, {"b": 4, "c": 4}, {"c": 1},
    ]  # fmt: skip
    assert steps[5].scheduled == {"a": 1, "b": 1, "c": 1}


def test_max_prefill_tokens_bounds_a_batch_but_not_its_first_request() -> None:
    settings = replace(HOPEFUL, max_prefill_tokens=10)
    engine = config(200, settings, enable_chunked_prefill=False, max_model_len=64)
    jobs = workload([12, 5, 4, 5], [2, 2, 2, 2], cap=4)
    _, steps = logged(jobs, engine)
    assert [step.scheduled for step in steps[:3]] == [{"a": 12}, {"b": 5, "c": 4}, {"d": 5}]
    _, steps = logged(jobs, config(200, settings))
    assert [step.scheduled for step in steps[:3]] == [{"a": 10}, {"a": 2, "b": 5, "c": 3},
                                                      {"c": 1, "d": 5}]  # fmt: skip


# --- retraction: trigger, order, number, KV, place in the queue ---

# Both hold 8 + t tokens after decode step t (step t + 1): 40 tokens are full after t = 12.
PAIR = workload([8, 8], [20, 20], cap=20)


def test_retraction_comes_when_the_next_decode_step_does_not_fit() -> None:
    """Prefill is step 1; step 13 fills tokens 39 and 40; step 14 needs two more."""
    result, steps = logged(PAIR, config(40, EAGER))
    assert retractions(steps) == [(14, ("b",))]
    assert steps[12].num_free_blocks == 0
    assert (steps[13].scheduled, steps[13].waiting) == ({"a": 1}, ("b",))
    assert [r.num_preemptions for r in result.records] == [0, 1]
    assert all(r.state == "completed" and r.output_tokens == 20 for r in result.records)


def test_with_pages_it_comes_at_a_page_boundary() -> None:
    """Six pages of 8: each holds three when 24 tokens are known, and step 18 needs a fourth."""
    _, steps = logged(PAIR, EngineConfig(num_blocks=7, block_size=8, sglang=EAGER))
    assert retractions(steps) == [(18, ("b",))]


@pytest.mark.parametrize(
    ("prompts", "arrivals", "victim"),
    [
        ([8, 8, 8], [0.0, 0.0, 2.0], "c"),  # "c" wrote less: it came later
        ([8, 12, 8], [0.0, 0.0, 0.0], "b"),  # all wrote as much: the longest prompt
        ([8, 8, 8], [0.0, 0.0, 0.0], "c"),  # all equal: the last admitted
    ],
)
def test_who_wrote_least_goes_then_who_has_the_longest_prompt(
    prompts: list[int], arrivals: list[float], victim: str
) -> None:
    jobs = workload(prompts, [20] * 3, arrivals, cap=20)
    _, steps = logged(jobs, config(52, EAGER))
    assert retractions(steps)[0][1] == (victim,)


def test_the_least_written_goes_even_if_it_is_the_oldest() -> None:
    run = Run(PAIR, config(40), SECOND, least_decoded, checks=True)
    a, b = run.requests
    a.generated_tokens, b.generated_tokens = 3, 5
    assert least_decoded([a, b], 0.0) == 0
    a.generated_tokens, a.prompt_tokens = 5, 9
    assert least_decoded([a, b], 0.0) == 0
    a.prompt_tokens = 8
    assert least_decoded([a, b], 0.0) == 1


def test_a_policy_chooses_instead() -> None:
    oldest = Policy("oldest id", lambda views: -views.request_id.astype(np.float64))
    _, steps = logged(PAIR, config(40, EAGER), oldest)
    assert retractions(steps)[0] == (14, ("a",))
    jobs = workload([8, 12, 9, 10], [20, 25, 11, 14], [0.0, 0.0, 3.0, 4.0], cap=25)
    expected = logged(jobs, config(45, EAGER))
    assert len(retractions(expected[1])) >= 2
    assert logged(jobs, config(45, EAGER), get_policy("sglang-retract")) == expected


def retract_without_a_free_token(prompts: list[int]) -> tuple[list[str], list[str], list[str]]:
    """Let ``prompts`` be computed, take all free tokens away, and plan the decode step: return
    who is retracted, who decodes and who waits."""
    count = len(prompts)
    run = Run(workload(prompts, [9] * count), config(200, EAGER), SECOND, least_decoded, True)
    scheduler = run.scheduler
    run.admit_arrivals()
    plan = scheduler.begin(0.0)
    scheduler.schedule_running(plan)
    assert len(plan.scheduled) == count
    run.start(plan)
    run.finish_oldest()
    scheduler.pool.take(99, scheduler.pool.num_free)
    plan = scheduler.begin(1.0)
    scheduler.schedule_running(plan)
    return tuple(
        [r.request_id for r in x] for x in (plan.preempted, plan.scheduled, scheduler.waiting)
    )


def test_at_least_one_goes_and_no_more_than_it_takes() -> None:
    """Five tokens are needed; without "a" four, and it leaves 30."""
    assert retract_without_a_free_token([30, 2, 2, 2, 2]) == (["a"], list("bcde"), ["a"])


def test_more_go_until_the_rest_fits_and_queue_in_that_order() -> None:
    """One token each: without "e" 4 are needed and 1 is free, without "d" 3 and 2, without "c"
    2 and 3."""
    assert retract_without_a_free_token([1] * 5) == (list("edc"), ["a", "b"], list("edc"))


def test_a_retracted_request_goes_behind_those_that_wait() -> None:
    jobs = workload([8, 8, 30], [20, 20, 4], [0.0, 0.0, 5.0], cap=20)
    _, steps = logged(jobs, config(40, EAGER))
    assert retractions(steps)[0] == (14, ("b",))
    assert steps[13].waiting == ("c", "b")


def test_only_the_cached_prefix_of_a_retracted_request_survives() -> None:
    """It was cached when the prompt was computed: 8 tokens, of which 12 decoded ones are lost."""
    engine = config(40, replace(EAGER, retract_decode_steps=2))
    _, b = logged(PAIR, engine)[0].records
    # "a" has taken seven of the twelve tokens that hold nothing, and none of the cached ones
    assert b.cache_hit_tokens == 8
    assert b.recomputed_tokens == 12
    _, b = logged(PAIR, replace(engine, enable_prefix_caching=False))[0].records
    assert (b.cache_hit_tokens, b.recomputed_tokens) == (0, 20)


def test_the_slack_after_a_retraction_costs_cached_prefixes() -> None:
    """One request is left, and 20 tokens are free: 12 hold nothing, 8 a cached prompt, which
    must go as far as the slack asks (its end first)."""
    for slack_tokens, hit_tokens in ((12, 8), (15, 5), (20, 0), (99, 0)):
        settings = replace(EAGER, retract_decode_steps=slack_tokens)
        _, b = logged(PAIR, config(40, settings))[0].records
        assert (b.cache_hit_tokens, b.recomputed_tokens) == (hit_tokens, 20 - hit_tokens)


def test_outputs_and_the_time_of_the_first_token_are_kept() -> None:
    _, b = logged(PAIR, config(40, EAGER))[0].records
    # retracted when step 14 begins (13 s); "a" ends at 20 s; "b" prefills with its 14th token
    assert (b.first_token_s, b.preempted_s, b.end_s) == (1.0, 7.0, 27.0)


def test_the_last_request_is_kept_and_aborted_if_even_it_does_not_fit() -> None:
    """The estimate is clipped at 4 tokens, so that a cap of 64 passes for a pool of 20."""
    settings = replace(HOPEFUL, clip_max_new_tokens_estimation=4)
    result, steps = logged(workload([8, 8], [40, 5], [0.0, 20.0]), config(20, settings))
    a, b = result.records
    assert (a.state, a.end_reason) == ("failed", "out_of_kv")
    # the prompt and 12 decoded tokens fill the pool; the 13th has been delivered
    assert (a.output_tokens, a.end_s, a.num_preemptions) == (13, 13.0, 0)
    assert steps[13].running == ()
    assert steps[13].num_free_blocks == 20
    assert b.state == "completed"
    assert result.drained


def test_a_retracted_request_that_outgrew_the_pool_is_given_up() -> None:
    """ "b" arrives wanting 8 + 20 + 1 of 40 tokens, and returns wanting 8 + 13 + 20 + 1 when "a"
    is gone. SGLang would let it block the queue for ever."""
    settings = replace(HOPEFUL, clip_max_new_tokens_estimation=20)
    jobs = workload([8, 8, 8], [20, 50, 4], [0.0, 0.0, 15.0], cap=[60, 60, 10])
    result, steps = logged(jobs, config(40, settings))
    assert retractions(steps) == [(15, ("b",))]
    a, b, c = result.records
    assert (a.state, a.end_s) == ("completed", 21.0)
    assert (b.state, b.end_reason, b.end_s) == ("failed", "infeasible_kv", 21.0)
    assert (b.output_tokens, b.preempted_s) == (13, 7.0)
    assert c.state == "completed"
    assert result.drained


# --- the queue limit ---


def test_the_queue_limit_refuses_arrivals_and_drops_the_retracted() -> None:
    settings = replace(EAGER, max_queued_requests=1)
    jobs = workload([8, 8, 30, 8], [20, 20, 4, 4], [0.0, 0.5, 5.0, 6.0], cap=20)
    result, steps = logged(jobs, config(40, settings))
    a, b, c, d = result.records
    assert (d.state, d.end_reason, d.accepted_s) == ("rejected", "queue_full", None)
    victim = retractions(steps)[0][1]
    assert victim == ("b",)
    assert (b.state, b.end_reason, b.num_preemptions) == ("failed", "queue_full", 1)
    assert [r.state for r in (a, c)] == ["completed", "completed"]


# --- the new-token ratio ---


def test_the_ratio_starts_at_seven_tenths_and_decays_to_its_floor() -> None:
    ratio = NewTokenRatio(SglangSettings())
    assert ratio.value == 0.7
    ratio.decay()
    assert ratio.value == pytest.approx(0.7 - (0.7 - 0.098) / 600)
    for _ in range(299):
        ratio.decay()
    assert ratio.value == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(400):
        ratio.decay()
    assert ratio.value == pytest.approx(0.098)
    ratio.reset()
    assert ratio.value == 0.7


@pytest.mark.parametrize(("conservativeness", "initial"), [(0.5, 0.35), (1.0, 0.7), (2.0, 1.0)])
def test_conservativeness_scales_the_start_up_to_one(
    conservativeness: float, initial: float
) -> None:
    settings = SglangSettings(schedule_conservativeness=conservativeness)
    assert NewTokenRatio(settings).value == pytest.approx(initial)


class Watched:
    """The ratio after each planned step of a run."""

    def __init__(self, jobs: Workload, engine: EngineConfig) -> None:
        self.run = Run(jobs, engine, SECOND, least_decoded, checks=True)
        assert isinstance(self.run.scheduler, SglangScheduler)
        self.scheduler = self.run.scheduler
        self.plans = []
        self.ratios = []
        while self.run.goes_on():
            self.run.admit_arrivals()
            if self.run.is_idle():
                self.run.jump_to_next_arrival()
                continue
            plan = self.scheduler.begin(self.run.clock_s)
            self.scheduler.schedule_running(plan)
            self.scheduler.schedule_waiting(plan)
            self.plans.append(plan)
            self.ratios.append(self.scheduler.ratio.value)
            self.run.start(plan)
            self.run.finish_oldest()


def test_the_ratio_decays_in_decode_steps_only_and_starts_anew_when_idle() -> None:
    jobs = workload([8, 8, 8], [4, 4, 4], [0.0, 2.0, 30.0], cap=4)
    watched = Watched(jobs, config(100, SglangSettings()))
    step = (0.7 - 0.098) / 600
    # prefill a, decode, prefill b, decode, decode (a ends), decode (b ends), idle, prefill c, ...
    decays = [0, 1, 1, 2, 3, 4, 0, 1, 2, 3]
    assert watched.ratios == pytest.approx([0.7 - step * count for count in decays])


def test_after_a_retraction_the_ratio_is_what_the_kept_ones_have_written() -> None:
    watched = Watched(PAIR, config(40, EAGER))
    (at,) = [i for i, plan in enumerate(watched.plans) if plan.preempted]
    # "a" has written 13 of at most 20: (13 + 20 x 1) / (20 + 1), but 1 at most
    assert watched.ratios[at] == 1.0
    gentle = Watched(PAIR, config(40, replace(EAGER, retract_decode_steps=2)))
    assert gentle.ratios[at] == pytest.approx((13 + 2) / 21)
    assert gentle.ratios[at + 1] < gentle.ratios[at]


# --- admission by reservation ---


def test_a_request_enters_if_prompt_cap_and_page_are_less_than_what_is_free() -> None:
    """8 + 20 + 1 = 29 must be below the free tokens: 30 are enough, 29 are not."""
    jobs = workload([8], [4], cap=20)
    assert logged(jobs, config(30))[0].records[0].state == "completed"
    (refused,) = logged(jobs, config(29))[0].records
    assert (refused.state, refused.end_reason) == ("rejected", "infeasible_kv")


@pytest.mark.parametrize(("usable_tokens", "is_admitted"), [(51, True), (50, False)])
def test_running_requests_reserve_the_ratio_of_what_they_may_still_write(
    usable_tokens: int, is_admitted: bool
) -> None:
    """At 1 s "a" holds 8 tokens and may write 19 more, of which 0.7 x 19 = 13.3 are reserved; "b"
    wants 8 + 20 + 1 = 29. So there must be more than 50.3 tokens."""
    jobs = workload([8, 8], [20, 4], [0.0, 1.0], cap=20)
    _, steps = logged(jobs, config(usable_tokens, SglangSettings()))
    assert ("b" in steps[1].scheduled) == is_admitted


def test_in_one_batch_the_whole_cap_is_reserved() -> None:
    """ "b" wants 29 < usable - 8 - (20 + 1): 59 are enough, 58 are not, whatever the ratio."""
    jobs = workload([8, 8], [4, 4], cap=20)
    assert logged(jobs, config(59))[1][0].scheduled == {"a": 8, "b": 8}
    _, steps = logged(jobs, config(58))
    assert steps[0].scheduled == {"a": 8}
    assert steps[1].scheduled == {"b": 8}  # now "a" runs, and the ratio counts


def test_the_estimate_is_clipped() -> None:
    settings = replace(HOPEFUL, clip_max_new_tokens_estimation=10)
    jobs = workload([8], [4], cap=5000)
    assert logged(jobs, config(20, settings))[0].records[0].state == "completed"
    assert logged(jobs, config(19, settings))[0].records[0].state == "rejected"
    assert SglangSettings().clip_max_new_tokens_estimation == 4096


def test_a_cached_prefix_need_not_fit_again() -> None:
    """ "b" shares 24 of its 30 tokens with "a", which runs: it wants 6 + 4 + 1 only."""
    jobs = workload([30, 30], [4, 4], [0.0, 1.0], cap=4)
    shared = replace(jobs, prefix_groups=np.array([[0, 24], [0, 24]]))
    engine = config(50)
    assert logged(jobs, engine)[1][1].scheduled == {"a": 1}
    result, steps = logged(shared, engine)
    assert steps[1].scheduled == {"b": 6}
    assert result.records[1].cache_hit_tokens == 24


def test_a_prefix_is_not_found_in_the_batch_that_computes_it() -> None:
    jobs = replace(workload([30, 30], [4, 4], cap=4), prefix_groups=np.array([[0, 24], [0, 24]]))
    _, steps = logged(jobs, config(100))
    assert steps[0].scheduled == {"a": 30, "b": 30}


def test_a_cut_prompt_can_be_found_as_far_as_it_is_computed() -> None:
    jobs = replace(workload([20, 20], [4, 4], cap=4), prefix_groups=np.array([[0, 16], [0, 16]]))
    result, steps = logged(jobs, config(100, max_num_batched_tokens=8))
    assert [step.scheduled for step in steps[:3]] == [{"a": 8}, {"a": 8}, {"a": 4, "b": 4}]
    assert result.records[1].cache_hit_tokens == 16


def test_what_a_request_wrote_is_cached_when_it_ends() -> None:
    """So it is not taken before older cached text: of 30 tokens "a" leaves 9 cached and "b" 17;
    "c" takes the 4 that hold nothing, then the last 5 of "a", and "d" finds the first 4."""
    jobs = replace(
        workload([8, 8, 8, 9], [2, 10, 2, 2], [0.0, 10.0, 30.0, 50.0], cap=10),
        prefix_groups=np.array([[0, 8], [1, 8], [2, 8], [0, 8]]),
    )
    result, _ = logged(jobs, config(30))
    assert [r.cache_hit_tokens for r in result.records] == [0, 0, 0, 4]


@pytest.mark.parametrize(("usable_tokens", "is_admitted"), [(38, True), (37, False)])
def test_the_end_of_a_cut_prompt_reserves_like_an_admission(
    usable_tokens: int, is_admitted: bool
) -> None:
    """ "b" wants 3 + 10 + 1 < usable - 12 - (10 + 1) in the step that ends the prompt of "a"."""
    jobs = workload([12, 3], [4, 4], cap=10)
    engine = config(usable_tokens, SglangSettings(), max_num_batched_tokens=8)
    _, steps = logged(jobs, engine)
    assert steps[0].scheduled == {"a": 8}
    assert steps[1].scheduled == ({"a": 4, "b": 3} if is_admitted else {"a": 4})


def test_who_found_no_room_is_not_looked_at_until_somebody_leaves() -> None:
    """The ratio falls fast enough for "b" at 3 s, but SGLang's batch is marked as full."""
    settings = SglangSettings(new_token_ratio_decay_steps=2)
    jobs = workload([8, 8, 8], [9, 4, 4], [0.0, 1.0, 40.0], cap=20)
    result, _ = logged(jobs, config(50, settings))
    a, b, _ = result.records
    assert a.end_s == b.first_scheduled_s == 9.0


def test_a_retraction_makes_room_for_who_found_none() -> None:
    """ "c" arrives when all 40 tokens are taken; "b" leaves 20 in step 14, and "c" enters next."""
    jobs = workload([8, 8, 12], [20, 20, 4], [0.0, 0.0, 12.0], cap=20)
    _, steps = logged(jobs, config(40, EAGER))
    assert retractions(steps)[0] == (14, ("b",))
    assert steps[12].waiting == ("c",)
    assert steps[13].waiting == ("c", "b")
    assert steps[14].scheduled == {"c": 12}


def test_seats_are_limited() -> None:
    jobs = workload([8, 8], [4, 4], cap=4)
    _, steps = logged(jobs, config(100, max_num_seqs=1))
    assert steps[0].scheduled == {"a": 8}
    assert max(len(step.running) for step in steps) == 1


# --- choosing the mode ---


def test_the_mode_is_chosen_by_the_config() -> None:
    plain = EngineConfig(num_blocks=41, block_size=1)
    assert type(Run(PAIR, plain, SECOND, least_decoded, checks=True).scheduler) is Scheduler
    run = Run(PAIR, config(40), SECOND, least_decoded, checks=True)
    assert type(run.scheduler) is SglangScheduler


def test_the_jump_engine_hands_over_to_the_step_engine() -> None:
    assert "sglang = " in (unsupported(PAIR, config(40), SECOND) or "")
    assert simulate_fast(PAIR, config(40), SECOND) == simulate(PAIR, config(40), SECOND)


def test_the_matrix_runs_in_this_mode(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_runs(synthetic_runs(num_prompts=20, repeats=3, seed=2, cap_tokens=120), runs, {})
    policies = ("lifo", "sglang-retract", "longest-remaining")
    matrix = demo_matrix(
        runs, {}, num_seeds=1, policies=policies, pressures=(Pressure("tight", 41),)
    )
    matrix = replace(matrix, num_warmup=4, num_tagged=20, rate_per_s=6.0)
    changed = replace(matrix, engine=replace(matrix.engine, sglang=EAGER))
    assert task_key(changed, 0) != task_key(matrix, 0)
    cells = run_matrix(changed, tmp_path / "out", num_jobs=1)
    assert {cell.policy for cell in cells} == set(policies)
    assert all(cell.num_preemptions > 0 for cell in cells)


@pytest.mark.parametrize(
    "changes",
    [
        {"scheduling": "priority"}, {"watermark": 0.1}, {"async_scheduling": True},
        {"reserve_full_isl": False}, {"long_prefill_token_threshold": 8},
        {"trust_withdrawn_blocks": True}, {"vllm_version": "0.27"},
    ],
)  # fmt: skip
def test_what_only_vllm_has_is_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(InvalidInput, match=f"{name} .*SGLang's scheduler does not have"):
        config(40, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule_conservativeness": 0.0}, "above 0"),
        ({"schedule_conservativeness": float("nan")}, "above 0"),
        ({"init_new_token_ratio": 1.5}, r"share in \(0, 1\]"),
        ({"min_new_token_ratio_factor": 0.0}, r"share in \(0, 1\]"),
        ({"new_token_ratio_decay_steps": 0}, "whole number >= 1"),
        ({"max_prefill_tokens": 0.5}, "whole number >= 1"),
        ({"max_queued_requests": 0}, "whole number >= 1"),
        ({"retract_decode_steps": -1}, "whole number >= 0"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SglangSettings(**changes)
