"""Validation against recorded runs: profile, reader, metrics, and what the real data gives."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidInput, UnknownName
from eval.recorded_run import Occupancy, derived_blocks, read_recorded_run
from eval.validation import (
    compare,
    compare_occupancy,
    measured_latencies,
    record_latencies,
    replay,
    report,
    statistics,
)
from preemptbench.cli import cli
from serving_sim.config import EngineConfig
from serving_sim.engine import simulate
from serving_sim.jump import unsupported
from serving_sim.operator_profile import OperatorProfile, load_operator_profile
from serving_sim.profile import StepProfile, StepWork

MODEL = "Llama-3.1-8B"
LAYERS = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
ONCE = ("embedding", "final_layernorm")
TOKENS, SEQUENCES = (1, 8, 64), (1, 4, 16)
CHUNKS, PREFIXES, DECODES, CONTEXTS = (16, 32, 64), (0, 16, 32, 64), (1, 2, 4), (16, 32, 64)
RUNS = Path("llmservingsim", "runs")


def attention_us(chunk: float, prefix: float, decodes: float, context: float) -> float:
    """A made-up attention time, linear along each axis."""
    return 2.0 + chunk * (3.0 + prefix * 0.25) + decodes * (1.0 + context * 0.5)


def write_tables(folder: Path, holes: tuple[tuple[int, ...], ...] = ()) -> Path:
    """Write small operator tables and return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    dense = [(name, x, (1 + i) * x) for i, name in enumerate((*LAYERS, *ONCE)) for x in TOKENS]
    heads = [("lm_head", x, 100 + x) for x in SEQUENCES] + [("sampler", x, x) for x in SEQUENCES]
    points = [(0, 0, n, kv) for n, kv in product((*DECODES, 8), CONTEXTS)]
    points += [(c, k, 0, 0) for c, k in product(CHUNKS, PREFIXES)]
    points += list(product(CHUNKS, PREFIXES, DECODES, CONTEXTS))
    attention = [(*p, attention_us(*p)) for p in points if p not in holes]
    header = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    for name, columns, rows in (
        ("dense", ("layer", "tokens", "time_us"), dense),
        ("per_sequence", ("layer", "sequences", "time_us"), heads),
        ("attention", header, attention),
    ):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])
    return folder


@pytest.fixture
def profile(tmp_path: Path) -> OperatorProfile:
    return load_operator_profile(write_tables(tmp_path / "perf"), MODEL)


def expected_us(work: StepWork, attention: float) -> float:
    """The step's microseconds from the formulas that :func:`write_tables` wrote down."""
    tokens = work.prefill_tokens + work.num_decodes
    dense = sum(
        (2 if name == "layernorm" else 1) * (1 + i) * tokens for i, name in enumerate(LAYERS)
    )
    once = (len(LAYERS) + 1 + len(LAYERS) + 2) * tokens
    return 32 * (dense + attention) + once + 100 + 2 * work.num_requests


def test_a_measured_step_costs_what_was_measured(profile: OperatorProfile) -> None:
    assert isinstance(profile, StepProfile)
    for n, kv in product((*DECODES, 8), CONTEXTS):
        work = StepWork(0, 0, n, n * kv, n)
        us = expected_us(work, attention_us(0, 0, n, kv))
        assert profile.step_s(work) == pytest.approx(us * 1e-6, rel=1e-12)
    for c, k, n, kv in product(CHUNKS, PREFIXES, (0, *DECODES), CONTEXTS):
        work = StepWork(c, k + c, n, n * kv, n + 1)
        us = expected_us(work, attention_us(c, k, n, kv))
        assert profile.step_s(work) == pytest.approx(us * 1e-6, rel=1e-12)


def test_between_the_points_it_is_linear_and_beyond_them_it_goes_on(
    profile: OperatorProfile,
) -> None:
    for c, k, n, kv in ((24, 24, 3, 20), (48, 8, 8, 50), (128, 128, 16, 128)):
        work = StepWork(c, k + c, n, n * kv, n + 1)
        us = expected_us(work, attention_us(c, k, n, kv))
        assert profile.step_s(work) == pytest.approx(us * 1e-6, rel=1e-12)


def test_several_chunks_have_the_query_key_pairs_of_one(profile: OperatorProfile) -> None:
    """Two chunks of 16 on 48 have 2 x 16 x 56 pairs, as one of 32 on 40 has; two of 32 on nothing
    have 2 x 32 x 16, as one of sqrt(2048) on nothing has."""
    work = StepWork(32, 2 * (48 + 16), 0, 0, 2)
    assert profile.step_s(work) == pytest.approx(
        1e-6 * expected_us(work, attention_us(32, 40, 0, 0))
    )
    work = StepWork(64, 64, 0, 0, 2)
    one = attention_us(math.sqrt(2048), 0, 0, 0)
    assert profile.step_s(work) == pytest.approx(1e-6 * expected_us(work, one))


def test_a_hole_between_measured_points_is_bridged_and_one_at_the_edge_is_refused(
    tmp_path: Path,
) -> None:
    bridged = load_operator_profile(write_tables(tmp_path / "a", ((32, 16, 2, 32),)), MODEL)
    work = StepWork(32, 48, 2, 64, 3)
    us = expected_us(work, attention_us(32, 16, 2, 32))
    assert bridged.step_s(work) == pytest.approx(us * 1e-6, rel=1e-12)
    edge = tuple((64, k, 2, 64) for k in PREFIXES)
    with pytest.raises(InvalidInput, match=r"attention\.csv: the grid has a hole at .*64"):
        load_operator_profile(write_tables(tmp_path / "b", edge), MODEL)


META = """skew_profile:
  enabled: true
skew_fit:
  enabled: true
  bucket_axes:
    pc: raw
  per_tp:
    1:
      method: some
      alpha_default: 0.25
    2:
      alpha_default: 0.5
"""


def test_an_uneven_batch_costs_the_measured_share_of_the_longest(tmp_path: Path) -> None:
    """Two decodes of 16 and 48 tokens: mean 32, and a quarter (tp 2: half) of the way to 48."""
    even = StepWork(0, 0, 2, 64, 2, max_decode_context_tokens=32)
    uneven = even._replace(max_decode_context_tokens=48)
    unknown = even._replace(max_decode_context_tokens=0)
    for degree, share in ((1, 0.25), (2, 0.5), (None, 0.0)):
        folder = write_tables(tmp_path / str(degree) / f"tp{degree or 1}")
        text = (
            META
            if degree
            else META.replace("skew_fit:\n  enabled: true", "skew_fit:\n  enabled: no")
        )
        (folder.parent / "meta.yaml").write_text(text, encoding="utf-8")
        profile = load_operator_profile(folder, MODEL)
        assert profile.skew_share == share
        attention = attention_us(0, 0, 2, 32) + share * (
            attention_us(0, 0, 2, 48) - attention_us(0, 0, 2, 32)
        )
        assert profile.step_s(uneven) == pytest.approx(1e-6 * expected_us(uneven, attention))
        flat = 1e-6 * expected_us(even, attention_us(0, 0, 2, 32))
        assert profile.step_s(even) == profile.step_s(unknown) == pytest.approx(flat)
    folder = write_tables(tmp_path / "4" / "tp4")
    (folder.parent / "meta.yaml").write_text(META, encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"names no alpha_default in \[0, 1\] for tp 4"):
        load_operator_profile(folder, MODEL)


@pytest.mark.parametrize(
    ("table", "old", "new", "message"),
    [
        ("dense", "qkv_proj,8,", "qkv_proj,8,-", "must be numbers >= 0"),
        ("dense", "o_proj", "q_proj", "'o_proj' needs at least two points"),
        ("per_sequence", "sampler,1,1", "sampler,1,nan", "must be numbers >= 0"),
        ("per_sequence", "sequences", "seqs", "sequences, time_us must be numbers"),
        ("attention", "time_us", "time", "time_us must be numbers"),
    ],
)
def test_a_damaged_table_says_what_is_wrong(
    tmp_path: Path, table: str, old: str, new: str, message: str
) -> None:
    path = write_tables(tmp_path) / f"{table}.csv"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        load_operator_profile(tmp_path, MODEL)


def test_an_unknown_model_and_an_absent_table_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=f"did you mean '{MODEL}'"):
        load_operator_profile(write_tables(tmp_path), "Llama-3-8B")
    with pytest.raises(InvalidInput, match=r"dense\.csv does not exist: --perf"):
        load_operator_profile(tmp_path / "none", MODEL)


@given(st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e3)), min_size=2, max_size=30))
def test_the_comparison_is_what_its_names_say(pairs: list[tuple[float, float]]) -> None:
    real, simulated = np.array(pairs).T
    got = compare(real, simulated)
    assert got.mape == pytest.approx(sum(abs(s - r) / r for r, s in pairs) / len(pairs))
    for side, seconds in ((real, got.real_s), (simulated, got.simulated_s)):
        ordered = sorted(side.tolist())
        assert seconds["mean"] == pytest.approx(sum(ordered) / len(ordered))
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            at = share * (len(ordered) - 1)
            low = math.floor(at)
            high = min(low + 1, len(ordered) - 1)
            value = ordered[low] + (at - low) * (ordered[high] - ordered[low])
            assert seconds[name] == pytest.approx(value)
    for name, error in got.error.items():
        assert error == pytest.approx(got.simulated_s[name] / got.real_s[name] - 1)


def test_correlation_and_missing_values() -> None:
    x = np.array([1.0, 2.0, 4.0, 8.0])
    assert compare(x, 3 * x + 1).correlation == pytest.approx(1.0)
    assert compare(x, 10 - x).correlation == pytest.approx(-1.0)
    assert math.isnan(compare(x, np.ones(4)).correlation)
    holed = np.array([np.nan, 2.0, 4.0, 8.0])
    assert compare(x, holed) == compare(x[1:], holed[1:])
    with pytest.raises(InvalidInput, match="no request was measured on both sides"):
        compare(np.array([np.nan]), np.array([1.0]))
    assert statistics(np.array([5.0])) == dict.fromkeys(("mean", "p50", "p90", "p99"), 5.0)


def test_occupancy_is_read_at_the_real_sampling_times() -> None:
    real = Occupancy(
        np.array([0.5, 2.0, 9.0]), *np.array([[2.0, 4, 0], [1, 1, 1], [0.5, 0.5, 0.2]])
    )
    ours = Occupancy(
        np.array([1.0, 2.0, 3.0]), *np.array([[7.0, 6, 5], [3, 9, 0], [0.1, 0.9, 0.3]])
    )
    means = compare_occupancy(
        real, ours
    )  # ours counts at 2.0 only: before 1 and after 3 it is empty
    assert means["running"] == (2.0, 2.0)
    assert means["waiting"] == (1.0, 3.0)
    assert means["kv_share"] == pytest.approx((0.4, 0.3))


def write_run(folder: Path, **meta: object) -> Path:
    """Write a run folder of four requests and return it."""
    (folder / "vllm").mkdir(parents=True)
    instance = {"hardware": "GPU", "npu_mem": {"mem_size": 24, "mem_util": 0.833919}}
    fields = {
        "model": f"meta-llama/{MODEL}",
        "vllm_version": "0.19.0",
        "engine_kwargs": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": None},
    }
    rows = [
        {
            "request_id": f"r{i}", "input_toks": 20 + i, "output_toks": 4, "arrival_time": 0.0,
            "queued_ts": 100.0 + i, "first_token_ts": 101.0 + i, "last_token_ts": 104.0 + i,
        }
        for i in (1, 0, 3, 2)
    ]  # fmt: skip
    files = {
        "config.json": json.dumps({"nodes": [{"instances": [instance]}]}),
        "vllm/meta.json": json.dumps(fields | meta),
        "vllm/requests.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "vllm/timeseries.csv": "t,running,waiting,kv_cache_pct\n1,1,0,0.5\n2,2,0,50\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_run_is_read_in_arrival_order_and_says_what_it_did_not_record(tmp_path: Path) -> None:
    run = read_recorded_run(write_run(tmp_path / "run"))
    assert run.workload.request_ids == ("r0", "r1", "r2", "r3")
    assert run.workload.arrival_s.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert run.workload.prompt_tokens.tolist() == [20, 21, 22, 23]
    latencies = measured_latencies(run)
    assert (latencies.ttft == 1.0).all() and (latencies.e2e == 4.0).all()
    assert (latencies.tpot == 1.0).all()
    assert run.occupancy.kv_share.tolist() == [0.005, 0.5]
    assert run.config.num_blocks == 2588
    assert any("num_blocks = 2588: derived" in note for note in run.notes)
    assert any("async_scheduling = True: vLLM's default" in note for note in run.notes)
    recorded = {"cache_config": {"block_size": 32}, "scheduler_config": {"async_scheduling": False}}
    blocks = {"num_gpu_blocks": 99}
    run = read_recorded_run(write_run(tmp_path / "b", resolved_config=recorded, kv_cache=blocks))
    assert (run.config.num_blocks, run.config.block_size) == (99, 32)
    assert not run.config.async_scheduling
    assert not any("num_blocks" in note or "async" in note for note in run.notes)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"engine_kwargs": {"data_parallel_size": 2}}, "2 data-parallel ranks .* not covered"),
        ({"engine_kwargs": {"max_num_seqs": "8"}}, "max_num_seqs as '8'"),
        ({"model": "x/Llama-3.1-70B"}, "unknown model"),
        ({"engine_kwargs": []}, "'engine_kwargs' is .*must be an object"),
        ({"vllm_version": "main"}, "vllm_version is 'main'"),
    ],
)
def test_a_run_that_is_not_covered_is_refused(
    tmp_path: Path, meta: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_recorded_run(write_run(tmp_path / "run", **meta))


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("vllm/requests.jsonl", '"output_toks": 4', '"output_toks": 4.5', "output_toks is 4.5"),
        ("vllm/requests.jsonl", '"queued_ts": 101.0', '"queued_ts": 999.0', "out of order"),
        ("vllm/timeseries.csv", "50", "nan", "not finite"),
        ("vllm/timeseries.csv", "running", "run", "needs numbers in t, running"),
        ("config.json", "nodes", "node", "names no instance"),
        ("config.json", "mem_util", "util", "neither num_gpu_blocks nor mem_size"),
    ],
)
def test_a_damaged_run_says_what_is_wrong(
    tmp_path: Path, name: str, old: str, new: str, message: str
) -> None:
    path = write_run(tmp_path / "run") / name
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        read_recorded_run(tmp_path / "run")


def test_an_unfinished_replay_is_not_compared(tmp_path: Path, profile: OperatorProfile) -> None:
    run = read_recorded_run(write_run(tmp_path / "run"))
    config = EngineConfig(num_blocks=2)  # one usable block: no prompt fits
    assert "is neither an AffineProfile" in str(unsupported(run.workload, config, profile))
    records = simulate(run.workload, config, profile).records
    with pytest.raises(InvalidInput, match="only a run in which every request ends"):
        record_latencies(records)


def test_the_command_writes_numbers_and_pictures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "set" / "runs" / "GPU" / MODEL)
    tables = write_tables(tmp_path / "set" / "perf" / "GPU" / "meta-llama" / MODEL / "bf16" / "tp1")
    out = tmp_path / "out"
    for options in ([], ["--perf", str(tables), "--no-async"]):
        args = ["validate", str(run), "--out", str(out), "--json", *options]
        done = CliRunner().invoke(cli, args, catch_exceptions=False)
        printed = json.loads(done.stdout)
        assert printed == json.loads((out / "validation.json").read_text(encoding="utf-8"))
        assert printed["async_scheduling"] is not bool(options)
        assert printed["num_requests"] == 4
        assert set(printed["e2e"]["error"]) == {"mean", "p50", "p90", "p99"}
    assert "<svg" in (out / "validation.svg").read_text(encoding="utf-8")
    assert (out / "validation.png").read_bytes().startswith(b"\x89PNG")
    done = CliRunner().invoke(cli, ["validate", str(run), "--out", str(out)])
    assert "makespan s" in done.stdout and "0 preemptions" in done.stdout
    assert "derived" in done.stdout


def operator_tables(public_data: Path, gpu: str) -> Path:
    return public_data / "llmservingsim" / "perf" / gpu / "meta-llama" / MODEL / "bf16" / "tp1"


@pytest.mark.data
def test_the_real_tables_are_met_at_their_points(public_data: Path) -> None:
    """Step seconds at every decode-only row equal the sum of the rows that make up the step."""
    folder = operator_tables(public_data, "RTX4090")
    profile = load_operator_profile(folder, MODEL)
    with (folder / "attention.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["prefill_chunk"] == "0"]
    assert len(rows) > 90
    for row in rows:
        n, kv = int(row["n_decode"]), int(row["kv_decode"])
        rest_s = 32 * profile.per_layer.at(n) + profile.once.at(n) + profile.head.at(n)
        attention_s = 32e-6 * float(row["time_us"])
        work = StepWork(0, 0, n, n * kv, n)
        assert profile.step_s(work) == pytest.approx(rest_s + attention_s, rel=1e-12)


@pytest.mark.data
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_the_run_under_kv_pressure_is_met(public_data: Path, async_scheduling: bool) -> None:
    """RTX 4090, vLLM 0.19.0: 300 requests through 2,588 blocks, reached +0.2 %, +0.7 %, 1.3 %."""
    run = read_recorded_run(public_data / RUNS / "RTX4090" / MODEL)
    assert run.config.async_scheduling and run.config.num_blocks == 2588
    memory = {"mem_size": 24, "mem_util": 0.833919}  # its config.json
    assert derived_blocks(memory, MODEL, 16) == run.config.num_blocks
    run = replace(run, config=replace(run.config, async_scheduling=async_scheduling))
    profile = load_operator_profile(operator_tables(public_data, "RTX4090"), MODEL)
    outcome = report(run, profile, replay(run, profile))
    assert abs(outcome.makespan_error) <= 0.004
    assert abs(outcome.e2e.error["mean"]) <= 0.01
    assert outcome.e2e.mape <= 0.015
    assert outcome.e2e.correlation >= 0.998
    assert abs(outcome.ttft.error["mean"]) <= 0.015
    assert abs(outcome.tpot.error["mean"]) <= 0.01
    assert 175 <= outcome.num_preemptions <= 205
    for real, simulated in outcome.occupancy.values():
        assert simulated == pytest.approx(real, rel=0.02)


@pytest.mark.data
def test_the_run_under_light_pressure_is_met(public_data: Path) -> None:
    """RTX PRO 6000, blocks derived, the tables' own share for uneven batches: +0.8 %, +2.9 %."""
    run = read_recorded_run(public_data / RUNS / "RTXPRO6000" / MODEL)
    assert any("num_blocks" in note and "derived" in note for note in run.notes)
    profile = load_operator_profile(operator_tables(public_data, "RTXPRO6000"), MODEL)
    assert profile.skew_share == 0.0543
    outcome = report(run, profile, replay(run, profile))
    assert outcome.num_preemptions == 0
    assert abs(outcome.makespan_error) <= 0.012
    assert abs(outcome.e2e.error["mean"]) <= 0.03
    assert outcome.e2e.mape <= 0.035
    assert outcome.e2e.correlation >= 0.995


@pytest.mark.data
def test_the_data_parallel_run_is_named_as_not_covered(public_data: Path) -> None:
    with pytest.raises(InvalidInput, match=r"2 data-parallel ranks .* not covered"):
        read_recorded_run(public_data / RUNS / "RTXPRO6000" / "Qwen3-30B-A3B-Instruct-2507")
