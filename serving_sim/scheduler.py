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
from serving_sim.requests import LiveRequest, PriorityQueue, WaitingQueue

ChooseVictim = Callable[[list[LiveRequest], float], int]
"""(running requests in admission order, now in seconds) -> position of the victim."""


@dataclass(slots=True)
class StepPlan:
    """One step: tokens to compute by request, in scheduling order, and the victims it took."""

    now_s: float
    budget_tokens: int
    scheduled: dict[LiveRequest, int] = field(default_factory=dict)
    preempted: list[LiveRequest] = field(default_factory=list)


class Scheduler:
    """Running list, waiting queue and block pool, and the two halves of a planning round."""

    def __init__(self, config: EngineConfig, choose_victim: ChooseVictim, *, checks: bool) -> None:
        self.config = config
        self.running: list[LiveRequest] = []
        self.waiting = PriorityQueue() if config.scheduling == "priority" else WaitingQueue()
        self.pool = BlockPool(
            config.usable_blocks, caching=config.enable_prefix_caching, checks=checks
        )
        self.num_preemptions = 0
        self._choose_victim = choose_victim
        self._num_admissions = 0

    def begin(self, now_s: float) -> StepPlan:
        """Return the empty plan of a step that starts at ``now_s``."""
        return StepPlan(now_s, self.config.max_num_batched_tokens)

    def schedule_running(self, plan: StepPlan) -> None:
        """Give each running request its next tokens, evicting until their blocks are free.

        A victim may stand before the cursor (it was scheduled already: its tokens return to the
        budget), behind it, or be the very request that asked; the loop then goes on with the next.
        """
        running, pool, block_size = self.running, self.pool, self.config.block_size
        chunk_limit = self._chunk_limit()
        cursor = 0
        while cursor < len(running) and plan.budget_tokens > 0:
            request = running[cursor]
            computed = request.computed_tokens
            tokens = min(request.known_tokens - computed, chunk_limit, plan.budget_tokens)
            missing = -(-(computed + tokens) // block_size) - len(request.blocks)
            while missing > pool.num_free:
                at = self._choose_victim(running, plan.now_s)
                victim = self._preempt(at, plan)
                cursor -= at < cursor
                if victim is request:
                    break
            else:
                if missing > 0:
                    request.blocks += pool.take(request.index, missing)
                plan.scheduled[request] = tokens
                plan.budget_tokens -= tokens
                cursor += 1

    def schedule_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests in queue order while budget, seats and blocks last."""
        if plan.preempted:
            return
        config, waiting = self.config, self.waiting
        chunk_limit = self._chunk_limit()
        while waiting and plan.budget_tokens > 0 and len(self.running) < config.max_num_seqs:
            request = waiting.peek()
            known = request.known_tokens
            # at least one token is computed again, so that there is something to sample from
            found = self.pool.find(request.index, (known - 1) // config.block_size)
            hit_tokens = len(found) * config.block_size
            tokens = min(known - hit_tokens, chunk_limit)
            if not config.enable_chunked_prefill and tokens > plan.budget_tokens:
                break
            tokens = min(tokens, plan.budget_tokens)
            must_fit = known if config.reserve_full_isl else hit_tokens + tokens
            spare = config.watermark_blocks if self.running else 0
            if config.blocks_for(must_fit) + spare > self.pool.num_free:
                break
            self._admit(waiting.pop(), found, tokens, plan)

    def retire(self, request: LiveRequest) -> None:
        """Take a finished request off the running list and free its blocks."""
        self.running.remove(request)
        self._release(request)

    def _chunk_limit(self) -> int:
        """Tokens one request may compute in this step (long-prefill threshold, 0.33.0 rule)."""
        config = self.config
        num_requests = len(self.running) + len(self.waiting)
        if not config.long_prefill_token_threshold or num_requests <= 1:
            return config.max_num_batched_tokens
        return config.long_prefill_token_threshold

    def _admit(self, request: LiveRequest, found: list[int], tokens: int, plan: StepPlan) -> None:
        block_size = self.config.block_size
        hit_tokens = len(found) * block_size
        self.pool.reuse(request.index, found)
        missing = -(-(hit_tokens + tokens) // block_size) - len(found)
        request.blocks = found + self.pool.take(request.index, missing)
        request.computed_tokens = hit_tokens
        request.cache_hit_tokens += hit_tokens
        request.admission_seq = self._num_admissions
        self._num_admissions += 1
        if request.first_scheduled_s is None:
            request.first_scheduled_s = plan.now_s
        if request.evicted_at_s is not None:
            request.preempted_s += plan.now_s - request.evicted_at_s
            request.evicted_at_s = None
        self.running.append(request)
        plan.scheduled[request] = tokens
        plan.budget_tokens -= tokens

    def _preempt(self, at: int, plan: StepPlan) -> LiveRequest:
        """Evict the running request at ``at``: it keeps its tokens and loses its KV."""
        victim = self.running.pop(at)
        withdrawn = plan.scheduled.pop(victim, 0)
        plan.budget_tokens += withdrawn
        victim.peak_computed_tokens = max(victim.peak_computed_tokens, victim.computed_tokens)
        self._release(victim, withdrawn if self.config.trust_withdrawn_blocks else 0)
        victim.computed_tokens = 0
        victim.num_preemptions += 1
        victim.draw = None
        victim.evicted_at_s = plan.now_s
        self.waiting.push_victim(victim)
        plan.preempted.append(victim)
        self.num_preemptions += 1
        return victim

    def _release(self, request: LiveRequest, trusted_tokens: int = 0) -> None:
        num_full = (request.computed_tokens + trusted_tokens) // self.config.block_size
        self.pool.release(request.index, request.blocks, num_full)
        request.blocks = []
