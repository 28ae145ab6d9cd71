"""The scheduler of vLLM V1 (0.33.0): which requests compute how many tokens in the next step.

Running requests come first, in admission order; waiting ones are admitted only in a step that
preempted nobody, and the first that does not fit ends the scan. Eviction is mechanism here;
*which* request goes is the business of ``choose_victim`` (serving_sim/victims.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from serving_sim.blocks import BlockPool
from serving_sim.config import EngineConfig
from serving_sim.offload import Load, Tier
from serving_sim.requests import LiveRequest, PriorityQueue, WaitingQueue

NO_LOAD = Load(0, 0.0)
ChooseVictim = Callable[[list[LiveRequest], float], int]
"""(running requests in admission order, now in seconds) -> position of the victim."""


@dataclass(slots=True)
class StepPlan:
    """One step: tokens to compute by request, in scheduling order, and the victims it took.

    ``sampling`` lists the requests that get a token when it returns, each with its number of
    preemptions when the step began: a token for a request that was preempted since is *stale*.
    ``step_s`` is how long the step takes, ``load_s`` of it to load KV from a slower tier.
    ``failed`` lists the requests that the scheduler gave up, each with the reason (SGLang mode
    only).
    """

    now_s: float
    budget_tokens: int
    scheduled: dict[LiveRequest, int] = field(default_factory=dict)
    preempted: list[LiveRequest] = field(default_factory=list)
    sampling: list[tuple[LiveRequest, int]] = field(default_factory=list)
    failed: list[tuple[LiveRequest, str]] = field(default_factory=list)
    step_s: float = 0.0
    load_s: float = 0.0


class Scheduler:
    """Running list, waiting queue and block pool, and the two halves of a planning round."""

    def __init__(self, config: EngineConfig, choose_victim: ChooseVictim, *, checks: bool) -> None:
        self.config = config
        self.running: list[LiveRequest] = []
        self.waiting = PriorityQueue() if config.scheduling == "priority" else WaitingQueue()
        self.pool = BlockPool(
            config.usable_blocks, blank_first=config.follows("0.27"), checks=checks
        )
        self.tier: Tier | None = None
        self.num_preemptions = 0
        self._checks = checks
        self._evicted_between_steps: list[LiveRequest] = []
        self._choose_victim = choose_victim
        self._num_admissions = 0
        self._counts_all_passed = config.follows("0.33")
        self._self_victim_ends_step = not config.follows("0.33")

    def refusal(self, request: LiveRequest) -> str | None:
        """Say why an arriving ``request`` is not queued; None if it is.

        It is held against the configured pool, so that a pool that shrank refuses nobody: who is
        accepted must not depend on the policy.
        """
        return None if self.can_hold(request, self.config.usable_blocks) else "infeasible_kv"

    def can_hold(self, request: LiveRequest, num_blocks: int) -> bool:
        """Say whether a pool of ``num_blocks`` can hold all that ``request`` may write."""
        return self.config.blocks_for(request.final_tokens) <= num_blocks

    def rest(self) -> None:
        """Take note that nothing runs or waits: vLLM's scheduler learns nothing from that."""

    def begin(self, now_s: float) -> StepPlan:
        """Return the empty plan of a step that starts at ``now_s``."""
        return self._new_plan(now_s, self.config.max_num_batched_tokens)

    def schedule_running(self, plan: StepPlan) -> None:
        """Give each running request its next tokens, evicting until their blocks are free.

        A victim may stand before the cursor (it was scheduled already: its tokens return to the
        budget), behind it, or be the very request that asked; the loop then goes on with the next
        (up to vLLM 0.27, it ends).
        """
        running, pool, block_size = self.running, self.pool, self.config.block_size
        publishes = self.config.enable_prefix_caching
        chunk_limit = self._chunk_limit()
        cursor = 0
        while cursor < len(running) and plan.budget_tokens > 0:
            request = running[cursor]
            if request.expected_tokens >= request.final_tokens or request.load_ends_s > plan.now_s:
                cursor += 1  # its last token, or its KV, is on the way
                continue
            computed = request.computed_tokens
            tokens = min(request.expected_tokens - computed, chunk_limit, plan.budget_tokens)
            missing = -(-(computed + tokens) // block_size) - len(request.blocks)
            while missing > pool.num_free:
                at = self._choose_victim(running, plan.now_s)
                moves_cursor = at < cursor and self._counts_as_passed(running[at], plan)
                victim = self._preempt(at, plan)
                cursor -= moves_cursor
                if victim is request:
                    break
            else:
                if missing > 0:
                    request.blocks += pool.take(request.index, missing)
                plan.scheduled[request] = tokens
                plan.budget_tokens -= tokens
                if publishes and computed + tokens >= (request.num_published + 1) * block_size:
                    self.publish(request, min(computed + tokens, request.known_tokens))
                cursor += 1
                continue
            if self._self_victim_ends_step:
                break

    def _counts_as_passed(self, victim: LiveRequest, plan: StepPlan) -> bool:
        """Say whether the cursor moves back for a victim before it.

        Up to vLLM 0.27 it stayed when the victim had been passed over (its last token was on the
        way), so that the request behind the victim was skipped in that step.
        """
        return self._counts_all_passed or victim in plan.scheduled

    def schedule_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests in queue order while budget, seats and blocks last."""
        if plan.preempted:
            return
        config, waiting, pool = self.config, self.waiting, self.pool
        chunk_limit = self._chunk_limit()
        while waiting and plan.budget_tokens > 0 and len(self.running) < config.max_num_seqs:
            request = waiting.peek()
            known = request.known_tokens
            # at least one token is computed again, so that there is something to sample from
            found = pool.find(map(request.content, range((known - 1) // config.block_size)))
            hit_tokens = len(found) * config.block_size
            load = self._offer(request, hit_tokens, plan.now_s)
            ready_tokens = hit_tokens + load.tokens
            tokens = min(known - ready_tokens, chunk_limit)
            if not config.enable_chunked_prefill and tokens > plan.budget_tokens:
                break
            tokens = min(tokens, plan.budget_tokens)
            must_fit = known if config.reserve_full_isl else ready_tokens + tokens
            missing = config.blocks_for(must_fit) - len(found) + pool.count_free(found)
            spare = config.watermark_blocks if self.running else 0
            if missing + spare > pool.num_free:
                break
            self._admit(waiting.pop(), found, tokens, plan, load)
            if request in plan.scheduled:
                self.publish(request, ready_tokens + tokens)

    def publish(self, request: LiveRequest, num_tokens: int) -> None:
        """Let the full blocks of the first ``num_tokens`` be found, if caching is on."""
        if not self.config.enable_prefix_caching:
            return
        for position in range(request.num_published, num_tokens // self.config.block_size):
            self.pool.publish(request.blocks[position], request.content(position))
            request.num_published += 1

    def retire(self, request: LiveRequest) -> None:
        """Let a finished request go: it runs, or it was preempted before its last token came."""
        (self.running if request.evicted_at_s is None else self.waiting).remove(request)
        self._release(request)
        if self.tier is not None:
            self.tier.drop(request)

    def drop(self, request: LiveRequest) -> None:
        """Let a request go that ends before its time, whether it runs or waits."""
        (self.running if request in self.running else self.waiting).remove(request)
        self._release(request)
        if self.tier is not None:
            self.tier.drop(request)

    def resize(self, num_blocks: int, now_s: float) -> None:
        """Change the size of the pool between two steps: free blocks go first, then victims'."""
        between = StepPlan(now_s, 0)
        while self.pool.num_blocks - num_blocks > self.pool.num_free:
            self._preempt(self._choose_victim(self.running, now_s), between)
        self.pool.resize(num_blocks)
        self._evicted_between_steps += between.preempted

    def lose_kv(self, now_s: float) -> list[LiveRequest]:
        """Lose all KV, as when the worker dies; return who ran. They wait again, oldest first."""
        lost, self.running = self.running, []
        self.pool = BlockPool(
            self.pool.num_blocks, blank_first=self.config.follows("0.27"), checks=self._checks
        )
        for request in reversed(lost):
            request.blocks, request.num_published = [], 0
            self._requeue(request, now_s)
        if self.tier is not None:
            self.tier.lose(now_s)
        return lost

    def diagnosis(self, now_s: float, idle_steps: int) -> str:
        """Return what a user should know when ``idle_steps`` passed without an output token."""
        config, pool = self.config, self.pool
        held = ", ".join(
            f"{r.request_id} ({r.computed_tokens}/{r.known_tokens} tokens, {len(r.blocks)} blocks, "
            f"{r.num_preemptions} preemptions)"
            for r in self.running[:5]
        )
        head = next(iter(self.waiting), None)
        wanted = (
            f"{head.request_id} needs {config.blocks_for(head.known_tokens)} blocks"
            if head is not None
            else "nobody"
        )
        return (
            f"no output token in {idle_steps} steps (bound max_idle_steps = "
            f"{config.max_idle_steps}) at {now_s:.6f} s: {len(self.running)} "
            f"running [{held}], {len(self.waiting)} waiting, first {wanted}; {pool.num_free} "
            f"of {pool.num_blocks} blocks free; {self.num_preemptions} preemptions so far. "
            "The victim rule undoes its own work, or prompts are long for the token budget: try "
            "another policy, more num_blocks or max_num_batched_tokens, or a larger max_idle_steps"
        )

    def _chunk_limit(self) -> int:
        """Tokens one request may compute in this step (long-prefill threshold)."""
        config = self.config
        threshold = config.long_prefill_token_threshold
        num_requests = len(self.running) + len(self.waiting)
        if num_requests <= 1:
            return config.lone_chunk_tokens
        if not threshold:
            return config.max_num_batched_tokens
        if config.long_prefill_token_threshold_adaptive:
            return max(threshold, config.max_num_batched_tokens // num_requests)
        return threshold

    def _new_plan(self, now_s: float, budget_tokens: int) -> StepPlan:
        """Return an empty plan; who was evicted since the last one counts as preempted in it."""
        evicted, self._evicted_between_steps = self._evicted_between_steps, []
        return StepPlan(now_s, budget_tokens, preempted=evicted)

    def _offer(self, request: LiveRequest, hit_tokens: int, now_s: float) -> Load:
        """Return what the tier can add to the ``hit_tokens`` that were found."""
        if self.tier is None:
            return NO_LOAD
        return self.tier.offer(request, hit_tokens, now_s)

    def _start_load(self, request: LiveRequest, load: Load, plan: StepPlan) -> None:
        """Load KV: the request waits for it while others go on, or the whole step does."""
        if self.tier is None or not load.tokens:
            return
        self.tier.load(request, load, plan.now_s)
        if self.tier.overlaps:
            request.load_ends_s = load.ends_s
        else:
            plan.load_s = max(plan.load_s, load.ends_s - plan.now_s)

    def _admit(
        self,
        request: LiveRequest,
        found: list[int],
        tokens: int,
        plan: StepPlan,
        load: Load = NO_LOAD,
    ) -> None:
        """Let ``request`` run: its blocks are taken, and it computes ``tokens`` in this step, or
        none while its KV is loaded."""
        hit_tokens = len(found) * self.config.block_size
        self._start_load(request, load, plan)
        if request.load_ends_s > plan.now_s:
            tokens = 0
        self.pool.share(request.index, found)
        ready_tokens = hit_tokens + load.tokens
        missing = self.config.blocks_for(ready_tokens + tokens) - len(found)
        request.blocks = found + self.pool.take(request.index, missing)
        request.num_published = len(found)
        request.computed_tokens = ready_tokens
        request.cache_hit_tokens += hit_tokens
        request.admission_seq = self._num_admissions
        self._num_admissions += 1
        if request.first_scheduled_s is None:
            request.first_scheduled_s = plan.now_s
        request.end_eviction(plan.now_s)
        self.running.append(request)
        if tokens:
            plan.scheduled[request] = tokens
            plan.budget_tokens -= tokens

    def _preempt(self, at: int, plan: StepPlan) -> LiveRequest:
        """Evict the running request at ``at``: it keeps its tokens and loses its KV."""
        victim = self.running.pop(at)
        plan.budget_tokens += plan.scheduled.pop(victim, 0)
        if not self.config.trust_withdrawn_blocks:
            self._unpublish_withdrawn(victim)
        self._release(victim)
        if self.tier is not None:
            self.tier.store(victim, plan.now_s)
        victim.num_preemptions += 1
        victim.draw = None
        self._requeue(victim, plan.now_s)
        plan.preempted.append(victim)
        self.num_preemptions += 1
        return victim

    def _requeue(self, request: LiveRequest, now_s: float) -> None:
        """Let a request that lost its KV wait again."""
        request.peak_computed_tokens = max(request.peak_computed_tokens, request.computed_tokens)
        request.computed_tokens = 0
        request.expected_tokens = request.known_tokens
        request.load_ends_s = 0.0
        request.evicted_at_s = now_s
        self.waiting.push_victim(request)

    def _unpublish_withdrawn(self, victim: LiveRequest) -> None:
        """Take back what the step now planned would have filled."""
        num_filled = victim.computed_tokens // self.config.block_size
        for block in victim.blocks[num_filled : victim.num_published]:
            self.pool.unpublish(block)

    def _release(self, request: LiveRequest) -> None:
        self.pool.release(request.index, request.blocks)
        request.blocks, request.num_published = [], 0
