"""What the scheduler class costs inside vLLM, in microseconds a step, at 256 running requests.

    PREEMPTBENCH_VLLM_ENV=/path/to/env python -m benchmarks.bench_signal_scheduler

The same workload (1,024 requests, a pool that is always short) is planned by vLLM's own scheduler
and by ours, in turns, in one process, without the garbage collector: CPU time of the planning
thread, on steps with at least 200 running requests. *Hook* is ours with ``lifo`` less vLLM's own,
less what its chooser takes (timed in runs of its own, as the timing costs something too): the two
plan the same steps, so each step is compared with itself. *Least* takes the smallest time of each
step over the repetitions, *median* the median. *Decide* is what the chooser took (asking the
predictor ahead, choosing, counting). Hook and decide are the overhead of a policy. No GPU and no
model. Without numba in vLLM's environment (its GPU packages bring it), gbm-hazard is answered by
numpy: the table says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

ROOT = Path(__file__).resolve().parents[1]
NUM_RUNNING = 256
MANY_RUN = 200  # steps with fewer running requests are not counted
ENGINE = {
    "num_blocks": 5200, "block_size": 16, "max_num_seqs": NUM_RUNNING,
    "max_num_batched_tokens": 8192, "max_model_len": 4096, "async_scheduling": True,
}  # fmt: skip
POLICIES = ("lifo", "least-computed", "largest-kv", "random", "sglang-retract", "longest-remaining")


def workload() -> dict[str, Any]:
    """Return requests that keep the seats full and the pool short."""
    rng = random.Random(0)
    rows = [
        {"id": f"r{i:04d}", "prompt": rng.randint(32, 96), "output": rng.randint(200, 600)}
        for i in range(4 * NUM_RUNNING)
    ]
    return {"engine": ENGINE, "requests": rows}


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


def measure(environ: dict[str, str] | None, max_steps: int, *, watch: bool) -> dict[str, Any]:
    """Plan the workload once; return CPU seconds by step, what the chooser counted and, with
    ``watch``, how long it took."""
    from benchmarks.vllm_prefix_driver import Run

    for key in [key for key in os.environ if key.startswith("PREEMPTBENCH_")]:
        del os.environ[key]
    load = workload()
    if environ is not None:
        os.environ.update(environ)
        load["engine"] = ENGINE | {"scheduler_cls": "integrations.vllm_scheduler.SignalScheduler"}
    run = Run(load, cast(TextIO, _Nowhere()))
    plan, seconds, crowded = run.scheduler.schedule, [], []
    spent_s = watch_chooser(run.scheduler.chooser) if watch else [0.0]

    def timed() -> Any:
        start_s = time.thread_time()
        planned = plan()
        seconds.append(time.thread_time() - start_s)
        crowded.append(len(run.scheduler.running) >= MANY_RUN)
        return planned

    run.scheduler.schedule = timed
    gc.collect()
    gc.disable()
    try:
        run.play(max_steps)
    finally:
        gc.enable()
    chooser = run.scheduler.chooser if environ is not None else None
    counters = chooser.counters.as_dict() if chooser is not None else {}
    counters["chooser_seconds"] = spent_s[0]
    return {"seconds": seconds, "crowded": crowded, "counters": counters}


def watch_chooser(chooser: Any) -> list[float]:
    """Return a list whose one number grows by the CPU seconds that the chooser takes."""
    spent_s = [0.0]

    def timed(call: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            start_s = time.thread_time()
            answer = call(*args)
            spent_s[0] += time.thread_time() - start_s
            return answer

        return wrapper

    for name in ("prepare", "choose", "planned"):
        setattr(chooser, name, timed(getattr(chooser, name)))
    return spent_s


def inside(repeats: int, max_steps: int, checkpoints: list[str]) -> None:
    """Measure in vLLM's environment; print one JSON object."""
    import importlib.util

    import vllm

    environs: dict[str, dict[str, str] | None] = {
        "stock": None,
        "unwatched": {"PREEMPTBENCH_POLICY": "lifo"},
    }
    for policy in POLICIES:
        for checkpoint in checkpoints if policy == "longest-remaining" else [""]:
            name = f"{policy} {Path(checkpoint).name}".strip()
            environs[name] = {"PREEMPTBENCH_POLICY": policy, "PREEMPTBENCH_CHECKPOINT": checkpoint}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in environs}
    measure(
        None, max_steps // 4, watch=False
    )  # what is imported or compiled at first is not measured
    for _ in range(repeats):
        for name, environ in environs.items():
            watch = name not in ("stock", "unwatched")
            runs[name].append(measure(environ, max_steps, watch=watch))
    has_numba = importlib.util.find_spec("numba") is not None
    rows = [row_of(name, runs) for name in list(runs)[2:]]
    print(json.dumps({"vllm": vllm.__version__, "numba": has_numba, "rows": rows}))


def row_of(name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the overhead of one policy, in microseconds a step."""
    steps = [i for i, full in enumerate(runs["lifo"][0]["crowded"]) if full]
    hook = {}
    for way, of_times in (("least", min), ("median", statistics.median)):
        stock, lifo = (by_step(runs[one], of_times, steps) for one in ("stock", "unwatched"))
        hook[way] = lifo - stock - of_times(decide_us(runs["lifo"]))
    decide = decide_us(runs[name])
    counters = min((run["counters"] for run in runs[name]), key=lambda c: c["chooser_seconds"])
    return {
        "policy": name,
        "crowded_steps": len(steps),
        "stock_us": by_step(runs["stock"], min, steps),
        "hook_us": hook["least"],
        "decide_us": min(decide),
        "least_us": hook["least"] + min(decide),
        "median_us": hook["median"] + statistics.median(decide),
        "worst_step_us": min(max(run["seconds"]) * 1e6 for run in runs[name]),
        "decisions_per_step": counters["decisions"] / counters["steps"],
        "old": counters["old_answers"],
        "late": counters["fallback_late"],
    }


def by_step(
    runs: list[dict[str, Any]], of_times: Callable[[Any], float], steps: list[int]
) -> float:
    """Return the mean over ``steps`` of one of each step's times, in microseconds; all repetitions
    plan the same steps."""
    times = list(zip(*(run["seconds"] for run in runs), strict=True))
    return 1e6 * sum(of_times(times[i]) for i in steps) / len(steps)


def decide_us(runs: list[dict[str, Any]]) -> list[float]:
    """Return the microseconds a step that choosing took, in each repetition."""
    counters = [run["counters"] for run in runs]
    return [1e6 * c["chooser_seconds"] / c["steps"] for c in counters]


def make_checkpoints(folder: Path) -> list[str]:
    """Fit age-km and gbm-hazard (its default size) on synthetic runs."""
    from predictors.age_km import AgeKmSettings
    from predictors.gbm_hazard import GbmHazardSettings
    from tests.synthetic_runs import synthetic_runs
    from training.rows import training_set

    training = training_set(synthetic_runs(num_prompts=200, cap_tokens=600))
    paths = [folder / "age-km", folder / "gbm-hazard"]
    AgeKmSettings().fit(training).save_pretrained(paths[0])
    GbmHazardSettings().fit(training).save_pretrained(paths[1])
    return [str(path) for path in paths]


def main() -> None:
    """Run the benchmark, or, in vLLM's environment, its inner half."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--inside", nargs="*", metavar="CHECKPOINT")
    options = parser.parse_args()
    if options.inside is not None:
        inside(options.repeats, options.steps, options.inside)
        return
    env = os.environ.get("PREEMPTBENCH_VLLM_ENV")
    if not env or not Path(env, "bin/python").exists():
        print("PREEMPTBENCH_VLLM_ENV names no environment with vLLM: make conformance makes one")
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [f"{env}/bin/python", "-m", "benchmarks.bench_signal_scheduler"]
        command += ["--repeats", str(options.repeats), "--steps", str(options.steps), "--inside"]
        command += make_checkpoints(Path(folder))
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    show(json.loads(done.stdout.splitlines()[-1]))


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    print(f"vLLM {found['vllm']}, numba {'present' if found['numba'] else 'absent'}; us a step")
    columns = ("stock_us", "hook_us", "decide_us", "least_us", "median_us", "worst_step_us")
    print(f"{'policy':<30}" + "".join(f"{c:>17}" for c in columns) + "  decisions/step   old  late")
    for row in found["rows"]:
        cells = "".join(f"{row[column]:>17.1f}" for column in columns)
        print(
            f"{row['policy']:<30}{cells}{row['decisions_per_step']:>16.3f}{row['old']:>6}{row['late']:>6}"
        )


if __name__ == "__main__":
    main()
