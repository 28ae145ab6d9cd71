"""What a policy sees, and what it is: a pure function that scores running requests for eviction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class RunningView(NamedTuple):
    """What a real engine can know of one running request; no field can express the future.

    Times are seconds on the engine's clock, lengths are tokens. ``request_id`` is a dense number
    whose order is the order of arrival. ``rank_from_youngest`` is 0 for the last admitted.
    ``deadline_s`` (absolute), ``remaining`` and ``remaining_upper`` are NaN when there is none.
    ``recent_tpot_s`` is the trailing mean time per output token. ``draw`` is uniform in [0, 1),
    keyed by (seed, request, how often it was preempted).
    """

    request_id: int
    admission_seq: int
    arrival_s: float
    deadline_s: float
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    kv_blocks: int
    max_tokens: int
    num_preemptions: int
    priority: int
    rank_from_youngest: int
    num_running: int
    now_s: float
    recent_tpot_s: float
    prefill_s_per_token: float
    remaining: float
    remaining_upper: float
    draw: float


class RunningViews(NamedTuple):
    """The running set of one decision: the fields of RunningView, each an array of shape (n,)."""

    request_id: IntArray
    admission_seq: IntArray
    arrival_s: FloatArray
    deadline_s: FloatArray
    prompt_tokens: IntArray
    generated_tokens: IntArray
    computed_tokens: IntArray
    kv_blocks: IntArray
    max_tokens: IntArray
    num_preemptions: IntArray
    priority: IntArray
    rank_from_youngest: IntArray
    num_running: IntArray
    now_s: FloatArray
    recent_tpot_s: FloatArray
    prefill_s_per_token: FloatArray
    remaining: FloatArray
    remaining_upper: FloatArray
    draw: FloatArray

    def row(self, index: int) -> RunningView:
        """Return the view of one request."""
        return RunningView(*(column[index].item() for column in self))


RowPolicy = Callable[[RunningView], float]
ArrayPolicy = Callable[[RunningViews], FloatArray]


@dataclass(frozen=True, slots=True)
class Policy:
    """A named victim rule. ``score`` maps the running set to one float a request; the highest is
    evicted, ties go to the larger ``admission_seq``.

    ``reads_signal`` and ``reads_deadline`` say which optional fields the rule looks at: the first
    decides whether the matrix crosses it with signals, the second whether its records may be
    rescored at another deadline. ``row``, where there is one, is the same rule for one request: the
    jump engine compiles it when it can, so change both or neither. The conformance suite holds a
    policy to all three.
    """

    name: str
    score: ArrayPolicy
    reads_signal: bool = False
    reads_deadline: bool = False
    row: RowPolicy | None = None


def from_rows(
    name: str, score: RowPolicy, *, reads_signal: bool = False, reads_deadline: bool = False
) -> Policy:
    """Return the policy of a function that scores one RunningView at a time."""

    def score_rows(views: RunningViews) -> FloatArray:
        rows = map(RunningView, *(column.tolist() for column in views))
        return np.fromiter(map(score, rows), np.float64, len(views.request_id))

    return Policy(name, score_rows, reads_signal, reads_deadline, row=score)


def views_from_rows(rows: list[RunningView]) -> RunningViews:
    """Return the array form of a list of views."""
    columns = zip(*rows, strict=True)
    arrays: list[Any] = [
        np.array(column, dtype=kind) for column, kind in zip(columns, _FIELD_KINDS, strict=True)
    ]
    return RunningViews(*arrays)


_FIELD_KINDS = tuple(
    np.int64 if kind is int else np.float64 for kind in get_type_hints(RunningView).values()
)
