"""Random driver workloads, each wholly drawn from its number: small, crowded, and varied."""

from __future__ import annotations

import random
from typing import Any

Row = dict[str, Any]


def random_workload(number: int, *, special: bool) -> dict[str, Any]:
    """Return a workload; a ``special`` one has shared prefixes, own stops, the newest settings."""
    rng = random.Random(f"conformance-{number}-{special}")
    block_size = rng.choice([8, 16, 32])
    rows = _requests(rng)
    if special:
        _share_prefixes(rng, rows, block_size)
    most_tokens = max(row["prompt"] + row.get("max_tokens", row["output"]) for row in rows)
    max_model_len = most_tokens + rng.choice([0, 1, 100])
    if rng.random() < 0.2:  # some end at the model's length
        max_model_len = max(row["prompt"] for row in rows) + rng.randint(1, 40)
    largest_blocks = -(-min(most_tokens, max_model_len) // block_size)
    chunked = rng.random() < 0.85
    budget = rng.choice([16, 64, 128, 512, 2048])
    if not chunked:
        budget = max(budget, max_model_len)
    engine = {
        "num_blocks": largest_blocks + 1 + int(largest_blocks * rng.choice([0, 0.2, 0.5, 1, 2, 5])),
        "block_size": block_size,
        "max_num_seqs": min(budget, rng.choice([1, 2, 4, 8, 16, 64])),
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "policy": rng.choice(["fcfs", "priority"]),
        "enable_prefix_caching": special or rng.random() < 0.6,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": min(max_model_len, rng.choice([0, 0, 5, 24, 60])),
        "async_scheduling": rng.random() < 0.5,
        "reserve_full_isl": rng.random() < 0.6,
        "watermark": rng.choice([0.0, 0.0, 0.01, 0.1, 0.25]),
        "t_fixed": rng.choice([0.0, 0.008, 0.05]),
    }
    if special:
        engine["long_prefill_token_threshold_adaptive"] = rng.random() < 0.3
    return {"engine": engine, "requests": rows}


def _requests(rng: random.Random) -> list[Row]:
    """Requests in bursts; equal arrivals and equal priorities are common."""
    longest_prompt = rng.choice([10, 60, 200, 400])
    longest_output = rng.choice([4, 40, 120])
    num_priorities = rng.choice([1, 2, 4])
    pause_s = rng.choice([0.0, 0.05, 0.3, 3.0])
    rows: list[Row] = []
    arrival_s = 0.0
    for index in range(rng.randint(1, 30)):
        if rng.random() < 0.5:
            arrival_s += round(rng.expovariate(1.0) * pause_s, 4)
        rows.append(
            {
                "id": f"r{index:03d}",
                "prompt": rng.randint(1, longest_prompt),
                "output": rng.randint(1, longest_output),
                "arrival": arrival_s,
                "priority": rng.randrange(num_priorities),
            }
        )
    return rows


def _share_prefixes(rng: random.Random, rows: list[Row], block_size: int) -> None:
    """Put most requests into a few groups; let some stop before their cap."""
    num_groups = rng.randint(1, 3)
    for row in rows:
        if rng.random() < 0.8:
            row["prefix_group"] = rng.randrange(num_groups)
            whole_blocks = row["prompt"] // block_size * block_size
            row["shared"] = rng.choice([row["prompt"], whole_blocks, rng.randint(0, row["prompt"])])
        if rng.random() < 0.5:
            row["max_tokens"] = row["output"] + rng.choice([0, 1, 2, 30])
