"""``preemptbench simulate --workload``: one engine run of one workload file, and what it counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from preemptbench.timelines import record_timelines

if TYPE_CHECKING:
    from serving_sim.config import OffloadSettings
    from serving_sim.decisions import DriverLog
    from serving_sim.engine import SimResult


def simulate_file(
    workload_path: Path,
    policies: tuple[str, ...],
    scheduler: str | None,
    decisions_path: Path | None,
    timeline_paths: tuple[Path, ...],
    faults_path: Path | None,
    offload: OffloadSettings | None,
    as_json: bool,
) -> None:
    """Run a file of the vLLM driver under at most one of ``policies`` and print what happened.

    Raises click.UsageError where options do not go together.
    """
    from eval.named_policies import checked_policy
    from serving_sim.decisions import read_driver_file, simulate_driver, write_log
    from serving_sim.engine import StepLog
    from serving_sim.fault_rates import read_faults

    if decisions_path is not None and (faults_path is not None or offload is not None):
        raise click.UsageError(
            "--decisions writes a log that replays by itself: drop --faults and --offload."
        )
    if len(policies) > 1:
        raise click.UsageError("--workload runs once: give one --policy at most.")
    policy = checked_policy(policies[0]) if policies else None
    driver = read_driver_file(workload_path)
    if scheduler == "sglang":
        driver = replace(driver, engine={"sglang": {}} | dict(driver.engine))
    elif scheduler == "vllm" and "sglang" in driver.engine:
        raise click.UsageError(f"--engine is vllm, but {workload_path} asks for sglang: drop one.")
    faults = None
    if faults_path is not None:
        faults = read_faults(faults_path).plan(driver.workload, seed=0)

    def run(on_step: Callable[[StepLog], None] | None = None) -> SimResult:
        if decisions_path is not None:
            return write_log(driver, decisions_path, policy, on_step)
        return simulate_driver(driver, policy, on_step, faults, offload)

    if timeline_paths:
        rule = f"policy {policies[0]}" if policies else "the engine's own victim rule"
        result = record_timelines(
            timeline_paths,
            run,
            title=f"{rule}, {workload_path.name}",
            rule=rule,
            usable_blocks=driver.config.usable_blocks,
            num_requests=len(driver.workload),
        )
    else:
        result = run()
    summary = _summary(driver, result, faults is not None, offload is not None)
    if as_json:
        click.echo(json.dumps(summary))
        return
    for name, value in summary.items():
        click.echo(f"{name:<18} {value:>12}")


def _summary(
    driver: DriverLog, result: SimResult, has_faults: bool, has_offload: bool
) -> dict[str, int | float]:
    from serving_sim.decisions import totals

    summary: dict[str, int | float] = {
        **totals(driver, result),
        "recomputed_tokens": result.recomputed_tokens,
        "cache_hit_tokens": result.cache_hit_tokens,
        "simulated_s": round(result.end_s, 6),
    }
    if has_faults:
        summary |= {"faults": result.num_faults} | _ends(result)
    if has_offload:
        summary |= {
            "offloaded_tokens": result.offloaded_tokens,
            "loaded_tokens": result.loaded_tokens,
            "load_s": round(result.load_s, 6),
        }
    return summary


def _ends(result: SimResult) -> dict[str, int]:
    """Count the requests by how they ended otherwise than by writing all they had to."""
    counts = Counter(record.state for record in result.records)
    return {state: counts[state] for state in ("failed", "withdrawn", "unfinished", "rejected")}
