"""The step engine against an installed vLLM, line by line, on random workloads.

Run by ``make conformance``, which installs vLLM small into its own environment; left out of the
default run. PREEMPTBENCH_VLLM_ENV names the environment's folder, PREEMPTBENCH_TOOLS the folder of
the public driver (default: ../shared/tools), PREEMPTBENCH_CONFORMANCE how many workloads of each
kind to try.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving_sim.decisions import DriverLog, read_driver_file, simulate_driver, step_line
from serving_sim.engine import StepLog
from tests.conformance.random_workloads import random_workload

ROOT = Path(__file__).resolve().parents[2]
ENV = os.environ.get("PREEMPTBENCH_VLLM_ENV")
TOOLS = Path(os.environ.get("PREEMPTBENCH_TOOLS", ROOT.parent / "shared" / "tools"))
COUNT = int(os.environ.get("PREEMPTBENCH_CONFORMANCE", "300"))
DRIVER = TOOLS / "vllm_driver.py"
MAX_STEPS = 2000  # vLLM can livelock: under PRIORITY without the gate, equals evict each other

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.skipif(ENV is None, reason="PREEMPTBENCH_VLLM_ENV is not set: make conformance"),
]


def real_logs(workloads: list[dict[str, Any]], folder: Path, *driver: str) -> list[Path]:
    """Let vLLM run ``workloads`` in one process (importing it takes long); return its logs."""
    path = folder / "workloads.jsonl"
    path.write_text("".join(json.dumps(w) + "\n" for w in workloads), encoding="utf-8")
    program = ROOT / "benchmarks" / "vllm_prefix_driver.py"
    command = [f"{ENV}/bin/python", program, path, folder / "logs", *driver]
    command += ["--max-steps", str(MAX_STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted((folder / "logs").glob("*.jsonl"))


class LogEnded(Exception):
    """The log was cut here."""


def first_difference(log: DriverLog) -> str | None:
    """Say where our decisions leave those of ``log``, which may be cut at MAX_STEPS."""
    stored = list(log.steps())
    num_compared = 0

    def check(step: StepLog) -> None:
        nonlocal num_compared
        if step.step > MAX_STEPS:
            raise LogEnded
        ours, theirs = step_line(step), stored[step.step - 1] if step.step <= len(stored) else None
        if ours != theirs or list(ours["sched"]) != list(theirs["sched"]):
            raise AssertionError(f"{log.path.name}: ours {ours}, vLLM {theirs}")
        num_compared += 1

    try:
        simulate_driver(log, on_step=check)
    except AssertionError as difference:
        return str(difference)
    except LogEnded:
        pass
    if num_compared != len(stored):
        return f"{log.path.name}: {num_compared} steps, vLLM {len(stored)}"
    return None


def compare(paths: list[Path]) -> None:
    logs = [read_driver_file(path) for path in paths]
    differences = [text for text in map(first_difference, logs) if text is not None]
    assert not differences, f"{len(differences)} of {len(logs)} differ:\n" + "\n".join(
        differences[:5]
    )
    num_steps = sum(1 for log in logs for _ in log.steps())
    preempting = sum(any(line["preempted"] for line in log.steps()) for log in logs)
    message = f"\n{len(logs)} workloads, {num_steps} steps equal; {preempting} with preemptions\n"
    sys.stderr.write(message)
    assert preempting >= len(logs) // 4


def test_random_workloads_equal_the_public_driver(tmp_path: Path) -> None:
    if not DRIVER.is_file():
        pytest.skip(f"{DRIVER} does not exist: set PREEMPTBENCH_TOOLS to its folder")
    workloads = [random_workload(number, special=False) for number in range(COUNT)]
    compare(real_logs(workloads, tmp_path, "--driver", str(DRIVER)))


def test_shared_prefixes_and_own_stops_equal_vllm(tmp_path: Path) -> None:
    workloads = [random_workload(number, special=True) for number in range(COUNT)]
    compare(real_logs(workloads, tmp_path))
