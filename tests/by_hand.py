"""Workloads small enough to check by hand: what a test of one engine rule starts from."""

from __future__ import annotations

import numpy as np

from traces.workload import Workload


def workload(
    prompt: list[int],
    output: list[int],
    arrival: list[float] | None = None,
    cap: int | list[int] = 64,
) -> Workload:
    count = len(prompt)
    return Workload(
        name="by hand",
        request_ids=tuple("abcdefgh"[:count]),
        arrival_s=np.array(arrival or [0.0] * count),
        prompt_tokens=np.array(prompt),
        output_tokens=np.array(output),
        max_tokens=np.full(count, cap),
        priority=np.zeros(count, np.int64),
        deadline_s=np.full(count, 10.0),
        cohort=np.ones(count, np.int64),
        capped=np.zeros(count, bool),
    )
