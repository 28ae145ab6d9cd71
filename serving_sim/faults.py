"""Fault plans: what goes wrong in a run, and when; the same under every policy.

Times are wall times (seconds since the run began) and targets are request ids, so that two
policies meet the same faults. A fault takes effect at the first step boundary at or after its time:
a token that returns there was still written. serving_sim/strikes.py lets them strike.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args

from contracts.errors import InvalidInput, unknown_name
from traces.workload import Workload

Answer = Literal["nan", "inf", "negative", "stale"]
Running = Literal["retried", "failed"]
Queue = Literal["kept", "lost"]


class _Checked:
    """Every fault: its numbers are checked when it is built."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            _check(self, item.name, getattr(self, item.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(_Checked):
    """A request fails after it was accepted: ``failed``, reason ``request_failed``."""

    at_s: float
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect(_Checked):
    """The client leaves of its own accord: ``withdrawn``, reason ``client_disconnect``."""

    at_s: float
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience(_Checked):
    """The client gives up ``patience_s`` after the arrival: ``failed``, reason ``patience``.

    Without ``request_id`` every client does.
    """

    patience_s: float
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoss(_Checked):
    """The worker dies: all KV is lost, and nothing runs for ``restart_s``.

    ``running`` requests are ``retried`` (original arrival, written tokens kept, KV computed again)
    or ``failed``, reason ``worker_lost``; waiting ones are ``kept``, or ``lost`` (failed alike).
    """

    at_s: float
    restart_s: float
    running: Running = "retried"
    queue: Queue = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall(_Checked):
    """The engine stands still: what the next step writes comes ``extra_s`` later."""

    at_s: float
    extra_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(_Checked):
    """Steps that begin in [at_s, until_s) take ``factor`` times as long."""

    at_s: float
    until_s: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity(_Checked):
    """The KV pool shrinks or grows to ``blocks_share`` of the configured usable blocks (rounded
    down); from ``until_s`` on, if given, it has its configured size again."""

    at_s: float
    blocks_share: float
    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalOutage(_Checked):
    """In [at_s, until_s) the signal answers garbage, or (``stale``) what it said at age 0."""

    at_s: float
    until_s: float
    answer: Answer


Fault = Failure | Disconnect | Patience | WorkerLoss | Stall | Slow | Capacity | SignalOutage
KINDS: Mapping[str, type[Fault]] = {
    "failure": Failure,
    "disconnect": Disconnect,
    "patience": Patience,
    "worker_loss": WorkerLoss,
    "stall": Stall,
    "slow": Slow,
    "capacity": Capacity,
    "signal": SignalOutage,
}
_CHOICES = {"running": get_args(Running), "queue": get_args(Queue), "answer": get_args(Answer)}
HITS_REQUESTS = ("failure", "disconnect", "patience")


def kind_of(fault: Fault) -> str:
    """Return the name of a fault's kind."""
    return next(name for name, kind in KINDS.items() if isinstance(fault, kind))


def _check(fault: Any, name: str, value: object) -> None:
    where = f"fault {kind_of(fault)!r}: {name}"
    if value is None and name in ("request_id", "until_s"):
        return
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise unknown_name(where, str(value), _CHOICES[name])
    elif name == "request_id":
        if not isinstance(value, str):
            raise InvalidInput(f"{where} is {value!r}; give the id of a request, as text")
    elif not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidInput(f"{where} is {value!r}; give a finite number")
    elif name in ("factor", "blocks_share"):
        if value <= 0:
            raise InvalidInput(f"{where} is {value}; it must be above 0 (1 changes nothing)")
    elif value < 0:
        raise InvalidInput(f"{where} is {value} s; it must be at least 0 s")
    elif name == "until_s" and value <= fault.at_s:
        raise InvalidInput(f"{where} is {value} s; it must be after at_s = {fault.at_s} s")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of one run; an empty plan changes nothing."""

    faults: tuple[Fault, ...] = ()

    def check(self, workload: Workload, usable_blocks: int) -> None:
        """Raise InvalidInput for a target that ``workload`` lacks or that was not there yet, and
        for a pool without a block."""
        arrivals = dict(zip(workload.request_ids, workload.arrival_s.tolist(), strict=True))
        for fault in self.faults:
            if isinstance(fault, Capacity) and int(fault.blocks_share * usable_blocks) < 1:
                raise InvalidInput(
                    f"fault 'capacity': blocks_share {fault.blocks_share} of {usable_blocks} "
                    f"usable blocks leaves none; give at least {1 / usable_blocks:.6g}"
                )
            if not isinstance(fault, Failure | Disconnect | Patience) or fault.request_id is None:
                continue
            if fault.request_id not in arrivals:
                near = difflib.get_close_matches(fault.request_id, arrivals, n=5, cutoff=0.0)
                kind = f"target of fault {kind_of(fault)!r} ({len(arrivals)} requests)"
                raise unknown_name(kind, fault.request_id, near)
            arrival_s = arrivals[fault.request_id]
            if not isinstance(fault, Patience) and fault.at_s < arrival_s:
                raise InvalidInput(
                    f"fault {kind_of(fault)!r}: at_s is {fault.at_s} s, but request "
                    f"{fault.request_id!r} arrives at {arrival_s} s only; choose a later time"
                )


def build_fault(kind: str, settings: Mapping[str, Any], place: str) -> Fault:
    """Return a fault of the named kind; raises InvalidInput or UnknownName naming ``place``."""
    known = {item.name: item for item in fields(KINDS[kind])}
    for name in settings:
        if name not in known:
            raise unknown_name(f"setting of {kind!r} in {place},", name, known)
    missing = [n for n, item in known.items() if item.default is MISSING and n not in settings]
    if missing:
        raise InvalidInput(f"{place}: a fault of kind {kind!r} also needs {', '.join(missing)}")
    return KINDS[kind](**settings)
