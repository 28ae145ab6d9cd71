"""vLLM's own scheduler, with victims chosen by a policy and a checkpoint of this project.

    vllm serve MODEL --scheduler-cls integrations.vllm_scheduler.SignalScheduler

``schedule()`` is vLLM's. Its FCFS branch can only evict the tail; its PRIORITY branch evicts
anyone, and takes back what the victim was given in the same step. So the PRIORITY branch is used,
whatever orders the queue: when an allocation for a running request fails, the policy is asked, the
victim is lent the largest priority for as long as vLLM needs to find it, and the queue's own
policy is restored at the end of the call.

How a failure is noticed: vLLM then reads ``self.policy``, and, since 0.33, reads it nowhere else
while it plans. So the first read tells of the first failure, and a step that evicts nobody costs
nothing. From there to the step's end each allocation is watched (up to 0.27, where the admission
phase reads it too, in every step).
"""

from __future__ import annotations

import math
import time
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from integrations.chooser import Chooser
from integrations.sampled import Asking, tell_drawn
from integrations.settings import read_settings
from integrations.versions import check_version, policy_reads_tell
from integrations.vllm_log import SchedulerLog

DEADLINE_KEY = "deadline_s"  # in SamplingParams.extra_args: seconds after arrival
_FIRST = math.inf  # the priority lent to a victim: nobody else's is as large


def asked_logprobs(request: Any) -> int | None:
    """Return how many log-probabilities a token ``request`` asks for (-1: all); None for none, or
    for those of tokens that it names."""
    params = request.sampling_params
    if params is None or getattr(params, "logprob_token_ids", None):
        return None
    count: int | None = params.logprobs
    return count


class _SignalVictims(Scheduler):  # type: ignore[misc]
    """What :class:`SignalScheduler` adds to either of vLLM's schedulers. ``now_s`` is the clock
    that vLLM stamps arrivals with."""

    now_s = staticmethod(time.time)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version(vllm.__version__)
        super().__init__(*args, **kwargs)
        settings = read_settings(self.vllm_config.additional_config)
        model = self.vllm_config.model_config.model or ""
        self.chooser = Chooser(settings, str(model), self.now_s)
        self.live_log: SchedulerLog | None = None
        if settings.decisions:
            is_async = isinstance(self, AsyncScheduler)
            self.live_log = SchedulerLog(self, settings, vllm.__version__, is_async=is_async)
        self._lent: tuple[Any, int] | None = None  # the victim, and the priority it gets back
        self._managers = self.kv_cache_manager.coordinator.single_type_managers
        self._pool = self.kv_cache_manager.block_pool
        mode = self.vllm_config.model_config.logprobs_mode
        self._lists_logprobs = mode in (None, "raw_logprobs")
        self._asking: dict[str, Asking] = {}  # requests whose log-probabilities are read
        self._reads_tell = policy_reads_tell(vllm.__version__)
        if not self._reads_tell:
            self._watch_allocations()

    # --- noticing a shortage

    _plans = False  # inside schedule()
    _is_short = False  # an allocation failed in this step

    @property
    def policy(self) -> Any:
        """What orders the queue; PRIORITY for the rest of a step in which blocks ran out."""
        if self._plans and self._reads_tell and not self._is_short:
            self._watch_allocations()
            self._lend()
        return SchedulingPolicy.PRIORITY if self._is_short else self._queue_policy

    @policy.setter
    def policy(self, value: Any) -> None:
        self._queue_policy = value

    def _watch_allocations(self) -> None:
        """Ask for a victim whenever a running request cannot have its blocks."""
        allocate, running_status = self.kv_cache_manager.allocate_slots, RequestStatus.RUNNING

        def watched(
            request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **admission: Any
        ) -> Any:
            # one call a running request: no *args, which would cost more than the rest
            if admission:
                return allocate(
                    request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **admission
                )
            blocks = allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens)
            if blocks is None and request.status == running_status:
                self._lend()
            return blocks

        self.kv_cache_manager.allocate_slots = watched

    def _lend(self) -> None:
        """Make the policy's victim the one that vLLM's PRIORITY branch finds."""
        self._give_back()
        self._is_short = True
        victim = self.running[self.chooser.choose(self.running, self._count_blocks)]
        self._lent = (victim, victim.priority)
        victim.priority = _FIRST

    def _give_back(self) -> None:
        if self._lent is not None:
            victim, priority = self._lent
            victim.priority, self._lent = priority, None

    def _count_blocks(self, request_id: str) -> int:
        return sum(len(m.req_to_blocks.get(request_id, ())) for m in self._managers)

    # --- what vLLM calls

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step; see vLLM."""
        self.chooser.prepare(self.running, self._pool.get_num_free_blocks())
        self._plans = True
        try:
            planned = super().schedule(*args, **kwargs)
        finally:
            self._give_back()
            if self._is_short and self._reads_tell:
                # not set to what it was: found on the instance, it would slow down every step
                del self.kv_cache_manager.allocate_slots
            self._plans = self._is_short = False
        self.chooser.planned(planned.num_scheduled_tokens, self.requests)
        if self.live_log is not None:
            self.live_log.step(planned)
        return planned

    def update_from_output(self, planned: Any, output: Any) -> Any:
        """Take a step's tokens; see vLLM. What they were drawn from goes to the predictor."""
        if output.logprobs is not None and self._asking:
            answers = self._update_and_tell(planned, output)
        else:
            answers = super().update_from_output(planned, output)
        if self.live_log is not None:
            self.live_log.returned(planned)
        return answers

    def _update_and_tell(self, planned: Any, output: Any) -> Any:
        asking = [self._asking.get(name) for name in planned.num_scheduled_tokens]
        before = [(one, one.request.num_output_tokens) for one in asking if one is not None]
        answers = super().update_from_output(planned, output)
        tell_drawn(before, output.req_id_to_index, output.logprobs)
        return answers

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._give_back()  # the queue it goes to may order by priority
        self.chooser.preempted(request, request.num_computed_tokens)
        if self.live_log is not None:
            self.live_log.preempted(request)
        return super()._preempt_request(request, *args, **kwargs)

    def add_request(self, request: Any) -> None:
        """Queue a request; see vLLM."""
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        relative_s = extra.get(DEADLINE_KEY)
        has_deadline = isinstance(relative_s, int | float)
        tracked = self.chooser.arrived(
            request, request.arrival_time + relative_s if has_deadline else math.nan
        )
        if self.chooser.reads_sampling and self.chooser.estimates is not None:
            count = asked_logprobs(request) if self._lists_logprobs else None
            if count is None:
                self.chooser.unsampled()
            else:
                progress = self.chooser.estimates.visible(tracked)
                self._asking[request.request_id] = Asking(request, count, progress)
        if self.live_log is not None:
            self.live_log.arrived(request)
        super().add_request(request)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.chooser.ended(request.request_id)
        self._asking.pop(request.request_id, None)
        if self.live_log is not None:
            self.live_log.ended(request, str(request.get_finished_reason()))
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        """Write the last counters; see vLLM."""
        self.chooser.report()
        if self.live_log is not None:
            self.live_log.close()
        super().shutdown()


class SignalScheduler(_SignalVictims, AsyncScheduler):  # type: ignore[misc]
    """For ``--scheduler-cls``: asynchronous scheduling stays on, as is vLLM's default."""


class SyncSignalScheduler(_SignalVictims):
    """The same for an engine started with ``--no-async-scheduling``."""
