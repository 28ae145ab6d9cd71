"""Breach: what became of the accepted requests of the tagged cohort at a deadline.

A request that was accepted and did not finish in time is a breach, whether it ended late, failed,
or never ended. A score over completed requests only leaves the last two out and flatters whoever
starves the long ones; it is computed beside the real one so that the gap can be seen.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from contracts.errors import InvalidInput, LawViolation
from contracts.records import RequestRecord

Outcome = Literal["met", "late", "failed", "unfinished", "withdrawn", "undetermined"]
_ENDED = ("completed", "length_capped")


def outcome(record: RequestRecord, deadline_s: float | None) -> Outcome:
    """Return what became of an accepted request at ``deadline_s`` after its arrival, or at its own
    deadline when that is None.

    Both sides of the comparison are rounded to 1 µs and ties are met. A request still running
    when observation stopped before its deadline is undetermined. Raises InvalidInput for a rejected
    request, or one without a deadline of its own where that is asked for.
    """
    if record.state == "rejected":
        raise InvalidInput(f"request {record.request_id!r} was rejected: it has no outcome")
    if record.state == "withdrawn":
        return "withdrawn"
    if record.state == "failed":
        return "failed"
    if deadline_s is None:
        deadline_s = own_deadline_s(record)
    if record.state in _ENDED:
        assert record.end_s is not None
        return "met" if _within(record.end_s - record.arrival_s, deadline_s) else "late"
    watched_s = record.censor_s - record.arrival_s
    return "undetermined" if watched_s < deadline_s else "unfinished"


def own_deadline_s(record: RequestRecord) -> float:
    """Return a request's own deadline, seconds after its arrival."""
    if record.deadline_s is None:
        raise InvalidInput(
            f"request {record.request_id!r} has no deadline of its own: give one for all, or a "
            "deadline to each request of the workload"
        )
    return record.deadline_s


def _within(latency_s: float, deadline_s: float) -> bool:
    return round(latency_s * 1e6) <= round(deadline_s * 1e6)


@dataclass(frozen=True, slots=True)
class BreachScore:
    """Counts of one cell's tagged cohort and the rates that follow from them.

    ``breach_low`` and ``breach_high`` bound the breach rate when requests are undetermined or
    withdrawn (all met, all breached); ``breach`` is NaN while any is undetermined.
    """

    accepted: int
    rejected: int
    met: int
    late: int
    failed: int
    unfinished: int
    withdrawn: int
    undetermined: int
    floor: float
    breach: float
    breach_low: float
    breach_high: float
    completed_only: float

    def __post_init__(self) -> None:
        total = (
            self.met
            + self.late
            + self.failed
            + self.unfinished
            + self.withdrawn
            + self.undetermined
        )
        if total != self.accepted:
            raise LawViolation(
                f"outcomes add up to {total}, but {self.accepted} requests were accepted: "
                f"{self.met} met + {self.late} late + {self.failed} failed + "
                f"{self.unfinished} unfinished + {self.withdrawn} withdrawn + "
                f"{self.undetermined} undetermined"
            )


def score_breach(records: Iterable[RequestRecord], deadline_s: float | None) -> BreachScore:
    """Score the tagged cohort of one engine run at one deadline (seconds after arrival), or each
    request at its own when that is None."""
    if deadline_s is not None and not deadline_s > 0:
        raise InvalidInput(f"deadline is {deadline_s} s: it must be above 0")
    cohort = [record for record in records if record.cohort == "tagged"]
    accepted = [record for record in cohort if record.state != "rejected"]
    if not accepted:
        raise InvalidInput(
            f"none of {len(cohort)} tagged requests was accepted: enlarge the KV pool or tag more"
        )
    counts = Counter(outcome(record, deadline_s) for record in accepted)
    breached = counts["late"] + counts["failed"] + counts["unfinished"]
    judged = len(accepted) - counts["withdrawn"]
    open_ended = counts["undetermined"] + counts["withdrawn"]
    exact = counts["undetermined"] == 0 and judged > 0
    return BreachScore(
        accepted=len(accepted),
        rejected=len(cohort) - len(accepted),
        met=counts["met"],
        late=counts["late"],
        failed=counts["failed"],
        unfinished=counts["unfinished"],
        withdrawn=counts["withdrawn"],
        undetermined=counts["undetermined"],
        floor=_floor(accepted, deadline_s),
        breach=breached / judged if exact else float("nan"),
        breach_low=breached / len(accepted),
        breach_high=(breached + open_ended) / len(accepted),
        completed_only=_completed_only(accepted, deadline_s),
    )


def accepted_digest(records: Iterable[RequestRecord]) -> str:
    """Return 16 hexadecimal digits that name the set of accepted tagged requests, by their ids."""
    ids = {r.request_id for r in records if r.cohort == "tagged" and r.state != "rejected"}
    return hashlib.sha256(repr(sorted(ids)).encode()).hexdigest()[:16]


def is_hopeless(record: RequestRecord, deadline_s: float | None) -> bool:
    """Say whether a request would be late even alone on an idle engine."""
    due_s = own_deadline_s(record) if deadline_s is None else deadline_s
    return not _within(record.single_stream_s, due_s)


def _floor(accepted: Sequence[RequestRecord], deadline_s: float | None) -> float:
    return sum(is_hopeless(record, deadline_s) for record in accepted) / len(accepted)


def _completed_only(accepted: Sequence[RequestRecord], deadline_s: float | None) -> float:
    """What a score over completed requests says: NaN when none completed."""
    ended = [record for record in accepted if record.state in _ENDED]
    if not ended:
        return float("nan")
    return sum(outcome(record, deadline_s) == "late" for record in ended) / len(ended)
