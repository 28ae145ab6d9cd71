"""Wall time of the two engines on reasoning requests (long outputs, much preemption).

    python -m benchmarks.bench_engine [--requests 1000 10000 100000] [--step-up-to 1000]

The workload: random.Random(0); for each request a gap of expovariate(2.0) s, a prompt of
randint(200, 1000) tokens, an output of randint(2000, 10000). 27,500 KV blocks of 16 tokens, 256
sequences, 8,192 batched tokens, soft KV. "array lifo" is the built-in rule written as a policy of
the user's own: the same victims, each asked for in Python. First calls (compilation, or loading
what an earlier run compiled) are timed apart; single-stream seconds, which all cells of a workload
share, are part of the "first cell". Medians of ``--repeats`` runs, one process, one core.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from contracts.policy import FloatArray, Policy, RunningViews
from serving_sim.config import EngineConfig
from serving_sim.engine import SimResult, simulate
from serving_sim.jump import simulate_fast
from serving_sim.policies import get_policy
from serving_sim.profile import load_profile
from traces.workload import Workload

CONFIG = EngineConfig(num_blocks=27_500, max_num_seqs=256, max_num_batched_tokens=8192)
PROFILE = load_profile("rtx4090-llama-3.1-8b")


def _newest(views: RunningViews) -> FloatArray:
    return views.admission_seq.astype(np.float64)


POLICIES: dict[str, Policy | None] = {
    "built-in lifo": get_policy("lifo"),
    "array lifo": Policy("array lifo", _newest),
    "random": get_policy("random"),
    "largest-kv": get_policy("largest-kv"),
}


def reasoning_workload(count: int) -> Workload:
    """Return the first ``count`` requests of the generator above."""
    rng, clock_s = random.Random(0), 0.0
    rows = []
    for _ in range(count):
        clock_s += rng.expovariate(2.0)
        rows.append((clock_s, rng.randint(200, 1000), rng.randint(2000, 10_000)))
    arrival_s, prompt, output = zip(*rows, strict=True)
    return Workload(
        name=f"reasoning-{count}",
        request_ids=tuple(f"r{i:06d}" for i in range(count)),
        arrival_s=np.array(arrival_s),
        prompt_tokens=np.array(prompt),
        output_tokens=np.array(output),
        max_tokens=np.full(count, 10_000),
        priority=np.zeros(count, np.int64),
        deadline_s=np.full(count, np.nan),
        cohort=np.ones(count, np.int64),
        capped=np.zeros(count, bool),
    )


def timed(run: Callable[[], SimResult]) -> tuple[float, SimResult]:
    """Return (seconds, result) of one call."""
    start_s = time.perf_counter()
    result = run()
    return time.perf_counter() - start_s, result


def report(engine: str, count: int, policy: str, seconds: list[float], result: SimResult) -> None:
    """Print one row."""
    wall_s = median(seconds)
    tokens = sum(record.output_tokens for record in result.records)
    print(
        f"{engine:<5} {count:>8,} {policy:<14} {1000 * wall_s:>10,.1f} {result.num_steps:>11,} "
        f"{result.num_preemptions:>11,} {tokens / wall_s / 1e6:>14,.1f}"
    )


def main() -> None:
    """Run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--step-up-to", type=int, default=1000, help="largest step-engine run")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()

    small = reasoning_workload(20)
    warm_up_s, _ = timed(lambda: simulate_fast(small, CONFIG, PROFILE))
    print(f"first call, compiling or loading: {warm_up_s:.2f} s\n")
    print(f"{'':<5} {'requests':>8} {'policy':<14} {'wall ms':>10} {'steps':>11} "
          f"{'preemptions':>11} {'M out tokens/s':>14}")  # fmt: skip
    for count in options.requests:
        workload = reasoning_workload(count)
        first_s, result = timed(lambda: simulate_fast(workload, CONFIG, PROFILE))  # noqa: B023
        report("jump", count, "(first cell)", [first_s], result)
        repeats = options.repeats if count <= 10_000 else 1
        for name, policy in POLICIES.items():
            runs = [timed(lambda: simulate_fast(workload, CONFIG, PROFILE, policy))  # noqa: B023
                    for _ in range(repeats)]  # fmt: skip
            report("jump", count, name, [seconds for seconds, _ in runs], runs[0][1])
            if count <= options.step_up_to:
                seconds, expected = timed(lambda: simulate(workload, CONFIG, PROFILE, policy))  # noqa: B023
                report("step", count, name, [seconds], expected)
                assert expected == runs[0][1], "the engines disagree"


if __name__ == "__main__":
    main()
