"""The requests of a driver file: JSON objects, checked one by one, and the workload they make.

A request has an ``id``, a ``prompt`` and an ``output`` in tokens; ``arrival`` (0 s), ``priority``
(0, as in vLLM), ``max_tokens`` (the output) and a ``prefix_group`` with ``shared`` leading tokens
may follow.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from contracts.records import COHORTS
from traces.workload import Workload

_MAX = 2**53
_ROW_KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    "id": ((str,), "a string"),
    "prompt": ((int,), "a whole number of tokens from 1 to 2**53"),
    "output": ((int,), "a whole number of tokens from 1 to 2**53"),
    "max_tokens": ((int,), "a whole number of tokens from output to 2**53"),
    "arrival": ((int, float), "finite seconds, at least 0"),
    "priority": ((int,), "a whole number; the smallest goes first"),
    "prefix_group": ((int,), "a whole number >= 0"),
    "shared": ((int,), "a whole number of tokens from 0 to 2**53"),
}


def check_row(row: Any, where: str) -> None:
    """Refuse a request whose fields are not what the driver's are. One without a priority has 0,
    as in vLLM."""
    for key in ("id", "prompt", "output"):
        if not isinstance(row, dict) or key not in row:
            raise InvalidInput(f"{where} has no {key!r}: {row!r:.80}")
    for key, value in row.items():
        if key not in _ROW_KEYS:
            raise unknown_name(f"field in {where}:", key, _ROW_KEYS)
        kinds, wanted = _ROW_KEYS[key]
        is_kind = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_kind or not _is_in_range(value):
            raise InvalidInput(f"{where}: {key} is {value!r:.80}; it must be {wanted}")


def workload_of(name: str, rows: list[Any]) -> Workload:
    """Return the checked ``rows``, in arrival order, as a workload without deadlines."""
    rows = sorted(rows, key=lambda row: row.get("arrival", 0.0))
    count = len(rows)
    return Workload(
        name=name,
        request_ids=tuple(row["id"] for row in rows),
        arrival_s=np.array([row.get("arrival", 0.0) for row in rows], dtype=np.float64),
        prompt_tokens=np.array([row["prompt"] for row in rows], dtype=np.int64),
        output_tokens=np.array([row["output"] for row in rows], dtype=np.int64),
        max_tokens=np.array([row.get("max_tokens", row["output"]) for row in rows], np.int64),
        priority=np.array([row.get("priority", 0) for row in rows], dtype=np.int64),
        deadline_s=np.full(count, np.nan),
        cohort=np.full(count, COHORTS.index("tagged")),
        capped=np.zeros(count, dtype=bool),
        manifest={"source": name},
        prefix_groups=_prefix_groups(rows),
    )


def _prefix_groups(rows: list[Any]) -> np.ndarray | None:
    """Return shape (n, 2), or None when no request names a group."""
    if not any("prefix_group" in row for row in rows):
        return None
    pairs = [(row.get("prefix_group", 0), row.get("shared", 0)) for row in rows]
    return np.array(pairs, dtype=np.int64)


def request_rows(workload: Workload) -> list[dict[str, Any]]:
    """Return the requests of ``workload`` as a driver file holds them."""
    columns = {
        "id": workload.request_ids,
        "prompt": workload.prompt_tokens.tolist(),
        "output": workload.output_tokens.tolist(),
        "max_tokens": workload.max_tokens.tolist(),
        "arrival": workload.arrival_s.tolist(),
        "priority": workload.priority.tolist(),
    }
    if workload.prefix_groups is not None:
        columns["prefix_group"], columns["shared"] = workload.prefix_groups.T.tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _is_in_range(value: object) -> bool:
    """Say whether a number is finite and whole ones are exact as floats too."""
    return not isinstance(value, int | float) or (math.isfinite(value) and abs(value) <= _MAX)
