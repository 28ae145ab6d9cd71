"""The jump engine against the step engine: equal results, bit for bit, on random small workloads.

PREEMPTBENCH_DIFFERENTIAL sets the number of workloads (default 3,000; a nightly run takes more).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.choice import TPOT_WINDOW_STEPS
from contracts.errors import (
    ConformanceError,
    InvalidInput,
    LawViolation,
    NoProgressError,
    UnknownName,
)
from contracts.policy import ArrayPolicy, FloatArray, Policy, RunningView, RunningViews, from_rows
from contracts.signals import RemainingGrid
from eval.matrix import run_matrix, task_key
from eval.matrix_config import Pressure
from preemptbench.demo import demo_matrix
from serving_sim import jump
from serving_sim.config import EngineConfig
from serving_sim.engine import ARRIVAL_SLACK_S, Run, SimResult, simulate
from serving_sim.jump import ENGINES, Simulate, simulate_fast, unsupported
from serving_sim.kernels import layout, leaps
from serving_sim.policies import get_policy
from serving_sim.profile import AffineProfile, StepProfile, StepWork, load_profile
from serving_sim.victims import youngest
from tests.surfaces import small_profile
from tests.synthetic_runs import synthetic_runs
from traces.runlog import write_runs
from traces.workload import Workload

NUM_EXAMPLES = int(os.environ.get("PREEMPTBENCH_DIFFERENTIAL", "3000"))
CAP = 40
SURFACE = replace(small_profile(), skew_share=0.3, graph_batch_sizes=(1, 2, 4))
PROFILES = (
    AffineProfile("every part", 0.008, 1e-4, 2e-8, 1e-5),
    AffineProfile("context rules", 0.001, 0.0, 3e-3),
    AffineProfile("one second a step", 1.0, 0.0, 0.0),  # arrivals meet step ends exactly
    AffineProfile("tokens only", 0.0, 0.25, 0.0),
    SURFACE,
    replace(SURFACE, tables={k: v for k, v in SURFACE.tables.items() if k != "mixed"}),
    load_profile("rtx4090-llama-3.1-8b-tp1"),
    load_profile("h100-qwen3-32b-tp2"),
)


def _all_columns(views: RunningViews) -> FloatArray:
    """Score by everything that may be seen, so that one wrong column changes the victim."""
    total = sum(np.nan_to_num(np.sin(1e3 * column)) for column in views)
    return np.asarray(total, dtype=np.float64)


def _half_nan(views: RunningViews) -> FloatArray:
    return np.where(views.draw < 0.5, np.nan, np.floor(4 * views.draw))


def _in_pieces(view: RunningView) -> float:
    """Compiled; NaN now and then, ties, and everything that changes while a run goes on."""
    if view.draw < 0.2:
        return math.nan
    spared = max(view.remaining, view.recent_tpot_s) / (1 + view.num_preemptions)
    return spared // 3 + 1e3 * view.prefill_s_per_token


def _cut(view: RunningView) -> float:
    """Compiled: by deadline and clock."""
    left_s = view.deadline_s - view.now_s
    return -left_s if left_s > 0.0 else view.rank_from_youngest - view.computed_tokens % 7


def _called(view: RunningView) -> float:
    """Not compiled: int() of a float."""
    return int(8 * view.draw) + view.kv_blocks


def _failing(view: RunningView) -> float:
    """Compiled; raises at a second preemption."""
    return view.draw / (view.num_preemptions - 2)


OWN_POLICIES = {
    "in-pieces": from_rows("in-pieces", _in_pieces, reads_signal=True),
    "cut": from_rows("cut", _cut, reads_deadline=True),
    "called": from_rows("called", _called),
    "failing": from_rows("failing", _failing),
    "all-columns": Policy("all-columns", _all_columns, reads_signal=True, reads_deadline=True),
    "deadline": Policy("deadline", lambda views: views.deadline_s, reads_deadline=True),
    "half-nan": Policy("half-nan", _half_nan),
    "all-nan": Policy("all-nan", lambda views: np.full(len(views.draw), np.nan)),
    "all-equal": Policy("all-equal", lambda views: np.zeros(len(views.draw))),
}
POLICY_NAMES = (
    "", "lifo", "fifo", "random", "young(0.4)", "largest-kv", "least-computed", "most-computed",
    "sglang-retract", "priority", "longest-remaining", "shortest-remaining",
    "remaining-per-sunk", "slack-per-sunk", "doomed-first", "spare-evicted", *OWN_POLICIES,
)  # fmt: skip


def find(name: str) -> Policy | None:
    return OWN_POLICIES.get(name) or (get_policy(name) if name else None)


def make_workload(
    seed: int, count: int, longest_prompt: int, gap_s: float, whole_seconds: bool
) -> Workload:
    """Return ``count`` requests drawn from ``seed``; whole seconds make equal arrivals."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(gap_s, count) if gap_s else np.zeros(count))
    output = rng.integers(1, CAP + 1, count)
    deadline_s = rng.uniform(0.5, 5.0, count)
    deadline_s[rng.random(count) < 0.3] = np.nan
    tagged_only = rng.random() < 0.7
    return Workload(
        name=f"random-{seed}",
        request_ids=tuple(f"q{i:03d}" for i in range(count)),
        arrival_s=np.floor(arrival_s) if whole_seconds else arrival_s,
        prompt_tokens=rng.integers(1, longest_prompt + 1, count),
        output_tokens=output,
        max_tokens=np.where(rng.random(count) < 0.5, CAP, output),
        priority=rng.integers(-1, 2, count),
        deadline_s=deadline_s,
        cohort=np.ones(count, np.int64) if tagged_only else rng.integers(0, 3, count),
        capped=rng.random(count) < 0.2,
    )


def make_grid(workload: Workload, seed: int, stride: int, cap: int = CAP) -> RemainingGrid:
    """Return random answers; half of the upper ones are missing."""
    rng = np.random.default_rng([seed, stride])
    slots = cap // stride + 1
    remaining = rng.uniform(1.0, CAP, slots * len(workload))
    upper = np.where(rng.random(len(remaining)) < 0.5, np.nan, remaining + 3.0)
    return RemainingGrid(
        "noise", stride, slots * np.arange(len(workload) + 1), remaining, upper, 0.9,
        (frozenset(),), np.zeros(len(workload), np.int64),
    )  # fmt: skip


workloads = st.builds(
    make_workload,
    seed=st.integers(0, 1_000_000),
    count=st.sampled_from([1, 3, 8, 16, 24, 30]),
    longest_prompt=st.sampled_from([1, 8, 40, 40, 100]),
    gap_s=st.sampled_from([0.0, 0.01, 0.05, 0.3, 3.0]),
    whole_seconds=st.booleans(),
)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    chunked = draw(st.integers(0, 3)) > 0
    budget = draw(st.sampled_from([1, 5, 16, 64, 8192] if chunked else [64, 200]))
    lengths = [None, None, 50, 150] if chunked else [30, 64]
    block_size = draw(st.sampled_from([1, 3, 8, 16]))
    return EngineConfig(
        num_blocks=1 + draw(st.sampled_from([60, 90, 120, 150, 250])) // block_size,
        block_size=block_size,
        max_num_seqs=draw(st.sampled_from([1, 3, 6, *[64] * 5])),
        max_num_batched_tokens=budget,
        max_model_len=draw(st.sampled_from(lengths)),
        scheduling=draw(st.sampled_from(["fcfs", "priority"])),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 7, 24])),
        reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.0, 0.2])),
        drain_s=draw(st.sampled_from([0.0, 1.0, *[float("inf")] * 4])),
        max_idle_steps=draw(st.sampled_from([30, 200])),
    )


def outcome(
    engine: Simulate,
    workload: Workload,
    config: EngineConfig,
    profile: StepProfile,
    name: str,
    grid: RemainingGrid | None,
    compiled: bool = False,
) -> tuple[SimResult | str, list[RunningViews]]:
    """Return the result, or the words of the error, and all that the policy was shown.

    With ``compiled`` a policy that can be compiled is, and so shows nothing."""
    shown: list[RunningViews] = []
    policy = find(name)
    if policy is not None and name != "lifo" and not compiled:
        policy = replace(policy, score=_recorder(policy.score, shown), row=None)
    try:
        return engine(workload, config, profile, policy, signal=grid, seed=7), shown
    except (NoProgressError, ZeroDivisionError) as error:
        return str(error), shown


def _recorder(score: ArrayPolicy, shown: list[RunningViews]) -> ArrayPolicy:
    def record(views: RunningViews) -> FloatArray:
        shown.append(views)
        return score(views)

    return record


def assert_equal_runs(
    workload: Workload,
    config: EngineConfig,
    profile: StepProfile,
    name: str,
    grid: RemainingGrid | None,
) -> SimResult | str:
    assert unsupported(workload, config, profile, find(name), grid) is None
    expected, expected_views = outcome(simulate, workload, config, profile, name, grid)
    result, views = outcome(simulate_fast, workload, config, profile, name, grid)
    assert result == expected
    own, _ = outcome(simulate_fast, workload, config, profile, name, grid, compiled=True)
    assert own == expected
    assert len(views) == len(expected_views)
    for seen, wanted in zip(views, expected_views, strict=True):
        for field, column, right in zip(RunningViews._fields, seen, wanted, strict=True):
            assert column.dtype == right.dtype, field
            assert np.array_equal(column, right, equal_nan=True), field
    return result


@settings(
    max_examples=NUM_EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    workloads,
    configs(),
    st.sampled_from(PROFILES),
    st.sampled_from(POLICY_NAMES),
    st.sampled_from([1, 4, 7]),
)
def test_same_results_bit_for_bit(
    workload: Workload, config: EngineConfig, profile: StepProfile, name: str, stride: int
) -> None:
    assert_equal_runs(workload, config, profile, name, make_grid(workload, len(name), stride))


def test_a_refused_last_request_does_not_stretch_the_run() -> None:
    """Found by the test above: the run ends one step after the last awaited request was refused,
    though others still decode."""
    workload = Workload(
        name="refused last",
        request_ids=("filler", "tagged"),
        arrival_s=np.array([0.0, 3.0]),
        prompt_tokens=np.array([4, 90]),
        output_tokens=np.array([30, 1]),
        max_tokens=np.array([30, 30]),
        priority=np.zeros(2, np.int64),
        deadline_s=np.full(2, np.nan),
        cohort=np.array([2, 1]),
        capped=np.zeros(2, bool),
    )
    result = assert_equal_runs(workload, EngineConfig(num_blocks=4), PROFILES[2], "", None)
    assert isinstance(result, SimResult)
    assert [record.state for record in result.records] == ["unfinished", "rejected"]
    assert result.num_steps == 4


@pytest.mark.parametrize("name", ["", "lifo", "all-columns", "half-nan", "longest-remaining"])
@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
def test_hundreds_of_requests_under_pressure(name: str, scheduling: Literal["fcfs"]) -> None:
    """Longer runs than the random ones: long leaps, deep queues, many segments of soft KV."""
    workload = make_workload(11, 250, 100, 0.01, False)
    workload = replace(workload, cohort=np.ones(len(workload), np.int64))
    config = EngineConfig(num_blocks=60, block_size=8, max_num_batched_tokens=300,
                          scheduling=scheduling)  # fmt: skip
    result = assert_equal_runs(workload, config, PROFILES[0], name, make_grid(workload, 3, 4))
    assert isinstance(result, SimResult)
    assert result.num_preemptions > 40
    assert result.cache_hit_tokens > 0 and result.recomputed_tokens > 0


def test_the_random_workloads_reach_what_they_are_for() -> None:
    """Guard against a vacuous comparison: pressure, soft KV, refusals and asked policies occur."""
    met: Counter[str] = Counter()
    for seed in range(60):
        workload = make_workload(seed, 20, 40, 0.02, False)
        config = EngineConfig(num_blocks=13, block_size=8, max_num_batched_tokens=64,
                              max_model_len=66, drain_s=1.2, max_idle_steps=30)  # fmt: skip
        for name in ("", "random"):
            result, shown = outcome(simulate_fast, workload, config, PROFILES[0], name, None)
            if isinstance(result, str):
                met["stuck"] += 1
                continue
            met["preempting"] += result.num_preemptions > 0
            met["asking"] += bool(shown)
            met["finding soft KV"] += result.cache_hit_tokens > 0
            met["stopped at the horizon"] += not result.drained
            met["cut"] += any(r.end_reason == "max_model_len" for r in result.records)
    assert met["stuck"] < 20
    assert min(met[kind] for kind in ("preempting", "finding soft KV")) > 60
    assert min(met[kind] for kind in ("asking", "stopped at the horizon", "cut")) > 20


def test_no_progress_is_explained_in_the_same_words() -> None:
    """Two long prompts evict each other for ever; a third waits."""
    workload = replace(
        make_workload(0, 3, 1, 0.0, False),
        prompt_tokens=np.full(3, 64), output_tokens=np.full(3, 4), max_tokens=np.full(3, 4),
        cohort=np.ones(3, np.int64),
    )  # fmt: skip
    config = EngineConfig(
        num_blocks=11, block_size=8, max_num_batched_tokens=16, max_idle_steps=50, max_num_seqs=2,
        enable_prefix_caching=False, reserve_full_isl=False, long_prefill_token_threshold=8,
    )  # fmt: skip
    words = assert_equal_runs(workload, config, PROFILES[2], "fifo", None)
    assert isinstance(words, str)
    assert "no output token in 51 steps" in words and "1 waiting" in words


class _Tabulated:
    """A step profile that is not affine."""

    name = "tabulated"
    prefill_s_per_token = 0.001

    def step_s(self, work: StepWork) -> float:
        return 0.01 if work.num_decodes < 3 else 0.02


def test_what_it_cannot_do_the_step_engine_does_and_a_log_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workload, config = make_workload(5, 20, 40, 0.05, False), EngineConfig(num_blocks=12)
    short = make_grid(workload, 5, 4, cap=8)
    with caplog.at_level(logging.WARNING, logger="serving_sim.jump"):
        assert simulate_fast(workload, config, _Tabulated()) == simulate(
            workload, config, _Tabulated()
        )
    assert "the step engine runs instead" in caplog.text
    assert "'tabulated' is neither an AffineProfile nor a SurfaceProfile" in caplog.text
    trusting = replace(config, trust_withdrawn_blocks=True)
    assert "every KV block" in (unsupported(workload, trusting, PROFILES[0]) or "")
    assert simulate_fast(workload, trusting, PROFILES[0], get_policy("fifo")) == simulate(
        workload, trusting, PROFILES[0], get_policy("fifo")
    )
    reader = get_policy("longest-remaining")
    assert "every age" in (unsupported(workload, config, PROFILES[0], reader, short) or "")
    assert unsupported(workload, config, PROFILES[0], get_policy("lifo"), short) is None


@pytest.mark.parametrize(
    "change",
    [
        {"async_scheduling": True},
        {"vllm_version": "0.27"},
        {"long_prefill_token_threshold_adaptive": True},
        {"prefix_groups": True},
    ],
)
def test_settings_of_the_step_engine_only_fall_back_to_it(change: dict[str, Any]) -> None:
    """An option that the compiled loop does not know must never be ignored by it."""
    workload = make_workload(3, 30, 40, 0.05, False)
    if change.pop("prefix_groups", False):
        groups = np.stack([np.arange(30) % 3, np.minimum(workload.prompt_tokens, 16)], axis=1)
        workload = replace(workload, prefix_groups=groups)
    config = replace(EngineConfig(num_blocks=24, max_num_batched_tokens=64), **change)
    assert unsupported(workload, config, PROFILES[0])
    expected = simulate(workload, config, PROFILES[0])
    assert simulate_fast(workload, config, PROFILES[0]) == expected


def test_every_engine_setting_is_followed_or_falls_back() -> None:
    """A new field of EngineConfig must be known to the jump engine, one way or the other."""
    config = EngineConfig(num_blocks=90)
    run = Run(make_workload(1, 2, 40, 0.05, False), config, PROFILES[0], youngest, checks=False)
    followed = set(jump._engine_state(run, PROFILES[0], True).dtype.names or ())
    renamed = {
        "num_blocks": "num_free",
        "scheduling": "is_priority",
        "enable_prefix_caching": "caches",
        "enable_chunked_prefill": "chunks_prefill",
        "reserve_full_isl": "reserves_full_isl",
        "watermark": "watermark_blocks",
        "drain_s": "horizon_s",
    }
    outside = {"max_model_len", "trust_withdrawn_blocks"} | set(jump._PLAIN)
    for field in fields(EngineConfig):
        name = renamed.get(field.name, field.name)
        assert name in followed or field.name in outside, f"the jump engine ignores {field.name}"


def test_bad_input_raises_what_the_step_engine_raises() -> None:
    workload, config = make_workload(5, 20, 40, 0.05, False), EngineConfig(num_blocks=12)
    endless = AffineProfile("endless", 1.7e308, 1e308, 0.0)
    wrong = Policy("wrong", lambda views: np.zeros(1 + len(views.draw)))
    for engine in ENGINES.values():
        with pytest.raises(InvalidInput, match="reads a signal"):
            engine(workload, config, PROFILES[0], get_policy("longest-remaining"))
        with pytest.raises(LawViolation, match="must not run backwards"):
            engine(workload, config, endless)
        with pytest.raises(ConformanceError, match="one float a request"):
            engine(workload, config, PROFILES[0], wrong)


def test_the_compiled_loop_has_the_engines_constants() -> None:
    assert leaps.NUM_RECENT_STEPS == TPOT_WINDOW_STEPS
    assert leaps.ARRIVAL_SLACK_S == ARRIVAL_SLACK_S
    assert set(layout.INT_VIEWS) | set(layout.FLOAT_VIEWS) == set(RunningViews._fields)


def test_narrow_integers_are_read_as_numbers() -> None:
    workload = make_workload(4, 20, 40, 0.05, False)
    narrow = replace(workload, **{
        name: getattr(workload, name).astype(np.int32)
        for name in ("prompt_tokens", "output_tokens", "max_tokens", "priority", "cohort")
    })  # fmt: skip
    config = EngineConfig(num_blocks=12)
    assert_equal_runs(narrow, config, PROFILES[0], "random", None)
    assert simulate_fast(narrow, config, PROFILES[0]) == simulate_fast(
        workload, config, PROFILES[0]
    )


def test_the_matrix_runs_on_either_engine_and_cannot_tell(tmp_path: Path) -> None:
    runs = tmp_path / "runs.parquet"
    write_runs(synthetic_runs(num_prompts=20, repeats=3, seed=2, cap_tokens=120), runs, {})
    config = demo_matrix(
        runs, {}, num_seeds=1, policies=("lifo", "random", "longest-remaining"),
        pressures=(Pressure("tight", 41),),
    )  # fmt: skip
    config = replace(config, num_warmup=4, num_tagged=20, rate_per_s=6.0)
    assert config.simulator == "jump"
    slow = replace(config, simulator="step")
    assert task_key(slow, 0) == task_key(config, 0)
    cells = run_matrix(config, tmp_path / "jump", num_jobs=1)
    assert any(cell.num_preemptions > 0 for cell in cells)
    assert run_matrix(slow, tmp_path / "step", num_jobs=1) == cells
    with pytest.raises(UnknownName, match="unknown simulator 'jumpy': did you mean 'jump'"):
        replace(config, simulator="jumpy")


def test_policies_are_compiled_where_that_is_promised(caplog: pytest.LogCaptureFixture) -> None:
    """Guard against a vacuous comparison of compiled and called policies."""
    workload, config = make_workload(5, 30, 40, 0.01, False), EngineConfig(num_blocks=12)
    grid = make_grid(workload, 5, 4)
    called = set()
    for name in POLICY_NAMES:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="serving_sim.jump"):
            outcome(simulate_fast, workload, config, PROFILES[0], name, grid, compiled=True)
        called |= {name} if "is asked in Python" in caplog.text else set()
    assert called == {"all-columns", "deadline", "half-nan", "all-nan", "all-equal", "called"}


def _long_workload() -> Workload:
    """Return requests that keep the compiled loop busy for seconds."""
    count = 30_000
    workload = make_workload(1, count, 100, 0.01, False)
    long = np.full(count, 4000)
    return replace(workload, output_tokens=long, max_tokens=long, cohort=np.ones(count, np.int64))


@pytest.mark.parametrize("name", ["lifo", "largest-kv"])
def test_ctrl_c_arrives_while_the_compiled_loop_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT is sent while the loop has the processor; each of its turns is short."""
    workload, advance, turns_s = _long_workload(), jump._Arrays.advance, []

    def timed(arrays: jump._Arrays) -> int:
        if len(turns_s) == 3:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
        start_s = time.process_time()
        status = advance(arrays)
        turns_s.append(time.process_time() - start_s)
        return status

    def interrupt(number: int, frame: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(jump._Arrays, "advance", timed)
    before = signal.signal(signal.SIGALRM, interrupt)
    # a shell's background job starts with SIGINT ignored
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate_fast(workload, EngineConfig(num_blocks=4000), PROFILES[0], find(name))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, heard)
    assert len(turns_s) >= 3
    assert max(turns_s[1:]) < 0.2  # the first may compile


@pytest.mark.parametrize(
    ("field", "change", "law"),
    [
        ("num_free", 1, r"free \+ used = total"),
        ("num_blank", -1, r"blank \+ findable = free"),
        ("fixed_s", -9.0, "the clock never falls"),
        ("num_preemptions", 1, "preemptions"),
    ],
)
@pytest.mark.parametrize("name", ["", "random", "called"])
def test_a_fault_in_the_compiled_loop_is_a_law_violation(
    field: str, change: float, law: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, config = make_workload(5, 20, 40, 0.01, False), EngineConfig(num_blocks=40)
    advance = jump._Arrays.advance

    def plant(arrays: jump._Arrays) -> int:
        arrays.engine[field] += change * (arrays.engine["num_steps"] == 0)
        return advance(arrays)

    monkeypatch.setattr(jump._Arrays, "advance", plant)
    with pytest.raises(LawViolation, match=law):
        simulate_fast(workload, config, PROFILES[0], find(name))
    simulate_fast(workload, config, PROFILES[0], find(name), checks=False)


def test_a_request_that_gets_lost_is_a_law_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, advance = make_workload(5, 20, 40, 0.01, False), jump._Arrays.advance

    def lose(arrays: jump._Arrays) -> int:
        status = advance(arrays)
        arrays.requests["status"][4] = leaps.ACCEPTED
        return status

    monkeypatch.setattr(jump._Arrays, "advance", lose)
    with pytest.raises(LawViolation, match=r"accepted = ended \+ running \+ waiting"):
        simulate_fast(workload, EngineConfig(num_blocks=40), PROFILES[0])
