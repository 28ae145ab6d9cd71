"""``simulate --workload``: one file in, the engine's decisions out, in the driver's form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from contracts.errors import InvalidInput
from preemptbench.cli import cli
from serving_sim.decisions import read_driver_file, step_line, write_log
from serving_sim.engine import StepLog, simulate

ROWS = [
    {"id": "a", "prompt": 8, "output": 20},
    {"id": "b", "prompt": 8, "output": 20, "priority": 1, "prefix_group": 0, "shared": 8},
    {"id": "c", "prompt": 9, "output": 6, "max_tokens": 12, "prefix_group": 0, "shared": 8},
]
ENGINE = {"num_blocks": 7, "block_size": 8, "enable_prefix_caching": True}


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"engine": ENGINE, "requests": ROWS}), encoding="utf-8")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, arguments)])


def test_decisions_of_a_workload(workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = run("--workload", workload, "--decisions", out, "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    header, *steps = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert header["engine"] == ENGINE
    assert header["totals"] == {name: summary[name] for name in header["totals"]}
    assert header["totals"]["sampled_tokens"] == 46
    assert header["totals"]["steps"] == len(steps)
    assert steps[0] == {
        "step": 1, "t": 0.0, "sched": {"a": 8, "b": 8, "c": 1}, "preempted": [],
        "finished_before": [], "running": ["a", "b", "c"], "waiting": [],
        "n_running": 3, "n_waiting": 0, "free": 3,
    }  # fmt: skip
    assert sum(len(step["preempted"]) for step in steps) == summary["preemptions"] > 0


@pytest.mark.parametrize("name", ["again.jsonl", "again.jsonl.gz"])
def test_a_log_is_a_workload_that_gives_the_same_log(
    workload: Path, tmp_path: Path, name: str
) -> None:
    first, again = tmp_path / "first.jsonl", tmp_path / name
    assert run("--workload", workload, "--decisions", first).exit_code == 0
    assert run("--workload", first, "--decisions", again).exit_code == 0
    assert list(read_driver_file(again).steps()) == list(read_driver_file(first).steps())
    assert read_driver_file(again).totals == read_driver_file(first).totals


def test_a_policy_takes_the_place_of_the_engines_rule(workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for options, victim in ((), "b"), (("--policy", "fifo"), "a"):
        assert run("--workload", workload, "--decisions", out, *options).exit_code == 0
        (evicted,) = [
            step["preempted"] for step in read_driver_file(out).steps() if step["preempted"]
        ]
        assert evicted == [victim]
    own = run("--workload", workload, "--json")
    table = run("--workload", workload).stdout.split()
    assert table[:2] == ["steps", str(json.loads(own.stdout)["steps"])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Give at least one --policy, or --workload FILE"),
        (("--decisions", "x.jsonl"), "--decisions needs --workload"),
        (("--workload", "w.json", "--rate", "2"), "--rate does not go with --workload"),
        (("--workload", "w.json", "--policy", "lifo", "--policy", "fifo"), "one --policy at most"),
        (("--workload", "w.json", "--offload-gib", "2"), "--offload-gib needs --offload"),
        (
            ("--workload", "w.json", "--offload", "2", "--decisions", "x.jsonl"),
            "drop --faults and --offload",
        ),
    ],
)
def test_options_that_do_not_go_together(options: tuple[str, ...], message: str) -> None:
    done = run(*options)
    assert done.exit_code == 2
    assert message in done.output


def test_faults_strike_a_workload(workload: Path, tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text("""
        [[fault]]
        kind = "disconnect"
        request_id = "c"
        at_s = 0.01
        [[fault]]
        kind = "stall"
        at_s = 0.02
        extra_s = 7.0
    """)
    done = run("--workload", workload, "--faults", faults, "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert (summary["faults"], summary["withdrawn"], summary["failed"]) == (2, 1, 0)
    assert summary["simulated_s"] > 7.0
    done = run("--workload", workload, "--faults", tmp_path / "absent.toml")
    assert isinstance(done.exception, InvalidInput)
    assert "absent.toml cannot be read" in str(done.exception)


def test_a_tier_keeps_what_a_workload_would_compute_again(workload: Path) -> None:
    plain = json.loads(run("--workload", workload, "--json").stdout)
    assert plain["recomputed_tokens"] > 0
    tiered = run("--workload", workload, "--json", "--offload", "1000", "--offload-gib", "1")
    summary = json.loads(tiered.stdout)
    assert summary["recomputed_tokens"] == 0
    assert summary["loaded_tokens"] == summary["offloaded_tokens"] - 16 > 0
    recompute = run(
        "--workload", workload, "--json", "--offload", "1", "--offload-rule", "always_recompute"
    )
    assert json.loads(recompute.stdout)["recomputed_tokens"] == plain["recomputed_tokens"]


def test_a_version_that_nobody_follows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"vllm_version": "0.8.5", "requests": ROWS}), encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"vllm_version is '0\.8\.5'; the engine follows 0\.15"):
        read_driver_file(path)


def test_settings_that_a_version_lacks_are_off_in_its_logs(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    header = {"vllm_version": "0.15.1", "engine": {"watermark": 0.5}, "requests": ROWS}
    path.write_text(json.dumps(header), encoding="utf-8")
    driver = read_driver_file(path)
    steps: list[StepLog] = []
    simulate(driver.workload, driver.config, driver.profile, on_step=steps.append)
    assert (driver.config.watermark, driver.config.reserve_full_isl) == (0.0, False)
    write_log(driver, tmp_path / "log.jsonl")
    assert [step_line(step) for step in steps] == list(
        read_driver_file(tmp_path / "log.jsonl").steps()
    )
