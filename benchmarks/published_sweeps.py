"""Two published sweeps over the KV pool, run again: what was published beside what we get.

    python -m benchmarks.published_sweeps [--seeds 10] [--with-async] [--json] [--figure F]

1. Preemptions against the admission watermark (vLLM pull request #44594): a closed loop of 128
   clients. In a closed loop every arrival is the end of another request, so seconds change no
   decision and the counts need no step-time model.
2. Recompute tax (recomputed / all computed tokens) against the number of KV blocks, and the order
   of four victim rules (vLLM RFC #54644): 300 requests, all there at the start.

What the sources state, what they leave open and how we chose it: docs/published_sweeps.md. Means
over seeds; a minute on one core, two more with ``--with-async``. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.published_setups import (
    CLOSED_LOOP,
    NUM_CLIENTS,
    ORDER,
    POOLS,
    READINGS,
    ROOFLINE,
    VARIANTS,
    WATERMARKS,
    Offline,
    served_prompts,
)
from contracts.policy import FloatArray, Policy
from serving_sim.config import EngineConfig
from serving_sim.engine import SimResult
from serving_sim.jump import Simulate, simulate_fast
from serving_sim.policies import get_policy
from serving_sim.profile import AffineProfile, StepProfile
from traces.workload import Workload


def closed_loop(
    workload: Workload,
    config: EngineConfig,
    profile: StepProfile,
    num_clients: int,
    *,
    run: Simulate = simulate_fast,
) -> SimResult:
    """Serve ``num_clients`` clients that each send the next request when their last one ended.

    ``workload`` gives the order and the lengths. A closed loop is a fixed point: the arrival of
    request ``num_clients + k`` is the k-th end. What happens up to an end depends on earlier
    arrivals only, so each pass makes one more arrival right; a queue that never empties hides
    arrivals from the scheduler, and a handful of passes is enough. Raises RuntimeError otherwise.
    """
    count = len(workload)
    arrival_s = np.zeros(count)
    for _ in range(count + 1):
        result = run(replace(workload, arrival_s=arrival_s), config, profile)
        following = np.zeros(count)
        following[num_clients:] = ends_s(result)[: max(0, count - num_clients)]
        if np.array_equal(following, arrival_s):
            return result
        arrival_s = following
    raise RuntimeError(f"the closed loop of {num_clients} clients found no fixed point")


def ends_s(result: SimResult) -> FloatArray:
    """Return when requests ended, earliest first; they all did."""
    return np.sort([record.end_s for record in result.records if record.end_s is not None])


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkRow:
    """A watermark: preemptions (mean, least, most) and times, means over seeds."""

    variant: str
    watermark: float
    preemptions: float
    least: int
    most: int
    tokens_per_s: float
    ttft_p50_s: float
    e2e_p50_s: float


def watermark_row(
    variant: str, watermark: float, seeds: Sequence[int], profile: StepProfile
) -> WatermarkRow:
    """Run one point of the first sweep."""
    base, num_clients = VARIANTS[variant]
    config = replace(base, watermark=watermark)
    results = [closed_loop(served_prompts(s), config, profile, num_clients) for s in seeds]
    counts = [result.num_preemptions for result in results]
    tokens_per_s, ttft_s, e2e_s = np.mean([_rate_and_medians(r) for r in results], axis=0).tolist()
    return WatermarkRow(
        variant=variant,
        watermark=watermark,
        preemptions=float(np.mean(counts)),
        least=min(counts),
        most=max(counts),
        tokens_per_s=tokens_per_s,
        ttft_p50_s=ttft_s,
        e2e_p50_s=e2e_s,
    )


def _rate_and_medians(result: SimResult) -> tuple[float, float, float]:
    """Return output tokens/s, and the medians of TTFT and E2E in seconds."""
    rows = [
        (r.first_token_s - r.arrival_s, r.end_s - r.arrival_s)
        for r in result.records
        if r.first_token_s is not None and r.end_s is not None
    ]
    ttft_s, e2e_s = np.median(rows, axis=0).tolist()
    return sum(r.output_tokens for r in result.records) / result.end_s, ttft_s, e2e_s


def fitted_profile(seed: int) -> AffineProfile:
    """Return the roofline plus the seconds a step that give the published tokens/s without
    watermark. One run is enough: seconds change no decision, and time is linear in them."""
    result = closed_loop(served_prompts(seed), CLOSED_LOOP, ROOFLINE, NUM_CLIENTS)
    wanted_s = sum(r.output_tokens for r in result.records) / WATERMARKS[0.0][1]
    more_s = (wanted_s - result.end_s) / result.num_steps
    return replace(ROOFLINE, name="fitted roofline", fixed_s=ROOFLINE.fixed_s + more_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaxRow:
    """A pool under one reading: mean over seeds of tax, recomputed tokens and preemptions, in
    the order of ORDER."""

    reading: str
    num_blocks: int
    tax: tuple[float, ...]
    recomputed_tokens: tuple[float, ...]
    preemptions: tuple[float, ...]

    @property
    def change(self) -> float | None:
        """Tokens that least-computed wastes relative to LIFO, minus 1; None if LIFO wastes none."""
        least, lifo = self.recomputed_tokens[:2]
        return least / lifo - 1 if lifo else None

    @property
    def is_ordered(self) -> bool:
        """Whether the four taxes stand in the published order."""
        return list(self.tax) == sorted(self.tax)


def tax_row(reading: str, num_blocks: int, seeds: Sequence[int]) -> TaxRow:
    """Run one point of the second sweep."""
    offline = READINGS[reading]
    columns = [_tax_of(get_policy(name), offline, num_blocks, seeds) for name in ORDER]
    tax, recomputed, preemptions = zip(*columns, strict=True)
    return TaxRow(
        reading=reading,
        num_blocks=num_blocks,
        tax=tax,
        recomputed_tokens=recomputed,
        preemptions=preemptions,
    )


def _tax_of(
    policy: Policy, offline: Offline, num_blocks: int, seeds: Sequence[int]
) -> tuple[float, float, float]:
    config = offline.config(num_blocks)
    runs = [simulate_fast(offline.workload(s), config, ROOFLINE, policy, seed=s) for s in seeds]
    return (
        float(np.mean([run.recomputed_tokens / run.computed_tokens for run in runs])),
        float(np.mean([run.recomputed_tokens for run in runs])),
        float(np.mean([run.num_preemptions for run in runs])),
    )


def run_sweeps(num_seeds: int, *, with_async: bool) -> tuple[list[WatermarkRow], list[TaxRow]]:
    """Run all. Asynchronous scheduling, which the step engine alone knows, takes one seed, and in
    the long closed loops only on demand."""
    profile = fitted_profile(0)
    first = []
    for variant, (config, _) in VARIANTS.items():
        if config.async_scheduling and not with_async:
            continue
        _tell(f"watermark sweep: {variant} ...")
        seeds = range(1 if config.async_scheduling else num_seeds)
        first += [watermark_row(variant, w, seeds, profile) for w in WATERMARKS]
    second = []
    for reading, offline in READINGS.items():
        _tell(f"recompute tax: {reading} ...")
        count = 1 if offline.async_scheduling else num_seeds
        seeds = range(12_345, 12_345 + count)  # the RFC's own seed first
        second += [tax_row(reading, num_blocks, seeds) for num_blocks in POOLS]
    return first, second


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run and print the tables."""
    from benchmarks.published_sweeps_report import print_tables, write_figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs of each point (default 10)")
    parser.add_argument("--with-async", action="store_true", help="closed loops with async, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not tables")
    parser.add_argument("--figure", type=Path, help="write the picture here (.png or .svg)")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}: give at least 1")
    first, second = run_sweeps(options.seeds, with_async=options.with_async)
    if options.json:
        rows = {"watermark": [asdict(r) for r in first], "tax": [asdict(r) for r in second]}
        print(json.dumps(rows, indent=1))
    else:
        print_tables(first, second)
    if options.figure is not None:
        write_figure(first, second, options.figure)
        _tell(f"wrote {options.figure}")


if __name__ == "__main__":
    main()
