"""Laws of faults and of the offload tier (docs/faults.md) on random plans, workloads, settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from contracts.errors import NoProgressError
from serving_sim.config import EngineConfig, OffloadSettings, SglangSettings
from serving_sim.engine import SimResult, StepLog, simulate
from serving_sim.fault_rates import FaultRate, FaultSource
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
from serving_sim.policies import get_policy
from serving_sim.profile import StepWork
from tests.laws.test_engine_laws import (
    PROFILE,
    clairvoyant_grid,
    make_workload,
)
from tests.laws.test_engine_laws import configs as any_configs
from traces.workload import Workload

laws = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TERMINAL = ("completed", "length_capped", "failed", "withdrawn")

POLICIES = (
    "lifo", "fifo", "random", "most-computed", "young(0.5)", "longest-remaining",
    "shortest-remaining",
)  # fmt: skip
times = st.floats(0.0, 3.0)
seconds = st.floats(0.001, 2.0)
policy_names = st.sampled_from(POLICIES)
# more pressure than in the laws without faults: the tier and the signal matter to victims only
workloads = st.builds(
    make_workload, st.integers(0, 10_000), st.integers(8, 24), gap_s=st.just(0.02)
)
configs = st.builds(
    lambda config, num_blocks, num_seqs: replace(
        config, num_blocks=num_blocks, block_size=8, max_num_seqs=num_seqs
    ),
    any_configs,
    st.integers(20, 40),
    st.sampled_from([5, 64]),
)


def window(kind: Any, **settings: Any) -> Any:
    """Return a strategy of windows of ``kind`` that begin in the first four seconds."""
    return st.builds(
        lambda at_s, lasts_s, **rest: kind(at_s=at_s, until_s=at_s + lasts_s, **rest),
        times, seconds, **settings,
    )  # fmt: skip


def faults_of(workload: Workload) -> Any:
    """Return a strategy of plans whose targets are requests of ``workload``."""
    arrivals = dict(zip(workload.request_ids, workload.arrival_s.tolist(), strict=True))
    targets = st.sampled_from(workload.request_ids)

    def later(kind: Any) -> Any:
        return st.builds(
            lambda who, after_s: kind(request_id=who, at_s=arrivals[who] + after_s), targets, times
        )

    return st.builds(
        lambda faults: FaultPlan(tuple(faults)),
        st.lists(
            st.one_of(
                later(Failure),
                later(Disconnect),
                st.builds(Patience, patience_s=st.floats(0.0, 3.0), request_id=targets),
                st.builds(Patience, patience_s=st.floats(0.5, 5.0)),
                st.builds(
                    WorkerLoss,
                    at_s=times,
                    restart_s=st.floats(0.0, 2.0),
                    running=st.sampled_from(["retried", "failed"]),
                    queue=st.sampled_from(["kept", "lost"]),
                ),
                st.builds(Stall, at_s=times, extra_s=seconds),
                window(Slow, factor=st.floats(0.25, 4.0)),
                st.builds(Capacity, at_s=times, blocks_share=st.floats(0.3, 2.0)),
                window(Capacity, blocks_share=st.floats(0.3, 2.0)),
                window(SignalOutage, answer=st.sampled_from(["nan", "inf", "negative", "stale"])),
            ),
            max_size=8,
        ),
    )


tiers = st.builds(
    OffloadSettings,
    bytes_per_s=st.sampled_from([1e8, 1e10, math.inf]),
    latency_s=st.sampled_from([0.0, 0.02]),
    capacity_blocks=st.sampled_from([0, 8, 30, None]),
    rule=st.sampled_from(["always_load", "always_recompute", "cheaper"]),
    overlap=st.booleans(),
    is_durable=st.booleans(),
)
tiered = st.builds(lambda config, tier: replace(config, offload=tier), configs, tiers)
sglang = st.builds(
    lambda config, ratio: EngineConfig(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_idle_steps=200,
        sglang=SglangSettings(schedule_conservativeness=ratio),
    ),
    configs,
    st.sampled_from([0.2, 1.0]),
)
engines = st.one_of(tiered, configs, sglang)


@st.composite
def faulty_cases(draw: Any) -> tuple[Workload, EngineConfig, FaultPlan, str | None]:
    workload = draw(workloads)
    policy = draw(st.sampled_from((None, *POLICIES)))
    return workload, draw(engines), draw(faults_of(workload)), policy


def run(
    workload: Workload,
    config: EngineConfig,
    policy: str | None,
    faults: FaultPlan | None = None,
    **kwargs: Any,
) -> tuple[SimResult, list[StepLog]]:
    """Simulate; see test_engine_laws.run for the stall that is no result."""
    steps: list[StepLog] = []
    found = get_policy(policy) if policy is not None else None
    kwargs.setdefault("signal", clairvoyant_grid(workload))
    try:
        result = simulate(
            workload, config, PROFILE, found, faults=faults, on_step=steps.append, **kwargs
        )
    except NoProgressError:
        if policy in (None, "lifo"):
            raise
        reject()
    return result, steps


@laws
@given(faulty_cases())
def test_every_accepted_request_reaches_a_terminal_state(
    case: tuple[Workload, EngineConfig, FaultPlan, str | None],
) -> None:
    """And reads a legal life: states add up, times are in order, nobody wrote too much."""
    workload, config, faults, policy = case
    result, _ = run(workload, config, policy, faults)
    assert result.drained
    accepted = [r for r in result.records if r.accepted_s is not None]
    assert all(r.state == "rejected" for r in result.records if r.accepted_s is None)
    states = [r.state for r in accepted]
    assert len(accepted) == sum(states.count(state) for state in TERMINAL)
    for record, wanted in zip(result.records, workload.output_tokens.tolist(), strict=True):
        if record.accepted_s is None:
            continue
        assert record.end_s is not None and record.arrival_s <= record.end_s + 1e-9
        assert record.end_s <= result.end_s
        assert record.output_tokens <= wanted
        ended = record.state in ("completed", "length_capped")
        assert (record.output_tokens == wanted) == ended
        assert record.first_token_s is None or record.first_token_s <= record.end_s
        assert 0.0 <= record.preempted_s <= record.end_s - record.arrival_s + 1e-9


@laws
@given(faulty_cases(), configs)
def test_what_is_due_happens_within_a_bound(
    case: tuple[Workload, EngineConfig, FaultPlan, str | None], config: EngineConfig
) -> None:
    """vLLM's FCFS rule serves the oldest in every step. So after the last fault and the last
    arrival, what is left takes at most a step for each chunk and token of each request, and two to
    admit it, each as long as a step can be."""
    workload, _, faults, _ = case
    config = replace(config, scheduling="fcfs")
    result, _ = run(workload, config, None, faults)
    quiet_s = max([float(workload.arrival_s[-1]), *(_over_s(f, workload) for f in faults.faults)])
    chunk_tokens = min(config.long_prefill_token_threshold or 512, config.max_num_batched_tokens)
    left = [r for r in result.records if r.end_s is not None and r.end_s > quiet_s]
    num_steps = 1 + sum(
        -(-(r.prompt_tokens + r.output_tokens) // chunk_tokens) + r.output_tokens + 2 for r in left
    )
    kv_tokens = 2 * config.num_blocks * config.block_size  # the pool at its largest
    work = StepWork(
        config.max_num_batched_tokens, kv_tokens, 0, config.max_num_seqs * 140, config.max_num_seqs
    )
    factor = math.prod(max(1.0, f.factor) for f in faults.faults if isinstance(f, Slow))
    stops_s = sum(map(_stops_s, faults.faults))
    longest_s = PROFILE.step_s(work)
    assert result.end_s <= quiet_s + stops_s + (factor + num_steps) * longest_s


def _over_s(fault: Fault, workload: Workload) -> float:
    """When ``fault`` is over at the latest, stops of the engine aside."""
    match fault:
        case Patience():
            return float(workload.arrival_s[-1]) + fault.patience_s
        case Slow() | SignalOutage():
            return fault.until_s
        case Capacity():
            return fault.until_s or fault.at_s
        case _:
            return fault.at_s


def _stops_s(fault: Fault) -> float:
    match fault:
        case WorkerLoss():
            return fault.restart_s
        case Stall():
            return fault.extra_s
        case _:
            return 0.0


@laws
@given(faulty_cases(), st.booleans())
def test_an_empty_plan_changes_nothing(
    case: tuple[Workload, EngineConfig, FaultPlan, str | None], windows_only: bool
) -> None:
    """Nor do faults that are over before anything happens, or that never strike."""
    workload, config, _, policy = case
    expected = run(workload, config, policy)
    assert run(workload, config, policy, FaultPlan()) == expected
    late_s = expected[0].end_s + 1.0
    idle = FaultPlan((
        Slow(at_s=late_s, until_s=late_s + 1, factor=3.0),
        SignalOutage(at_s=late_s, until_s=late_s + 1, answer="nan"),
        Stall(at_s=late_s, extra_s=1.0),
        Slow(at_s=0.0, until_s=late_s, factor=1.0),
    ))  # fmt: skip
    assert run(workload, config, policy, idle) == expected


@laws
@given(faulty_cases())
def test_equal_input_gives_equal_results_with_and_without_checks(
    case: tuple[Workload, EngineConfig, FaultPlan, str | None],
) -> None:
    workload, config, faults, policy = case
    expected = run(workload, config, policy, faults)
    assert run(workload, config, policy, faults, checks=False) == expected


@laws
@given(faulty_cases())
def test_names_change_nothing(
    case: tuple[Workload, EngineConfig, FaultPlan, str | None],
) -> None:
    workload, config, faults, policy = case
    if policy is not None and policy[:3] in ("ran", "you"):
        policy = "lifo"  # their draws are keyed by the name
    names = dict(zip(workload.request_ids, reversed(workload.request_ids), strict=True))
    renamed = FaultPlan(
        tuple(
            replace(f, request_id=names[f.request_id])
            if isinstance(f, Failure | Disconnect | Patience) and f.request_id is not None
            else f
            for f in faults.faults
        )
    )
    result, _ = run(replace(workload, request_ids=tuple(names.values())), config, policy, renamed)
    expected, _ = run(workload, config, policy, faults)
    assert [replace(r, request_id="") for r in result.records] == [
        replace(r, request_id="") for r in expected.records
    ]


@laws
@given(faulty_cases(), policy_names)
def test_every_policy_meets_the_same_faults(
    case: tuple[Workload, EngineConfig, FaultPlan, str | None], other: str
) -> None:
    """The same requests are accepted, and a target lives on only if its last token returned before
    the first step boundary at or after the fault."""
    workload, config, faults, policy = case
    targets = [f for f in faults.faults if isinstance(f, Failure | Disconnect)]
    accepted = []
    for name in (policy, other):
        result, steps = run(workload, config, name, faults)
        by_id = {record.request_id: record for record in result.records}
        accepted.append([record.state != "rejected" for record in result.records])
        for fault in targets:
            record = by_id[fault.request_id]
            if record.state == "rejected":
                continue
            assert record.end_s is not None
            assert not any(fault.at_s <= step.start_s < record.end_s for step in steps)
    assert accepted[0] == accepted[1]


@laws
@given(faulty_cases())
def test_kv_is_conserved_while_the_pool_changes(
    case: tuple[Workload, EngineConfig, FaultPlan, str | None],
) -> None:
    """Free blocks follow from log and plan: what the pool has less what each computed."""
    workload, config, faults, policy = case
    config = replace(config, enable_prefix_caching=False, offload=None)
    _, steps = run(workload, config, policy, faults)
    computed: dict[str, int] = {}
    for step in steps:
        for request in (*step.finished_before, *step.preempted, *step.lost):
            computed.pop(request, None)
        for request, tokens in step.scheduled.items():
            computed[request] = computed.get(request, 0) + tokens
        assert set(computed) == set(step.running)
        used = sum(config.blocks_for(tokens) for tokens in computed.values())
        usable = _usable_blocks(config, faults, step.start_s)
        assert used + step.num_free_blocks == usable
        assert step.num_free_blocks >= 0


def _usable_blocks(config: EngineConfig, faults: FaultPlan, now_s: float) -> int:
    """What the last capacity fault up to ``now_s`` left, in the order of time and plan."""
    changes = []
    for f in faults.faults:
        if isinstance(f, Capacity):
            changes.append((f.at_s, f.blocks_share))
            if f.until_s is not None:
                changes.append((f.until_s, 1.0))
    due = [change for change in sorted(changes, key=lambda c: c[0]) if change[0] <= now_s]
    return int((due[-1][1] if due else 1.0) * config.usable_blocks)


@laws
@given(workloads, configs, policy_names, st.booleans())
def test_a_boundless_tier_means_that_nothing_is_computed_again(
    workload: Workload, config: EngineConfig, policy: str, overlap: bool
) -> None:
    tier = OffloadSettings(bytes_per_s=math.inf, overlap=overlap)
    result, _ = run(workload, replace(config, offload=tier), policy)
    assert result.recomputed_tokens == 0 and result.load_s == 0.0
    first_time = sum(
        r.prompt_tokens + r.output_tokens - 1 for r in result.records if r.accepted_s is not None
    )
    assert result.computed_tokens == first_time + result.discarded_tokens
    assert result.loaded_tokens == sum(r.loaded_tokens for r in result.records)


@laws
@given(workloads, configs, policy_names, st.sampled_from(["empty", "unused", "slow"]))
def test_a_tier_that_holds_or_loads_nothing_is_no_tier(
    workload: Workload, config: EngineConfig, policy: str, why: str
) -> None:
    tier = {
        "empty": OffloadSettings(bytes_per_s=1e9, capacity_blocks=0),
        "unused": OffloadSettings(bytes_per_s=1e9, rule="always_recompute"),
        "slow": OffloadSettings(bytes_per_s=1.0, rule="cheaper"),
    }[why]
    result, steps = run(workload, replace(config, offload=tier), policy)
    assert (replace(result, offloaded_tokens=0), steps) == run(workload, config, policy)


@laws
@given(st.integers(0, 10_000), st.integers(0, 50), st.floats(0.0, 1.0))
def test_a_plan_depends_on_seed_kind_and_id_only(seed: int, number: int, swarm: float) -> None:
    """One more rate of another kind, or another order of requests' lengths, moves no draw."""
    workload = make_workload(seed, 12)
    rates = (
        FaultRate(kind="failure", probability=0.5, mean_after_s=1.0),
        FaultRate(kind="stall", per_hour=20_000.0, settings={"extra_s": 0.1}),
        FaultRate(kind="slow", per_hour=9_000.0, mean_duration_s=0.1, settings={"factor": 2.0}),
    )
    plan = FaultSource(rates=rates, swarm=swarm).plan(workload, number)
    longer = replace(workload, output_tokens=workload.output_tokens[::-1].copy())
    assert FaultSource(rates=rates, swarm=swarm).plan(longer, number) == plan
    more = (FaultRate(kind="patience", probability=1.0, settings={"patience_s": 1.0}), *rates)
    with_more = FaultSource(rates=more, swarm=swarm).plan(workload, number)
    assert [f for f in with_more.faults if not isinstance(f, Patience)] == list(plan.faults)
    if swarm == 1.0:
        assert plan.faults
    assert all(f.at_s <= workload.arrival_s[-1] for f in plan.faults if isinstance(f, Stall | Slow))


def test_the_random_plans_do_strike() -> None:
    """Guard against vacuous laws: each kind ends or delays somebody."""
    workload = make_workload(3, 20)
    config = EngineConfig(num_blocks=24)
    quiet = simulate(workload, config, PROFILE)
    last = workload.request_ids[-1]
    end_s = quiet.records[-1].end_s
    assert end_s is not None
    at_s = float(workload.arrival_s[-1])
    for fault, what in (
        (Failure(at_s=at_s, request_id=last), "failed"),
        (Disconnect(at_s=at_s, request_id=last), "withdrawn"),
        (Patience(patience_s=0.0, request_id=last), "failed"),
        (WorkerLoss(at_s=at_s, restart_s=1.0, running="failed", queue="lost"), "failed"),
        (Capacity(at_s=at_s, blocks_share=0.1), "failed"),
    ):
        assert (
            simulate(workload, config, PROFILE, faults=FaultPlan((fault,))).records[-1].state
            == what
        )
    for slower in (
        Stall(at_s=at_s, extra_s=1.0),
        Slow(at_s=0.0, until_s=50.0, factor=2.0),
        WorkerLoss(at_s=at_s, restart_s=1.0),
        Capacity(at_s=0.0, blocks_share=0.4),
    ):
        assert simulate(workload, config, PROFILE, faults=FaultPlan((slower,))).end_s > quiet.end_s
