"""Small versions of the two published sweeps (benchmarks/published_sweeps.py), seeds stated."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.published_setups import (
    AFTERWARDS,
    BEFOREHAND,
    ORDER,
    ROOFLINE,
    Offline,
    requests,
    uniform,
)
from benchmarks.published_sweeps import closed_loop, ends_s
from serving_sim.config import EngineConfig
from serving_sim.engine import SimResult
from serving_sim.jump import simulate_fast
from serving_sim.policies import get_policy
from serving_sim.profile import AffineProfile
from traces.workload import Workload

NUM_CLIENTS = 24
# the mean demand, 24 x (60 + 300 / 2) tokens, is 1.4 times the pool; published: 1.5 times
SMALL = EngineConfig(num_blocks=220, max_num_batched_tokens=1024, enable_prefix_caching=False)


def prompts(seed: int) -> Workload:
    """Return 80 requests of about 60 tokens in and 300 out, each +-20 %."""
    rng = np.random.default_rng(seed)
    return requests(uniform(rng, 60, 0.2, 80), uniform(rng, 300, 0.2, 80))


def served(seed: int, watermark: float = 0.0, profile: AffineProfile = ROOFLINE) -> SimResult:
    return closed_loop(prompts(seed), replace(SMALL, watermark=watermark), profile, NUM_CLIENTS)


def test_a_closed_loop_keeps_each_client_busy_with_one_request() -> None:
    result = served(0)
    arrivals = sorted(record.arrival_s for record in result.records)
    assert arrivals[:NUM_CLIENTS] == [0.0] * NUM_CLIENTS
    assert arrivals[NUM_CLIENTS:] == ends_s(result)[: 80 - NUM_CLIENTS].tolist()


def test_in_a_closed_loop_seconds_change_no_decision() -> None:
    """Every arrival is an end, so it falls on the same step whatever steps cost: the counts of the
    watermark sweep owe nothing to a step-time model."""
    slow = AffineProfile("another shape", 0.5, 1e-2, 0.0, 1e-3)
    one, other = served(0), served(0, profile=slow)
    assert one.num_steps == other.num_steps
    assert one.end_s != other.end_s
    for record, twin in zip(one.records, other.records, strict=True):
        assert record.num_preemptions == twin.num_preemptions
        assert record.recomputed_tokens == twin.recomputed_tokens


def test_preemptions_fall_with_the_watermark() -> None:
    """Blocks that admission leaves free are the ones that those who run grow into. It holds on
    average only: a single run may be unlucky. Means over seeds 0 to 7."""
    watermarks = (0.0, 0.02, 0.05, 0.1)
    means = [np.mean([served(s, w).num_preemptions for s in range(8)]) for w in watermarks]
    assert all(more >= less for more, less in pairwise(means))
    assert means[0] > 2 * means[-1]  # published: 1065 to 168


@pytest.mark.parametrize("offline", [BEFOREHAND, AFTERWARDS], ids=["beforehand", "afterwards"])
def test_the_tax_of_four_rules_stands_in_the_published_order(offline: Offline) -> None:
    """least-computed throws away least at each eviction, most-computed most; LIFO evicts those that
    were admitted last, who have computed less than a random one. Means over 12 seeds from 12345, a
    third of the requests and a tight pool."""
    config = offline.config(400)
    taxes = []
    for name in ORDER:
        runs = [
            simulate_fast(offline.workload(s, 100), config, ROOFLINE, get_policy(name), seed=s)
            for s in range(12_345, 12_357)
        ]
        taxes.append(np.mean([run.recomputed_tokens / run.computed_tokens for run in runs]))
    assert all(less < more for less, more in pairwise(taxes))


def test_the_tax_of_lifo_grows_as_the_pool_shrinks() -> None:
    """Means over 3 seeds from 12345; 2,800 blocks hold 64 requests of the mean length."""
    means, seeds = [], range(12_345, 12_348)
    for num_blocks in (2800, 1600, 800, 400):
        config = AFTERWARDS.config(num_blocks)
        runs = [simulate_fast(AFTERWARDS.workload(s), config, ROOFLINE) for s in seeds]
        means.append(np.mean([run.recomputed_tokens / run.computed_tokens for run in runs]))
    assert means[0] == 0.0
    assert all(less < more for less, more in pairwise(means))
