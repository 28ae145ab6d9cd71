"""Timelines: the trace obeys its format, and says what the records and the step log say."""

from __future__ import annotations

import gzip
import io
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from contracts.errors import InvalidInput, NoProgressError
from eval.cells import read_cells
from eval.one_cell import OneCell, only_cell, run_one_cell
from eval.timeline_figure import NUM_BINS, envelope, means, thinned, write_timeline_figure
from preemptbench.cli import cli
from preemptbench.demo import demo_matrix
from serving_sim.config import EngineConfig, SglangSettings
from serving_sim.engine import SimResult, StepLog, simulate
from serving_sim.policies import get_policy
from serving_sim.profile import AffineProfile
from serving_sim.timeline import COUNTERS, ChromeTrace, StepSeries, chrome_trace
from tests.by_hand import workload
from tests.laws.test_engine_laws import configs, make_workload, workloads
from tests.laws.test_fault_laws import faults_of
from traces.bundled import bundled_runs
from traces.workload import Workload

SECOND = AffineProfile("one second a step", 1.0, 0.0, 0.0)
PROFILE = AffineProfile("test", 0.008, 1e-4, 2e-8, 1e-5)
PAIR = workload([8, 8], [20, 20], cap=20)
TIGHT = EngineConfig(num_blocks=7, block_size=8)

Event = dict[str, Any]


@dataclass
class Traced:
    """A run, its trace as written, and what the step engine told."""

    result: SimResult
    steps: list[StepLog]
    events: list[Event]
    other: dict[str, Any]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["ph"] == kind]

    def slices(self) -> dict[str, list[Event]]:
        """Slices by request id, in order of time."""
        owners = {
            event["tid"]: event["args"]["name"].rpartition(" (")[0]
            for event in self.of("M")
            if event["name"] == "thread_name"
        }
        found: dict[str, list[Event]] = defaultdict(list)
        for event in sorted(self.of("X"), key=lambda event: event["ts"]):
            found[owners[event["tid"]]].append(event)
        return found


def traced(jobs: Workload, config: EngineConfig, policy: str | None = None, **more: Any) -> Traced:
    file, steps = io.StringIO(), list[StepLog]()
    trace = ChromeTrace(file, "title", policy or "own", config.usable_blocks)

    def tell(log: StepLog) -> None:
        steps.append(log)
        trace.step(log)

    found = get_policy(policy) if policy else None
    profile = more.pop("profile", PROFILE)
    result = simulate(jobs, config, profile, found, on_step=tell, **more)
    trace.finish(result)
    trace.close()
    data = json.loads(file.getvalue())
    return Traced(result, steps, data["traceEvents"], data["otherData"])


def ns(microseconds: float) -> int:
    """Times are written in whole nanoseconds, as microseconds with three decimals."""
    return round(microseconds * 1000)


def test_a_preemption_by_hand() -> None:
    """One second a step; "b" is evicted in step 18 and back in step 21 (tests/unit/test_engine)."""
    run = traced(PAIR, TIGHT, "lifo", profile=SECOND)
    phases = {
        name: [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in slices]
        for name, slices in run.slices().items()
    }
    assert phases == {
        "a": [("prefill", 0, 1), ("decode", 1, 19)],
        "b": [
            ("prefill", 0, 1), ("decode", 1, 16), ("preempted", 17, 3), ("recompute", 20, 1),
            ("decode", 21, 2),
        ],
    }  # fmt: skip
    (evicted,) = [e for e in run.of("i") if e["name"] == "evicted"]
    assert evicted["ts"] == 17e6
    assert evicted["args"] == {
        "rule": "lifo", "asked_by": "a", "sunk_tokens": 24, "generated_tokens": 17,
        "preemption_of_request": 1, "left_running": 1, "step": 18,
    }  # fmt: skip
    again = run.slices()["b"][3]
    assert again["args"] == {"computed_tokens": 9, "steps": 1}
    ends = {e["ts"] / 1e6: e["args"]["reason"] for e in run.of("i") if e["name"] == "completed"}
    assert ends == {20: "stop", 23: "stop"}


def test_a_victim_may_be_who_asked() -> None:
    """Both need a fourth block in step 18; with fifo "a", asking first, evicts itself."""
    run = traced(PAIR, TIGHT, "fifo", profile=SECOND)
    (evicted,) = [e for e in run.of("i") if e["name"] == "evicted"]
    assert evicted["args"]["asked_by"] == "a"
    assert evicted["tid"] == next(
        e["tid"] for e in run.of("M") if e["args"].get("name") == "a (tagged)"
    )


def test_waiting_refused_and_unborn_requests() -> None:
    jobs = workload([8, 40, 8, 8], [4, 4, 4, 4], [0.0, 1.0, 1.5, 90.0], cap=16)
    jobs = replace(jobs, cohort=np.array([1, 1, 1, 2]))
    run = traced(jobs, replace(TIGHT, max_num_seqs=1), profile=SECOND)
    slices = run.slices()
    assert [(e["name"], e["ts"], e["dur"]) for e in slices["c"][:1]] == [("queued", 1.5e6, 2.5e6)]
    assert "b" not in slices  # refused: it never waited
    (refused,) = [e for e in run.of("i") if e["name"] == "rejected"]
    assert (refused["ts"], refused["args"]["reason"]) == (1e6, "infeasible_kv")
    assert "d (filler)" not in [e["args"].get("name") for e in run.of("M")]


def test_an_idle_engine_counts_nothing() -> None:
    jobs = workload([8, 8], [4, 4], [0.0, 9.0], cap=4)
    for ahead in (False, True):
        run = traced(jobs, replace(TIGHT, async_scheduling=ahead), profile=SECOND)
        running = [
            (e["ts"] / 1e6, e["args"]["value"]) for e in run.of("C") if e["name"] == "running"
        ]
        assert running == [(0, 0), (0, 1), (4, 0), (9, 1), (13, 0)]


SGLANG = EngineConfig(num_blocks=30, block_size=8, sglang=SglangSettings(init_new_token_ratio=0.1))
laws = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@laws
@given(
    st.one_of(
        workloads,
        st.builds(make_workload, st.integers(0, 999), st.just(9), tagged_only=st.just(False)),
    ),
    st.one_of(configs, st.just(SGLANG)),
    st.sampled_from([None, "lifo", "fifo", "random"]),
)
def test_a_trace_says_what_the_run_says(
    jobs: Workload, config: EngineConfig, policy: str | None
) -> None:
    try:
        run = traced(jobs, replace(config, drain_s=2.0), policy)
    except NoProgressError:
        reject()
    _check_format(run)
    _check_slices(run)
    _check_counters(run, config.usable_blocks)


@laws
@given(st.data(), workloads, configs)
def test_phases_of_a_faulty_run_neither_overlap_nor_outlast_the_request(
    data: st.DataObject, jobs: Workload, config: EngineConfig
) -> None:
    try:
        run = traced(jobs, config, "lifo", faults=data.draw(faults_of(jobs)))
    except NoProgressError:
        reject()
    slices = run.slices()
    for record in run.result.records:
        mine = slices[record.request_id]
        bounds = [round(record.arrival_s * 1e9)]
        for event in mine:
            bounds += [ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])]
        bounds.append(round((record.censor_s if record.end_s is None else record.end_s) * 1e9))
        assert bounds == sorted(bounds)


def _check_format(run: Traced) -> None:
    """The rules of the trace event format that apply to the kinds used."""
    assert {event["ph"] for event in run.events} <= {"M", "X", "C", "i"}
    named = {(e["pid"], e["tid"]) for e in run.of("M") if e["name"] == "thread_name"}
    for event in run.events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
        if event["ph"] in "Xi":
            assert (event["pid"], event["tid"]) in named
        if event["ph"] == "i":
            assert event["s"] == "t"
        if event["ph"] == "C":
            assert [type(value) for value in event["args"].values()] == [int]
    counters = {e["name"] for e in run.of("C")}
    assert counters == (set(COUNTERS) if run.steps else set())


def _check_slices(run: Traced) -> None:
    """Every track is one chain from arrival to end, and sums to the record within 1 ns a slice."""
    slices = run.slices()
    num_evicted = 0
    for record in run.result.records:
        mine = slices[record.request_id]
        for one, next_one in pairwise(mine):
            assert ns(one["ts"]) + ns(one["dur"]) == ns(next_one["ts"])
            assert (next_one["name"] == "recompute") == (one["name"] == "preempted")
        if record.accepted_s is not None:
            end_s = record.censor_s if record.end_s is None else record.end_s
            total_ns = sum(ns(event["dur"]) for event in mine)
            assert total_ns == round(end_s * 1e9) - round(record.arrival_s * 1e9)
        for name, seconds in (("queued", record.queued_s), ("preempted", record.preempted_s)):
            found = [ns(event["dur"]) for event in mine if event["name"] == name]
            assert abs(sum(found) - seconds * 1e9) <= 1 + len(found)
        decodes = [event["ts"] for event in mine if event["name"] == "decode"]
        if decodes and not record.num_preemptions:
            assert ns(decodes[0]) == round((record.first_token_s or 0.0) * 1e9)
        num_evicted += record.num_preemptions
    evictions = [e for e in run.of("i") if e["name"] == "evicted"]
    assert len(evictions) == num_evicted == run.result.num_preemptions
    computed = sum(e["args"].get("computed_tokens", 0) for e in run.of("X"))
    zero_length = run.result.computed_tokens - computed  # async: planned, and the run was over
    assert zero_length >= 0
    assert not zero_length or any(step.start_s == run.result.end_s for step in run.steps)


def _check_counters(run: Traced, usable_blocks: int) -> None:
    """At the time of each step, the last value written is that of the step's log."""
    samples = run.of("C")
    assert [e["ts"] for e in samples] == sorted(e["ts"] for e in samples)
    place, now = 0, dict[str, int]()
    last_at = {step.start_s: step for step in run.steps}  # async: two steps may start together
    num_preempted = 0
    for step in run.steps:
        num_preempted += len(step.preempted)
        if last_at[step.start_s] is not step:
            continue
        if step is run.steps[-1] and step.start_s == run.result.end_s:
            continue  # the run's end, at the same moment, has the last word
        while place < len(samples) and ns(samples[place]["ts"]) <= round(step.start_s * 1e9):
            now[samples[place]["name"]] = samples[place]["args"]["value"]
            place += 1
        assert now == dict(
            zip(
                COUNTERS,
                (
                    usable_blocks - step.num_free_blocks, len(step.running), len(step.waiting),
                    sum(step.scheduled.values()), num_preempted,
                ),
                strict=True,
            )
        )  # fmt: skip


def test_a_run_that_fails_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), chrome_trace(path, "t", "r", 6) as trace:
        simulate(PAIR, TIGHT, SECOND, on_step=trace.step)
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@given(st.integers(0, 9999), st.integers(2, 3000), st.integers(1, 50))
def test_an_envelope_keeps_every_spike(seed: int, count: int, num_bins: int) -> None:
    rng = np.random.default_rng(seed)
    t_s, values = np.sort(rng.uniform(0, 9, count)), rng.integers(0, 9, count).astype(float)
    edges, low, high = envelope(t_s, values, 10.0, num_bins)
    assert (low <= high).all()
    bins = np.clip(np.searchsorted(edges, t_s, side="right") - 1, 0, num_bins - 1)
    assert (low[bins] <= values).all()
    assert (high[bins] >= values).all()
    assert (low.min(), high.max()) == (values.min(), values.max())
    mean = means(t_s, values, edges)
    assert (low - 1e-9 <= mean).all()  # rounding: sums of thousands of areas below 100
    assert (mean <= high + 1e-9).all()
    # a bin without a sample shows what was held
    for empty in set(range(num_bins)) - set(bins.tolist()):
        held = values[t_s <= edges[empty]][-1]
        assert low[empty] == high[empty] == held


def test_a_mean_weighs_values_by_how_long_they_hold() -> None:
    t_s, values = np.array([0.0, 1.0, 1.5]), np.array([4.0, 8.0, 0.0])
    assert means(t_s, values, np.array([0.0, 2.0, 4.0])).tolist() == [4.0, 0.0]


def test_series_keep_what_a_figure_needs(tmp_path: Path) -> None:
    series = StepSeries(TIGHT.usable_blocks)
    result = simulate(PAIR, TIGHT, SECOND, on_step=series.step)
    series.finish(result)
    assert series.evicted_s.tolist() == [17.0]
    assert series.values("running").max() == 2
    assert series.values("KV blocks used")[-1] == 0
    assert series.t_s[-1] == series.end_s == 23.0
    for name in ("figure.svg", "figure.png"):
        write_timeline_figure(series, tmp_path / name, "by hand")
    text = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    for part in ("by hand", "1 eviction<", "of 6 blocks", "seconds since the run began"):
        assert part in text
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_run_is_drawn_as_bands(tmp_path: Path) -> None:
    series = StepSeries(64)
    jobs = workload([8] * 2, [5000, 2], cap=5000)
    series.finish(simulate(jobs, EngineConfig(num_blocks=999), SECOND, on_step=series.step))
    assert len(series.t_s) > 2 * NUM_BINS
    write_timeline_figure(series, tmp_path / "f.svg", "long")
    assert "0 evictions" in (tmp_path / "f.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("count", [1, NUM_BINS, NUM_BINS + 1, 50_000])
def test_many_evictions_are_thinned_to_the_pixel(count: int) -> None:
    at_s = np.sort(np.random.default_rng(count).random(count) ** 3) * 70.0
    kept_s, so_far = thinned(at_s, 70.0)
    assert len(kept_s) <= NUM_BINS and so_far[-1] == count
    assert (so_far == np.searchsorted(at_s, kept_s, side="right")).all()
    nearest_s = np.abs(at_s[:, None] - kept_s[None, :]).min(axis=1)
    assert nearest_s.max() <= 70.0 / NUM_BINS  # every eviction has a tick within a pixel


def run_cli(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, arguments)])


SMALL = ("--blocks", 161, "--seeds", 2, "--tagged", 30, "--jobs", 1)


def test_a_cell_of_the_matrix_from_the_command_line(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("t.json.gz", "t.json", "t.png")]
    wanted = [part for path in paths for part in ("--timeline", path)]
    out = tmp_path / "out"
    done = run_cli("--policy", "fifo", *SMALL, "--timeline-seed", 1, *wanted, "--out", out)
    assert done.exit_code == 0, done.output
    assert "the step engine runs" in done.stderr
    data = json.loads(gzip.decompress(paths[0].read_bytes()))
    assert data == json.loads(paths[1].read_text(encoding="utf-8"))
    assert data["otherData"]["title"].startswith(
        "policy fifo, 161 blocks, seed 1, smollm2-everyday"
    )
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    cells = [c for path in (out / "cells").glob("*") for c in read_cells(path)]
    (cell,) = [c for c in cells if (c.policy, c.seed) == ("fifo", 1)]
    evictions = [e for e in data["traceEvents"] if e["name"] == "evicted"]
    assert len(evictions) == cell.num_preemptions > 0


def test_a_signal_and_a_measured_trace_have_timelines_too(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "t.json"
    lines = [f"{i / 8},{30 + i % 50},{20 + i % 30}" for i in range(220)]
    head = "arrival_s,context_tokens,generated_tokens"
    trace.write_text("\n".join([head, *lines]), encoding="utf-8")
    for options, title in (
        (("--policy", "fifo", "--trace", trace), "policy fifo, 161 blocks, seed 0, trace"),
        (("--policy", "shortest-remaining", "--signal", "oracle"), "remaining, signal oracle, 161"),
    ):
        done = run_cli(*options, *SMALL, "--timeline", out, "--out", tmp_path / "out")
        assert done.exit_code == 0, done.output
        data = json.loads(out.read_text(encoding="utf-8"))
        assert title in data["otherData"]["title"]
        assert len(data["traceEvents"]) > 500


def test_a_cell_run_again_is_the_matrix_cell() -> None:
    config = demo_matrix(bundled_runs(), {}, num_seeds=1, policies=("lifo", "young(0.5)"))
    config = replace(
        config, num_tagged=30, pressures=config.pressures[-1:], signals=config.signals[:1]
    )
    which = only_cell(config, "young(0.5)", 0)
    assert which == OneCell("young(0.5)", "none", config.pressures[0], 0)
    steps: list[StepLog] = []
    cell, result = run_one_cell(config, which, steps.append)
    assert (cell.policy, cell.num_steps) == ("young(0.5)", len(steps))
    assert result.num_preemptions == cell.num_preemptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "lifo", "--policy", "fifo", *SMALL), r"there are 2 policies"),
        (("--policy", "fifo"), "meets 3 pool sizes (221, 191, 161): give --blocks once"),
        (
            ("--policy", "longest-remaining", *SMALL, "--signal", "oracle", "--signal", "oracle-2"),
            "meets 2 signals (oracle, oracle-2): give --signal once",
        ),
        (("--policy", "fifo", *SMALL, "--timeline-seed", 2), "seed 2 is not in the matrix"),
    ],
)
def test_which_cell_must_be_clear(
    tmp_path: Path, options: tuple[object, ...], message: str
) -> None:
    done = run_cli(*options, "--timeline", tmp_path / "t.json", "--out", tmp_path / "out")
    assert done.exit_code != 0
    assert message in f"{done.output}{done.exception}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("t.txt",), r"must end in \.json, \.json\.gz \(a trace\) or \.png, \.svg"),
        (("w.json",), "names a file that this run uses"),
        (("t.json", "t.json"), "names a file that this run uses"),
        (("folder.json",), "is a folder"),
    ],
)
def test_a_bad_path_is_refused_before_any_work(
    tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    source = tmp_path / "w.json"
    source.write_text('{"requests": [{"id": "a", "prompt": 3, "output": 2}]}', encoding="utf-8")
    (tmp_path / "folder.json").mkdir()
    wanted = [part for name in names for part in ("--timeline", tmp_path / name)]
    done = run_cli("--workload", source, *wanted)
    assert isinstance(done.exception, InvalidInput)
    with pytest.raises(InvalidInput, match=message):
        raise done.exception
    assert not (tmp_path / "t.json").exists()


def test_a_workload_file_with_decisions_beside(tmp_path: Path) -> None:
    rows = [{"id": name, "prompt": 8, "output": 20} for name in "ab"]
    source, log, out = tmp_path / "w.json", tmp_path / "log.jsonl", tmp_path / "t.json"
    engine = {"num_blocks": 7, "block_size": 8}
    source.write_text(json.dumps({"engine": engine, "requests": rows}), encoding="utf-8")
    done = run_cli("--workload", source, "--decisions", log, "--timeline", out, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["preemptions"] == 1
    steps = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()[1:]]
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    assert [e["args"]["step"] for e in events if e["name"] == "evicted"] == [
        step["step"] for step in steps if step["preempted"]
    ]
