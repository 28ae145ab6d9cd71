"""A live log read back, and the verb that replays it under other policies."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import vllm_gpu_policies
from contracts.errors import InvalidInput
from eval.what_if import clairvoyant_grid
from integrations.counters import Counters
from integrations.live_log import LiveLog
from preemptbench.cli import cli
from serving_sim.decisions import read_driver_file, simulate_driver, step_line
from serving_sim.engine import StepLog
from serving_sim.live_log import Recorded, read_recorded
from serving_sim.policies import get_policy

ENGINE = {"num_blocks": 20, "max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 256}

ARRIVED = ['{"arrived": {"id": "a", "prompt": 3, "max_tokens": 5}}']
OUTPUTS = [40 + 5 * (3 * i % 8) for i in range(8)]


def write_live(folder: Path, *, cut: tuple[str, ...] = ()) -> tuple[Path, list[dict[str, Any]]]:
    """Let our engine play a server that writes a live log; the requests in ``cut`` never end in
    it. Return the log and the steps."""
    rows = [
        {
            "id": f"r{i}",
            "prompt": 20 + i,
            "output": OUTPUTS[i],
            "max_tokens": 90,
            "arrival": 0.1 * i,
        }
        for i in range(8)
    ]
    source = folder / "source.json"
    source.write_text(json.dumps({"engine": ENGINE, "requests": rows}), encoding="utf-8")
    path, steps = folder / "live.jsonl", []
    header = {"vllm_version": "0.33.0", "victims_by": "fifo", "engine": ENGINE}
    log = LiveLog(path, header, start_s=100.0)
    waiting = list(rows)
    ended = {row["id"]: row["output"] for row in rows}

    def on_step(step: StepLog) -> None:
        if step.num_returned:
            log.returned(step.num_returned)
        while waiting and waiting[0]["arrival"] <= step.start_s:
            row = waiting.pop(0)
            known = {key: row[key] for key in ("id", "prompt", "max_tokens")}
            log.arrived(known | {"priority": 0}, 100.0 + row["arrival"])
        for name in step.finished_before:
            if name not in cut:
                log.ended(name, ended[name], "stop")
        line = step_line(step)
        steps.append(line)
        own = {key: value for key, value in line.items() if key not in ("step", "t")}
        log.step(100.0 + step.start_s, own)

    simulate_driver(read_driver_file(source), get_policy("fifo"), on_step)
    for name in [row["id"] for row in rows][-3:]:  # who ended after the last step
        if name not in cut:
            log.ended(name, ended[name], "stop")
    log.close()
    return path, steps


def test_a_live_log_holds_what_the_engine_did(tmp_path: Path) -> None:
    path, steps = write_live(tmp_path)
    recorded = read_recorded(path)
    workload = recorded.log.workload
    assert workload.output_tokens.tolist() == OUTPUTS
    assert workload.max_tokens.tolist() == [90] * 8
    np.testing.assert_allclose(workload.arrival_s, 0.1 * np.arange(8), atol=1e-9)  # as written
    assert (recorded.num_censored, recorded.victims_by) == (0, "fifo")
    assert recorded.num_steps == len(steps)
    assert recorded.num_preemptions == sum(len(step["preempted"]) for step in steps) > 0
    assert recorded.log.config.num_blocks == 20


def test_the_replay_decides_as_the_server_did(tmp_path: Path) -> None:
    """Same policy, same clock: the decisions of a live log come back, step by step."""
    path, steps = write_live(tmp_path)
    log = read_recorded(path).log
    replayed: list[dict[str, Any]] = []
    simulate_driver(log, get_policy("fifo"), lambda step: replayed.append(step_line(step)))
    assert [line["preempted"] for line in replayed] == [line["preempted"] for line in steps]
    assert [line["sched"] for line in replayed] == [line["sched"] for line in steps]


def test_step_times_are_learned_from_the_log(tmp_path: Path) -> None:
    """The driver's clock has a context term of 2e-8 s a token (some 1e-5 s here): left to the
    fixed part, it may move that by as much, and the token part by less than 1 %."""
    path, _ = write_live(tmp_path)
    profile = read_recorded(path).profile
    assert profile.fixed_s == pytest.approx(0.008, abs=2e-5)
    assert profile.per_token_s == pytest.approx(1e-4, rel=0.01)


def test_requests_that_were_cut_are_censored_and_said_so(tmp_path: Path) -> None:
    path, _ = write_live(tmp_path, cut=("r2", "r7"))
    recorded = read_recorded(path)
    assert recorded.num_censored == 2
    written = recorded.log.workload.output_tokens.tolist()
    assert 0 < written[2] <= OUTPUTS[2]  # what it was seen to decode, at most its true length
    done = CliRunner().invoke(cli, ["what-if", str(path), "--policy", "fifo"])
    assert done.exit_code == 0, done.output
    assert "2 of 8 requests were cut off; their lengths are lower bounds" in done.stdout


def test_the_verb_compares_policies(tmp_path: Path) -> None:
    path, _ = write_live(tmp_path)
    arguments = ["what-if", str(path), "--signal", "clairvoyant", "--deadline", "2.0", "--json"]
    arguments += ["--policy", "fifo", "--policy", "longest-remaining"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    lifo, fifo, longest = found["policies"]
    assert [row["policy"] for row in found["policies"]] == ["lifo", "fifo", "longest-remaining"]
    assert [row["signal"] for row in found["policies"]] == ["none", "none", "clairvoyant"]
    assert lifo["moved"] == 0
    assert fifo["recomputed_tokens"] > lifo["recomputed_tokens"]
    assert longest["moved"] > 0
    assert all(0 <= row["late"] <= 8 for row in found["policies"])
    assert found["logged_preemptions"] == pytest.approx(fifo["num_preemptions"], abs=1)


def test_a_driver_log_is_taken_too(tmp_path: Path) -> None:
    write_live(tmp_path)
    done = CliRunner().invoke(cli, ["what-if", str(tmp_path / "source.json"), "--policy", "fifo"])
    assert done.exit_code == 0, done.output
    assert "0 preemptions logged" in done.stdout


def test_the_clairvoyant_grid_knows_what_remains(tmp_path: Path) -> None:
    write_live(tmp_path)
    workload = read_recorded(tmp_path / "source.json").log.workload
    grid = clairvoyant_grid(workload)
    for index in range(len(workload)):
        length = int(workload.output_tokens[index])
        assert [grid.read(index, age)[0] for age in range(length)] == [
            length - age for age in range(length)
        ]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path, steps = write_live(tmp_path)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + '{"step": 9', encoding="utf-8")
    assert _summary(read_recorded(path)) == (len(steps), 0)


def _summary(recorded: Recorded) -> tuple[int, int]:
    return recorded.num_steps, recorded.num_censored


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"live_log": 2}'], "live_log is 2"),
        (['{"live_log": 1, "engine": {}}'], "no request yet"),
        (['{"live_log": 1, "engine": {}}', '{"arrived": 3}'], "line 2 has no 'id'"),
        (['{"live_log": 1, "engine": {}}', '{"t": "x", "sched": {}}'], "line 2: field 't'"),
        (['{"live_log": 1, "engine": {}}', '{"ended": "a"}'], "output is None"),
        (['{"live_log": 1, "engine": {}}', '{"returned": "a"}'], "returned is 'a'"),
        (['{"live_log": 1, "seed": "a", "engine": {}}', *ARRIVED], "'seed' is 'a'"),
        (['{"live_log": 1, "engine": {}}', *ARRIVED, *ARRIVED], "'a' arrives a second time"),
        (
            ['{"live_log": 1, "engine": {}}', *ARRIVED],
            "0 timed steps",
        ),
    ],
)
def test_damaged_logs_are_refused(lines: list[str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match=said):
        _ = read_recorded(path).profile


def test_a_full_disk_ends_the_log_not_the_engine(tmp_path: Path) -> None:
    log = LiveLog(tmp_path / "log.jsonl", {}, time.time())
    assert log._file is not None
    log._file.close()
    log.step(time.time(), {"sched": {}})
    log.step(time.time(), {"sched": {}})
    assert log._file is None


def test_the_gpu_scripts_comparison_reads_what_a_run_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first half needs a GPU; the second half, given such files, counts what they hold."""
    out = tmp_path / "gpu"
    out.mkdir()
    (out / "device.txt").write_text("no GPU", encoding="utf-8")
    for policy in vllm_gpu_policies.POLICIES:
        write_live(tmp_path)[0].rename(out / f"{policy}.jsonl")
        text = Counters(recomputed_tokens=321).prometheus(policy)
        (out / f"{policy}.prom").write_text(text, encoding="utf-8")
    vllm_gpu_policies.compare(out)
    *_, lifo, least, fifo = (line.split() for line in capsys.readouterr().out.splitlines())
    assert [row[3] for row in (lifo, least, fifo)] == ["321"] * 3
    assert fifo[0] == "fifo"
    assert all(a == b for a, b in (cell.split("/") for cell in fifo[5:7]))
    assert fifo[1] == fifo[2] != "0"  # the log was written under fifo: its replay agrees
