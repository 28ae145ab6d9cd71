"""SGLang's scheduler: prefill ahead of decode, admission by estimate, retraction.

A waiting request is admitted when the running ones, each expected to write a share of what it may
still write (the *new-token ratio*), would leave room for it. When that was too hopeful and a decode
step does not fit, requests are retracted to the back of the queue and the ratio is raised.
docs/sglang.md names the rules, their source, and what is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from serving_sim.config import EngineConfig, SglangSettings
from serving_sim.requests import BackQueue, LiveRequest
from serving_sim.scheduler import ChooseVictim, Scheduler, StepPlan


def scheduler_of(config: EngineConfig, choose_victim: ChooseVictim, *, checks: bool) -> Scheduler:
    """Return the scheduler that ``config`` asks for: vLLM's, or SGLang's."""
    if config.sglang is None:
        return Scheduler(config, choose_victim, checks=checks)
    return SglangScheduler(config, config.sglang, choose_victim, checks=checks)


class NewTokenRatio:
    """The share of its remaining ``max_new_tokens`` that a running request is expected to write."""

    def __init__(self, settings: SglangSettings) -> None:
        self._initial = settings.initial_ratio
        self._least = self._initial * settings.min_new_token_ratio_factor
        self._decay = (self._initial - self._least) / settings.new_token_ratio_decay_steps
        self._slack_tokens = settings.retract_decode_steps
        self.value = self._initial

    def reset(self) -> None:
        """Start anew: the engine is idle."""
        self.value = self._initial

    def decay(self) -> None:
        """Grow more hopeful: a decode step fitted."""
        self.value = max(self.value - self._decay, self._least)

    def learn(self, kept: Iterable[LiveRequest]) -> None:
        """Take the share that the requests ``kept`` by a retraction have written, plus slack."""
        kept = list(kept)
        written = sum(request.generated_tokens + self._slack_tokens for request in kept)
        allowed = sum(max_new_tokens(request) for request in kept)
        self.value = min(1.0, written / (allowed + 1))


class SglangScheduler(Scheduler):
    """Plans either a prefill batch or a decode step; see :class:`Scheduler` for the surface."""

    def __init__(
        self,
        config: EngineConfig,
        settings: SglangSettings,
        choose_victim: ChooseVictim,
        *,
        checks: bool,
    ) -> None:
        super().__init__(config, choose_victim, checks=checks)
        self.waiting = BackQueue()
        self.ratio = NewTokenRatio(settings)
        self._settings = settings
        self._chunked: LiveRequest | None = None  # its prompt is computed in part
        self._last_batch: list[LiveRequest] = []  # whose prefill was the last step
        self._is_full = False  # somebody found no room beside those that run, and nobody left since

    def refusal(self, request: LiveRequest) -> str | None:
        """Say why an arriving ``request`` is not queued; None if it is."""
        if not self.can_hold(request, self.config.usable_blocks):
            return "infeasible_kv"
        limit = self._settings.max_queued_requests
        return "queue_full" if limit is not None and len(self.waiting) >= limit else None

    def can_hold(self, request: LiveRequest, num_blocks: int) -> bool:
        """Say whether an empty pool of ``num_blocks`` would admit ``request``."""
        return self._wanted_tokens(request, request.known_tokens) < self._tokens(num_blocks)

    def rest(self) -> None:
        """Take note that nothing runs or waits."""
        self.ratio.reset()

    def begin(self, now_s: float) -> StepPlan:
        """Return the empty plan of a step that starts at ``now_s``; its budget is for prefill.

        What a prefill computed can be found now that it returned; decoded tokens can when their
        request ends.
        """
        for request in self._last_batch:
            if request.end_s is None:
                self.publish(request, request.computed_tokens)
        budget_tokens = self._settings.max_prefill_tokens
        if self.config.enable_chunked_prefill:
            budget_tokens = min(budget_tokens, self.config.max_num_batched_tokens)
        return self._new_plan(now_s, budget_tokens)

    def schedule_running(self, plan: StepPlan) -> None:
        """Plan a prefill batch if one can be formed, else a decode step of all that run."""
        self._prefill(plan)
        self._last_batch = list(plan.scheduled)
        if not plan.scheduled and self.running:
            self._decode(plan)

    def schedule_waiting(self, plan: StepPlan) -> None:
        """Do nothing: who waits was looked at first."""

    def retire(self, request: LiveRequest) -> None:
        """Let a finished request go; all of its KV can be found from now on."""
        self.publish(request, request.computed_tokens)
        super().retire(request)
        self._is_full = False

    def drop(self, request: LiveRequest) -> None:
        """Let a request go that ends before its time, whether it runs or waits."""
        super().drop(request)
        self._forget_gone()

    def resize(self, num_blocks: int, now_s: float) -> None:
        """Change the size of the pool between two steps."""
        super().resize(num_blocks, now_s)
        self._forget_gone()

    def lose_kv(self, now_s: float) -> list[LiveRequest]:
        """Lose all KV, and what the lost worker had learned."""
        lost = super().lose_kv(now_s)
        self._forget_gone()
        self.ratio.reset()
        return lost

    def _forget_gone(self) -> None:
        """Take note that somebody left between two steps."""
        if self._chunked not in self.running:
            self._chunked = None
        self._is_full = False

    def _prefill(self, plan: StepPlan) -> None:
        """Go on with a cut prompt, then admit waiting requests while their estimate fits."""
        if self._chunked is None and not (self.waiting and self._has_seat()):
            return
        reserved, was_empty = self._reserved_tokens(), not self.running
        if self._chunked is not None:
            reserved += self._go_on(self._chunked, plan)
        waiting, pool, chunks = self.waiting, self.pool, self.config.enable_chunked_prefill
        while waiting and plan.budget_tokens > 0 and self._has_seat():
            request = waiting.peek()
            found = self._find_prefix(request)
            new_tokens = request.known_tokens - self._tokens(len(found))
            free_tokens = self._tokens(pool.num_free - pool.count_free(found))
            if self._wanted_tokens(request, new_tokens) < free_tokens - reserved:
                if not chunks and plan.scheduled and new_tokens >= plan.budget_tokens:
                    break
                reserved += self._let_in(waiting.pop(), found, new_tokens, plan)
            elif self.running:
                self._is_full = not was_empty  # SGLang's first batch loses the mark
                break
            else:  # all blocks are free: it would wait for ever, and so would all behind it
                plan.failed.append((waiting.pop(), "infeasible_kv"))

    def _has_seat(self) -> bool:
        return not self._is_full and len(self.running) < self.config.max_num_seqs

    def _find_prefix(self, request: LiveRequest) -> list[int]:
        """Return the blocks that hold a prefix of what ``request`` knows. At least one token is
        computed again, so that there is something to sample from."""
        num_full = (request.known_tokens - 1) // self.config.block_size
        return self.pool.find(map(request.content, range(num_full)))

    def _go_on(self, request: LiveRequest, plan: StepPlan) -> int:
        """Compute more of a cut prompt; return the tokens to reserve for what it will write."""
        new_tokens = request.known_tokens - request.computed_tokens
        tokens = min(new_tokens, plan.budget_tokens)
        missing = self.config.blocks_for(request.computed_tokens + tokens) - len(request.blocks)
        request.blocks += self.pool.take(request.index, missing)
        self._schedule(request, tokens, plan)
        self._chunked = request if tokens < new_tokens else None
        return self._new_reservation(request)

    def _let_in(
        self, request: LiveRequest, found: list[int], new_tokens: int, plan: StepPlan
    ) -> int:
        """Admit a request; return the tokens to reserve for what it will write."""
        tokens = new_tokens
        if self.config.enable_chunked_prefill:
            tokens = min(new_tokens, plan.budget_tokens)
        self._admit(request, found, tokens, plan)
        self._chunked = request if tokens < new_tokens else None
        return self._new_reservation(request)

    def _decode(self, plan: StepPlan) -> None:
        """Let every running request write a token, once the blocks for that are free."""
        if self._missing_blocks() > self.pool.num_free:
            self._retract(plan)
        else:
            self.ratio.decay()
        for request in self.running:
            missing = self.config.blocks_for(request.known_tokens) - len(request.blocks)
            request.blocks += self.pool.take(request.index, missing)
            self._schedule(request, 1, plan)

    def _retract(self, plan: StepPlan) -> None:
        """Evict until the next decode step fits; give up the last request if it never does."""
        limit = self._settings.max_queued_requests
        self._is_full = False
        while self._missing_blocks() > self.pool.num_free:
            if len(self.running) == 1:
                request = self.running.pop()
                self._release(request)
                plan.failed.append((request, "out_of_kv"))
                return
            victim = self._preempt(self._choose_victim(self.running, plan.now_s), plan)
            slack_tokens = len(self.running) * self._settings.retract_decode_steps
            self.pool.forget_free(self.config.blocks_for(slack_tokens))
            if limit is not None and len(self.waiting) > limit:
                self.waiting.remove(victim)
                plan.failed.append((victim, "queue_full"))
        self.ratio.learn(self.running)

    def _missing_blocks(self) -> int:
        """Blocks that the next decode step takes."""
        blocks_for = self.config.blocks_for
        return sum(blocks_for(r.known_tokens) - len(r.blocks) for r in self.running)

    def _wanted_tokens(self, request: LiveRequest, new_tokens: int) -> int:
        """Tokens that must be free for ``request``: to compute, to write, and a page."""
        return new_tokens + self._clipped(tokens_left(request)) + self.config.block_size

    def _reserved_tokens(self) -> float:
        """Tokens that running requests are expected to write still."""
        left = sum(self._clipped(tokens_left(r)) for r in self.running if r is not self._chunked)
        return left * self.ratio.value

    def _new_reservation(self, request: LiveRequest) -> int:
        """Tokens reserved within the batch that admits ``request``: the ratio comes later."""
        if request is self._chunked:
            return 0  # nobody is admitted after a cut prompt: the budget is used up
        return self._clipped(max_new_tokens(request)) + self.config.block_size

    def _clipped(self, tokens: int) -> int:
        return min(tokens, self._settings.clip_max_new_tokens_estimation)

    def _tokens(self, num_blocks: int) -> int:
        return num_blocks * self.config.block_size

    def _schedule(self, request: LiveRequest, tokens: int, plan: StepPlan) -> None:
        """Plan ``tokens`` of a running request."""
        plan.scheduled[request] = tokens
        plan.budget_tokens -= tokens


def max_new_tokens(request: LiveRequest) -> int:
    """Return how many tokens ``request`` may write, max_model_len considered."""
    return request.final_tokens - request.prompt_tokens


def tokens_left(request: LiveRequest) -> int:
    """Return how many tokens ``request`` may still write."""
    return request.final_tokens - request.known_tokens
