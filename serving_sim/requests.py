"""LiveRequest: one request while the engine holds it, and the record it leaves behind."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from contracts.records import COHORTS, RequestRecord, State
from serving_sim.blocks import Content
from serving_sim.config import EngineConfig
from traces.workload import Workload


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Mutable state. ``output_tokens`` is the truth: only the end of a run may read it.

    ``known_tokens`` = prompt + generated. ``expected_tokens`` adds the token of a step that has
    not returned yet (one at most); ``final_tokens`` is where the request ends at the latest.
    ``computed_tokens`` have KV, or will have once the planned steps have run;
    ``peak_computed_tokens`` had it before a preemption took it away. Of ``blocks`` the first
    ``num_published`` can be found; the first ``num_shared`` hold the prefix of ``prefix_owner``.
    KV that is being loaded from a slower tier is complete at ``load_ends_s``.
    """

    index: int
    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int
    deadline_s: float
    is_awaited: bool
    final_tokens: int
    prefix_owner: int
    num_shared: int
    known_tokens: int
    expected_tokens: int
    generated_tokens: int = 0
    computed_tokens: int = 0
    peak_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    admission_seq: int = -1
    num_preemptions: int = 0
    draw: float | None = None
    recomputed_tokens: int = 0
    cache_hit_tokens: int = 0
    loaded_tokens: int = 0
    load_ends_s: float = 0.0
    accepted_s: float | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    evicted_at_s: float | None = None
    preempted_s: float = 0.0
    end_s: float | None = None
    state: State = "unfinished"
    end_reason: str = "not-arrived"

    def content(self, position: int) -> Content:
        """Return what the block at ``position`` holds once it is full."""
        return (self.prefix_owner if position < self.num_shared else self.index, position)

    def end_eviction(self, now_s: float) -> None:
        """Count the time since the last preemption, if it still lasts."""
        if self.evicted_at_s is not None:
            self.preempted_s += now_s - self.evicted_at_s
            self.evicted_at_s = None


def live_requests(
    workload: Workload, awaited: list[bool], output_tokens: list[int], config: EngineConfig
) -> list[LiveRequest]:
    """Return the requests of ``workload`` before anything happened to them."""
    prompts = workload.prompt_tokens.tolist()
    arrivals = workload.arrival_s.tolist()
    deadlines = (workload.arrival_s + workload.deadline_s).tolist()
    priorities, caps = workload.priority.tolist(), workload.max_tokens.tolist()
    groups = workload.prefix_groups
    prefixes = groups.tolist() if groups is not None else [(0, 0)] * len(workload)
    return [
        LiveRequest(
            index=i,
            request_id=request_id,
            arrival_s=arrivals[i],
            prompt_tokens=prompts[i],
            output_tokens=output_tokens[i],
            max_tokens=caps[i],
            priority=priorities[i],
            deadline_s=deadlines[i],
            is_awaited=awaited[i],
            final_tokens=config.fitting_tokens(prompts[i] + caps[i]),
            prefix_owner=-1 - prefixes[i][0],
            num_shared=prefixes[i][1] // config.block_size,
            known_tokens=prompts[i],
            expected_tokens=prompts[i],
        )
        for i, request_id in enumerate(workload.request_ids)
    ]


def record_of(
    request: LiveRequest,
    workload: Workload,
    *,
    censor_s: float,
    single_stream_s: float,
    deadline_seen: bool,
) -> RequestRecord:
    """Return what is left of ``request`` when the run ended at ``censor_s``."""
    index = request.index
    queue_end_s, preempted_s = request.first_scheduled_s, request.preempted_s
    if queue_end_s is None:
        queue_end_s = request.end_s if request.end_s is not None else censor_s
    if request.evicted_at_s is not None:
        preempted_s += censor_s - request.evicted_at_s
    deadline_s = float(workload.deadline_s[index])
    own_deadline_s = None if math.isnan(deadline_s) else deadline_s
    return RequestRecord(
        request_id=request.request_id,
        run_id=workload.run_ids[index] if workload.run_ids is not None else None,
        cohort=COHORTS[int(workload.cohort[index])],
        arrival_s=request.arrival_s,
        accepted_s=request.accepted_s,
        first_scheduled_s=request.first_scheduled_s,
        first_token_s=request.first_token_s,
        end_s=request.end_s,
        state=request.state,
        end_reason=request.end_reason,
        censor_s=censor_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.generated_tokens,
        max_tokens=request.max_tokens,
        num_preemptions=request.num_preemptions,
        recomputed_tokens=request.recomputed_tokens,
        cache_hit_tokens=request.cache_hit_tokens,
        loaded_tokens=request.loaded_tokens,
        queued_s=max(0.0, queue_end_s - request.arrival_s),
        preempted_s=preempted_s,
        single_stream_s=single_stream_s,
        deadline_s=own_deadline_s,
        deadline_seen=own_deadline_s if deadline_seen else None,
    )


class WaitingQueue:
    """FCFS order: arrivals at the back, victims at the front (the last one evicted first)."""

    def __init__(self) -> None:
        self._queue: deque[LiveRequest] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._queue)

    def push(self, request: LiveRequest) -> None:
        """Add an arrival."""
        self._queue.append(request)

    def push_victim(self, request: LiveRequest) -> None:
        """Add a request that was preempted."""
        self._queue.appendleft(request)

    def peek(self) -> LiveRequest:
        """Return the request that is admitted next."""
        return self._queue[0]

    def pop(self) -> LiveRequest:
        """Remove and return the request that is admitted next."""
        return self._queue.popleft()

    def remove(self, request: LiveRequest) -> None:
        """Remove a request that ended while it waited."""
        self._queue.remove(request)


class BackQueue(WaitingQueue):
    """SGLang's order: arrivals and victims alike go to the back."""

    def push_victim(self, request: LiveRequest) -> None:
        """Add a request that was retracted."""
        self.push(request)


class PriorityQueue(WaitingQueue):
    """PRIORITY order: smallest (priority, arrival) first; a victim gets no better place."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, LiveRequest]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[LiveRequest]:
        return (entry[-1] for entry in sorted(self._heap))

    def push(self, request: LiveRequest) -> None:
        """Add an arrival."""
        heappush(self._heap, (request.priority, request.arrival_s, request.index, request))

    def push_victim(self, request: LiveRequest) -> None:
        """Add a request that was preempted."""
        self.push(request)

    def peek(self) -> LiveRequest:
        """Return the request that is admitted next."""
        return self._heap[0][-1]

    def pop(self) -> LiveRequest:
        """Remove and return the request that is admitted next."""
        return heappop(self._heap)[-1]

    def remove(self, request: LiveRequest) -> None:
        """Remove a request that ended while it waited."""
        self._heap = [entry for entry in self._heap if entry[-1] is not request]
        heapify(self._heap)
