"""Wall time of the engines, ours and vLLM's own scheduler, on reasoning requests in one run.

    python -m benchmarks.bench_engine [--repeats 9] [--curve 1000 10000 100000] [--million]
                                      [--no-step] [--no-vllm]

The workload: random.Random(0); for each request a gap of expovariate(2.0) s, a prompt of
randint(200, 1000) tokens, an output of randint(2000, 10000). 27,500 KV blocks of 16 tokens, 256
sequences, 8,192 batched tokens, no prefix caching, and the step time of the vLLM driver
(0.008 s + 1e-4 s a token + 2e-8 s a KV token), so that steps and preemptions can be compared.

The real scheduler runs in the environment that PREEMPTBENCH_VLLM_ENV names (`make bench` sets it:
VLLM_ENV, by default out/vllm-env, which `make conformance` installs), driven by vllm_driver.py of
PREEMPTBENCH_TOOLS. Where it is absent the rest runs, and a line says so. Single-stream seconds,
which all cells of a workload share, are computed by the first cell and timed apart. On a machine
that others use, compare the processor's seconds: they are what the wall shows when it is quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from contracts.policy import FloatArray, Policy, RunningView, RunningViews, from_rows
from contracts.signals import RemainingGrid
from serving_sim.config import EngineConfig
from serving_sim.engine import SimResult, simulate
from serving_sim.jump import simulate_fast
from serving_sim.policies import get_policy, list_policies
from serving_sim.profile import AffineProfile
from traces.workload import Workload

CONFIG = EngineConfig(
    num_blocks=27_500, max_num_seqs=256, max_num_batched_tokens=8192, enable_prefix_caching=False
)
PROFILE = AffineProfile("vllm_driver.py", fixed_s=0.008, per_token_s=1e-4, per_context_token_s=2e-8)
BAR_RATIO = 2500
TOOLS = Path(__file__).parents[2] / "shared" / "tools"


def _newest(views: RunningViews) -> FloatArray:
    return views.admission_seq.astype(np.float64)


def _newest_of_many(view: RunningView) -> float:
    return float(int(float(view.admission_seq)))  # int() is what is not compiled


def _own(view: RunningView) -> float:
    """Holds its place longest, less the prefill that the eviction wastes (seconds)."""
    wasted_s = view.computed_tokens * view.prefill_s_per_token
    return view.remaining * view.recent_tpot_s - wasted_s


def _cells() -> dict[str, tuple[str, Policy | None]]:
    names = ["lifo", *sorted(n for n in list_policies() if "(" not in n and n != "lifo")]
    cells: dict[str, tuple[str, Policy | None]] = {"engine's own rule": ("built in", None)}
    cells |= {name: ("built in", get_policy(name)) for name in (*names, "young(0.25)")}
    cells["own, compiled"] = ("compiled", from_rows("own", _own, reads_signal=True))
    cells["array"] = ("called", Policy("array", _newest))
    cells["scalar, not compiled"] = ("called", from_rows("scalar", _newest_of_many))
    return cells


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


def clairvoyant_grid(workload: Workload, stride: int = 64) -> RemainingGrid:
    """Return the truth as a signal: for speed, it matters only that one is read."""
    slots = workload.output_tokens // stride + 1
    offsets = np.concatenate([[0], np.cumsum(slots)])
    ages = np.arange(offsets[-1]) - np.repeat(offsets[:-1], slots)
    remaining = np.repeat(workload.output_tokens, slots) - stride * ages
    remaining = np.maximum(1.0, remaining)
    return RemainingGrid(
        "clairvoyant", stride, offsets, remaining, remaining, 0.9,
        (frozenset(),), np.zeros(len(workload), np.int64), clairvoyant=True,
    )  # fmt: skip


class Seconds(NamedTuple):
    """What a call took: on the wall, and of the processor (all runs are of one thread)."""

    wall: float
    cpu: float


def timed(run: Callable[[], SimResult]) -> tuple[Seconds, SimResult]:
    """Return (seconds, result) of one call."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = run()
    return Seconds(time.perf_counter() - wall_s, time.process_time() - cpu_s), result


def least(seconds: Sequence[Seconds]) -> Seconds:
    """Return the least wall and the least processor seconds."""
    return Seconds(min(s.wall for s in seconds), min(s.cpu for s in seconds))


def bench_cells(workload: Workload, repeats: int) -> tuple[Seconds, SimResult]:
    """Print a row for each policy; return the least seconds and the result of the engine's own."""
    grid = clairvoyant_grid(workload)
    cells: list[tuple[Seconds, SimResult]] = []
    print(f"{'policy':<22}{'how':<10}{'first ms':>10}{'median ms':>11}{'least ms':>10}"
          f"{'CPU ms':>8}{'steps':>9}{'preemptions':>13}")  # fmt: skip
    for name, (how, policy) in _cells().items():
        signal = grid if policy is not None and policy.reads_signal else None
        run = partial(simulate_fast, workload, CONFIG, PROFILE, policy, signal=signal)
        runs = [timed(run) for _ in range(repeats + 1)]
        first, *others = (seconds for seconds, _ in runs)
        result, best = runs[0][1], least(others)
        cells.append((best, result))
        middle = median(s.wall for s in others)
        print(f"{name:<22}{how:<10}{1000 * first.wall:>10.1f}{1000 * middle:>11.1f}"
              f"{1000 * best.wall:>10.1f}{1000 * best.cpu:>8.1f}{result.num_steps:>9,}"
              f"{result.num_preemptions:>13,}", flush=True)  # fmt: skip
    return cells[0]


def bench_checks(workload: Workload, repeats: int) -> None:
    """Print what the law checks cost: runs with and without them, taken in turns."""
    both: dict[bool, list[Seconds]] = {True: [], False: []}
    for _ in range(repeats):
        for checks, seconds in both.items():
            run = partial(simulate_fast, workload, CONFIG, PROFILE, checks=checks)
            seconds.append(timed(run)[0])
    on_s, off_s = least(both[True]).cpu, least(both[False]).cpu
    print(f"\nlaws checked: {1000 * on_s:.1f} CPU ms, unchecked: {1000 * off_s:.1f} "
          f"({100 * (on_s / off_s - 1):+.1f} %)", flush=True)  # fmt: skip


def bench_step(workload: Workload, jump: Seconds, expected: SimResult) -> None:
    """Time the step engine, which must give the same result."""
    seconds, result = timed(lambda: simulate(workload, CONFIG, PROFILE))
    assert result == expected, "the engines disagree"
    print_ratio("step engine", seconds, jump)


def print_ratio(name: str, theirs: Seconds, jump: Seconds) -> None:
    """Print another engine's seconds beside the jump engine's least ones."""
    print(f"{name}: {theirs.wall:.1f} s, {theirs.cpu:.1f} CPU s: {theirs.wall / jump.wall:,.0f}x "
          f"the jump engine on the wall, {theirs.cpu / jump.cpu:,.0f}x in CPU time",
          flush=True)  # fmt: skip


def bench_vllm(jump: Seconds, ours: SimResult) -> None:
    """Time the real scheduler on the same requests, and compare what it did."""
    python = Path(os.environ.get("PREEMPTBENCH_VLLM_ENV", "out/vllm-env")) / "bin" / "python"
    driver = Path(os.environ.get("PREEMPTBENCH_TOOLS", TOOLS)) / "vllm_driver.py"
    if not (python.is_file() and driver.is_file()):
        print(f"real vLLM scheduler: not run, {python} or {driver} is absent (make conformance "
              "installs it)")  # fmt: skip
        return
    try:
        start_up_s, _ = _child(python, "-c", "import vllm.v1.core.sched.scheduler")
        cpu_s, lines = _child(python, str(driver), "reason1000", "--stub")
    except subprocess.CalledProcessError as error:
        print(f"real vLLM scheduler: failed: {error.stderr.strip().splitlines()[-1:]}")
        return
    theirs, version = map(json.loads, lines[-2:])
    seconds = Seconds(theirs["wall_total"], cpu_s - start_up_s)
    print_ratio(f"vLLM {version['vllm']} scheduler (bar {BAR_RATIO:,}x)", seconds, jump)
    for what, own in (("steps", ours.num_steps), ("preemptions", ours.num_preemptions)):
        verdict = "equal" if own == theirs[what] else "DIFFERENT"
        print(f"  {what}: ours {own:,}, vLLM's {theirs[what]:,}: {verdict}", flush=True)


def _child(*command: str | Path) -> tuple[float, list[str]]:
    """Run a command; return its processor seconds and its lines."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu_s, done.stdout.strip().splitlines()


def bench_curve(counts: list[int]) -> None:
    """Print seconds and memory against the number of requests."""
    print(f"\n{'requests':>10}{'first cell s':>14}{'second s':>10}{'CPU s':>9}"
          f"{'CPU us/request':>16}{'steps':>12}{'peak RSS MB':>13}")  # fmt: skip
    for count in counts:
        workload = reasoning_workload(count)
        run = partial(simulate_fast, workload, CONFIG, PROFILE)
        (first, result), (second, _) = timed(run), timed(run)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{count:>10,}{first.wall:>14.3f}{second.wall:>10.3f}{second.cpu:>9.3f}"
              f"{1e6 * second.cpu / count:>16.1f}{result.num_steps:>12,}{peak_mb:>13,.0f}",
              flush=True)  # fmt: skip


def main() -> None:
    """Run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--curve", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--million", action="store_true", help="add 1,000,000 to the curve")
    parser.add_argument("--no-step", action="store_true", help="leave out the step engine")
    parser.add_argument("--no-vllm", action="store_true", help="leave out the real scheduler")
    options = parser.parse_args()
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    warm_up, _ = timed(lambda: simulate_fast(reasoning_workload(20), CONFIG, PROFILE))
    print(f"load average {load} on {os.cpu_count()} cores; first call, compiling or loading: "
          f"{warm_up.wall:.2f} s\n")  # fmt: skip
    workload = reasoning_workload(1000)
    jump, result = bench_cells(workload, options.repeats)
    bench_checks(workload, options.repeats)
    if not options.no_step:
        bench_step(workload, jump, result)
    if not options.no_vllm:
        bench_vllm(jump, result)
    bench_curve(options.curve + [1_000_000] * options.million)


if __name__ == "__main__":
    main()
