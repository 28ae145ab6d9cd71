"""Arrivals and workloads: keyed, never rescaled, scaled by one factor; trace replay; Parquet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contracts.errors import InvalidInput
from tests.unit.test_runlog import make_run, make_runs
from traces.arrivals import arrival_times, build_workload, workload_from_trace
from traces.workload import Workload
from traces.workload_io import read_workload, write_workload

SIZES = {"num_warmup": 3, "num_tagged": 5, "num_filler": 2}


def build(runs: list, **changes: object) -> Workload:
    settings: dict = {"rate_per_s": 2.0, "seed": 1, "deadline_s": 30.0, "name": "w", **SIZES}
    return build_workload(runs, **{**settings, **changes})


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_stated_mean_and_variation(cv: float) -> None:
    gaps = np.diff(arrival_times(40_000, rate_per_s=4.0, cv=cv, seed=0), prepend=0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_arrivals_are_keyed_and_never_rescaled() -> None:
    long = arrival_times(100, rate_per_s=2.0, seed=5)
    assert np.array_equal(long[:40], arrival_times(40, rate_per_s=2.0, seed=5))
    totals = {float(arrival_times(100, rate_per_s=2.0, seed=seed)[-1]) for seed in range(8)}
    assert len(totals) == 8
    assert np.allclose(long, 2.0 * arrival_times(100, rate_per_s=4.0, seed=5))


def test_workload_of_runs() -> None:
    runs = make_runs(6)
    runs[1] = make_run(1, output_tokens=32, finish_reason="length", event_observed=False)
    runs[2] = make_run(2, finish_reason="abort", event_observed=False)
    workload = build(runs, num_tagged=200)
    by_id = {run.run_id: run for run in runs}
    assert workload.request_ids[:2] == ("r000000", "r000001")
    assert workload.cohort.tolist() == [0] * 3 + [1] * 200 + [2] * 2
    assert workload.run_ids is not None and set(workload.run_ids) == set(by_id)
    for i, run_id in enumerate(workload.run_ids):
        run = by_id[run_id]
        assert workload.output_tokens[i] == run.output_tokens
        assert workload.max_tokens[i] == run.max_new_tokens
        assert workload.prompt_tokens[i] == run.prompt_tokens
        assert workload.capped[i] == (run.run_id == "run-1")
    cut_short = workload.run_ids.count("run-2")
    assert workload.manifest["num_cut_below_cap"] == cut_short > 0
    assert set(workload.deadline_s.tolist()) == {30.0}
    assert np.isnan(build(runs, deadline_s=None).deadline_s).all()


def test_draws_depend_on_the_seed_and_not_on_the_order_of_runs() -> None:
    runs = make_runs(30)
    first = build(runs)
    again = build(runs[::-1])
    assert first.run_ids == again.run_ids
    assert np.array_equal(first.arrival_s, again.arrival_s)
    other = build(runs, seed=2)
    assert other.run_ids != first.run_ids
    longer = build(runs, num_filler=9)
    assert first.run_ids is not None and longer.run_ids is not None
    assert longer.run_ids[:10] == first.run_ids
    assert build(runs, rate_per_s=9.0).run_ids == first.run_ids


def test_one_factor_scales_lengths_and_caps() -> None:
    plain, scaled = build(make_runs(8)), build(make_runs(8), length_scale=16)
    assert np.array_equal(scaled.output_tokens, 16 * plain.output_tokens)
    assert np.array_equal(scaled.max_tokens, 16 * plain.max_tokens)
    assert np.array_equal(scaled.prompt_tokens, plain.prompt_tokens)
    assert np.array_equal(scaled.arrival_s, plain.arrival_s)
    assert scaled.manifest["length_scale"] == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate_per_s": 0.0}, r"rate_per_s is 0\.0"),
        ({"rate_per_s": float("inf")}, "rate_per_s is inf"),
        ({"cv": -1.0}, r"cv is -1\.0"),
        ({"length_scale": 0}, "length_scale is 0"),
        ({"length_scale": 1.5}, r"length_scale is 1\.5"),
        ({"num_tagged": 0}, "num_tagged is 0"),
        ({"num_filler": -1}, "-1 filler requests"),
        ({"deadline_s": -1.0}, "deadline_s is -1"),
    ],
)
def test_bad_settings(changes: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build(make_runs(4), **changes)


def test_no_run_no_workload() -> None:
    with pytest.raises(InvalidInput, match="at least one decode run"):
        build([])


# --- traces ------------------------------------------------------------------------------------


def replay(path: Path, **changes: object) -> Workload:
    settings: dict = {"seed": 0, "deadline_s": None, "name": "t", **SIZES}
    return workload_from_trace(path, **{**settings, **changes})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{i * i / 10},{i + 1},{2 * i + 1}" for i in range(30)]
    path.write_text("arrival_s,context_tokens,generated_tokens\n" + "\n".join(rows) + "\n")
    return path


def test_replay_keeps_the_gaps(trace: Path) -> None:
    workload = replay(trace)
    start = int(workload.prompt_tokens[0]) - 1
    rows = np.arange(start, start + 10)
    assert np.allclose(workload.arrival_s, (rows**2 - start**2) / 10)
    assert workload.output_tokens.tolist() == (2 * rows + 1).tolist()
    assert set(workload.max_tokens.tolist()) == {59}
    assert not workload.capped.any() and workload.run_ids is None
    starts = {int(replay(trace, seed=seed).prompt_tokens[0]) for seed in range(12)}
    assert len(starts) > 3


def test_a_cap_cuts_a_trace(trace: Path) -> None:
    workload = replay(trace, max_tokens=20, num_tagged=25)
    assert workload.output_tokens.max() == 20
    assert np.array_equal(workload.capped, 2 * workload.prompt_tokens - 1 > 20)


def test_parquet_traces_equal_csv(trace: Path) -> None:
    table = np.genfromtxt(trace, delimiter=",", names=True)
    columns = {name: pa.array(table[name]) for name in table.dtype.names}
    columns["context_tokens"] = columns["context_tokens"].cast(pa.int32())
    path = trace.with_suffix(".parquet")
    pq.write_table(pa.table(columns), path)
    assert np.array_equal(replay(path).arrival_s, replay(trace).arrival_s)
    pq.write_table(pa.table(columns).drop_columns(["arrival_s"]), path)
    with pytest.raises(InvalidInput, match=r"lacks \['arrival_s'\]"):
        replay(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1.0,5,0", "row 1: generated_tokens is 0.0; it must be a whole number of at least 1"),
        ("1.0,5.5,3", "row 1: context_tokens is 5.5"),
        ("-1.0,5,3", "row 1: arrival_s is -1.0"),
        ("nan,5,3", "row 1: arrival_s is nan"),
        ("1.0,5", "write three numbers a row"),
        ("x,5,3", "write three numbers a row"),
    ],
)
def test_bad_traces(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"arrival_s,context_tokens,generated_tokens\n0,5,3\n{row}\n")
    with pytest.raises(InvalidInput, match=message):
        replay(path)


def test_trace_too_short_or_empty(trace: Path) -> None:
    with pytest.raises(InvalidInput, match=r"holds 30 requests; .*ask for 105"):
        replay(trace, num_tagged=100)
    trace.write_text("arrival_s,context_tokens,generated_tokens\n")
    with pytest.raises(InvalidInput, match="holds 0 requests"):
        replay(trace)
    trace.write_text("arrival_s,context_tokens\n")
    with pytest.raises(InvalidInput, match="lacks"):
        replay(trace)


@pytest.mark.data
@pytest.mark.parametrize("name", ["code", "conv"])
def test_azure_traces_replay(public_data: Path, name: str) -> None:
    path = public_data / "traces_azure_2023" / f"azure_llm_2023_{name}.parquet"
    workload = replay(path, num_tagged=500)
    assert len(workload) == 505 and workload.arrival_s[0] == 0.0


# --- Parquet -----------------------------------------------------------------------------------


def test_workload_round_trip(tmp_path: Path) -> None:
    plain = build(make_runs(8))
    groups = np.stack([np.arange(len(plain)) % 2, np.minimum(plain.prompt_tokens, 3)], axis=1)
    shared = replace(plain, prefix_groups=groups.astype(np.int64))
    for workload in (build(make_runs(8), deadline_s=None), shared, plain):
        path = tmp_path / "w.parquet"
        write_workload(workload, path)
        back = read_workload(path)
        for name in Workload.__dataclass_fields__:
            ours, theirs = getattr(workload, name), getattr(back, name)
            if isinstance(ours, np.ndarray):
                assert np.array_equal(ours, theirs, equal_nan=ours.dtype == float)
                assert ours.dtype == theirs.dtype
            else:
                assert ours == theirs
    replayed = replace(workload, run_ids=None)
    write_workload(replayed, path)
    assert read_workload(path).run_ids is None


def test_damaged_workloads(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    write_workload(build(make_runs(8)), path)
    data, manifest = path.read_bytes(), path.with_suffix(".manifest.json")
    path.write_bytes(data[:-20])
    with pytest.raises(InvalidInput, match="not a readable Parquet file"):
        read_workload(path)
    path.write_bytes(data)
    pq.write_table(pq.read_table(path).drop_columns(["cohort"]), tmp_path / "x.parquet")
    with pytest.raises(InvalidInput, match="a workload has"):
        read_workload(tmp_path / "x.parquet")
    manifest.unlink()
    with pytest.raises(InvalidInput, match=r"w\.manifest\.json is missing"):
        read_workload(path)
