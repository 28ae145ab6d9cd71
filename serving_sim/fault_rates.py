"""Where fault plans come from: a script, rates, or both; from a TOML or JSON file.

Draws are keyed by (seed, kind, request id), so a plan depends on no policy and on no other rate.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput, unknown_name
from contracts.randomness import keyed_generator, keyed_uniform
from serving_sim.faults import HITS_REQUESTS, KINDS, Fault, FaultPlan, build_fault
from traces.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRate:
    """Faults of one ``kind`` at random. ``settings`` are the fields that no draw fills.

    A kind that hits requests strikes each with ``probability``, after exponential ``mean_after_s``
    since its arrival (``patience`` has its ``patience_s``). Any other comes ``per_hour`` times on
    average between 0 and the last arrival (Poisson), and lasts an exponential
    ``mean_duration_s`` if it is a window.
    """

    kind: str
    probability: float = 0.0
    mean_after_s: float = 0.0
    per_hour: float = 0.0
    mean_duration_s: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("fault kind", self.kind, KINDS)
        if not 0.0 <= self.probability <= 1.0:
            raise InvalidInput(
                f"rate of {self.kind!r}: probability is {self.probability}; it must be in [0, 1]"
            )
        for name in ("mean_after_s", "per_hour", "mean_duration_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                value = getattr(self, name)
                raise InvalidInput(f"rate of {self.kind!r}: {name} is {value}; give a number >= 0")
        unused = ("per_hour", "mean_duration_s") if self._hits_requests else _OF_REQUESTS
        for name in unused:
            if getattr(self, name):
                other = "probability" if self._hits_requests else "per_hour"
                raise InvalidInput(
                    f"rate of {self.kind!r}: {name} has no meaning for this kind; give {other}"
                )
        self._fault(0.0, 1.0, "any")

    @property
    def _hits_requests(self) -> bool:
        return self.kind in HITS_REQUESTS

    def draw(self, workload: Workload, seed: int, number: int) -> list[Fault]:
        """Return the faults of ``seed``. ``number`` tells several rates of one kind apart."""
        purpose = f"fault-{self.kind}-{number}"
        if self._hits_requests:
            return self._draw_requests(workload, seed, purpose)
        stream = keyed_generator(seed, purpose)
        faults, at_s, last_s = [], 0.0, float(workload.arrival_s[-1])
        while self.per_hour:
            at_s += float(stream.exponential(3600.0 / self.per_hour))
            duration_s = float(stream.exponential(self.mean_duration_s or 1.0))
            if at_s > last_s:
                break
            faults.append(self._fault(at_s, max(duration_s, 1e-6), None))
        return faults

    def _draw_requests(self, workload: Workload, seed: int, purpose: str) -> list[Fault]:
        faults = []
        for request_id, arrival_s in zip(workload.request_ids, workload.arrival_s, strict=True):
            if keyed_uniform(seed, purpose, request_id) < self.probability:
                after_s = -self.mean_after_s * math.log1p(
                    -keyed_uniform(seed, purpose + "-after", request_id)
                )
                faults.append(self._fault(float(arrival_s) + after_s, 1.0, request_id))
        return faults

    def _fault(self, at_s: float, duration_s: float, request_id: str | None) -> Fault:
        drawn = {"at_s": at_s, "request_id": request_id}
        if self.kind != "capacity" or self.mean_duration_s:
            drawn["until_s"] = at_s + duration_s
        known = [item.name for item in fields(KINDS[self.kind])]
        return build_fault(
            self.kind,
            {name: value for name, value in drawn.items() if name in known} | dict(self.settings),
            f"rate of {self.kind!r}",
        )


_OF_REQUESTS = ("probability", "mean_after_s")


@dataclass(frozen=True, slots=True)
class FaultSource:
    """Where the plans of several seeds come from: ``faults`` that strike in each, and ``rates``.

    A *swarm* below 1 lets each rate be active in a seed with that probability only, so that
    combinations of few faults are met, too.
    """

    faults: tuple[Fault, ...] = ()
    rates: tuple[FaultRate, ...] = ()
    swarm: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.swarm <= 1.0:
            raise InvalidInput(f"faults: swarm is {self.swarm}; it must be a probability in [0, 1]")

    def plan(self, workload: Workload, seed: int) -> FaultPlan:
        """Return the plan of ``seed``; no policy can change it."""
        faults = list(self.faults)
        for at, rate in enumerate(self.rates):
            number = sum(other.kind == rate.kind for other in self.rates[:at])
            if keyed_uniform(seed, "fault-swarm", rate.kind, number) < self.swarm:
                faults += rate.draw(workload, seed, number)
        return FaultPlan(tuple(faults))


def read_faults(path: Path) -> FaultSource:
    """Read a TOML or JSON file of faults (docs/faults.md shows one); see faults_from_table."""
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InvalidInput(f"faults {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"faults {path} are not {path.suffix[1:] or 'TOML'}: {error}") from None
    return faults_from_table(table, f"faults {path}")


def faults_from_table(table: object, where: str) -> FaultSource:
    """Return what the keys ``fault`` and ``rate`` (lists of tables) and ``swarm`` say.

    Raises InvalidInput or UnknownName naming ``where`` and the value.
    """
    if not isinstance(table, Mapping):
        raise InvalidInput(f"{where}: got a {type(table).__name__}; write a table")
    for key in table:
        if key not in ("fault", "rate", "swarm"):
            raise unknown_name(f"key in {where}", str(key), ("fault", "rate", "swarm"))
    faults = [
        build_fault(kind, settings, place) for kind, settings, place in _rows(table, "fault", where)
    ]
    rates = [_rate(kind, row, place) for kind, row, place in _rows(table, "rate", where)]
    swarm = table.get("swarm", 1.0)
    if not isinstance(swarm, int | float):
        raise InvalidInput(f"{where}: swarm is {swarm!r}; it must be a probability in [0, 1]")
    return FaultSource(tuple(faults), tuple(rates), float(swarm))


def _rows(
    table: Mapping[str, Any], key: str, where: str
) -> Sequence[tuple[str, dict[str, Any], str]]:
    """Return (kind, the other keys, place) of each table of a list."""
    rows = table.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidInput(f"{where}: {key} must be a list of tables, [[{key}]]")
    found = []
    for number, row in enumerate(rows):
        place = f"{where}, {key} {number}"
        kind = row.get("kind")
        if not isinstance(kind, str):
            raise InvalidInput(f"{place}: kind is {kind!r}; give one of {', '.join(KINDS)}")
        if kind not in KINDS:
            raise unknown_name(f"fault kind in {place},", kind, KINDS)
        found.append((kind, {name: value for name, value in row.items() if name != "kind"}, place))
    return found


_RATE_KEYS = tuple(f.name for f in fields(FaultRate) if f.name not in ("kind", "settings"))


def _rate(kind: str, row: dict[str, Any], place: str) -> FaultRate:
    rates = {name: value for name, value in row.items() if name in _RATE_KEYS}
    for name, value in rates.items():
        if not isinstance(value, int | float):
            raise InvalidInput(f"{place}: {name} is {value!r}; give a number")
    settings = {name: value for name, value in row.items() if name not in _RATE_KEYS}
    return FaultRate(kind=kind, settings=settings, **rates)
