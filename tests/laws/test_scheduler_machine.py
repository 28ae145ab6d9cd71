"""The scheduler under any sequence of arrivals, steps, early ends and hostile victim rules.

A hypothesis state machine drives one Run step by step, as serving_sim.engine.simulate does. Before
and after both halves of each planning it looks at queue, running list, plan and pool, and holds
them to the laws of DESIGN §7. At the end it drains the engine under a rule that promises progress.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serving_sim.config import EngineConfig, VllmVersion
from serving_sim.engine import Run
from serving_sim.profile import AffineProfile
from serving_sim.requests import LiveRequest
from serving_sim.scheduler import ChooseVictim, StepPlan
from serving_sim.victims import least_urgent, youngest
from traces.workload import Workload

PROFILE = AffineProfile("test", 0.01, 1e-3, 0.0)
CAP = 20
NEVER_S = 1e9  # the arrival of a request that was not submitted yet
MAX_DRAIN_STEPS = 3000  # 16 requests of <= 20 tokens, each step of LIFO gives the oldest its next

VICTIM_RULES: dict[str, Callable[[random.Random], ChooseVictim]] = {
    "youngest": lambda rng: youngest,
    "oldest": lambda rng: lambda running, now_s: 0,
    "least urgent": lambda rng: least_urgent,
    "anyone": lambda rng: lambda running, now_s: rng.randrange(len(running)),
    "middle": lambda rng: lambda running, now_s: len(running) // 2,
    "most computed": lambda rng: lambda running, now_s: _most(running, lambda r: r.computed_tokens),
    "last preempted": lambda rng: (
        lambda running, now_s: _most(running, lambda r: r.num_preemptions)
    ),
}


def _most(running: list[LiveRequest], key: Callable[[LiveRequest], int]) -> int:
    return max(range(len(running)), key=lambda at: key(running[at]))


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    is_chunked = draw(st.booleans())
    budget = draw(st.sampled_from([8, 64, 3] if is_chunked else [24]))
    version: VllmVersion = draw(st.sampled_from(["0.33", "0.27"]))
    return EngineConfig(
        num_blocks=draw(st.sampled_from([10, 14, 18])),
        block_size=4,
        max_num_seqs=draw(st.sampled_from([8, 3, 1])),
        max_num_batched_tokens=budget,
        max_model_len=draw(st.sampled_from([None, 24])) if is_chunked else 24,
        scheduling=draw(st.sampled_from(["fcfs", "priority"])),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=is_chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 5])) if is_chunked else 0,
        reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.5])),
        async_scheduling=draw(st.booleans()),
        vllm_version=version,
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Requests that wait to be submitted; some share the first tokens of their prompts."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    count = draw(st.integers(1, 16))
    prompt = rng.integers(1, draw(st.sampled_from([6, 12, 40])), count)
    shared = np.minimum(prompt, 9)
    return Workload(
        name="machine",
        request_ids=tuple(f"q{i:02d}" for i in range(count)),
        arrival_s=np.full(count, NEVER_S),
        prompt_tokens=prompt,
        output_tokens=rng.integers(draw(st.sampled_from([CAP // 2, 1])), CAP + 1, count),
        max_tokens=np.full(count, CAP),
        priority=rng.integers(0, 3, count),
        deadline_s=np.full(count, np.nan),
        cohort=np.ones(count, np.int64),
        capped=np.zeros(count, bool),
        prefix_groups=np.stack([np.zeros_like(prompt), shared], axis=1) * draw(st.integers(0, 1)),
    )


class SchedulerMachine(RuleBasedStateMachine):
    is_started = False

    @initialize(config=configs(), workload=workloads(), name=st.sampled_from(sorted(VICTIM_RULES)))
    def start(self, config: EngineConfig, workload: Workload, name: str) -> None:
        self.config, self.workload = config, workload
        self.rule = VICTIM_RULES[name](random.Random(0))
        self.run_ = Run(workload, config, PROFILE, self.choose, checks=True)
        self.scheduler, self.pool = self.run_.scheduler, self.run_.scheduler.pool
        self.num_submitted = 0
        self.chosen: list[LiveRequest] = []
        self.is_started = True
        self.submit(8)

    def choose(self, running: list[LiveRequest], now_s: float) -> int:
        """The victim rule of the run: today's, on record."""
        assert running is self.scheduler.running and now_s == self.run_.clock_s
        assert all(request.evicted_at_s is None for request in running)
        at = self.rule(running, now_s)
        self.chosen.append(running[at])
        return at

    @rule(name=st.sampled_from(sorted(VICTIM_RULES)), seed=st.integers(0, 100))
    def change_the_victim_rule(self, name: str, seed: int) -> None:
        self.rule = VICTIM_RULES[name](random.Random(seed))

    @rule(count=st.integers(1, 6))
    def submit(self, count: int) -> None:
        for request in self.run_.requests[self.num_submitted : self.num_submitted + count]:
            request.arrival_s = self.run_.clock_s
            self.num_submitted += 1
        self.run_.admit_arrivals()

    @rule(at=st.integers(0, 100))
    def end_early(self, at: int) -> None:
        """The model writes EOS with the next token: nobody but the end of the run may notice."""
        running = self.scheduler.running
        if running:
            request = running[at % len(running)]
            request.output_tokens = min(request.output_tokens, request.generated_tokens + 1)

    @rule(count=st.integers(1, 20))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.advance()

    def advance(self) -> None:
        """One turn of the loop of serving_sim.engine.simulate."""
        run = self.run_
        if run.is_idle():
            return
        if self.scheduler.running or self.scheduler.waiting:
            plan = self.plan_a_step()
            run.start(plan)
            self.check_computed(plan)
            if run.may_plan_ahead(plan):
                return
        before_s = run.clock_s
        run.finish_oldest()
        assert run.clock_s >= before_s

    def plan_a_step(self) -> StepPlan:
        scheduler, self.chosen = self.scheduler, []
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        plan = scheduler.begin(self.run_.clock_s)
        scheduler.schedule_running(plan)
        survivors = list(scheduler.running)
        assert plan.preempted == self.chosen
        assert set(plan.preempted) <= set(running)
        assert survivors == [r for r in running if r not in plan.preempted]
        self.check_nobody_is_passed_over(plan)
        scheduler.schedule_waiting(plan)
        admitted = scheduler.running[len(survivors) :]
        assert scheduler.running == survivors + admitted
        self.check_queue(plan, waiting, admitted)
        self.check_plan(plan, admitted)
        self.check_work_conserving(plan)
        return plan

    def check_queue(
        self, plan: StepPlan, waiting: list[LiveRequest], admitted: list[LiveRequest]
    ) -> None:
        """Who waits, in which order: victims at the front (FCFS), or all in order of urgency."""
        assert not (plan.preempted and admitted)
        queue = [*reversed(plan.preempted), *waiting]
        if self.config.scheduling == "priority":
            queue.sort(key=lambda r: (r.priority, r.arrival_s, r.index))
        assert admitted + list(self.scheduler.waiting) == queue

    def check_plan(self, plan: StepPlan, admitted: list[LiveRequest]) -> None:
        """Budget, seats, and what each request was given."""
        config = self.config
        total = sum(plan.scheduled.values())
        assert total + plan.budget_tokens == config.max_num_batched_tokens
        assert plan.budget_tokens >= 0
        assert len(self.scheduler.running) <= config.max_num_seqs
        assert set(plan.scheduled) <= set(self.scheduler.running)
        for request, tokens in plan.scheduled.items():
            assert 1 <= tokens <= request.expected_tokens - request.computed_tokens
            assert len(request.blocks) == config.blocks_for(request.computed_tokens + tokens)
        for request in admitted:
            assert request.computed_tokens % config.block_size == 0  # found blocks are full
            assert request.computed_tokens < request.known_tokens
            if not config.enable_chunked_prefill:
                assert plan.scheduled[request] == request.known_tokens - request.computed_tokens

    def check_nobody_is_passed_over(self, plan: StepPlan) -> None:
        """Budget left: all who still run get tokens, save those about to end. Up to series 0.27 a
        request that evicts itself ends the round."""
        if plan.budget_tokens and (not plan.preempted or self.config.follows("0.33")):
            for request in self.scheduler.running:
                is_ending = request.expected_tokens >= request.final_tokens
                assert is_ending or request in plan.scheduled

    def check_work_conserving(self, plan: StepPlan) -> None:
        """The head stays out only for want of tokens, seats or blocks for all it knows (those that
        others use and it finds are no want), or because somebody was evicted."""
        config, scheduler = self.config, self.scheduler
        if not scheduler.waiting or plan.preempted or not plan.budget_tokens:
            return
        head = scheduler.waiting.peek()
        known = head.known_tokens
        found = self.pool.find(map(head.content, range((known - 1) // config.block_size)))
        wanted = config.blocks_for(known) - len(found) + self.pool.count_free(found)
        spare = config.watermark_blocks if scheduler.running else 0
        has_room = wanted + spare <= self.pool.num_free
        has_tokens = config.enable_chunked_prefill or known <= plan.budget_tokens
        has_seat = len(scheduler.running) < config.max_num_seqs
        assert not (has_room and has_tokens and has_seat)

    def check_computed(self, plan: StepPlan) -> None:
        """Publishing follows computing, block by block."""
        size = self.config.block_size
        for request in plan.scheduled:
            most = min(request.computed_tokens, request.known_tokens) // size
            is_cached = self.config.enable_prefix_caching
            assert request.num_published == (most if is_cached else 0)

    @invariant()
    def every_block_has_its_owner(self) -> None:
        """Free + used = total; two requests share a block only as the prefix that they share."""
        running, size = self.scheduler.running, self.config.block_size
        users = Counter(block for request in running for block in request.blocks)
        assert len(users) + self.pool.num_free == self.config.usable_blocks
        private = [block for r in running for block in r.blocks[r.num_shared :]]
        assert all(users[block] == 1 for block in private)
        for request in running:
            assert len(set(request.blocks)) == len(request.blocks)
            assert len(request.blocks) == self.config.blocks_for(request.computed_tokens)
            assert request.num_published * size <= request.computed_tokens
            assert request.computed_tokens <= request.expected_tokens
            assert (
                request.expected_tokens == request.known_tokens or self.run_.config.async_scheduling
            )

    @invariant()
    def everybody_is_somewhere(self) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        seqs = [request.admission_seq for request in running]
        assert seqs == sorted(set(seqs))
        submitted = self.run_.requests[: self.num_submitted]
        alive = [request for request in submitted if request.end_s is None]
        assert Counter(running) + Counter(waiting) == Counter(alive)
        assert self.run_.num_awaited == len(self.run_.requests) - len(submitted) + len(alive)
        for request in submitted:
            assert request.known_tokens == request.prompt_tokens + request.generated_tokens
            assert request.generated_tokens <= request.output_tokens
        for request in waiting:
            assert not request.blocks and not request.computed_tokens
            assert (request.evicted_at_s is None) == (request.first_scheduled_s is None)

    @invariant()
    def what_is_found_was_computed(self) -> None:
        """A waiting request finds no block of its own that it never filled."""
        size = self.config.block_size
        for request in self.scheduler.waiting:
            for position in range(request.num_shared, request.known_tokens // size):
                if self.pool.find([request.content(position)]):
                    assert (position + 1) * size <= request.peak_computed_tokens

    def teardown(self) -> None:
        """Under a rule that never evicts the oldest, all who were accepted come to an end."""
        if not self.is_started:
            return
        self.rule = youngest
        for _ in range(MAX_DRAIN_STEPS):
            if self.run_.is_idle():
                break
            self.advance()
        assert self.run_.is_idle()
        assert self.pool.num_free == self.config.usable_blocks
        for request in self.run_.requests[: self.num_submitted]:
            is_refused = request.accepted_s is None
            assert request.state in (["rejected"] if is_refused else ["completed", "length_capped"])
            assert request.generated_tokens == (0 if is_refused else request.output_tokens)


SchedulerMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=20, deadline=None, derandomize=True
)
TestScheduler = SchedulerMachine.TestCase
