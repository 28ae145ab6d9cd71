"""RequestRecord: one request's life in an engine. Every score is a function of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["completed", "length_capped", "failed", "rejected", "withdrawn", "unfinished"]
Cohort = Literal["warmup", "tagged", "filler"]
COHORTS: tuple[Cohort, ...] = ("warmup", "tagged", "filler")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One life. A time is None until the thing happens; times are seconds since the run began.

    ``censor_s`` is when observation of this request stopped (the run's end). ``recomputed_tokens``
    were computed a second time after a preemption or the loss of a worker; ``cache_hit_tokens``
    were found again instead, and ``loaded_tokens`` came back from a slower tier. ``preempted_s`` is
    the time between losing KV and being admitted again.
    ``single_stream_s`` is how long the same request takes alone on an idle, uncapped engine.
    ``deadline_s`` is the request's own deadline (relative seconds; None without one), and
    ``deadline_seen`` that which any part of the engine could read.
    """

    request_id: str
    run_id: str | None
    cohort: Cohort
    arrival_s: float
    accepted_s: float | None
    first_scheduled_s: float | None
    first_token_s: float | None
    end_s: float | None
    state: State
    end_reason: str
    censor_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    num_preemptions: int
    recomputed_tokens: int
    cache_hit_tokens: int
    queued_s: float
    preempted_s: float
    single_stream_s: float
    deadline_seen: float | None
    loaded_tokens: int = 0
    deadline_s: float | None = None
