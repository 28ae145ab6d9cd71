"""Two tables of docs/faults.md: what completed-only scoring hides, and loading against recomputing.

    python -m benchmarks.bench_faults [seeds]

The workload is the demo's (bundled runs, 7 requests a second, 600 tagged, deadline 5 s).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from eval.cells import Cell
from eval.matrix import prepare_seed, run_cell
from eval.matrix_config import MatrixConfig, Pressure
from eval.statistics import paired_difference
from preemptbench.demo import demo_matrix
from serving_sim.config import OffloadSettings
from serving_sim.engine import SimResult
from serving_sim.fault_rates import FaultRate, FaultSource
from traces.bundled import bundled_runs
from traces.runlog import read_runs

PRESSURE = Pressure("medium", 191)
FAILURE_RATES = (0.0, 0.02, 0.05, 0.1, 0.2)
GB_PER_S = (0.1, 1.0, 25.0)


def config_of(
    policies: tuple[str, ...], faults: FaultSource | None, offload: OffloadSettings | None
) -> MatrixConfig:
    config = demo_matrix(bundled_runs(), {}, policies=policies, pressures=(PRESSURE,))
    engine = replace(config.engine, offload=offload, enable_prefix_caching=offload is None)
    return replace(config, faults=faults, engine=engine, simulator="step")


def cells(config: MatrixConfig, policy: str, seeds: int) -> Iterator[tuple[Cell, SimResult]]:
    runs = list(read_runs(config.runs))
    for seed in range(seeds):
        inputs = prepare_seed(config, runs, seed)
        yield run_cell(config, inputs, PRESSURE, policy, "none", seed)


def failures(seeds: int) -> None:
    print("| failures | policy | breach of all accepted | late of those completed | failed |")
    print("| --- | --- | --- | --- | --- |")
    for share in FAILURE_RATES:
        rate = FaultRate(kind="failure", probability=share, mean_after_s=2.0)
        for policy in ("lifo", "random"):
            config = config_of((policy,), FaultSource(rates=(rate,)), None)
            scores = [cell.score for cell, _ in cells(config, policy, seeds)]
            breach, late, failed = (
                100 * float(np.mean(column))
                for column in (
                    [s.breach for s in scores],
                    [s.completed_only for s in scores],
                    [s.failed / s.accepted for s in scores],
                )
            )
            print(
                f"| {100 * share:g} % | {policy} | {breach:.1f} % | {late:.1f} % | {failed:.1f} % |"
            )


def loading(seeds: int) -> None:
    print("| link | rule | breach | vs recompute, pp [95 %] | recomputed | loaded | wait, s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    baseline: list[float] = []
    links = [OffloadSettings(bytes_per_s=math.inf, rule="always_recompute")]
    for gb_per_s in GB_PER_S:
        link = OffloadSettings(bytes_per_s=gb_per_s * 1e9, latency_s=1e-4)
        links += [link, replace(link, rule="cheaper")]
    for link in links:
        config = config_of(("lifo",), None, link)
        found = list(cells(config, "lifo", seeds))
        results = [result for _, result in found]
        loads = sum(r.loaded_tokens > 0 for result in results for r in result.records)
        name = "-" if link.rule == "always_recompute" else f"{link.bytes_per_s / 1e9:g} GB/s"
        breach = [100 * cell.score.breach for cell, _ in found]
        baseline = baseline or breach
        d = paired_difference(breach, baseline)
        print(
            f"| {name} | `{link.rule}` | {np.mean(breach):.1f} % "
            f"| {d.mean:+.1f} [{d.low:+.1f}, {d.high:+.1f}] "
            f"| {np.mean([r.recomputed_tokens for r in results]):,.0f} "
            f"| {np.mean([r.loaded_tokens for r in results]):,.0f} "
            f"| {sum(r.load_s for r in results) / max(1, loads):.3f} |"
        )


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    failures(seeds)
    print()
    loading(seeds)


if __name__ == "__main__":
    main()
