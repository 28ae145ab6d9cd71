"""Laws of the step engine (DESIGN §7) on random small workloads."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from contracts.errors import NoProgressError
from contracts.records import RequestRecord
from contracts.signals import RemainingGrid
from serving_sim.config import EngineConfig, VllmVersion
from serving_sim.engine import SimResult, StepLog, simulate
from serving_sim.policies import get_policy
from serving_sim.profile import AffineProfile, single_stream_s
from traces.workload import Workload

PROFILE = AffineProfile("test", 0.008, 1e-4, 2e-8, 1e-5)
CAP = 60
SIGNAL_FREE = (
    "lifo", "fifo", "random", "largest-kv", "least-computed", "most-computed", "sglang-retract",
    "priority", "young(0.25)", "young(0.5)", "least-generated", "most-generated", "bidkv",
    "reclaimable-unfinished", "most-budget-left", "spare-evicted",
)  # fmt: skip
SIGNAL_READERS = (
    "longest-remaining", "shortest-remaining", "remaining-times-sunk", "remaining-per-sunk",
)  # fmt: skip
DEADLINE_READERS = (
    "most-slack", "slack-per-sunk", "doomed-first", "doomed-then-slack", "goodspeed-bid",
)  # fmt: skip
EVERY_POLICY = SIGNAL_FREE + SIGNAL_READERS

laws = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def make_workload(
    seed: int, count: int, *, gap_s: float = 0.05, tagged_only: bool = True
) -> Workload:
    """Return ``count`` requests with short prompts and outputs, all drawn from ``seed``."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 80, count)
    return Workload(
        name=f"random-{seed}",
        request_ids=tuple(f"q{i:03d}" for i in range(count)),
        arrival_s=np.cumsum(rng.exponential(gap_s, count)),
        prompt_tokens=prompt,
        output_tokens=rng.integers(1, CAP + 1, count),
        max_tokens=np.full(count, CAP),
        priority=rng.integers(0, 3, count),
        deadline_s=rng.uniform(0.5, 5.0, count),
        cohort=np.ones(count, np.int64) if tagged_only else rng.integers(0, 3, count),
        capped=rng.random(count) < 0.2,
    )


def clairvoyant_grid(workload: Workload, bias: float = 1.0) -> RemainingGrid:
    """Return a grid at stride 4 that knows (a multiple of) the truth."""
    slots = CAP // 4 + 1
    ages = 4 * np.arange(slots)
    left = np.maximum(1.0, bias * (workload.output_tokens[:, None] - ages[None, :])).ravel()
    return RemainingGrid(
        "truth", 4, slots * np.arange(len(workload) + 1), left, left, 0.9, (frozenset(),),
        np.zeros(len(workload), np.int64), clairvoyant=True,
    )  # fmt: skip


configs = st.builds(
    EngineConfig,
    num_blocks=st.integers(20, 60),
    block_size=st.sampled_from([8, 16]),
    max_num_seqs=st.sampled_from([2, 5, 64]),
    max_num_batched_tokens=st.sampled_from([16, 64, 512]),
    scheduling=st.sampled_from(["fcfs", "priority"]),
    enable_prefix_caching=st.booleans(),
    long_prefill_token_threshold=st.sampled_from([0, 24]),
    reserve_full_isl=st.booleans(),
    watermark=st.sampled_from([0.0, 0.1]),
    async_scheduling=st.booleans(),
    max_idle_steps=st.just(200),
)
workloads = st.builds(make_workload, st.integers(0, 10_000), st.integers(1, 24))
policy_names = st.sampled_from(EVERY_POLICY)


def run(
    workload: Workload, config: EngineConfig, policy: str | None, **kwargs: object
) -> SimResult:
    """Simulate; a policy that reads a signal gets the truth.

    Victims other than the youngest can undo each other's prefill for ever (see
    test_no_progress_is_explained): such a case has no result to hold to a law. The rules that
    promise progress may not stall.
    """
    found = get_policy(policy) if policy is not None else None
    kwargs.setdefault("signal", clairvoyant_grid(workload))
    profile = kwargs.pop("profile", PROFILE)
    try:
        return simulate(workload, config, profile, found, **kwargs)  # type: ignore[arg-type]
    except NoProgressError:
        if policy in (None, "lifo"):
            raise
        reject()


def logged(
    workload: Workload, config: EngineConfig, policy: str | None
) -> tuple[SimResult, list[StepLog]]:
    steps: list[StepLog] = []
    return run(workload, config, policy, on_step=steps.append), steps


@laws
@given(workloads, configs, st.sampled_from(EVERY_POLICY + DEADLINE_READERS))
def test_every_request_ends_once_and_every_token_is_counted(
    workload: Workload, config: EngineConfig, policy: str
) -> None:
    result, steps = logged(workload, config, policy)
    assert result.drained
    assert [r.request_id for r in result.records] == list(workload.request_ids)
    accepted = [r for r in result.records if r.accepted_s is not None]
    assert all(r.state in ("completed", "length_capped") for r in accepted)
    assert all(r.state == "rejected" for r in result.records if r.accepted_s is None)
    for record, wanted, capped in zip(
        result.records, workload.output_tokens, workload.capped, strict=True
    ):
        if record.accepted_s is not None:
            assert record.output_tokens == wanted
            assert record.state == ("length_capped" if capped else "completed")
    first_time = sum(r.prompt_tokens + r.output_tokens - 1 for r in accepted)
    extra = result.recomputed_tokens + result.discarded_tokens
    assert result.computed_tokens == first_time + extra
    assert config.async_scheduling or not result.discarded_tokens
    withdrawn_excluded = sum(sum(step.scheduled.values()) for step in steps)
    assert result.computed_tokens == withdrawn_excluded
    assert result.num_preemptions == sum(len(step.preempted) for step in steps)
    assert result.num_preemptions == sum(r.num_preemptions for r in result.records)
    assert result.recomputed_tokens == sum(r.recomputed_tokens for r in result.records)


@laws
@given(workloads, configs, policy_names)
def test_kv_is_conserved(workload: Workload, config: EngineConfig, policy: str) -> None:
    """Free blocks follow from the log alone: usable less what each running request computed."""
    config = replace(config, enable_prefix_caching=False)
    _, steps = logged(workload, config, policy)
    computed: dict[str, int] = {}
    for step in steps:
        for request in (*step.finished_before, *step.preempted):
            computed.pop(request, None)
        for request, tokens in step.scheduled.items():
            computed[request] = computed.get(request, 0) + tokens
        assert set(computed) == set(step.running)
        used = sum(config.blocks_for(tokens) for tokens in computed.values())
        assert used + step.num_free_blocks == config.usable_blocks
        assert sum(step.scheduled.values()) <= config.max_num_batched_tokens
        assert len(step.running) <= config.max_num_seqs
        assert not set(step.running) & set(step.waiting)


@laws
@given(workloads, configs, policy_names)
def test_no_budget_is_left_while_a_running_request_waits_for_it(
    workload: Workload, config: EngineConfig, policy: str
) -> None:
    """Also after a victim that was scheduled already gave its tokens back. Under async scheduling
    a request may sit out the step before its last token comes: then it has ended by the next."""
    _, steps = logged(workload, config, policy)
    for step, following in pairwise(steps):
        budget_left = config.max_num_batched_tokens - sum(step.scheduled.values())
        passed_over = set(step.running) - set(step.scheduled)
        if config.async_scheduling:
            passed_over -= set(following.finished_before)
        assert budget_left == 0 or not passed_over


@laws
@given(workloads, configs, policy_names)
def test_times_are_in_order(workload: Workload, config: EngineConfig, policy: str) -> None:
    result, steps = logged(workload, config, policy)
    starts = [step.start_s for step in steps]
    assert starts == sorted(starts)
    for record in result.records:
        if record.accepted_s is None:
            continue
        assert record.first_scheduled_s is not None and record.first_token_s is not None
        assert record.end_s is not None
        assert record.arrival_s <= record.first_scheduled_s + 1e-12
        assert record.first_scheduled_s < record.first_token_s <= record.end_s
        assert record.end_s <= record.censor_s == result.end_s
        assert record.queued_s == max(0.0, record.first_scheduled_s - record.arrival_s)
        assert 0.0 <= record.preempted_s < record.end_s - record.arrival_s
        assert (record.preempted_s > 0.0) == (record.num_preemptions > 0)


@laws
@given(workloads, configs, policy_names)
def test_ample_kv_means_no_preemption_and_equal_policies(
    workload: Workload, config: EngineConfig, policy: str
) -> None:
    ample = replace(config, num_blocks=10_000)
    result = run(workload, ample, policy)
    assert result.num_preemptions == result.recomputed_tokens == 0
    expected = run(workload, ample, None)
    assert _without_deadlines(result) == _without_deadlines(expected)


@laws
@given(workloads, configs)
def test_lifo_is_the_engines_own_fcfs_rule(workload: Workload, config: EngineConfig) -> None:
    config = replace(config, scheduling="fcfs")
    assert logged(workload, config, "lifo") == logged(workload, config, None)


@laws
@given(workloads, configs)
def test_priority_is_the_engines_own_priority_rule(
    workload: Workload, config: EngineConfig
) -> None:
    config = replace(config, scheduling="priority")
    assert logged(workload, config, "priority") == logged(workload, config, None)


@laws
@given(workloads, configs, st.sampled_from(SIGNAL_FREE), st.floats(0.1, 3.0))
def test_a_signal_changes_nothing_for_who_does_not_read_it(
    workload: Workload, config: EngineConfig, policy: str, bias: float
) -> None:
    expected = run(workload, config, policy, signal=None)
    assert run(workload, config, policy, signal=clairvoyant_grid(workload, bias)) == expected


@pytest.mark.parametrize("policy", DEADLINE_READERS)
def test_whose_rule_reads_deadlines_has_them_marked_as_seen(policy: str) -> None:
    workload = make_workload(5, 12, tagged_only=True)
    result = run(workload, EngineConfig(num_blocks=24), policy)
    assert [record.deadline_seen for record in result.records] == workload.deadline_s.tolist()


@laws
@given(workloads, configs, policy_names)
def test_deadlines_change_nothing_for_who_does_not_read_them(
    workload: Workload, config: EngineConfig, policy: str
) -> None:
    changed = replace(workload, deadline_s=workload.deadline_s[::-1] * 0.1)
    result, other = run(workload, config, policy), run(changed, config, policy)
    assert _without_deadlines(other) == _without_deadlines(result)
    assert replace(other, records=result.records) == result
    assert [record.deadline_s for record in other.records] == changed.deadline_s.tolist()
    assert all(record.deadline_seen is None for record in (*result.records, *other.records))


@laws
@given(workloads, configs, st.sampled_from(SIGNAL_FREE), st.integers(0, 1000))
def test_the_future_is_unknown_until_a_run_ends(
    workload: Workload, config: EngineConfig, policy: str, seed: int
) -> None:
    shuffled = np.random.default_rng(seed).permutation(workload.output_tokens)
    _, steps = logged(workload, config, policy)
    _, others = logged(replace(workload, output_tokens=shuffled), config, policy)
    for step, other in zip(steps, others, strict=False):
        if step.finished_before or other.finished_before:
            break
        assert step == other


@laws
@given(
    workloads, configs, st.sampled_from([p for p in EVERY_POLICY if p[:3] not in ("ran", "you")])
)
def test_names_change_nothing(workload: Workload, config: EngineConfig, policy: str) -> None:
    names = tuple(reversed(workload.request_ids))
    renamed = run(replace(workload, request_ids=names), config, policy)
    assert [replace(record, request_id="") for record in renamed.records] == [
        replace(record, request_id="") for record in run(workload, config, policy).records
    ]


@laws
@given(workloads, configs, policy_names, st.sampled_from([0.25, 2.0, 8.0]))
def test_scaling_time_scales_time(
    workload: Workload, config: EngineConfig, policy: str, factor: float
) -> None:
    """Powers of two scale a float exactly, so every time must be exact, too."""
    slow = replace(
        PROFILE,
        fixed_s=PROFILE.fixed_s * factor,
        per_token_s=PROFILE.per_token_s * factor,
        per_context_token_s=PROFILE.per_context_token_s * factor,
        per_request_s=PROFILE.per_request_s * factor,
    )
    stretched = replace(workload, arrival_s=workload.arrival_s * factor)
    expected = run(workload, config, policy)
    result = run(stretched, config, policy, profile=slow)
    assert result.end_s == expected.end_s * factor
    for record, base in zip(result.records, expected.records, strict=True):
        for field in ("end_s", "first_token_s", "queued_s", "preempted_s", "single_stream_s"):
            value, unscaled = getattr(record, field), getattr(base, field)
            assert value == (None if unscaled is None else unscaled * factor)


@laws
@given(
    st.integers(1, 300),
    st.integers(1, CAP),
    st.sampled_from([7, 64, 8192]),
    st.sampled_from([0, 5]),
    st.sampled_from(["0.27", "0.33"]),
    st.booleans(),
)
def test_alone_a_request_takes_its_single_stream_time(
    prompt: int, output: int, budget: int, threshold: int, version: VllmVersion, ahead: bool
) -> None:
    config = EngineConfig(
        num_blocks=64, max_num_batched_tokens=budget, long_prefill_token_threshold=threshold,
        vllm_version=version, async_scheduling=ahead,
    )  # fmt: skip
    workload = replace(
        make_workload(0, 1),
        arrival_s=np.zeros(1),
        prompt_tokens=np.array([prompt]),
        output_tokens=np.array([output]),
    )
    (record,) = simulate(workload, config, PROFILE).records
    assert (
        record.end_s == record.single_stream_s == single_stream_s(prompt, output, config, PROFILE)
    )


@laws
@given(workloads, configs, policy_names)
def test_nobody_is_faster_than_alone(workload: Workload, config: EngineConfig, policy: str) -> None:
    for record in run(workload, config, policy).records:
        if record.accepted_s is not None and record.end_s is not None:
            assert record.end_s - record.arrival_s >= record.single_stream_s * (1 - 1e-9)


@laws
@given(st.integers(0, 10_000), configs, policy_names, st.sampled_from([0.0, 0.3, float("inf")]))
def test_a_run_lasts_until_its_cohort_ended_or_the_drain_is_over(
    seed: int, config: EngineConfig, policy: str, drain_s: float
) -> None:
    workload = make_workload(seed, 20, tagged_only=False)
    result = run(workload, replace(config, drain_s=drain_s), policy)
    tagged = [r for r in result.records if r.cohort == "tagged"] or list(result.records)
    assert result.drained == all(r.state != "unfinished" for r in tagged)
    if drain_s == float("inf"):
        assert result.drained
    if not result.drained:
        assert result.end_s > max(r.arrival_s for r in tagged) + drain_s
    for record in result.records:
        if record.state == "unfinished":
            assert record.end_s is None
            assert record.censor_s == result.end_s
            assert (record.end_reason == "not-arrived") == (record.accepted_s is None)


_DIGEST = """
import sys
from tests.laws.test_engine_laws import digest
print(digest(int(sys.argv[1])))
"""


def digest(seed: int) -> str:
    """Return a hash of the records of one run of every policy."""
    workload, config = make_workload(seed, 30), EngineConfig(num_blocks=24)
    results = [run(workload, config, policy, seed=seed) for policy in EVERY_POLICY]
    assert sum(result.num_preemptions for result in results) > 0
    return hashlib.sha256(repr(results).encode()).hexdigest()


@pytest.mark.parametrize("seed", [3])
def test_bytes_do_not_depend_on_the_process_or_its_hash_seed(seed: int) -> None:
    root = Path(__file__).resolve().parents[2]
    expected = digest(seed)
    for hash_seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        answer = subprocess.run(
            [sys.executable, "-c", _DIGEST, str(seed)],
            cwd=root, env=env, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert answer.stdout.strip() == expected


def test_checks_off_changes_no_result() -> None:
    workload, config = make_workload(1, 30), EngineConfig(num_blocks=24)
    for policy in EVERY_POLICY:
        assert run(workload, config, policy, checks=False) == run(workload, config, policy)


def test_the_random_workloads_do_preempt() -> None:
    """Guard against vacuous laws: the pools above are small enough for pressure."""
    config = EngineConfig(num_blocks=20)
    totals = [run(make_workload(seed, 20), config, "lifo").num_preemptions for seed in range(20)]
    assert np.median(totals) >= 3


def _without_deadlines(result: SimResult) -> list[RequestRecord]:
    return [replace(record, deadline_seen=None, deadline_s=None) for record in result.records]


def test_what_a_withdrawn_step_would_have_filled_is_not_found() -> None:
    """With vLLM's fault, a victim "finds" 8 tokens of a step that never ran for it."""
    workload = make_workload(5258, 4, gap_s=0.05)
    config = EngineConfig(
        num_blocks=19, block_size=8, max_num_batched_tokens=64,
        long_prefill_token_threshold=24, reserve_full_isl=False,
    )  # fmt: skip
    result = run(workload, config, "random")
    assert result.num_preemptions > 0
    tokens = sum(workload.prompt_tokens) + sum(workload.output_tokens) - len(workload)
    assert result.computed_tokens == tokens + result.recomputed_tokens
    faulty = run(workload, replace(config, trust_withdrawn_blocks=True), "random")
    assert faulty.computed_tokens == tokens + faulty.recomputed_tokens - 8
