"""Timelines: what happened to every request and to the engine, step by step.

:func:`chrome_trace` writes a run in the trace event format, which Perfetto (ui.perfetto.dev) and
chrome://tracing open; :class:`StepSeries` keeps the counters for a figure. Both listen to the step
engine's ``on_step``; the jump engine has no steps to tell of. docs/timeline.md describes the file.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

from contracts.files import atomic_path
from contracts.policy import FloatArray, IntArray
from contracts.records import RequestRecord
from serving_sim.engine import SimResult, StepLog
from serving_sim.scheduler import Eviction

Phase = Literal["queued", "prefill", "decode", "preempted", "recompute"]
"""``recompute`` is the prefill after a preemption; a phase before it is of the first attempt."""
COUNTERS = ("KV blocks used", "running", "waiting", "batch tokens", "preemptions")
ENGINE_PID, REQUESTS_PID = 1, 2
_compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(slots=True)
class Span:
    """One phase of one request, from ``start_s`` until it is emitted with its end. Tokens that were
    computed for it meanwhile, and in how many steps; ``has_sampled`` once one will write a token.
    """

    phase: Phase
    start_s: float
    computed_tokens: int = 0
    num_steps: int = 0
    has_sampled: bool = False


class RequestPhases:
    """Turns step logs into spans: ``emit(request id, span, end in seconds)`` when a span is over.

    A prefill ends when the step that samples from it returns: at the request's first token.
    """

    def __init__(self, emit: Callable[[str, Span, float], None]) -> None:
        self.current: dict[str, Span] = {}
        self._emit = emit
        self._prefilled: deque[tuple[int, str, Span]] = deque()  # the step, who, and its prefill

    def step(self, log: StepLog) -> None:
        """Take note of one planned step."""
        while self._prefilled and self._prefilled[0][0] <= log.num_returned:
            _, request_id, prefill = self._prefilled.popleft()
            # a request that ended there, or was evicted meanwhile, decodes nothing
            if self.current[request_id] is prefill and request_id not in log.finished_before:
                self._switch(request_id, "decode", log.returned_s)
        for request_id, lost_s in log.lost:
            self._switch(request_id, "preempted", lost_s)
        for request_id in log.preempted:
            self._switch(request_id, "preempted", log.start_s)
        for request_id, tokens in log.scheduled.items():
            span = self.current.get(request_id)
            if span is None or span.phase == "preempted":
                span = self._switch(request_id, "recompute" if span else "prefill", log.start_s)
            span.computed_tokens += tokens
            span.num_steps += 1
        for request_id in log.sampling:
            span = self.current[request_id]
            if not span.has_sampled:
                span.has_sampled = True
                if span.phase != "decode":
                    self._prefilled.append((log.step, request_id, span))

    def end(self, request_id: str, end_s: float) -> None:
        """Close what ``request_id`` is in, if it was ever scheduled."""
        span = self.current.pop(request_id, None)
        if span is not None:
            self._emit(request_id, span, end_s)

    def _switch(self, request_id: str, phase: Phase, now_s: float) -> Span:
        self.end(request_id, now_s)
        self.current[request_id] = span = Span(phase, now_s)
        return span


class EngineCounters:
    """Turns step logs into samples (seconds, values in the order of COUNTERS), each valid until the
    next. While the engine idles, all but the preemptions are 0."""

    def __init__(self, usable_blocks: int) -> None:
        self._usable_blocks = usable_blocks
        self._num_preemptions = 0

    def samples(self, log: StepLog) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield what ``log`` shows: one sample, or two when the engine was idle before."""
        nothing_in_flight = log.num_returned == log.step - 1
        if nothing_in_flight and (log.returned_s < log.start_s or log.step == 1):
            yield self.idle(log.returned_s)
        self._num_preemptions += len(log.preempted)
        yield (
            log.start_s,
            (
                (log.num_blocks or self._usable_blocks) - log.num_free_blocks,
                len(log.running),
                len(log.waiting),
                sum(log.scheduled.values()),
                self._num_preemptions,
            ),
        )

    def idle(self, now_s: float) -> tuple[float, tuple[int, ...]]:
        """Return the sample of an engine that has nothing to do."""
        return now_s, (0, 0, 0, 0, self._num_preemptions)


class StepSeries:
    """The counters of a whole run (48 bytes a step), and when evictions were."""

    def __init__(self, usable_blocks: int) -> None:
        self.usable_blocks = usable_blocks
        self.end_s = 0.0
        self._counters = EngineCounters(usable_blocks)
        self._times = array("d")
        self._values = array("q")

    def step(self, log: StepLog) -> None:
        """Take note of one planned step."""
        for now_s, values in self._counters.samples(log):
            self._add(now_s, values)

    def finish(self, result: SimResult) -> None:
        """Take note of the run's end."""
        self.end_s = result.end_s
        if _is_empty_at_end(result):
            self._add(*self._counters.idle(result.end_s))

    @property
    def t_s(self) -> FloatArray:
        """When each sample begins to hold, shape (samples,), rising."""
        return np.array(self._times, dtype=np.float64)

    def values(self, counter: str) -> IntArray:
        """The samples of one of COUNTERS, shape (samples,)."""
        table = np.array(self._values, dtype=np.int64).reshape(-1, len(COUNTERS))
        return table[:, COUNTERS.index(counter)]

    @property
    def evicted_s(self) -> FloatArray:
        """The time of every eviction, shape (preemptions,)."""
        return np.repeat(self.t_s, np.diff(self.values("preemptions"), prepend=0))

    def _add(self, now_s: float, values: tuple[int, ...]) -> None:
        self._times.append(now_s)
        self._values.extend(values)


class ChromeTrace:
    """Writes one run as trace events: a track a request, and counter tracks of the engine.

    Counters are written when they change, spans when they are over: in memory are only the running
    phase of each request and nothing of the past. Times are exact to 1 ns.
    """

    def __init__(self, file: TextIO, title: str, rule: str, usable_blocks: int) -> None:
        self._file, self._rule = file, rule
        self._phases = RequestPhases(self._span)
        self._counters = EngineCounters(usable_blocks)
        self._last: list[int | None] = [None] * len(COUNTERS)
        self._tracks: dict[str, int] = {}
        self._num_evictions: dict[str, int] = {}
        other = {"title": title, "victim_rule": rule, "usable_blocks": usable_blocks}
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(other)},\n"traceEvents": ')
        self._separator = "[\n"
        self._name(ENGINE_PID, f"engine: {title}", 0)
        self._name(REQUESTS_PID, f"requests: {title}", 1)

    def step(self, log: StepLog) -> None:
        """Take note of one planned step."""
        self._phases.step(log)
        for eviction in log.evictions:
            self._evict(eviction, log)
        for sample in self._counters.samples(log):
            self._count(*sample)

    def finish(self, result: SimResult) -> None:
        """Write what only the records know: names, waiting before the first step, and ends."""
        if _is_empty_at_end(result):
            self._count(*self._counters.idle(result.end_s))
        for record in result.records:
            has_arrived = record.accepted_s is not None or record.end_s is not None
            end_s = record.censor_s if record.end_s is None else record.end_s
            self._phases.end(record.request_id, end_s)
            if has_arrived:
                self._life(record, end_s)

    def close(self) -> None:
        """Write the end of the file."""
        self._file.write("\n]}\n")

    def _life(self, record: RequestRecord, end_s: float) -> None:
        track = self._track(record.request_id)
        name = f"{record.request_id} ({record.cohort})"
        self._event("M", "thread_name", REQUESTS_PID, track, args={"name": name})
        self._event("M", "thread_sort_index", REQUESTS_PID, track, args={"sort_index": track})
        queue_end_s = end_s if record.first_scheduled_s is None else record.first_scheduled_s
        sizes = {"prompt_tokens": record.prompt_tokens, "max_tokens": record.max_tokens}
        self._slice("queued", track, record.arrival_s, queue_end_s, sizes)
        args = {
            "reason": record.end_reason,
            "output_tokens": record.output_tokens,
            "preemptions": record.num_preemptions,
            "recomputed_tokens": record.recomputed_tokens,
            "cache_hit_tokens": record.cache_hit_tokens,
            "seconds_since_arrival": end_s - record.arrival_s,
        }
        self._instant(record.state, track, end_s, args)

    def _evict(self, eviction: Eviction, log: StepLog) -> None:
        name = eviction.request_id
        self._num_evictions[name] = nth = self._num_evictions.get(name, 0) + 1
        args = {
            "rule": self._rule,
            "asked_by": eviction.asked_by or "the decode step",
            "sunk_tokens": eviction.sunk_tokens,
            "generated_tokens": eviction.generated_tokens,
            "preemption_of_request": nth,
            "left_running": len(log.running),
            "step": log.step,
        }
        self._instant("evicted", self._track(name), log.start_s, args)

    def _span(self, request_id: str, span: Span, end_s: float) -> None:
        args = {}
        if span.phase != "preempted":
            args = {"computed_tokens": span.computed_tokens, "steps": span.num_steps}
        self._slice(span.phase, self._track(request_id), span.start_s, end_s, args)

    def _track(self, request_id: str) -> int:
        return self._tracks.setdefault(request_id, len(self._tracks) + 1)

    def _count(self, now_s: float, values: tuple[int, ...]) -> None:
        for at, value in enumerate(values):
            if value != self._last[at]:
                self._last[at] = value
                ts = {"ts": _ns(now_s) / 1000}
                self._event("C", COUNTERS[at], ENGINE_PID, 0, **ts, args={"value": value})

    def _slice(
        self, name: str, track: int, start_s: float, end_s: float, args: Mapping[str, object]
    ) -> None:
        start_ns = _ns(start_s)
        duration_ns = _ns(end_s) - start_ns
        if duration_ns > 0:
            times = {"ts": start_ns / 1000, "dur": duration_ns / 1000}
            self._event("X", name, REQUESTS_PID, track, **times, args=args)

    def _instant(self, name: str, track: int, now_s: float, args: Mapping[str, object]) -> None:
        self._event("i", name, REQUESTS_PID, track, ts=_ns(now_s) / 1000, s="t", args=args)

    def _name(self, pid: int, name: str, place: int) -> None:
        self._event("M", "process_name", pid, 0, args={"name": name})
        self._event("M", "process_sort_index", pid, 0, args={"sort_index": place})

    def _event(self, kind: str, name: str, pid: int, tid: int, **fields: Any) -> None:
        event = {"ph": kind, "name": name, "pid": pid, "tid": tid, **fields}
        self._file.write(self._separator + _compact(event))
        self._separator = ",\n"


@contextmanager
def chrome_trace(path: Path, title: str, rule: str, usable_blocks: int) -> Iterator[ChromeTrace]:
    """Write a trace to ``path``, whole or not at all; gzipped when it ends in .gz.

    Give the yielded object's ``step`` to the engine as ``on_step``, and the result to ``finish``.
    """
    with atomic_path(path) as scratch:
        open_file = gzip.open if path.suffix == ".gz" else open
        with open_file(scratch, "wt", encoding="utf-8") as file:
            trace = ChromeTrace(file, title, rule, usable_blocks)
            yield trace
            trace.close()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _is_empty_at_end(result: SimResult) -> bool:
    """Say whether nobody is left who runs or waits."""
    return not any(r.accepted_s is not None and r.end_s is None for r in result.records)
