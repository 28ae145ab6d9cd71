"""The faults of a plan as they strike one run, one at a time, between two steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from contracts.errors import LawViolation
from contracts.records import State
from serving_sim.faults import (
    Capacity,
    Disconnect,
    Failure,
    Fault,
    FaultPlan,
    Patience,
    SignalOutage,
    Slow,
    Stall,
    WorkerLoss,
)
from serving_sim.requests import LiveRequest

if TYPE_CHECKING:
    from serving_sim.engine import Run


class Strike(NamedTuple):
    """A fault that is due at ``at_s``, and whom it hits if it hits somebody."""

    at_s: float
    fault: Fault
    request: LiveRequest | None


class Strikes:
    """The strikes of a plan in order of time, equal times in the order of the plan."""

    def __init__(self, plan: FaultPlan, requests: list[LiveRequest], usable_blocks: int) -> None:
        by_id = {request.request_id: request for request in requests}
        strikes = [strike for fault in plan.faults for strike in _strikes(fault, requests, by_id)]
        self._strikes = sorted(strikes, key=lambda strike: strike.at_s)
        self._next = 0
        self._usable_blocks = usable_blocks
        self._slow = [fault for fault in plan.faults if isinstance(fault, Slow)]
        self.outages = tuple(fault for fault in plan.faults if isinstance(fault, SignalOutage))
        self.num_struck = 0

    @property
    def next_s(self) -> float:
        """When the next strike is due; infinity after the last."""
        if self._next == len(self._strikes):
            return math.inf
        return self._strikes[self._next].at_s

    def slowness(self, now_s: float) -> float:
        """Return how many times as long a step takes that begins at ``now_s``."""
        return math.prod(f.factor for f in self._slow if f.at_s <= now_s < f.until_s)

    def strike_next(self, run: Run) -> bool:
        """Let the next strike happen if it is due; say whether one did."""
        if self.next_s > run.clock_s:
            return False
        at_s, fault, request = self._strikes[self._next]
        self._next += 1
        if request is not None:
            self.num_struck += run.give_up(request, *_END[type(fault)])
            return True
        self.num_struck += 1
        match fault:
            case WorkerLoss():
                _lose_worker(run, fault)
            case Stall():
                run.clock_s += fault.extra_s
            case Capacity():
                share = 1.0 if at_s == fault.until_s else fault.blocks_share
                _resize(run, int(share * self._usable_blocks))
            case _:
                raise LawViolation(
                    f"fault {fault} strikes nobody and nothing: a bug of this engine"
                )
        return True


_END: dict[type[Fault], tuple[State, str]] = {
    Failure: ("failed", "request_failed"),
    Disconnect: ("withdrawn", "client_disconnect"),
    Patience: ("failed", "patience"),
}


def _strikes(
    fault: Fault, requests: list[LiveRequest], by_id: dict[str, LiveRequest]
) -> list[Strike]:
    """Return when ``fault`` strikes whom; nothing for a window in which things merely differ."""
    match fault:
        case Slow() | SignalOutage():
            return []
        case Patience():
            hit = requests if fault.request_id is None else [by_id[fault.request_id]]
            return [Strike(r.arrival_s + fault.patience_s, fault, r) for r in hit]
        case Failure() | Disconnect():
            return [Strike(fault.at_s, fault, by_id[fault.request_id])]
        case Capacity(until_s=float() | int() as until_s):
            return [Strike(fault.at_s, fault, None), Strike(until_s, fault, None)]
        case _:
            return [Strike(fault.at_s, fault, None)]


def _lose_worker(run: Run, loss: WorkerLoss) -> None:
    """Lose all KV and the steps in flight; then nothing happens until the worker is back."""
    queued = list(run.scheduler.waiting)
    lost = run.lose_kv()
    if loss.running == "failed":
        for request in lost:
            run.give_up(request, "failed", "worker_lost")
    if loss.queue == "lost":
        for request in queued:
            run.give_up(request, "failed", "worker_lost")
    run.clock_s += loss.restart_s


def _resize(run: Run, num_blocks: int) -> None:
    """Change the pool's size; who can no longer fit, whatever room is made, is given up."""
    scheduler = run.scheduler
    for request in [*scheduler.running, *scheduler.waiting]:
        if not scheduler.can_hold(request, num_blocks):
            run.give_up(request, "failed", "kv_shrunk")
    scheduler.resize(num_blocks, run.clock_s)
