"""The jump engine: what the step engine (serving_sim/engine.py) computes, hundreds of times faster.

The compiled loop (serving_sim/kernels/leaps.py) leaps over steps in which the batch cannot change.
A policy's scalar form is compiled into it when kernels/scalar.py finds that safe; any other policy
is asked in Python, one call a decision. Results are equal to the step engine's, times included, bit
for bit: tests/differential holds it to that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import numpy as np

from contracts.choice import DRAW_PURPOSE
from contracts.errors import LawViolation, NoProgressError
from contracts.policy import Policy, RunningViews
from contracts.signals import RemainingGrid
from serving_sim import policies
from serving_sim.config import EngineConfig
from serving_sim.engine import Run, SimResult, simulate, victim_rule
from serving_sim.faults import FaultPlan
from serving_sim.kernels import deciding, draws, layout, leaps, scalar
from serving_sim.kernels.alone import alone_seconds
from serving_sim.policies import lifo
from serving_sim.profile import AffineProfile, StepProfile
from serving_sim.scheduler import ChooseVictim
from serving_sim.surface import MeasuredRange, SurfaceProfile
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
        checks: bool = True,
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
    checks: bool = True,
) -> SimResult:
    """Return what :func:`serving_sim.engine.simulate` returns, and raise what it raises.

    ``checks`` asserts the laws that need no block identities: free + used = total and a clock that
    never falls, step by step or leap by leap; accepted = ended + unfinished, at the end.

    Where :func:`unsupported` gives a reason, the step engine does run; a log line says so.
    """
    reason = unsupported(workload, config, profile, policy, signal, faults)
    if reason is None:
        assert isinstance(profile, AffineProfile | SurfaceProfile)
        result = _jump(workload, config, profile, policy, signal, seed, checks)
        if result is not None:
            return result
        reason = "a step's seconds overflow"
    _say(reason)
    return simulate(
        workload, config, profile, policy, signal=signal, seed=seed, faults=faults, checks=checks
    )


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
    if type(profile) not in (AffineProfile, SurfaceProfile):
        return f"profile {profile.name!r} is neither an AffineProfile nor a SurfaceProfile"
    if isinstance(profile, SurfaceProfile) and profile.strict:
        return "a strict profile is asked step by step"
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
    """What the compiled loop works on: one row a request, the engine's state, and scratch.

    ``score`` is the compiled policy; None leaves the decisions to the engine's own rule, or to who
    called :meth:`advance` and gets ASKS.
    """

    def __init__(self, run: Run, profile: AffineProfile | SurfaceProfile, checks: bool) -> None:
        count = len(run.requests)
        self.requests = _request_rows(run)
        self.engine = _engine_state(run, profile, checks)
        self.running = np.zeros(count, np.int64)
        self.waiting = np.zeros(count, np.int64)
        self.score: object = None
        seats = min(count, run.config.max_num_seqs)
        self._int_views = np.zeros((len(layout.INT_VIEWS), seats), np.int64)
        self._float_views = np.zeros((len(layout.FLOAT_VIEWS), seats))
        recent_steps_s = np.zeros(leaps.NUM_RECENT_STEPS)
        self._decision = (self.engine, self.requests, self.running, recent_steps_s)
        num_asking = np.zeros(run.config.block_size, np.int64)
        tables = np.array(profile.flat) if isinstance(profile, SurfaceProfile) else np.zeros(0)
        self._loop = (*self._decision[:3], self.waiting, recent_steps_s, num_asking, tables)

    def show_to(self, rule: PolicyRule, run: Run) -> None:
        """Let the decisions see the rule's signal and draws, and the deadlines if it reads them."""
        grid = [np.zeros(0, np.int64), np.zeros(0), np.zeros(0)]
        if rule.signal is not None:
            self.engine["grid_stride"] = rule.signal.stride
            grid = [rule.signal.offsets, rule.signal.remaining, rule.signal.upper]
        if not rule.policy.reads_deadline:
            self.requests["deadline_s"] = np.nan
        ids = [request_id.encode() for request_id in run.workload.request_ids]
        starts = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(own) for own in ids], out=starts[1:])
        all_ids = np.frombuffer(b"".join(ids), np.uint8)
        kinds = (np.int64, np.float64, np.float64)
        self._context = (
            *(np.require(a, kind, ["C", "W"]) for a, kind in zip(grid, kinds, strict=True)),
            *(draws.key_prefix(rule.seed, DRAW_PURPOSE), all_ids, starts),
        )

    def advance(self) -> int:
        """Run on; see :func:`serving_sim.kernels.leaps.advance`."""
        if self.score is None:
            return int(leaps.advance(*self._loop))
        return int(deciding.compiled_loop()(self.score, *self._loop, *self._context))

    def views(self) -> RunningViews:
        """Return what PolicyRule.views would."""
        deciding.show(*self._decision, *self._context, self._int_views, self._float_views)
        count = self.engine["num_running"][0]
        ints, floats = self._int_views[:, :count].copy(), self._float_views[:, :count].copy()
        return RunningViews(*ints[:2], *floats[:2], *ints[2:], *floats[2:])


def _jump(
    workload: Workload,
    config: EngineConfig,
    profile: AffineProfile | SurfaceProfile,
    policy: Policy | None,
    signal: RemainingGrid | None,
    seed: int,
    checks: bool,
) -> SimResult | None:
    """Run; None when the clock left the floats, which the step engine explains."""
    rule = victim_rule(config, profile, policy, signal, seed)
    run = Run(workload, config, profile, rule, checks=False)
    arrays = _Arrays(run, profile, checks)
    status = _decide_and_advance(arrays, run, rule)
    if not math.isfinite(arrays.engine["clock_s"][0]):
        return None
    if checks:
        _check_laws(arrays, is_broken=status == leaps.BROKEN)
    _fill(run, arrays)
    if status == leaps.STUCK:
        _fill_scheduler(run, arrays)
        raise NoProgressError(run.diagnosis())
    if isinstance(profile, SurfaceProfile):
        profile.note_reach(MeasuredRange(**{name: float(arrays.engine[own][0])
                                            for name, own in _REACH.items()}))  # fmt: skip
    alone_s = _alone_s(
        arrays.requests["prompt_tokens"].tobytes(),
        np.maximum(1, arrays.requests["output_tokens"]).tobytes(),
        config.max_num_batched_tokens,
        profile,
    )
    reads_deadline = policy is not None and policy.reads_deadline
    return run.result(deadline_seen=reads_deadline, alone_s=alone_s)


def _decide_and_advance(arrays: _Arrays, run: Run, rule: ChooseVictim) -> int:
    """Let the compiled loop run to its end, asking the rule for victims where it must."""
    engine = arrays.engine
    if not isinstance(rule, PolicyRule) or rule.policy.score is lifo:
        least = rule is least_urgent
        engine["rule"] = leaps.NATIVE_LEAST_URGENT if least else leaps.NATIVE_YOUNGEST
    else:
        engine["rule"] = leaps.ASK
        arrays.show_to(rule, run)
        arrays.score = _compiled_score(rule.policy, run)
        if arrays.score is not None and rule.policy.row is not None:
            engine["draws"] = scalar.may_read(rule.policy.row, "draw")
    while True:
        try:
            status = arrays.advance()
        except Exception:
            if arrays.score is None:
                raise
            # the compiled policy raised; Python shall decide, or raise the same in its own words
            status = leaps.ASKS
        if status == leaps.ASKS:
            assert isinstance(rule, PolicyRule)
            engine["victim_at"] = rule.victim_of(arrays.views())
        elif status != leaps.PAUSED:
            break
        elif engine["num_admissions"][0] >= _MOST // 2:
            arrays.score = None
    if isinstance(rule, PolicyRule):
        rule.num_fallbacks += int(engine["num_fallbacks"][0])
    return status


_MOST = 2**scalar.FIELD_BITS


def _compiled_score(policy: Policy, run: Run) -> object:
    """Return the compiled policy, or None when it must be asked in Python."""
    workload = run.workload
    columns = (workload.prompt_tokens, workload.max_tokens, np.abs(workload.priority))
    largest = max(len(workload), run.config.num_blocks, *(int(c.max()) for c in columns))
    if policy.row is None:
        reason = "it is an array function"
    elif 2 * largest >= _MOST:
        reason = f"a length, a priority or a count reaches {_MOST // 2}"
    else:
        is_ours = policy.row.__module__ == policies.__name__
        made = scalar.compile_policy(policy.row, keep=is_ours)
        if not isinstance(made, str):
            return made
        reason = made
    _LOG.info("policy %r is asked in Python: %s", policy.name, reason)
    return None


def _check_laws(arrays: _Arrays, *, is_broken: bool) -> None:
    """Raise LawViolation when the end of a run cannot be true."""
    engine, rows = arrays.engine[0], arrays.requests
    held, soft = int(rows["num_blocks"].sum()), int(rows["soft_blocks"].sum())
    is_accepted = (rows["status"] == leaps.ACCEPTED) | (rows["status"] == leaps.FINISHED)
    num_finished = int((rows["status"] == leaps.FINISHED).sum())
    sums = {
        "KV blocks: free + used = total": (engine["num_free"] + held, engine["usable_blocks"]),
        "KV blocks: blank + findable = free": (engine["num_blank"] + soft, engine["num_free"]),
        "accepted = ended + running + waiting": (
            is_accepted.sum(), num_finished + engine["num_running"] + engine["num_waiting"],
        ),
        "preemptions: of all = of each": (
            engine["num_preemptions"], rows["num_preemptions"].sum()
        ),
        "the clock never falls, and every step's blocks add up: breaches": (int(is_broken), 0),
    }  # fmt: skip
    for law, (left, right) in sums.items():
        if left != right:
            raise LawViolation(
                f"{law}, but here {left} is not {right} after step {engine['num_steps']} at "
                f"{engine['clock_s']:.6f} s: a bug in the jump engine, please report it; the step "
                "engine (--simulator step) computes the same without it"
            )


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


def _engine_state(run: Run, profile: AffineProfile | SurfaceProfile, checks: bool) -> np.ndarray:
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
        "checks": checks,
        "usable_blocks": config.usable_blocks,
        "num_awaited": run.num_awaited,
        "num_free": config.usable_blocks,
        "num_blank": config.usable_blocks,
        "oldest": leaps.NOBODY,
        "newest": leaps.NOBODY,
        "horizon_s": run.horizon_s,
        "prefill_s_per_token": profile.prefill_s_per_token,
    }
    if isinstance(profile, AffineProfile):
        settings |= dict(zip(_COSTS, _costs(profile), strict=True))
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


_COSTS = ("fixed_s", "per_token_s", "per_context_token_s", "per_request_s")
_REACH = {
    "tokens": "most_tokens",
    "chunk_tokens": "most_chunk",
    "prefix_tokens": "most_prefix",
    "decodes": "most_decodes",
    "context_tokens": "most_context",
}


def _costs(profile: AffineProfile) -> tuple[float, ...]:
    return tuple(float(getattr(profile, name)) for name in _COSTS)


@lru_cache(maxsize=16)
def _alone_s(
    prompt_tokens: bytes,
    output_tokens: bytes,
    budget_tokens: int,
    profile: AffineProfile | SurfaceProfile,
) -> list[float]:
    """Return single-stream seconds; the cells of one seed ask for the same ones again."""
    prompts, outputs = (np.frombuffer(x, np.int64).copy() for x in (prompt_tokens, output_tokens))
    if isinstance(profile, AffineProfile):
        seconds: list[float] = alone_seconds(
            prompts, outputs, budget_tokens, *_costs(profile)
        ).tolist()
        return seconds
    pairs = list(zip(prompts.tolist(), outputs.tolist(), strict=True))
    known = {pair: profile.alone_s(*pair, budget_tokens) for pair in set(pairs)}
    return [known[pair] for pair in pairs]
