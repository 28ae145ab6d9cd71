"""Workload: arrivals x lengths, what an engine run is fed. The truth lives here only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.records import COHORTS


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
        for name in (
            "arrival_s", "prompt_tokens", "output_tokens", "max_tokens",
            "priority", "deadline_s", "cohort", "capped",
        ):  # fmt: skip
            if getattr(self, name).shape != (count,):
                raise InvalidInput(
                    f"workload {self.name!r}: {name} has shape {getattr(self, name).shape}, "
                    f"but there are {count} requests"
                )
        if not count:
            raise InvalidInput(f"workload {self.name!r} holds no request")
        if len(set(self.request_ids)) != count:
            raise InvalidInput(f"workload {self.name!r}: request ids are not unique")
        self._check_ranges()
        self._check_prefixes()

    def _check_ranges(self) -> None:
        rules = (
            ("arrival_s", ~(np.diff(self.arrival_s, prepend=0.0) >= 0), "must not fall"),
            ("prompt_tokens", self.prompt_tokens < 1, "must be at least 1"),
            ("output_tokens", self.output_tokens < 1, "must be at least 1"),
            ("output_tokens", self.output_tokens > self.max_tokens, "must not pass max_tokens"),
            ("deadline_s", self.deadline_s <= 0, "must be above 0 s"),
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
