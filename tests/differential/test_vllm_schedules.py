"""The step engine against the decision logs of vLLM 0.33.0's own scheduler, line by line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serving_sim.decisions import driver_config, driver_profile, read_driver_file, step_line
from serving_sim.engine import StepLog, simulate

_ROOT = Path(__file__).resolve().parents[2]
_DATA = Path(os.environ.get("PREEMPTBENCH_DATA", _ROOT.parent / "shared" / "data"))
_LOGS = sorted((_DATA / "vllm_schedules").glob("*.jsonl.gz"))

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not _LOGS, reason=f"no vllm_schedules logs under {_DATA}: set PREEMPTBENCH_DATA"
    ),
]


@pytest.mark.parametrize("path", _LOGS, ids=lambda path: path.name.split(".")[0])
def test_every_decision_equals_vllm(path: Path) -> None:
    log = read_driver_file(path)
    stored = log.steps()

    def compare(step: StepLog) -> None:
        expected, line = next(stored), step_line(step)
        assert line == expected
        assert list(line["sched"]) == list(expected["sched"])

    result = simulate(
        log.workload, driver_config(log.engine), driver_profile(log.engine), on_step=compare
    )
    assert next(stored, None) is None
    assert result.num_steps == log.totals["steps"]
    assert result.num_preemptions == log.totals["preemptions"]
    assert all(record.state == "completed" for record in result.records)
