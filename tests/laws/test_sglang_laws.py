"""Laws of SGLang mode (docs/sglang.md) on random small workloads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving_sim.config import EngineConfig, SglangSettings
from serving_sim.engine import SimResult, StepLog, simulate
from serving_sim.policies import get_policy
from serving_sim.profile import AffineProfile
from traces.workload import Workload

PROFILE = AffineProfile("test", 0.008, 1e-4, 2e-8, 1e-5)
POLICIES = (None, "lifo", "fifo", "random", "largest-kv", "most-computed", "sglang-retract")
REASONS = {"out_of_kv", "queue_full", "infeasible_kv"}

laws = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def make_workload(seed: int, count: int, gap_s: float) -> Workload:
    """Return ``count`` requests, a part of which share prefixes, all drawn from ``seed``."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 80, count)
    cap = rng.integers(20, 80, count)
    groups = np.stack([rng.integers(0, 3, count), rng.integers(0, prompt + 1)], axis=1)
    return Workload(
        name=f"random-{seed}",
        request_ids=tuple(f"q{i:03d}" for i in range(count)),
        arrival_s=np.cumsum(rng.exponential(gap_s, count)),
        prompt_tokens=prompt,
        output_tokens=rng.integers(1, cap + 1),
        max_tokens=cap,
        priority=rng.integers(0, 3, count),
        deadline_s=rng.uniform(0.5, 5.0, count),
        cohort=np.ones(count, np.int64),
        capped=rng.random(count) < 0.2,
        prefix_groups=groups if rng.random() < 0.5 else None,
    )


def engine(
    usable_tokens: int,
    block_size: int,
    conservativeness: float,
    clip: int,
    max_queued_requests: int | None,
    enable_prefix_caching: bool,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    slack_tokens: int,
) -> EngineConfig:
    return EngineConfig(
        num_blocks=usable_tokens // block_size + 1,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        max_idle_steps=200,
        sglang=SglangSettings(
            schedule_conservativeness=conservativeness,
            clip_max_new_tokens_estimation=clip,
            max_queued_requests=max_queued_requests,
            new_token_ratio_decay_steps=30,
            retract_decode_steps=slack_tokens,
        ),
    )


workloads = st.builds(
    make_workload, st.integers(0, 10_000), st.integers(1, 24), st.sampled_from([0.0, 0.05, 0.5])
)
engines = st.builds(
    engine,
    usable_tokens=st.integers(100, 600),
    block_size=st.sampled_from([1, 8, 16]),
    conservativeness=st.sampled_from([0.1, 1.0, 2.0]),
    clip=st.sampled_from([1, 30, 4096]),
    max_queued_requests=st.sampled_from([None, None, 3]),
    enable_prefix_caching=st.booleans(),
    max_num_batched_tokens=st.sampled_from([16, 64, 512]),
    max_num_seqs=st.sampled_from([3, 64]),
    slack_tokens=st.sampled_from([0, 20]),
)
policies = st.sampled_from(POLICIES)


def logged(
    workload: Workload, config: EngineConfig, policy: str | None
) -> tuple[SimResult, list[StepLog]]:
    steps: list[StepLog] = []
    found = None if policy is None else get_policy(policy)
    return simulate(workload, config, PROFILE, found, on_step=steps.append), steps


@laws
@given(workloads, engines, policies)
def test_every_request_ends_and_every_token_is_counted(
    workload: Workload, config: EngineConfig, policy: str | None
) -> None:
    result, steps = logged(workload, config, policy)
    assert result.drained
    accepted = [r for r in result.records if r.accepted_s is not None]
    refused = [r for r in result.records if r.accepted_s is None]
    assert all(r.state == "rejected" and r.end_reason in REASONS for r in refused)
    served = [r for r in accepted if r.state != "failed"]
    failed = [r for r in accepted if r.state == "failed"]
    assert all(r.state in ("completed", "length_capped") for r in served)
    assert all(r.end_reason in REASONS and r.end_s is not None for r in failed)
    wanted = dict(zip(workload.request_ids, workload.output_tokens, strict=True))
    assert all(r.output_tokens == wanted[r.request_id] for r in served)
    assert all(r.output_tokens < wanted[r.request_id] for r in failed)
    if config.sglang and config.sglang.clip_max_new_tokens_estimation > 80:
        assert all(r.end_reason == "queue_full" for r in failed)
    planned = sum(sum(step.scheduled.values()) for step in steps)
    assert result.computed_tokens == planned
    hits = sum(r.cache_hit_tokens for r in result.records)
    first_time = sum(r.prompt_tokens + r.output_tokens - 1 for r in served)
    partly = sum(r.prompt_tokens + r.output_tokens for r in failed)
    needed = planned - result.recomputed_tokens
    assert first_time - hits <= needed <= first_time + partly
    if not config.enable_prefix_caching:
        assert hits == 0
        assert needed >= first_time
    assert result.num_preemptions == sum(len(step.preempted) for step in steps)
    assert result.num_preemptions == sum(r.num_preemptions for r in result.records)


@laws
@given(workloads, engines, policies)
def test_kv_is_conserved(workload: Workload, config: EngineConfig, policy: str | None) -> None:
    """Free blocks follow from the log alone: usable less what each running request computed."""
    config = replace(config, enable_prefix_caching=False)
    _, steps = logged(workload, config, policy)
    computed: dict[str, int] = {}
    for step in steps:
        computed = {name: tokens for name, tokens in computed.items() if name in step.running}
        for request, tokens in step.scheduled.items():
            computed[request] = computed.get(request, 0) + tokens
        assert set(computed) == set(step.running)
        used = sum(config.blocks_for(tokens) for tokens in computed.values())
        assert used + step.num_free_blocks == config.usable_blocks
        assert len(step.running) <= config.max_num_seqs
        assert not set(step.running) & set(step.waiting)


@laws
@given(workloads, engines, policies)
def test_a_step_is_a_prefill_batch_or_a_decode_of_all_that_run(
    workload: Workload, config: EngineConfig, policy: str | None
) -> None:
    """What each request has computed and knows follows from the log alone, without caching."""
    config = replace(config, enable_prefix_caching=False)
    _, steps = logged(workload, config, policy)
    known = dict(zip(workload.request_ids, workload.prompt_tokens.tolist(), strict=True))
    computed = dict.fromkeys(known, 0)
    before: set[str] = set()
    cut: set[str] = set()  # whose prompt is computed in part
    for step in steps:
        entered = set(step.running) - before
        if entered or cut:
            assert set(step.scheduled) == entered | cut
            assert not step.preempted
            assert sum(step.scheduled.values()) <= config.max_num_batched_tokens
        else:
            assert step.scheduled == dict.fromkeys(step.running, 1)
        computed |= dict.fromkeys(step.preempted, 0)
        for name, tokens in step.scheduled.items():
            computed[name] += tokens
        cut = {name for name in step.scheduled if computed[name] < known[name]}
        for name in step.scheduled.keys() - cut:
            assert computed[name] == known[name]
            known[name] += 1
        assert len(cut) <= 1
        before = set(step.running)


@laws
@given(workloads, engines, policies)
def test_the_retracted_go_to_the_back_and_somebody_is_kept(
    workload: Workload, config: EngineConfig, policy: str | None
) -> None:
    result, steps = logged(workload, config, policy)
    dropped = {r.request_id for r in result.records if r.end_reason == "queue_full"}
    for before, step in pairwise(steps):
        if not step.preempted:
            continue
        back = tuple(name for name in step.preempted if name in step.waiting)
        assert not back or step.waiting[-len(back) :] == back
        assert set(step.preempted) - set(back) <= dropped
        stayed = [name for name in before.waiting if name in step.waiting]
        assert list(step.waiting[: len(stayed)]) == stayed
        gave_up = set(before.running) - set(step.running) - set(step.preempted)
        assert step.scheduled or gave_up - set(step.finished_before)


@laws
@given(workloads, engines, policies)
def test_times_are_in_order(workload: Workload, config: EngineConfig, policy: str | None) -> None:
    result, steps = logged(workload, config, policy)
    starts = [step.start_s for step in steps]
    assert starts == sorted(starts)
    for record in result.records:
        assert record.end_s is not None
        assert record.arrival_s <= record.end_s + 1e-12
        assert record.end_s <= record.censor_s == result.end_s
        if record.first_token_s is not None:
            assert record.first_scheduled_s is not None
            assert record.first_scheduled_s < record.first_token_s <= record.end_s
        assert 0.0 <= record.preempted_s <= record.end_s - record.arrival_s + 1e-12
        assert record.num_preemptions > 0 or record.preempted_s == 0.0


@laws
@given(workloads, engines, policies)
def test_ample_kv_means_no_retraction_and_equal_policies(
    workload: Workload, config: EngineConfig, policy: str | None
) -> None:
    ample = replace(config, num_blocks=100_000)
    result, steps = logged(workload, ample, policy)
    assert result.num_preemptions == result.recomputed_tokens == 0
    assert logged(workload, ample, None) == (result, steps)


@laws
@given(workloads, engines)
def test_the_policy_of_that_name_is_the_engines_own_rule(
    workload: Workload, config: EngineConfig
) -> None:
    assert logged(workload, config, "sglang-retract") == logged(workload, config, None)


@laws
@given(workloads, engines, st.integers(0, 1000))
def test_the_future_is_unknown_until_a_run_ends(
    workload: Workload, config: EngineConfig, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, workload.max_tokens + 1)
    _, steps = logged(workload, config, None)
    _, others = logged(replace(workload, output_tokens=lengths), config, None)
    for step, other in zip(steps, others, strict=False):
        if step.finished_before or other.finished_before:
            break
        assert step == other


def test_the_random_workloads_do_retract_and_fail() -> None:
    """Guard against vacuous laws: nearly every kind of end occurs in cases like those above."""
    reasons: set[str] = set()
    num_retractions = []
    for seed in range(60):
        config = engine(
            usable_tokens=110 + 10 * (seed % 5),
            block_size=(1, 8)[seed % 2],
            conservativeness=0.1,
            clip=1,
            max_queued_requests=(None, 3)[seed % 3 == 0],
            enable_prefix_caching=True,
            max_num_batched_tokens=64,
            max_num_seqs=64,
            slack_tokens=20,
        )
        result, _ = logged(make_workload(seed, 20, 0.05), config, None)
        num_retractions.append(result.num_preemptions)
        reasons |= {f"{r.state} {r.end_reason}" for r in result.records}
    assert np.median(num_retractions) >= 5
    assert reasons >= {
        "completed stop",
        "length_capped length",
        "rejected queue_full",
        "failed queue_full",
        "failed out_of_kv",
    }
