"""A running request of a real engine, as a victim rule sees it: read live, column by column."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from contracts.choice import DRAW_PURPOSE
from contracts.policy import FloatArray, IntArray, RunningView, RunningViews
from contracts.randomness import keyed_uniform
from integrations.visible import VisibleProgress


class EngineRequest(Protocol):
    """What is read of vLLM's Request; names are vLLM's."""

    @property
    def request_id(self) -> str: ...

    @property
    def arrival_time(self) -> float: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def output_token_ids(self) -> Sequence[int]: ...


@dataclass(slots=True, eq=False)
class Tracked:
    """What is remembered of a request from its arrival to its end.

    ``number`` counts arrivals. ``draw`` belongs to ``draw_of`` preemptions. ``peak_tokens`` were
    computed before a preemption took them (0: all are back). The signal's answer ``remaining``,
    ``upper`` is for age ``answered_age`` (-1: none yet).
    """

    number: int
    deadline_s: float = math.nan
    draw: float = math.nan
    draw_of: int = -1
    peak_tokens: int = 0
    answered_age: int = -1
    remaining: float = math.nan
    upper: float = math.nan
    progress: VisibleProgress | None = None
    asked: Any = field(default=None, repr=False)  # the SignalRequest, built when first needed


class LiveViews:
    """RunningViews of ``running`` (in admission order), each column read when the policy asks.

    ``admission_seq`` is the place in that order: only its order means something here.
    """

    def __init__(
        self,
        running: Sequence[EngineRequest],
        track: Callable[[EngineRequest], Tracked],
        count_blocks: Callable[[str], int],
        now_s: float,
        *,
        recent_tpot_s: float = math.nan,
        prefill_s_per_token: float = math.nan,
        seed: int = 0,
        reads_deadline: bool = True,
    ) -> None:
        self._running, self._track = running, track
        self._count_blocks, self._seed = count_blocks, seed
        self._now_s, self._recent_tpot_s = now_s, recent_tpot_s
        self._prefill_s_per_token = prefill_s_per_token
        self._reads_deadline = reads_deadline

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.columns())

    def columns(self) -> RunningViews:
        """Return all columns."""
        return RunningViews(*(getattr(self, name) for name in RunningViews._fields))

    def row(self, index: int) -> RunningView:
        """Return the view of one request."""
        return self.columns().row(index)

    @cached_property
    def _tracked(self) -> list[Tracked]:
        return [self._track(request) for request in self._running]

    @cached_property
    def request_id(self) -> IntArray:
        return _ints([t.number for t in self._tracked])

    @cached_property
    def admission_seq(self) -> IntArray:
        return np.arange(len(self._running))

    @cached_property
    def arrival_s(self) -> FloatArray:
        return _floats([r.arrival_time for r in self._running])

    @cached_property
    def deadline_s(self) -> FloatArray:
        if not self._reads_deadline:
            return self._same(math.nan)
        return _floats([t.deadline_s for t in self._tracked])

    @cached_property
    def prompt_tokens(self) -> IntArray:
        return _ints([r.num_prompt_tokens for r in self._running])

    @cached_property
    def generated_tokens(self) -> IntArray:
        return _ints([r.num_output_tokens for r in self._running])

    @cached_property
    def computed_tokens(self) -> IntArray:
        return _ints([r.num_computed_tokens for r in self._running])

    @cached_property
    def kv_blocks(self) -> IntArray:
        return _ints([self._count_blocks(r.request_id) for r in self._running])

    @cached_property
    def max_tokens(self) -> IntArray:
        return _ints([r.max_tokens for r in self._running])

    @cached_property
    def num_preemptions(self) -> IntArray:
        return _ints([r.num_preemptions for r in self._running])

    @cached_property
    def priority(self) -> IntArray:
        return _ints([r.priority for r in self._running])

    @cached_property
    def rank_from_youngest(self) -> IntArray:
        return np.arange(len(self._running) - 1, -1, -1)

    @cached_property
    def num_running(self) -> IntArray:
        return np.full(len(self._running), len(self._running))

    @cached_property
    def now_s(self) -> FloatArray:
        return self._same(self._now_s)

    @cached_property
    def recent_tpot_s(self) -> FloatArray:
        return self._same(self._recent_tpot_s)

    @cached_property
    def prefill_s_per_token(self) -> FloatArray:
        return self._same(self._prefill_s_per_token)

    @cached_property
    def remaining(self) -> FloatArray:
        return self._counted_down([t.remaining for t in self._tracked])

    @cached_property
    def remaining_upper(self) -> FloatArray:
        return self._counted_down([t.upper for t in self._tracked])

    @cached_property
    def draw(self) -> FloatArray:
        return _floats(
            [self._draw(r, t) for r, t in zip(self._running, self._tracked, strict=True)]
        )

    def _counted_down(self, answers: list[float]) -> FloatArray:
        """Take off what was written since the answer; at least 1 token is to come. NaN stays."""
        since = self.generated_tokens - _ints([t.answered_age for t in self._tracked])
        return np.maximum(_floats(answers) - since, 1.0)

    def _draw(self, request: EngineRequest, tracked: Tracked) -> float:
        if tracked.draw_of != request.num_preemptions:
            tracked.draw_of = request.num_preemptions
            tracked.draw = keyed_uniform(
                self._seed, DRAW_PURPOSE, request.request_id, request.num_preemptions
            )
        return tracked.draw

    def _same(self, value: float) -> FloatArray:
        return np.full(len(self._running), value)


def _ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _floats(values: list[float]) -> FloatArray:
    return np.array(values, dtype=np.float64)
