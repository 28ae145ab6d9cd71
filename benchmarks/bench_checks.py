"""What the laws cost that the step engine checks while it runs (``checks=True``, the default).

    python -m benchmarks.bench_checks [--requests 1000] [--repeats 5]

Two workloads: the reasoning requests of benchmarks/bench_engine.py, and prompts that share prefixes
(many moves of blocks: short outputs, long common prefixes, a pool that is always full). Runs with
and without checks take turns, and CPU seconds of the process are counted, so that a busy machine
slows both alike; the minimum of each counts. The bar is 10 %.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace

import numpy as np

from benchmarks.bench_engine import CONFIG, PROFILE, reasoning_workload
from serving_sim.config import EngineConfig
from serving_sim.engine import SimResult, simulate
from traces.workload import Workload

BAR = 0.10
PREFIX_CONFIG = EngineConfig(num_blocks=600, max_num_seqs=64, max_num_batched_tokens=4096)


def prefix_workload(count: int) -> Workload:
    """Return ``count`` prompts of 200 to 1,000 tokens in 20 groups, each with a common half, that
    write 20 to 200 tokens and arrive twenty a second."""
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(200, 1001, count), rng.integers(20, 201, count)
    groups = np.stack([rng.integers(0, 20, count), prompt // 2], axis=1)
    return replace(
        reasoning_workload(count),
        name=f"prefixes-{count}",
        arrival_s=np.cumsum(rng.exponential(0.05, count)),
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=np.full(count, 200),
        prefix_groups=groups,
    )


def compare(
    workload: Workload, config: EngineConfig, repeats: int
) -> tuple[list[float], SimResult]:
    """Return the least CPU seconds without and with checks, of interleaved runs, and the result."""
    best_s = [np.inf, np.inf]
    results: list[SimResult] = []
    for _ in range(repeats):
        for checks in (False, True):
            gc.collect()
            start_s = time.process_time()
            results.append(simulate(workload, config, PROFILE, checks=checks))
            best_s[checks] = min(best_s[checks], time.process_time() - start_s)
    assert all(result == results[0] for result in results), "checks changed a result"
    return best_s, results[0]


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("CPU seconds, the least of", options.repeats)
    print(f"| workload | steps | preemptions | without, s | with, s | cost (bar {BAR:.0%}) |")
    print("| --- | --- | --- | --- | --- | --- |")
    cases = (
        (prefix_workload(options.requests), PREFIX_CONFIG),
        (reasoning_workload(options.requests), CONFIG),
    )
    for workload, config in cases:
        (without_s, with_s), result = compare(workload, config, options.repeats)
        print(
            f"| {workload.name} | {result.num_steps:,} | {result.num_preemptions:,} "
            f"| {without_s:.2f} | {with_s:.2f} | {with_s / without_s - 1:+.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
