"""Decision logs replayed: a log of our own engine comes back whole; what was changed is found."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidInput
from contracts.policy import Policy
from contracts.signals import RemainingGrid
from eval.log_replay import replay_log
from eval.what_if import clairvoyant_grid, predictor_grid
from integrations.live_log import LiveLog
from predictors.age_km import AgeKm, AgeKmSettings
from preemptbench.cli import cli
from serving_sim.decisions import DriverLog, read_driver_file, step_line, write_log
from serving_sim.engine import StepLog, simulate
from serving_sim.faults import Disconnect, FaultPlan
from serving_sim.live_log import read_recorded
from serving_sim.policies import get_policy
from tests.conformance.random_workloads import random_workload
from tests.synthetic_runs import synthetic_runs
from training.rows import training_set

ENGINE = {"num_blocks": 20, "max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 256}


def workload(**engine: Any) -> dict[str, Any]:
    """Return requests that crowd a small pool; they stop before their cap."""
    rows = [
        {"id": f"r{i}", "prompt": 20 + i, "output": 40 + 5 * (3 * i % 8), "max_tokens": 90,
         "arrival": 0.1 * i, "priority": i % 3}
        for i in range(10)
    ]  # fmt: skip
    return {"engine": ENGINE | engine, "requests": rows}


def write_live(
    folder: Path,
    given_workload: dict[str, Any],
    policy: Policy,
    signal: Callable[[DriverLog], RemainingGrid] | None = None,
    leaving: tuple[Disconnect, ...] = (),
) -> Path:
    """Let our engine play a server that writes a live log; return the log."""
    source, path = folder / "source.json", folder / "live.jsonl"
    source.write_text(json.dumps(given_workload), encoding="utf-8")
    driver = read_driver_file(source)
    rows = sorted(given_workload["requests"], key=lambda row: row["arrival"])
    left = {fault.request_id for fault in leaving}
    log = LiveLog(
        path, {"vllm_version": "0.33.0", "victims_by": policy.name, "refresh_tokens": 8,
               "engine": given_workload["engine"]}, start_s=0.0,
    )  # fmt: skip

    def on_step(step: StepLog) -> None:
        log.returned(step.num_returned)
        while rows and rows[0]["arrival"] <= step.start_s + 1e-12:
            row = rows.pop(0)
            known = {"id": row["id"], "prompt": row["prompt"], "priority": row["priority"]}
            cap = row.get("max_tokens", row["output"])
            log.arrived(known | {"max_tokens": cap}, row["arrival"])
        for name in step.finished_before:
            ended = next(row for row in given_workload["requests"] if row["id"] == name)
            room = given_workload["engine"].get("max_model_len", 10**6) - ended["prompt"]
            log.ended(name, min(ended["output"], room), "abort" if name in left else "stop")
        line = step_line(step)
        own = {key: value for key, value in line.items() if key not in ("step", "t")}
        log.step(step.start_s, own)

    simulate(
        driver.workload, driver.config, driver.profile, policy,
        signal=signal(driver) if signal is not None else None,
        faults=FaultPlan(faults=leaving), on_step=on_step,
    )  # fmt: skip
    known = {json.loads(line).get("ended") for line in path.read_text("utf-8").splitlines()}
    for row in given_workload["requests"]:
        if row["id"] not in known:  # who ended with the last step
            log.ended(row["id"], row["output"], "stop")
    log.close()
    return path


@pytest.fixture(scope="module")
def age_km() -> AgeKm:
    return AgeKmSettings().fit(training_set(synthetic_runs()))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("queue", ["fcfs", "priority"])
@pytest.mark.parametrize("name", ["lifo", "fifo", "random", "least-computed"])
def test_a_log_of_our_engine_comes_back_whole(
    name: str, queue: str, is_async: bool, tmp_path: Path
) -> None:
    path = write_live(tmp_path, workload(policy=queue, async_scheduling=is_async), get_policy(name))
    recorded = read_recorded(path)
    found = replay_log(recorded, get_policy(name))
    assert found.is_equal, found
    assert found.num_steps == recorded.num_steps > 50
    assert found.num_victims == recorded.num_preemptions > 0


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(number=st.integers(0, 10**6), name=st.sampled_from(["lifo", "fifo", "largest-kv"]))
def test_random_logs_come_back_whole(number: int, name: str, tmp_path: Path) -> None:
    given_workload = random_workload(number, special=False)
    given_workload["engine"]["t_fixed"] = 0.01
    found = replay_log(
        read_recorded(write_live(tmp_path, given_workload, get_policy(name))), get_policy(name)
    )
    assert found.is_equal, found


@pytest.mark.parametrize("is_async", [False, True])
def test_clients_that_leave_end_where_the_log_cut_them(is_async: bool, tmp_path: Path) -> None:
    leaving = tuple(Disconnect(at_s=0.1 * i + 0.3, request_id=f"r{i}") for i in (1, 4, 9))
    given_workload = workload(async_scheduling=is_async)
    path = write_live(tmp_path, given_workload, get_policy("fifo"), leaving=leaving)
    found = replay_log(read_recorded(path), get_policy("fifo"))
    assert found.is_equal, found
    assert found.num_censored == 3
    assert found.num_victims > 0


def test_another_policy_names_other_victims_in_the_same_states(tmp_path: Path) -> None:
    """The replay goes on as the log did, so that every victim can be asked for."""
    path = write_live(tmp_path, workload(), get_policy("fifo"))
    found = replay_log(read_recorded(path), get_policy("lifo"))
    assert found.num_equal_steps == found.num_steps
    assert found.num_equal_victims < found.num_victims
    other = found.first_other_victim
    assert other is not None
    assert other.logged != other.replayed
    logged = read_recorded(path).steps[other.step - 1]["preempted"]
    assert other.logged in logged


def test_a_signal_is_asked_at_the_logs_refresh(age_km: AgeKm, tmp_path: Path) -> None:
    def signal(driver: DriverLog) -> RemainingGrid:
        return predictor_grid(age_km, driver.workload, stride=8, whole=True)

    path = write_live(tmp_path, workload(), get_policy("longest-remaining"), signal)
    recorded = read_recorded(path)
    grid = predictor_grid(age_km, recorded.log.workload, recorded.refresh_tokens, whole=True)
    found = replay_log(recorded, get_policy("longest-remaining"), grid)
    assert found.is_equal
    assert found.num_victims > 0
    knowing = clairvoyant_grid(recorded.log.workload)
    assert not replay_log(recorded, get_policy("longest-remaining"), knowing).is_equal


def edited(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """Change the steps of a log in place."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    change([row for row in rows if "sched" in row])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_changed_step_is_found_and_named(tmp_path: Path) -> None:
    path = write_live(tmp_path, workload(), get_policy("fifo"))
    rng = random.Random(0)
    num_steps = read_recorded(path).num_steps
    at = sorted(rng.sample(range(num_steps), 3))

    def change(steps: list[dict[str, Any]]) -> None:
        for index in at:
            steps[index]["free"] += 1

    found = replay_log(read_recorded(edited(path, change)), get_policy("fifo"))
    assert found.num_equal_steps == num_steps - 3
    assert found.num_equal_victims == found.num_victims
    assert found.first_difference is not None
    assert (found.first_difference.step, found.first_difference.what) == (at[0] + 1, "free")
    assert int(found.first_difference.logged) == int(found.first_difference.replayed) + 1


def test_the_order_of_service_is_compared(tmp_path: Path) -> None:
    path = write_live(tmp_path, workload(), get_policy("fifo"))

    def change(steps: list[dict[str, Any]]) -> None:
        step = next(step for step in steps if len(step["sched"]) > 2)
        step["sched"] = dict(reversed(step["sched"].items()))

    found = replay_log(read_recorded(edited(path, change)), get_policy("fifo"))
    assert found.num_equal_steps == found.num_steps - 1


def test_what_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    path = write_live(tmp_path, workload(), get_policy("fifo"))
    with pytest.raises(InvalidInput, match="reads deadlines"):
        replay_log(read_recorded(path), get_policy("most-slack"))
    with pytest.raises(InvalidInput, match="reads a signal"):
        replay_log(read_recorded(path), get_policy("longest-remaining"))
    with pytest.raises(InvalidInput, match="holds no step"):
        replay_log(read_recorded(tmp_path / "source.json"))


def test_the_verb_reads_live_logs_and_drivers_logs(age_km: AgeKm, tmp_path: Path) -> None:
    live = write_live(tmp_path, workload(), get_policy("fifo"))
    driver = tmp_path / "driver.jsonl"
    write_log(read_driver_file(tmp_path / "source.json"), driver, get_policy("lifo"))
    out = ["--out", str(tmp_path / "out")]
    for path, options in ((live, []), (driver, []), (driver, ["--policy", "lifo"])):
        done = CliRunner().invoke(cli, ["validate", str(path), "--json", *options, *out])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["is_equal"], done.stdout
    age_km.save_pretrained(tmp_path / "age-km")
    signal = ["--policy", "longest-remaining", "--signal", str(tmp_path / "age-km")]
    done = CliRunner().invoke(cli, ["validate", str(live), *signal, *out])
    assert done.exit_code == 0, done.output
    assert "first other victim: step" in done.stdout
    assert "named alike" in (text := done.stdout), text
    written = json.loads((tmp_path / "out" / "validation.json").read_text(encoding="utf-8"))
    assert written["policy"] == "longest-remaining"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["LOG", "--strict"], "are for run folders"),
        (["LOG", "--no-async"], "are for run folders"),
        (["FOLDER", "--policy", "lifo"], "are for decision logs"),
        (["LOG", "--policy", "longest-remaining"], "give --signal"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    names = {"LOG": str(write_live(tmp_path, workload(), get_policy("fifo")))}
    names["FOLDER"] = str(tmp_path)
    done = CliRunner().invoke(cli, ["validate", *(names.get(a, a) for a in arguments)])
    assert done.exit_code != 0
    assert said in done.output + str(done.exception)
