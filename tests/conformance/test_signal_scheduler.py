"""This project's scheduler class inside an installed vLLM, on random workloads, without a GPU.

With ``lifo`` it must be vLLM's own scheduler line by line; with any other policy, our step engine.
Run by ``make conformance``; the environment variables are those of test_real_vllm.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.errors import NoProgressError
from contracts.signals import RemainingGrid, SignalRequest, build_grid
from eval.log_replay import replay_log
from eval.what_if import predictor_grid, what_if
from integrations.sampled import signals_of
from predictors.base import Predictor
from predictors.boosting import BoostingSettings
from predictors.gbm_hazard import GbmHazardSettings
from predictors.online import OnlinePredictor
from predictors.registry import load_predictor
from serving_sim.decisions import DriverLog, read_driver_file, step_line
from serving_sim.engine import SimResult, StepLog, simulate
from serving_sim.live_log import ENDED_REASONS, read_recorded
from serving_sim.policies import get_policy, list_policies
from serving_sim.profile import AffineProfile
from tests.conformance import speech
from tests.conformance.random_workloads import random_workload
from tests.conformance.test_real_vllm import ENV, MAX_STEPS, ROOT, LogEnded, pytestmark
from tests.synthetic_runs import MODEL, synthetic_runs
from traces.bundled import bundled_runs
from traces.runlog import read_runs
from training.rows import training_set

__all__ = ["pytestmark"]
NUM_LIFO = int(os.environ.get("PREEMPTBENCH_CONFORMANCE", "240"))
NUM_EACH = max(6, NUM_LIFO // 6)  # workloads for each other policy
REFRESH_TOKENS = 8
# the driver's workloads have no deadlines, without which a policy that reads them cannot score
POLICIES = [
    name
    for name in (name.replace("(depth)", "(0.5)") for name in list_policies())
    if name != "lifo" and not get_policy(name).reads_deadline
]
Workload = dict[str, Any]


def crowded(number: int) -> Workload:
    """Return a random workload whose pool is small enough to be short often."""
    workload = random_workload(number, special=number % 2 == 1)
    engine = workload["engine"]
    engine["num_blocks"] = min(engine["num_blocks"], 3 + 2 * _largest_blocks(workload))
    return workload


def _largest_blocks(workload: Workload) -> int:
    engine = workload["engine"]
    most = max(r["prompt"] + r.get("max_tokens", r["output"]) for r in workload["requests"])
    return -(-min(most, engine["max_model_len"]) // int(engine["block_size"]))


def run_vllm(workloads: list[Workload], folder: Path) -> list[Path]:
    """Let vLLM run them all in one process; return the logs."""
    folder.mkdir()
    path = folder / "workloads.jsonl"
    path.write_text("".join(json.dumps(w) + "\n" for w in workloads), encoding="utf-8")
    command = [f"{ENV}/bin/python", "-m", "tests.conformance.signal_driver", path, folder / "logs"]
    done = subprocess.run(
        [*command, "--max-steps", str(MAX_STEPS)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted((folder / "logs").glob("[0-9][0-9][0-9][0-9].jsonl"))


def left_of(log: Path) -> dict[str, Any]:
    """Return what the run had left at its end."""
    left: dict[str, Any] = json.loads(log.with_suffix(".json").read_text(encoding="utf-8"))
    return left


def body(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines()[1:]


def test_lifo_is_the_stock_scheduler_line_by_line(tmp_path: Path) -> None:
    plain = [crowded(number) for number in range(NUM_LIFO)]
    for workload in plain:
        workload["engine"]["policy"] = "fcfs"
    environ = {"PREEMPTBENCH_POLICY": "lifo"}
    stock = run_vllm([w | {"environ": None} for w in plain], tmp_path / "stock")
    ours = run_vllm([w | {"environ": environ} for w in plain], tmp_path / "ours")
    different = [a.name for a, b in zip(stock, ours, strict=True) if body(a) != body(b)]
    assert not different, f"{len(different)} of {len(stock)} differ: {different[:5]}"
    lefts = [left_of(log) for log in ours]
    assert all(left["counters"]["unlike_lifo"] == 0 for left in lefts)
    steps = sum(left["num_steps"] for left in lefts)
    preempting = sum(left["counters"]["preemptions"] > 0 for left in lefts)
    sys.stderr.write(f"\nlifo: {len(ours)} workloads, {steps} steps; {preempting} preempting\n")
    assert preempting >= len(ours) // 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small age-km checkpoint."""
    from predictors.age_km import AgeKmSettings

    folder = tmp_path_factory.mktemp("checkpoint")
    AgeKmSettings().fit(training_set(synthetic_runs())).save_pretrained(folder)
    return folder


def grid_of(log: DriverLog, checkpoint: Path) -> RemainingGrid:
    """Return the answers that the predictor has for the requests of a log."""
    workload = log.workload
    rows = zip(workload.request_ids, workload.prompt_tokens, workload.max_tokens, strict=True)
    requests = [
        SignalRequest(name, name, name, "", "", "", MODEL, int(prompt), int(cap))
        for name, prompt, cap in rows
    ]
    return build_grid(load_predictor(checkpoint), requests, stride=REFRESH_TOKENS)


def compare(log: DriverLog, policy: str, signal: RemainingGrid | None) -> SimResult | None:
    """Hold our engine to ``log``; return its result, None if the log was cut."""
    stored = list(log.steps())
    num_compared = 0

    def check(step: StepLog) -> None:
        nonlocal num_compared
        if step.step > MAX_STEPS:
            raise LogEnded
        ours, theirs = step_line(step), stored[step.step - 1] if step.step <= len(stored) else None
        assert ours == theirs, f"{log.path.name} under {policy}: ours {ours}, vLLM {theirs}"
        num_compared += 1

    try:
        result = simulate(
            log.workload, log.config, log.profile, get_policy(policy), signal=signal, on_step=check
        )
    except (LogEnded, NoProgressError):
        assert num_compared == len(stored) == MAX_STEPS
        return None
    assert num_compared == len(stored)
    return result


def check_live_log(path: Path, log: DriverLog, *, is_whole: bool) -> None:
    """Hold what the scheduler logged itself to what the driver saw from outside."""
    live = path.with_suffix(".live.jsonl")
    own = [json.loads(line) for line in live.read_text(encoding="utf-8").splitlines()]
    assert [line for line in own if "step" in line] == list(log.steps())
    arrived = [line["arrived"] for line in own if "arrived" in line]
    arrival_s = np.round(log.workload.arrival_s, 9).tolist()  # as logged
    wanted = zip(log.workload.request_ids, arrival_s, strict=True)
    assert {row["id"]: row["arrival"] for row in arrived}.items() <= dict(wanted).items()
    ended = [line for line in own if "ended" in line]
    assert len(ended) == len(arrived)
    assert all(line["reason"] in ENDED_REASONS for line in ended) or not is_whole


def check_replay(path: Path, policy: str, checkpoint: Path | None, replays: Counter[str]) -> None:
    """Let ``preemptbench validate`` and ``what-if`` read what the scheduler logged itself."""
    recorded = read_recorded(path.with_suffix(".live.jsonl"))
    grid = None
    if checkpoint is not None:
        predictor, workload = load_predictor(checkpoint), recorded.log.workload
        grid = predictor_grid(predictor, workload, recorded.refresh_tokens, whole=True)
    found = replay_log(recorded, get_policy(policy), grid)
    assert recorded.victims_by == policy
    assert found.is_equal, found
    replays.update(logs=1, steps=found.num_equal_steps, victims=found.num_equal_victims)
    replays.update(censored=found.num_censored)
    if recorded.num_steps < MAX_STEPS:  # else it may be a livelock, which what-if refuses
        profile = AffineProfile("test", 0.01, 0.0001, 0.0)
        with contextlib.suppress(NoProgressError):  # the logged policy may livelock on this clock
            rows = what_if(recorded, [get_policy("lifo"), get_policy(policy)], grid, profile)
            assert all(row.makespan_s > 0.0 for row in rows)
            replays.update(what_if=1)


def test_every_other_policy_is_the_step_engine(tmp_path: Path, checkpoint: Path) -> None:
    environs, workloads, policies = {}, [], []
    for index, policy in enumerate(POLICIES):
        environs[policy] = {
            "PREEMPTBENCH_POLICY": policy,
            "PREEMPTBENCH_REFRESH_TOKENS": str(REFRESH_TOKENS),
            "PREEMPTBENCH_BUDGET_US": "60000000",
            "PREEMPTBENCH_DECISIONS": "beside the driver's log",
        }
        if get_policy(policy).reads_signal:
            environs[policy]["PREEMPTBENCH_CHECKPOINT"] = str(checkpoint)
        for number in range(NUM_EACH):
            workloads.append(crowded(1000 * (index + 1) + number) | {"environ": environs[policy]})
            policies.append(policy)
    logs = run_vllm(workloads, tmp_path / "run")
    total: dict[str, list[int]] = {policy: [0, 0, 0] for policy in POLICIES}
    replays: Counter[str] = Counter()
    for path, policy in zip(logs, policies, strict=True):
        log, left = read_driver_file(path), left_of(path)
        signal = grid_of(log, checkpoint) if get_policy(policy).reads_signal else None
        result = compare(log, policy, signal)
        counters = left["counters"]
        assert counters["fallback_error"] == counters["fallback_late"] == 0
        assert counters["fallback_unsound"] == 0
        if result is not None:  # not cut: it ran to its end
            assert left["num_finished"] == len(log.workload)
            assert left["num_tracked"] == 0
            assert counters["preemptions"] == result.num_preemptions
            assert counters["recomputed_tokens"] == result.recomputed_tokens
        check_live_log(path, log, is_whole=result is not None)
        if log.workload.prefix_groups is None:  # a live log does not know who shares a prefix
            reads = get_policy(policy).reads_signal
            check_replay(path, policy, checkpoint if reads else None, replays)
        sums = (left["num_steps"], counters["preemptions"], counters["unlike_lifo"])
        total[policy] = [a + b for a, b in zip(total[policy], sums, strict=True)]
    for policy, (steps, preemptions, unlike) in total.items():
        sys.stderr.write(f"\n{policy}: {steps} steps, {preemptions} victims, {unlike} not LIFO's")
        # it parts from LIFO only where the youngest was evicted before, and others were not
        assert unlike > 0 or policy == "spare-evicted", policy
    sys.stderr.write(f"\nreplayed from the scheduler's own logs, all equal: {dict(replays)}")
    assert replays["victims"] > 0
    assert replays["what_if"] > replays["logs"] // 2


def test_logs_of_clients_that_leave_are_replayed_whole(tmp_path: Path) -> None:
    """What a driver's log cannot hold, and a server's does every day: requests that are aborted."""
    workloads, policies = [], ("lifo", "fifo", "least-computed")
    for number in range(NUM_EACH * len(policies)):
        environ = {
            "PREEMPTBENCH_POLICY": policies[number % len(policies)],
            "PREEMPTBENCH_DECISIONS": "beside the driver's log",
        }
        workload = crowded(2 * (250_000 + number))  # even: no shared prefixes
        workloads.append(workload | {"environ": environ, "leave": 2 + number % 9})
    replays: Counter[str] = Counter()
    logs = run_vllm(workloads, tmp_path / "run")
    for number, path in enumerate(logs):
        check_replay(path, policies[number % len(policies)], None, replays)
        assert left_of(path)["num_tracked"] == 0 or left_of(path)["num_steps"] == MAX_STEPS
    sys.stderr.write(f"\nwith clients that leave, all equal: {dict(replays)}")
    assert replays["censored"] > len(logs)
    assert replays["victims"] > 0


# What a scheduler can see of a request: its age, its prompt's length, what it repeats, whether it
# thinks, and, where it asks for log-probabilities, what its tokens were drawn from.
VISIBLE = (
    "age", "log_age", "prompt_tokens", "last_mean_entropy", "last_mean_logprob", "last_repetition",
    "last_in_thinking", "mean_mean_entropy", "mean_mean_logprob", "mean_repetition",
    "mean_in_thinking", "entropy_trend", "logprob_trend", "num_records",
)  # fmt: skip
SPEAKING_POLICIES = [name for name in POLICIES if get_policy(name).reads_signal]


@pytest.fixture(scope="module")
def gbm_hazard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small gbm-hazard checkpoint, trained on the bundled run log."""
    folder = tmp_path_factory.mktemp("gbm-hazard")
    settings = GbmHazardSettings(features=VISIBLE, boosting=BoostingSettings(num_trees=40))
    settings.fit(training_set(list(read_runs(bundled_runs()))[::2])).save_pretrained(folder)
    return folder


def streamed_grid(log: DriverLog, predictor: Predictor, *, asked: bool = True) -> RemainingGrid:
    """Return what an OnlinePredictor answers when it is fed each request token by token; unless
    ``asked``, without what the tokens were drawn from."""
    workload = log.workload
    model = predictor.provenance.models[0]
    answers: list[float] = []
    offsets = [0]
    for index, name in enumerate(workload.request_ids):
        online = OnlinePredictor(
            predictor,
            stride=REFRESH_TOKENS,
            think_open=speech.THINK_OPEN,
            think_close=speech.THINK_CLOSE,
        )
        prompt, cap = int(workload.prompt_tokens[index]), int(workload.max_tokens[index])
        online.start(SignalRequest(name, name, name, "", "", "", model, prompt, cap))
        listed = speech.asked_by(index) if asked else None
        drawn = np.full((2, speech.MAX_TOKENS), np.nan)
        if listed is not None:
            drawn = np.array(signals_of(speech.logprobs_of(index), listed))
        for age in range(int(workload.output_tokens[index])):
            if age % REFRESH_TOKENS == 0:
                answers += online.remaining([name]).tolist()
            token = speech.tokens_of(index)[age]
            online.update(name, [token], [""], [float(drawn[0, age])], [float(drawn[1, age])])
        offsets.append(len(answers))
    return RemainingGrid(
        name="streamed",
        stride=REFRESH_TOKENS,
        offsets=np.array(offsets),
        remaining=np.array(answers),
        upper=np.full(len(answers), np.nan),
        upper_level=0.9,
        sources=(frozenset(),),
        source_of=np.zeros(len(workload), dtype=np.int64),
    )


def test_gbm_hazard_in_the_scheduler_is_the_online_predictor_in_the_step_engine(
    tmp_path: Path, gbm_hazard: Path
) -> None:
    """Streamed progress included: tokens, thinking marks, and log-probabilities where asked for."""
    environ = {
        "PREEMPTBENCH_CHECKPOINT": str(gbm_hazard),
        "PREEMPTBENCH_REFRESH_TOKENS": str(REFRESH_TOKENS),
        "PREEMPTBENCH_BUDGET_US": "60000000",
        "PREEMPTBENCH_THINK_OPEN": str(speech.THINK_OPEN),
        "PREEMPTBENCH_THINK_CLOSE": str(speech.THINK_CLOSE),
    }
    workloads, policies = [], []
    for index, policy in enumerate(SPEAKING_POLICIES):
        for number in range(NUM_EACH):
            workload = crowded(100_000 + 1000 * index + number)
            own = environ | {"PREEMPTBENCH_POLICY": policy}
            workloads.append(workload | {"environ": own, "speaks": True})
            policies.append(policy)
    logs = run_vllm(workloads, tmp_path / "run")
    predictor = load_predictor(gbm_hazard)
    steps = preemptions = unlike = sampling_mattered = 0
    for path, policy in zip(logs, policies, strict=True):
        log, left = read_driver_file(path), left_of(path)
        grid = streamed_grid(log, predictor)
        result = compare(log, policy, grid)
        counters = left["counters"]
        assert counters["fallback_error"] == counters["fallback_late"] == 0
        assert counters["fallback_unsound"] == 0
        if result is not None:
            assert left["num_tracked"] == 0
            unasked = [speech.asked_by(i) for i in range(len(log.workload))].count(None)
            assert counters["without_logprobs"] == unasked
        blind = streamed_grid(log, predictor, asked=False)
        sampling_mattered += not np.array_equal(blind.remaining, grid.remaining)
        steps += left["num_steps"]
        preemptions += counters["preemptions"]
        unlike += counters["unlike_lifo"]
    sys.stderr.write(
        f"\ngbm-hazard: {len(logs)} workloads, {steps} steps, {preemptions} victims, "
        f"{unlike} not LIFO's; log-probabilities changed answers in {sampling_mattered} workloads"
    )
    assert unlike > 0
    assert sampling_mattered > len(logs) // 4
