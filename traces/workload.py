"""Workload: arrivals x lengths, what an engine run is fed. The truth lives here only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.records import COHORTS

# what each array may hold, as numpy's kinds of dtype: whole numbers may stand for seconds
_KINDS = {
    "arrival_s": "fi",
    "prompt_tokens": "i",
    "output_tokens": "i",
    "max_tokens": "i",
    "priority": "i",
    "deadline_s": "fi",
    "cohort": "i",
    "capped": "b",
}
_KIND_NAMES = {"f": "seconds (floats)", "i": "whole numbers (integers)", "b": "booleans"}


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in arrival order; every array has shape (n,).

    ``output_tokens`` is what each request will write (the truth), ``max_tokens`` its cap.
    ``deadline_s`` is relative to arrival, NaN when there is none. ``cohort`` holds indices into
    contracts.records.COHORTS. ``run_ids`` name the decode runs behind the lengths, if any.
    ``capped`` marks requests whose run was cut at the cap. ``manifest`` says where all came from.
    ``prefix_groups``, shape (n, 2), holds a group id and how many leading prompt tokens are the
    group's: members have as many equal leading tokens as the smaller of their two numbers says.
    """

    name: str
    request_ids: tuple[str, ...]
    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    max_tokens: IntArray
    priority: IntArray
    deadline_s: FloatArray
    cohort: IntArray
    capped: np.ndarray
    run_ids: tuple[str, ...] | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    prefix_groups: IntArray | None = None

    def __len__(self) -> int:
        return len(self.request_ids)

    def __post_init__(self) -> None:
        count = len(self.request_ids)
        if not count:
            raise InvalidInput(f"workload {self.name!r} holds no request: give at least one")
        for name, kinds in _KINDS.items():
            self._check_array(name, kinds)
        self._check_names()
        self._check_ranges()
        self._check_prefixes()

    def _check_array(self, name: str, kinds: str) -> None:
        values, count = getattr(self, name), len(self)
        wanted = f"a numpy array of {_KIND_NAMES[kinds[0]]}, one a request"
        if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
            raise InvalidInput(
                f"workload {self.name!r}: {name} is {values!r:.60}; it must be {wanted}"
            )
        if values.shape != (count,):
            raise InvalidInput(
                f"workload {self.name!r}: {name} has shape {values.shape}, but there are {count} "
                f"requests: give {wanted}"
            )

    def _check_names(self) -> None:
        seen: set[str] = set()
        for row, name in enumerate(self.request_ids):
            if not isinstance(name, str):
                raise InvalidInput(
                    f"workload {self.name!r}: the request id of row {row} is {name!r}; it must be "
                    "a string"
                )
            if name in seen:
                raise InvalidInput(
                    f"workload {self.name!r}: request id {name!r} stands twice, again in row "
                    f"{row}: ids are not unique; rename one"
                )
            seen.add(name)
        if self.run_ids is not None and len(self.run_ids) != len(self):
            raise InvalidInput(
                f"workload {self.name!r}: there are {len(self.run_ids)} run_ids for {len(self)} "
                "requests: give one each, or None"
            )

    def _check_ranges(self) -> None:
        arrivals_rise = np.isfinite(self.arrival_s) & (np.diff(self.arrival_s, prepend=0.0) >= 0)
        rules = (
            (
                "arrival_s",
                ~arrivals_rise,
                "must be finite, at least 0 s, and must not fall below the arrival before it: sort "
                "the requests by arrival",
            ),
            ("prompt_tokens", self.prompt_tokens < 1, "must be at least 1: leave the request out"),
            ("output_tokens", self.output_tokens < 1, "must be at least 1: leave the request out"),
            (
                "output_tokens",
                self.output_tokens > self.max_tokens,
                "must not pass max_tokens: raise the cap, or cut the output there",
            ),
            ("deadline_s", self.deadline_s <= 0, "must be above 0 s, or NaN for none"),
            ("cohort", (self.cohort < 0) | (self.cohort >= len(COHORTS)), "must be 0, 1 or 2"),
        )
        for name, broken, rule in rules:
            if broken.any():
                row = int(np.flatnonzero(broken)[0])
                raise InvalidInput(
                    f"workload {self.name!r}, request {self.request_ids[row]!r}: "
                    f"{name} is {getattr(self, name)[row]}; it {rule}"
                )

    def _check_prefixes(self) -> None:
        groups = self.prefix_groups
        if groups is None:
            return
        if groups.shape != (len(self), 2):
            raise InvalidInput(
                f"workload {self.name!r}: prefix_groups has shape {groups.shape}; it must be "
                f"({len(self)}, 2): a group id and a number of shared tokens for each request"
            )
        broken = (groups < 0).any(axis=1) | (groups[:, 1] > self.prompt_tokens)
        if broken.any():
            row = int(np.flatnonzero(broken)[0])
            raise InvalidInput(
                f"workload {self.name!r}, request {self.request_ids[row]!r}: prefix_groups is "
                f"{groups[row].tolist()}; the group id must be at least 0, and the shared tokens "
                f"between 0 and the prompt's {self.prompt_tokens[row]}"
            )
