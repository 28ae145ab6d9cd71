"""The jump engine: what the step engine (serving_sim/engine.py) computes, hundreds of times faster.

The compiled loop (serving_sim/kernels/leaps.py) leaps over steps in which the batch cannot change
and hands a decision back to Python only when a policy has to name a victim. Results are equal to
the step engine's, times included, bit for bit: tests/differential holds it to that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import numpy as np

from contracts.errors import NoProgressError
from contracts.policy import FloatArray, IntArray, Policy, RunningViews
from contracts.signals import RemainingGrid
from serving_sim.config import EngineConfig
from serving_sim.engine import Run, SimResult, simulate, victim_rule
from serving_sim.faults import FaultPlan
from serving_sim.kernels import layout, leaps
from serving_sim.kernels.alone import alone_seconds
from serving_sim.policies import lifo
from serving_sim.profile import AffineProfile, StepProfile
from serving_sim.requests import LiveRequest
from serving_sim.victims import PolicyRule, least_urgent
from traces.workload import Workload

_LOG = logging.getLogger(__name__)


class Simulate(Protocol):
    """An engine: see :func:`serving_sim.engine.simulate`."""

    def __call__(
        self,
        workload: Workload,
        config: EngineConfig,
        profile: StepProfile,
        policy: Policy | None = None,
        *,
        signal: RemainingGrid | None = None,
        seed: int = 0,
        faults: FaultPlan | None = None,
    ) -> SimResult: ...


def simulate_fast(
    workload: Workload,
    config: EngineConfig,
    profile: StepProfile,
    policy: Policy | None = None,
    *,
    signal: RemainingGrid | None = None,
    seed: int = 0,
    faults: FaultPlan | None = None,
) -> SimResult:
    """Return what :func:`serving_sim.engine.simulate` returns, and raise what it raises.

    Where :func:`unsupported` gives a reason, the step engine does run; a log line says so.
    """
    reason = unsupported(workload, config, profile, policy, signal, faults)
    if reason is None:
        assert isinstance(profile, AffineProfile)
        result = _jump(workload, config, profile, policy, signal, seed)
        if result is not None:
            return result
        reason = "a step's seconds overflow"
    _say(reason)
    return simulate(workload, config, profile, policy, signal=signal, seed=seed, faults=faults)


ENGINES: Mapping[str, Simulate] = {"jump": simulate_fast, "step": simulate}


_PLAIN = {
    "sglang": None,
    "offload": None,
    "async_scheduling": False,
    "vllm_version": "0.33",
    "long_prefill_token_threshold_adaptive": False,
}
"""Settings whose other values only the step engine follows."""


def unsupported(
    workload: Workload,
    config: EngineConfig,
    profile: StepProfile,
    policy: Policy | None = None,
    signal: RemainingGrid | None = None,
    faults: FaultPlan | None = None,
) -> str | None:
    """Say why the jump engine cannot run this; None if it can."""
    if type(profile) is not AffineProfile:
        return f"profile {profile.name!r} is not an AffineProfile"
    if faults is not None and faults.faults:
        return "faults are followed by the step engine only"
    for name, plain in _PLAIN.items():
        if getattr(config, name) != plain:
            return f"{name} = {getattr(config, name)!r} is followed by the step engine only"
    if workload.prefix_groups is not None and config.enable_prefix_caching:
        return "shared prefixes need the identity of every KV block"
    if config.trust_withdrawn_blocks and config.enable_prefix_caching:
        return "trust_withdrawn_blocks needs the identity of every KV block"
    if policy is not None and policy.reads_signal and signal is not None:
        count = len(workload)
        starts = signal.offsets[:count]
        ends = np.append(signal.offsets, min(len(signal.remaining), len(signal.upper)))[1:][:count]
        last = np.maximum(workload.output_tokens - 1, 0) // signal.stride
        if len(starts) < count or not np.all((starts >= 0) & (starts + last < ends)):
            return f"signal {signal.name!r} does not answer for every request at every age"
    return None


@lru_cache
def _say(reason: str) -> None:
    _LOG.warning("the step engine runs instead of the jump engine: %s", reason)


class _Arrays:
    """What the compiled loop works on: one row a request, the engine's state, and scratch."""

    def __init__(self, run: Run, profile: AffineProfile, signal: RemainingGrid | None) -> None:
        count = len(run.requests)
        self.requests = _request_rows(run)
        self.engine = _engine_state(run, profile)
        self.running = np.zeros(count, np.int64)
        self.waiting = np.zeros(count, np.int64)
        self.recent_steps_s = np.zeros(leaps.NUM_RECENT_STEPS)
        self.int_views = np.zeros((len(layout.INT_VIEWS), count), np.int64)
        self.float_views = np.zeros((len(layout.FLOAT_VIEWS), count))
        grid = [np.zeros(0, np.int64), np.zeros(0), np.zeros(0)]
        if signal is not None:
            self.engine["grid_stride"] = signal.stride
            grid = [signal.offsets, signal.remaining, signal.upper]
        kinds = (np.int64, np.float64, np.float64)
        self._all = (
            self.engine,
            self.requests,
            self.running,
            self.waiting,
            self.recent_steps_s,
            np.zeros(run.config.block_size, np.int64),
            *(np.require(a, kind, ["C", "W"]) for a, kind in zip(grid, kinds, strict=True)),
            self.int_views,
            self.float_views,
        )

    def advance(self) -> int:
        """Run on; see :func:`serving_sim.kernels.leaps.advance`."""
        return int(leaps.advance(*self._all))


class _ShownRule(PolicyRule):
    """A PolicyRule whose views the compiled loop has written already."""

    arrays: _Arrays

    def views(self, running: list[LiveRequest], now_s: float) -> RunningViews:  # noqa: ARG002
        """Return what PolicyRule.views would."""
        arrays, count = self.arrays, len(running)
        ints = list(arrays.int_views[:, :count].copy())
        floats = list(arrays.float_views[:, :count].copy())
        if arrays.engine["num_missing_draws"][0]:
            self._draw_missing(running, floats[_DRAW], ints[_PREEMPTIONS])
        self.recent_steps_s.clear()
        self.recent_steps_s.extend(_recent(arrays))
        floats[_TPOT].fill(self._recent_tpot_s())
        return RunningViews(*ints[:2], *floats[:2], *ints[2:], *floats[2:])

    def _draw_missing(
        self, running: list[LiveRequest], draws: FloatArray, num_preemptions: IntArray
    ) -> None:
        for at in np.flatnonzero(np.isnan(draws)).tolist():
            request = running[at]
            request.draw, request.num_preemptions = None, int(num_preemptions[at])
            draws[at] = self.arrays.requests["draw"][request.index] = self._draw(request)


_TPOT = layout.FLOAT_VIEWS.index("recent_tpot_s")
_DRAW = layout.FLOAT_VIEWS.index("draw")
_PREEMPTIONS = layout.INT_VIEWS.index("num_preemptions")


def _recent(arrays: _Arrays) -> list[float]:
    """Return the seconds of the last steps, oldest first."""
    num_timed = int(arrays.engine["num_timed_steps"][0])
    seconds: list[float] = arrays.recent_steps_s.tolist()
    at = num_timed % leaps.NUM_RECENT_STEPS
    return seconds[at:] + seconds[:at] if num_timed >= leaps.NUM_RECENT_STEPS else seconds[:at]


def _jump(
    workload: Workload,
    config: EngineConfig,
    profile: AffineProfile,
    policy: Policy | None,
    signal: RemainingGrid | None,
    seed: int,
) -> SimResult | None:
    """Run; None when the clock left the floats, which the step engine explains."""
    rule = victim_rule(config, profile, policy, signal, seed)
    if policy is not None and policy.score is not lifo:
        rule = _ShownRule(policy, signal, seed, profile.prefill_s_per_token)
    run = Run(workload, config, profile, rule, checks=False)
    reads_deadline = policy is not None and policy.reads_deadline
    arrays = _Arrays(run, profile, rule.signal if isinstance(rule, _ShownRule) else None)
    if isinstance(rule, _ShownRule):
        arrays.engine["rule"] = leaps.ASK
        rule.arrays = arrays
        if not reads_deadline:
            arrays.requests["deadline_s"] = np.nan
        status = _run_asking(arrays, run, rule)
    else:
        arrays.engine["rule"] = (
            leaps.NATIVE_LEAST_URGENT if rule is least_urgent else leaps.NATIVE_YOUNGEST
        )
        status = arrays.advance()
    if not math.isfinite(arrays.engine["clock_s"][0]):
        return None
    _fill(run, arrays)
    if status == leaps.STUCK:
        _fill_scheduler(run, arrays)
        raise NoProgressError(run.diagnosis())
    alone_s = _alone_s(
        arrays.requests["prompt_tokens"].tobytes(),
        np.maximum(1, arrays.requests["output_tokens"]).tobytes(),
        config.max_num_batched_tokens,
        (profile.fixed_s, profile.per_token_s, profile.per_context_token_s, profile.per_request_s),
    )
    return run.result(deadline_seen=reads_deadline, alone_s=alone_s)


def _run_asking(arrays: _Arrays, run: Run, rule: PolicyRule) -> int:
    """Let the compiled loop run, and the rule name the victims."""
    engine = arrays.engine
    requests = np.array(run.requests, dtype=object)
    while (status := arrays.advance()) == leaps.ASKS:
        running = requests[arrays.running[: engine["num_running"][0]]].tolist()
        engine["victim_at"] = rule(running, float(engine["clock_s"][0]))
    return status


def _request_rows(run: Run) -> np.ndarray:
    workload = run.workload
    rows = np.zeros(len(workload), layout.REQUEST)
    for name in ("prompt_tokens", "max_tokens", "priority", "arrival_s"):
        rows[name] = getattr(workload, name)
    rows["known_tokens"] = workload.prompt_tokens
    rows["output_tokens"] = [request.output_tokens for request in run.requests]
    rows["is_awaited"] = [request.is_awaited for request in run.requests]
    rows["deadline_s"] = [request.deadline_s for request in run.requests]
    rows["is_refused"] = [run.refusal(request) is not None for request in run.requests]
    # arrivals never fall, so (priority, index) is the order of (priority, arrival, index)
    rows["rank"][np.argsort(workload.priority, kind="stable")] = np.arange(len(workload))
    for name in ("before", "after"):
        rows[name] = leaps.NOBODY
    for name in _UNKNOWN_TIMES:
        rows[name] = np.nan
    return rows


_UNKNOWN_TIMES = ("first_scheduled_s", "first_token_s", "evicted_at_s", "end_s", "draw")


def _engine_state(run: Run, profile: AffineProfile) -> np.ndarray:
    config = run.config
    settings = {
        "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "is_priority": config.scheduling == "priority",
        "caches": config.enable_prefix_caching,
        "chunks_prefill": config.enable_chunked_prefill,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "reserves_full_isl": config.reserve_full_isl,
        "watermark_blocks": config.watermark_blocks,
        "max_idle_steps": config.max_idle_steps,
        "num_awaited": run.num_awaited,
        "num_free": config.usable_blocks,
        "num_blank": config.usable_blocks,
        "oldest": leaps.NOBODY,
        "newest": leaps.NOBODY,
        "horizon_s": run.horizon_s,
        "fixed_s": profile.fixed_s,
        "per_token_s": profile.per_token_s,
        "per_context_token_s": profile.per_context_token_s,
        "per_request_s": profile.per_request_s,
        "prefill_s_per_token": profile.prefill_s_per_token,
    }
    engine = np.zeros(1, layout.ENGINE)
    for name, value in settings.items():
        engine[name] = value
    return engine


_SAME_NAMES = (
    "known_tokens", "generated_tokens", "computed_tokens", "num_preemptions", "recomputed_tokens",
    "cache_hit_tokens", "preempted_s",
)  # fmt: skip


def _fill(run: Run, arrays: _Arrays) -> None:
    """Write what became of the run and of its requests into ``run``."""
    for name in ("clock_s", "num_steps", "computed_tokens", "recomputed_tokens", "num_awaited",
                 "idle_steps"):  # fmt: skip
        setattr(run, name, arrays.engine[name][0].item())
    run.scheduler.num_preemptions = int(arrays.engine["num_preemptions"][0])
    rows = arrays.requests
    for name in _SAME_NAMES:
        for request, value in zip(run.requests, rows[name].tolist(), strict=True):
            setattr(request, name, value)
    for name in ("first_scheduled_s", "first_token_s", "evicted_at_s", "end_s"):
        for request, value in zip(run.requests, rows[name].tolist(), strict=True):
            setattr(request, name, None if math.isnan(value) else value)
    for request, status in zip(run.requests, rows["status"].tolist(), strict=True):
        if status == leaps.REFUSED:
            request.state, request.end_reason = "rejected", run.refusal(request) or ""
        elif status != leaps.NOT_ARRIVED:
            request.accepted_s, request.end_reason = request.arrival_s, "unfinished"
        if status == leaps.FINISHED:
            request.state, request.end_reason = run.outcome(request)


def _fill_scheduler(run: Run, arrays: _Arrays) -> None:
    """Write who runs, waits and holds blocks into ``run``, for its diagnosis."""
    scheduler, engine = run.scheduler, arrays.engine[0]
    scheduler.pool.num_free = int(engine["num_free"])
    scheduler.running = [run.requests[i] for i in arrays.running[: engine["num_running"]].tolist()]
    for request in scheduler.running:
        request.blocks = [0] * int(arrays.requests["num_blocks"][request.index])
    for entry in sorted(arrays.waiting[: engine["num_waiting"]].tolist()):
        scheduler.waiting.push(run.requests[entry % len(run.requests)])


@lru_cache(maxsize=16)
def _alone_s(
    prompt_tokens: bytes, output_tokens: bytes, budget_tokens: int, costs: tuple[float, ...]
) -> list[float]:
    """Return single-stream seconds; the cells of one seed ask for the same ones again."""
    prompts, outputs = (np.frombuffer(x, np.int64).copy() for x in (prompt_tokens, output_tokens))
    fixed_s, per_token_s, per_context_token_s, per_request_s = map(float, costs)
    seconds: list[float] = alone_seconds(
        prompts, outputs, budget_tokens, fixed_s, per_token_s, per_context_token_s, per_request_s
    ).tolist()
    return seconds
