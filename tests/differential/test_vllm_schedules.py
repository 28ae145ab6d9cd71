"""The step engine against decision logs of vLLM's own scheduler, line by line.

Public logs (vLLM 0.33.0) are read from the data folder. ``vllm_logs`` holds some that we made with
benchmarks/vllm_prefix_driver.py: shared prefixes, requests that stop before their cap, and four
series of vLLM, chosen so that each rule in which the series differ shows (docs/vllm_versions.md).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from serving_sim.config import VllmVersion
from serving_sim.decisions import DriverLog, read_driver_file, simulate_driver, step_line
from serving_sim.engine import SimResult, StepLog

_ROOT = Path(__file__).resolve().parents[2]
_DATA = Path(os.environ.get("PREEMPTBENCH_DATA", _ROOT.parent / "shared" / "data"))
_PUBLIC = sorted((_DATA / "vllm_schedules").glob("*.jsonl.gz"))
_OWN = sorted((Path(__file__).parent / "vllm_logs").glob("*.jsonl.gz"))


def replay(log: DriverLog) -> SimResult:
    """Run the workload of ``log``, holding every step to it."""
    stored = log.steps()

    def compare(step: StepLog) -> None:
        expected, line = next(stored), step_line(step)
        assert line == expected
        assert list(line["sched"]) == list(expected["sched"])

    result = simulate_driver(log, on_step=compare)
    assert next(stored, None) is None
    assert result.num_steps == log.totals["steps"]
    assert result.num_preemptions == log.totals["preemptions"]
    assert result.drained
    return result


@pytest.mark.data
@pytest.mark.skipif(not _PUBLIC, reason=f"no vllm_schedules logs in {_DATA}: set PREEMPTBENCH_DATA")
@pytest.mark.parametrize("path", _PUBLIC, ids=lambda path: path.name.split(".")[0])
def test_every_decision_equals_vllm(path: Path) -> None:
    result = replay(read_driver_file(path))
    assert all(record.state == "completed" for record in result.records)


@pytest.mark.parametrize("path", _OWN, ids=lambda path: path.name[: -len(".jsonl.gz")])
def test_shared_prefixes_and_older_series_equal_vllm(path: Path) -> None:
    replay(read_driver_file(path))


def test_every_two_series_differ_in_a_log() -> None:
    """A version option that changes nothing would pass every comparison above."""
    logs = [read_driver_file(path) for path in _OWN]
    told_apart = set()
    for log in logs:
        for version in get_args(VllmVersion):
            try:
                replay(replace(log, vllm_version=version))
            except (AssertionError, StopIteration):
                told_apart.add((log.vllm_version, version))
    versions = get_args(VllmVersion)
    assert told_apart == {(a, b) for a in versions for b in versions if a != b}
