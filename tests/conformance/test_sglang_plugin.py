"""The plug-in inside the real SGLang, on random batches, without a GPU.

PREEMPTBENCH_SGLANG_PYTHON names an interpreter that can import sglang.srt.managers.schedule_batch,
PREEMPTBENCH_SGLANG_PATH folders to put on its path. Left out of the default run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.choice import DRAW_PURPOSE, choose_victim
from contracts.policy import RunningViews
from contracts.randomness import keyed_uniform
from serving_sim.policies import get_policy, list_policies

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("PREEMPTBENCH_SGLANG_PYTHON")
NUM_BATCHES = 60
POLICIES = [
    name
    for name in (name.replace("(depth)", "(0.5)") for name in list_policies())
    if not get_policy(name).reads_deadline and not get_policy(name).reads_signal
]

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.skipif(PYTHON is None, reason="PREEMPTBENCH_SGLANG_PYTHON is not set"),
]
Row = dict[str, Any]


def random_batch(number: int) -> dict[str, Any]:
    """Return a decoding batch whose next step may not fit."""
    rng = random.Random(f"sglang-{number}")
    page = rng.choice([1, 1, 16])
    longest = rng.choice([2, 60])  # short ones free little: several go at once
    rows = []
    for index in range(rng.randint(1, 24)):
        prompt, written = rng.randint(1, longest), rng.randint(1, longest)
        committed = prompt + written
        rows.append(
            {
                "rid": f"b{number}-{index}", "prompt": prompt, "written": written,
                "cap": written + rng.randint(1, 60), "priority": rng.choice([None, 0, 1, 5]),
                "retractions": rng.choice([0, 0, 1, 2]), "committed": committed,
                "allocated": -(-committed // page) * page,
            }
        )  # fmt: skip
    return {"page": page, "free": rng.choice([0, 0, 1, 3]) * page, "reqs": rows}


def run_sglang(batches: list[dict[str, Any]], environ: Row | None, folder: Path) -> list[Row]:
    """Let SGLang retract from all batches in one process."""
    path = folder / "batches.jsonl"
    lines = [json.dumps(batch | {"environ": environ}) for batch in batches]
    path.write_text("\n".join(lines), encoding="utf-8")
    search = os.pathsep.join([str(ROOT), os.environ.get("PREEMPTBENCH_SGLANG_PATH", "")])
    done = subprocess.run(
        [str(PYTHON), "-m", "tests.conformance.sglang_driver", str(path)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": search},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"retracted"')
    ]


def wanted(batch: dict[str, Any], policy: str) -> list[str]:
    """Return whom the policy retracts, one after the other, until the next step fits."""
    left, free, taken = list(batch["reqs"]), batch["free"], []
    while len(left) > 1 and (not taken or _needs(left, batch["page"]) > free):
        at, _ = choose_victim(get_policy(policy), _views(left, batch["page"]))
        free += left[at]["allocated"]
        taken.append(left.pop(at)["rid"])
    return taken


def _needs(rows: list[Row], page: int) -> int:
    return sum(page for row in rows if row["committed"] % page == 0)


def _views(rows: list[Row], page: int) -> RunningViews:
    count = len(rows)
    nothing, numbers = np.full(count, np.nan), [int(row["rid"].split("-")[1]) for row in rows]
    draws = [keyed_uniform(0, DRAW_PURPOSE, row["rid"], row["retractions"]) for row in rows]
    urgent = [2**53 if row["priority"] is None else -row["priority"] for row in rows]
    return RunningViews(
        request_id=np.array(numbers), admission_seq=np.arange(count), arrival_s=nothing,
        deadline_s=nothing, prompt_tokens=np.array([row["prompt"] for row in rows]),
        generated_tokens=np.array([row["written"] for row in rows]),
        computed_tokens=np.array([row["committed"] for row in rows]),
        kv_blocks=np.array([row["allocated"] // page for row in rows]),
        max_tokens=np.array([row["cap"] for row in rows]),
        num_preemptions=np.array([row["retractions"] for row in rows]),
        priority=np.array(urgent), rank_from_youngest=np.arange(count - 1, -1, -1),
        num_running=np.full(count, count), now_s=nothing, recent_tpot_s=nothing,
        prefill_s_per_token=nothing, remaining=nothing, remaining_upper=nothing,
        draw=np.array(draws),
    )  # fmt: skip


def test_without_the_plug_in_sglang_retracts_as_the_policy_of_its_name(tmp_path: Path) -> None:
    """This holds the driver's stand-ins to SGLang: its own order is our ``sglang-retract``."""
    batches = [random_batch(number) for number in range(NUM_BATCHES)]
    found = run_sglang(batches, None, tmp_path)
    check(batches, found, "sglang-retract")


@pytest.mark.parametrize("policy", POLICIES)
def test_sglang_retracts_whom_the_policy_names(policy: str, tmp_path: Path) -> None:
    batches = [random_batch(number) for number in range(NUM_BATCHES)]
    check(batches, run_sglang(batches, {"PREEMPTBENCH_POLICY": policy}, tmp_path), policy)


def check(batches: list[dict[str, Any]], found: list[Row], policy: str) -> None:
    assert len(found) == len(batches)
    victims = 0
    for batch, line in zip(batches, found, strict=True):
        fits = _needs(batch["reqs"], batch["page"]) <= batch["free"]
        assert line["retracted"] == ([] if fits else wanted(batch, policy))
        victims += len(line["retracted"])
    sys.stderr.write(f"\n{policy}: {len(batches)} batches, {victims} retracted as named")
    assert victims > len(batches) // 2
