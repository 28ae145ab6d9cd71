"""The step engine: the specification of what a serving run is, one planned step at a time.

It follows the vLLM V1 scheduler (0.33.0) decision by decision; tests/differential holds it to
that scheduler's own logs. A policy replaces only the choice of the victim.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import LawViolation, NoProgressError
from contracts.policy import Policy
from contracts.records import COHORTS, RequestRecord, State
from contracts.signals import RemainingGrid
from serving_sim.config import EngineConfig
from serving_sim.faults import FaultPlan
from serving_sim.offload import Tier
from serving_sim.profile import StepProfile, StepWork, single_stream_s
from serving_sim.requests import LiveRequest, live_requests, record_of
from serving_sim.scheduler import ChooseVictim, Eviction, StepPlan
from serving_sim.sglang import scheduler_of
from serving_sim.strikes import Strikes
from serving_sim.victims import PolicyRule, least_decoded, least_urgent, youngest
from traces.workload import Workload

ARRIVAL_SLACK_S = 1e-12  # an arrival this little after the clock is due now


@dataclass(frozen=True, slots=True)
class StepLog:
    """What one planned step decided; the fields of a decision log (serving_sim/decisions.py).

    ``running`` and ``waiting`` are as the planning left them; ``scheduled`` is in its order.
    ``lost`` names whose KV went with a lost worker since the step before, and when.
    The rest tells a timeline (serving_sim/timeline.py) more than a decision log holds: ``sampling``
    get a token when the step returns; ``num_returned`` steps have, the last of them at
    ``returned_s``, which is before ``start_s`` if the engine was idle since; the pool has
    ``num_blocks``.
    """

    step: int
    start_s: float
    scheduled: dict[str, int]
    preempted: tuple[str, ...]
    finished_before: tuple[str, ...]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    num_free_blocks: int
    lost: tuple[tuple[str, float], ...] = ()
    sampling: tuple[str, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    num_returned: int = 0
    returned_s: float = 0.0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """One run. ``records`` are in workload order; token counts are sums over all requests.

    ``computed_tokens`` include the ``recomputed_tokens`` (computed before, lost by preemption) and
    the ``discarded_tokens`` (planned ahead for a request that then ended; async scheduling only).
    ``cache_hit_tokens`` were found instead. ``signal_fallbacks`` counts decisions that met a NaN
    score or a signal's garbage. ``drained`` says that every tagged request ended.
    ``offloaded_tokens`` were written to the offload tier, ``loaded_tokens`` read back, for which
    requests waited ``load_s`` in sum. ``num_faults`` counts the strikes of the fault plan that
    found their target.
    """

    records: tuple[RequestRecord, ...]
    num_steps: int
    end_s: float
    num_preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    cache_hit_tokens: int
    signal_fallbacks: int
    drained: bool
    discarded_tokens: int = 0
    offloaded_tokens: int = 0
    loaded_tokens: int = 0
    load_s: float = 0.0
    num_faults: int = 0


def simulate(
    workload: Workload,
    config: EngineConfig,
    profile: StepProfile,
    policy: Policy | None = None,
    *,
    signal: RemainingGrid | None = None,
    seed: int = 0,
    faults: FaultPlan | None = None,
    checks: bool = True,
    on_step: Callable[[StepLog], None] | None = None,
) -> SimResult:
    """Run ``workload`` until every tagged request ended, or ``config.drain_s`` after the last
    tagged arrival; without tagged requests, until all ended.

    Without a policy the victim is the engine's own: the youngest under FCFS, the least urgent
    under PRIORITY, the one that wrote least in SGLang mode. ``seed`` keys the policy's draws.
    ``faults`` strike between steps (serving_sim/faults.py). Raises InvalidInput, NoProgressError,
    and with ``checks`` LawViolation.
    """
    rule = victim_rule(config, profile, policy, signal, seed)
    run = Run(workload, config, profile, rule, checks, faults)
    play(run, on_step)
    return run.result(deadline_seen=policy is not None and policy.reads_deadline)


def play(run: Run, on_step: Callable[[StepLog], None] | None = None) -> None:
    """Let ``run`` go on to its end; ``on_step`` hears of each planned step before it starts."""
    scheduler = run.scheduler
    while run.goes_on():
        run.admit_arrivals()
        if run.strikes is not None and run.strikes.strike_next(run):
            continue
        if run.is_idle():
            run.jump_to_next_arrival()
            continue
        if scheduler.running or scheduler.waiting:
            plan = scheduler.begin(run.clock_s)
            scheduler.schedule_running(plan)
            scheduler.schedule_waiting(plan)
            if on_step is not None:
                on_step(run.step_log(plan))
            run.start(plan)
            if run.may_plan_ahead(plan):
                continue
        run.finish_oldest()


def victim_rule(
    config: EngineConfig,
    profile: StepProfile,
    policy: Policy | None,
    signal: RemainingGrid | None,
    seed: int,
) -> ChooseVictim:
    """Return the policy as a victim rule, or the engine's own rule without one."""
    if policy is not None:
        return PolicyRule(policy, signal, seed, profile.prefill_s_per_token)
    if config.sglang is not None:
        return least_decoded
    return least_urgent if config.scheduling == "priority" else youngest


class Run:
    """The state of one run: clock, arrivals still to come, scheduler, counters.

    The jump engine (serving_sim/jump.py) starts from one, and ends by filling it in.
    """

    def __init__(
        self,
        workload: Workload,
        config: EngineConfig,
        profile: StepProfile,
        rule: ChooseVictim,
        checks: bool,
        faults: FaultPlan | None = None,
    ) -> None:
        self.workload, self.config, self.profile, self.rule = workload, config, profile, rule
        self.scheduler = scheduler_of(config, rule, checks=checks)
        self.clock_s = self.returned_s = 0.0
        self.num_steps = self.computed_tokens = self.recomputed_tokens = 0
        self.discarded_tokens = 0
        tagged = workload.cohort == COHORTS.index("tagged")
        awaited = tagged if tagged.any() else np.ones(len(workload), dtype=bool)
        self.requests = live_requests(workload, awaited.tolist(), self._served_tokens(), config)
        self.num_awaited = int(awaited.sum())
        self.horizon_s = float(workload.arrival_s[awaited][-1]) + config.drain_s
        self.strikes = self._strikes_of(faults) if faults is not None and faults.faults else None
        if config.offload is not None:
            cost_s = profile.prefill_s_per_token
            self.scheduler.tier = Tier(config.offload, config, cost_s, checks=checks)
        self._next = 0
        self._finished: list[str] = []
        self._lost: list[tuple[str, float]] = []
        self._in_flight: deque[StepPlan] = deque()
        self._depth = 2 if config.async_scheduling else 1
        self.idle_steps = 0
        self._recent_steps_s = rule.recent_steps_s if isinstance(rule, PolicyRule) else None

    def _strikes_of(self, faults: FaultPlan) -> Strikes:
        faults.check(self.workload, self.config.usable_blocks)
        strikes = Strikes(faults, self.requests, self.config.usable_blocks)
        if isinstance(self.rule, PolicyRule):
            self.rule.outages = strikes.outages
        return strikes

    def _served_tokens(self) -> list[int]:
        """Output tokens of each request, cut where prompt + output reach max_model_len."""
        served = self.workload.output_tokens
        if self.config.max_model_len is not None:
            room = self.config.max_model_len - self.workload.prompt_tokens
            served = np.minimum(served, np.maximum(room, 0))
        return [int(tokens) for tokens in served]

    def goes_on(self) -> bool:
        """Say whether a tagged request is still to end, and the time for it is not over."""
        return self.num_awaited > 0 and self.clock_s <= self.horizon_s

    def is_idle(self) -> bool:
        """Say whether nothing runs, waits or is still to return."""
        return not (self.scheduler.running or self.scheduler.waiting or self._in_flight)

    def admit_arrivals(self) -> None:
        """Queue the requests that are due; refuse the ones that could never fit."""
        due_s = self.clock_s + ARRIVAL_SLACK_S
        requests = self.requests
        while self._next < len(requests) and requests[self._next].arrival_s <= due_s:
            self._next += 1
            self.admit(requests[self._next - 1])

    def admit(self, request: LiveRequest) -> None:
        """Queue ``request``, or refuse it if it could never fit."""
        reason = self.refusal(request)
        if reason is None:
            request.accepted_s = request.arrival_s
            request.end_reason = "unfinished"
            self.scheduler.waiting.push(request)
            if not self.scheduler.can_hold(request, self.scheduler.pool.num_blocks):
                self.give_up(request, "failed", "kv_shrunk")
        else:
            self._end(request, request.arrival_s, reason)
            request.state = "rejected"

    def refusal(self, request: LiveRequest) -> str | None:
        """Say why ``request`` is not accepted; None if it is."""
        if not request.output_tokens:
            return "exceeds_max_model_len"
        return self.scheduler.refusal(request)

    def jump_to_next_arrival(self) -> None:
        """Let an idle engine sleep until something arrives or strikes, or until the run's end."""
        self.scheduler.rest()
        if self._next < len(self.requests):
            self.clock_s = self._next_event_s()

    def _next_event_s(self) -> float:
        """When something arrives or strikes next; infinity when nothing will."""
        arrival_s = math.inf
        if self._next < len(self.requests):
            arrival_s = self.requests[self._next].arrival_s
        return arrival_s if self.strikes is None else min(arrival_s, self.strikes.next_s)

    def start(self, plan: StepPlan) -> None:
        """Let a step begin: its tokens count as computed, and its samples as expected."""
        self.num_steps += 1
        self._finished, self._lost = [], []
        self._in_flight.append(plan)
        for request, reason in plan.failed:
            self._fail(request, reason)
        work = self._compute(plan)
        plan.step_s = self._step_s(plan, work)
        if not 0.0 <= plan.step_s < math.inf:
            raise LawViolation(
                f"profile {self.profile.name!r} says a step of {work} takes {plan.step_s} s: the "
                "clock must not run backwards; give finite seconds >= 0"
            )

    def _step_s(self, plan: StepPlan, work: StepWork) -> float:
        """Return how long ``plan`` takes: one that computes nothing waits until something can."""
        if not work.num_requests:
            takes_time = any(other.step_s for other in self._in_flight)
            return 0.0 if takes_time else self._wait_s()
        step_s = self.profile.step_s(work)
        if self.strikes is not None:
            step_s *= self.strikes.slowness(self.clock_s)
        return step_s + plan.load_s

    def _wait_s(self) -> float:
        """Return the seconds until KV is loaded that somebody waits for, or another event; 0 if
        nobody does."""
        loads = [r.load_ends_s for r in self.scheduler.running if r.load_ends_s > self.clock_s]
        return min(*loads, self._next_event_s()) - self.clock_s if loads else 0.0

    def may_plan_ahead(self, plan: StepPlan) -> bool:
        """Say whether the next step is planned before ``plan`` returns: one is, under async."""
        return bool(plan.scheduled) and len(self._in_flight) < self._depth

    def _compute(self, plan: StepPlan) -> StepWork:
        prefill = prefill_context = decodes = decode_context = longest = 0
        for request, tokens in plan.scheduled.items():
            before = request.computed_tokens
            context = request.computed_tokens = before + tokens
            if tokens == 1:
                decodes += 1
                decode_context += context
                if context > longest:
                    longest = context
            else:
                prefill += tokens
                prefill_context += context
            if before < request.peak_computed_tokens:
                again = min(context, request.peak_computed_tokens) - before
                request.recomputed_tokens += again
                self.recomputed_tokens += again
            if context >= request.expected_tokens:
                request.expected_tokens += 1
                plan.sampling.append((request, request.num_preemptions))
        self.computed_tokens += prefill + decodes
        num_requests = len(plan.scheduled)
        return StepWork(prefill, prefill_context, decodes, decode_context, num_requests, longest)

    def finish_until(self, number: int) -> None:
        """Let the steps up to ``number`` (the first is 1) return, as far as they were planned."""
        while self._in_flight and self.num_steps - len(self._in_flight) < number:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """Let the oldest step return: pass its time, hand out its tokens, end what is done."""
        plan = self._in_flight.popleft()
        self.clock_s += plan.step_s
        self.returned_s = self.clock_s
        if plan.scheduled and self._recent_steps_s is not None:
            self._recent_steps_s.append(plan.step_s)
        num_tokens = 0
        for request, num_preemptions in plan.sampling:
            if request.end_s is not None:
                self.discarded_tokens += 1  # it ended one step ago: computed in vain
                continue
            num_tokens += 1
            if request.num_preemptions != num_preemptions:
                request.expected_tokens += 1  # stale: its KV is gone, and nobody expected it
            elif self._depth > 1:
                self.scheduler.publish(request, request.known_tokens)
            request.known_tokens += 1
            request.generated_tokens += 1
            if request.first_token_s is None:
                request.first_token_s = self.clock_s
            if request.generated_tokens >= request.output_tokens:
                self._complete(request)
        self.idle_steps = 0 if num_tokens else self.idle_steps + 1
        if self.idle_steps > self.config.max_idle_steps:
            raise NoProgressError(self.diagnosis())

    def _complete(self, request: LiveRequest) -> None:
        self.scheduler.retire(request)
        self._finished.append(request.request_id)
        request.state, reason = self.outcome(request)
        self._end(request, self.clock_s, reason)

    def _fail(self, request: LiveRequest, reason: str) -> None:
        self._finished.append(request.request_id)
        request.state = "failed"
        self._end(request, self.clock_s, reason)

    def give_up(self, request: LiveRequest, state: State, reason: str) -> bool:
        """End an accepted request before its time, wherever it is; once it ended, do nothing. Say
        whether it was there."""
        if request.accepted_s is None or request.end_s is not None:
            return False
        self.scheduler.drop(request)
        self._finished.append(request.request_id)
        request.state = state
        self._end(request, self.clock_s, reason)
        return True

    def lose_kv(self) -> list[LiveRequest]:
        """Lose all KV and the steps in flight; return who ran and now waits again."""
        self.discarded_tokens += self._num_discarded_in_flight()
        self._in_flight.clear()
        lost = self.scheduler.lose_kv(self.clock_s)
        self._lost += [(request.request_id, self.clock_s) for request in lost]
        return lost

    def outcome(self, request: LiveRequest) -> tuple[State, str]:
        """Return the state and the reason with which ``request`` ends once it wrote its tokens."""
        cut = request.output_tokens < int(self.workload.output_tokens[request.index])
        capped = cut or bool(self.workload.capped[request.index])
        reason = "max_model_len" if cut else "length" if capped else "stop"
        return "length_capped" if capped else "completed", reason

    def _end(self, request: LiveRequest, end_s: float, reason: str) -> None:
        request.end_s, request.end_reason = end_s, reason
        request.end_eviction(end_s)
        self.num_awaited -= request.is_awaited

    def diagnosis(self) -> str:
        """Say who holds what while no output token appears."""
        return self.scheduler.diagnosis(self.clock_s, self.idle_steps)

    def step_log(self, plan: StepPlan) -> StepLog:
        """Return what ``plan`` decided, before it runs."""
        scheduler = self.scheduler
        return StepLog(
            step=self.num_steps + 1,
            start_s=self.clock_s,
            scheduled={r.request_id: tokens for r, tokens in plan.scheduled.items()},
            preempted=tuple(r.request_id for r in plan.preempted),
            finished_before=tuple(sorted(self._finished)),
            running=tuple(r.request_id for r in scheduler.running),
            waiting=tuple(r.request_id for r in scheduler.waiting),
            num_free_blocks=scheduler.pool.num_free,
            lost=tuple(self._lost),
            sampling=tuple(
                r.request_id
                for r, tokens in plan.scheduled.items()
                if r.computed_tokens + tokens >= r.expected_tokens
            ),
            evictions=tuple(plan.evictions),
            num_returned=self.num_steps - len(self._in_flight),
            returned_s=self.returned_s,
            num_blocks=scheduler.pool.num_blocks,
        )

    def _num_discarded_in_flight(self) -> int:
        planned = (request for plan in self._in_flight for request, _ in plan.sampling)
        return sum(request.end_s is not None for request in planned)

    def result(self, *, deadline_seen: bool, alone_s: Sequence[float] | None = None) -> SimResult:
        """Return the records of all requests, whatever became of them. ``alone_s`` are their
        single-stream seconds, if known already."""
        if alone_s is None:
            alone_s = [
                single_stream_s(r.prompt_tokens, max(1, r.output_tokens), self.config, self.profile)
                for r in self.requests
            ]
        records = tuple(
            record_of(
                request,
                self.workload,
                censor_s=self.clock_s,
                single_stream_s=alone_s[request.index],
                deadline_seen=deadline_seen,
            )
            for request in self.requests
        )
        tier = self.scheduler.tier
        return SimResult(
            records=records,
            num_steps=self.num_steps,
            end_s=self.clock_s,
            num_preemptions=self.scheduler.num_preemptions,
            computed_tokens=self.computed_tokens,
            recomputed_tokens=self.recomputed_tokens,
            cache_hit_tokens=sum(record.cache_hit_tokens for record in records),
            signal_fallbacks=self.rule.num_fallbacks if isinstance(self.rule, PolicyRule) else 0,
            drained=self.num_awaited == 0,
            discarded_tokens=self.discarded_tokens + self._num_discarded_in_flight(),
            offloaded_tokens=tier.offloaded_tokens if tier is not None else 0,
            loaded_tokens=tier.loaded_tokens if tier is not None else 0,
            load_s=tier.load_s if tier is not None else 0.0,
            num_faults=self.strikes.num_struck if self.strikes is not None else 0,
        )
