"""Deadline classes: requests of one workload that may wait differently long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from contracts.errors import InvalidInput
from contracts.randomness import keyed_uniform
from traces.workload import Workload


@dataclass(frozen=True, slots=True)
class DeadlineClass:
    """A ``share`` of the requests (of 1) that is due ``deadline_s`` after its arrival."""

    name: str
    share: float
    deadline_s: float

    def __post_init__(self) -> None:
        if not (0 < self.share <= 1):
            raise InvalidInput(
                f"deadline class {self.name!r} has a share of {self.share}: it must be in (0, 1]"
            )
        if not (0 < self.deadline_s < math.inf):
            raise InvalidInput(
                f"deadline class {self.name!r} is due after {self.deadline_s} s: give finite "
                "seconds above 0"
            )


def parse_deadline_class(text: str) -> DeadlineClass:
    """Read ``NAME=SHARE:SECONDS``, as in ``chat=0.3:60``."""
    name, equals, rest = text.partition("=")
    share, colon, seconds = rest.partition(":")
    try:
        if not (name and equals and colon):
            raise ValueError
        return DeadlineClass(name, float(share), float(seconds))
    except ValueError:
        raise InvalidInput(
            f"deadline class {text!r} is not NAME=SHARE:SECONDS: write, for example, chat=0.3:60"
        ) from None


def check_classes(classes: Sequence[DeadlineClass]) -> None:
    """Raise InvalidInput unless shares add up to 1 and names and deadlines differ: what a request
    was promised is read off its deadline later."""
    total = sum(one.share for one in classes)
    if classes and abs(total - 1.0) > 1e-9:
        raise InvalidInput(
            f"the shares of deadline classes {_names(classes)} add up to {total:g}: make it 1"
        )
    for kind, values in (
        ("name", [one.name for one in classes]),
        ("deadline", [one.deadline_s for one in classes]),
    ):
        if len(set(values)) < len(values):
            raise InvalidInput(
                f"deadline classes {_names(classes)} share a {kind}: give each its own"
            )


def with_deadline_classes(
    workload: Workload, classes: Sequence[DeadlineClass], seed: int
) -> Workload:
    """Return ``workload`` with a deadline of one of ``classes`` for each request, drawn by (seed,
    request): who is in which class does not depend on lengths, on policies or on other requests."""
    check_classes(classes)
    if not classes:
        return workload
    draws = [keyed_uniform(seed, "deadline-class", name) for name in workload.request_ids]
    edges = np.cumsum([one.share for one in classes])[:-1]
    which = np.searchsorted(edges, draws, side="right")
    deadline_s = np.array([one.deadline_s for one in classes])[which]
    return replace(workload, deadline_s=deadline_s)


def _names(classes: Sequence[DeadlineClass]) -> str:
    return ", ".join(one.name for one in classes)
