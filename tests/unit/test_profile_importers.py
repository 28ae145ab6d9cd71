"""Importers of public operator tables, and the bundled profiles that came out of them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from benchmarks.fit_profiles import fits
from contracts.errors import InvalidInput, UnknownName
from eval.recorded_run import read_recorded_run
from eval.validation import replay, report
from preemptbench.cli import cli
from serving_sim.import_aiconfigurator import all_reduce_curve, import_aiconfigurator
from serving_sim.import_llmservingsim import import_llmservingsim
from serving_sim.models import MODELS
from serving_sim.operator_profile import load_operator_profile
from serving_sim.profile import StepWork, load_profile
from serving_sim.surface import SurfaceProfile
from serving_sim.surface_file import surface_text
from tests.surfaces import HEADER
from tests.unit.test_validation import MODEL, RUNS, write_tables

LLAMA = MODELS[MODEL]


def test_operator_tables_that_are_linear_come_back_whole(tmp_path: Path) -> None:
    """The tables' attention is linear along each axis: nothing is lost but what is written."""
    folder = write_tables(tmp_path / "tp1")
    raw, fitted = load_operator_profile(folder, MODEL), import_llmservingsim(folder, MODEL, HEADER)
    for work in (
        StepWork(0, 0, 2, 64, 2, 32), StepWork(32, 48, 0, 0, 1), StepWork(32, 48, 2, 64, 3, 32),
    ):  # fmt: skip
        # 0.5 % is what a dropped knot may bend, 5e-5 the digits of a written value
        assert fitted.step_s(work) == pytest.approx(raw.step_s(work), rel=0.006)


def test_more_gpus_add_two_sums_a_layer(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tp2")
    header = replace(HEADER, tensor_parallel=2)
    with pytest.raises(InvalidInput, match="hold no all-reduce; give all_reduce_s"):
        import_llmservingsim(folder, MODEL, header)
    alone, both = (
        import_llmservingsim(folder, MODEL, header, all_reduce_s=reduce)
        for reduce in (lambda size: 0.0, lambda size: 1e-9 * size)
    )
    added = both.tables["tokens"].seconds[-1] - alone.tables["tokens"].seconds[-1]
    tokens = both.tables["tokens"].axes[0][-1]
    assert added == pytest.approx(2 * LLAMA.layers * 1e-9 * tokens * LLAMA.hidden * 2, rel=1e-3)


def test_a_model_without_an_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown model 'GPT-5'"):
        import_llmservingsim(write_tables(tmp_path), "GPT-5", HEADER)


def _write(folder: Path, name: str, **columns: Any) -> None:
    pq.write_table(pa.table(columns), folder / f"{name}.vllm-1.parquet")


def _flops_ms(m: float, n: float, k: float) -> float:
    """A product in milliseconds: 10 us, and in proportion to what it reads."""
    return 0.01 + 1e-9 * n * k + 1e-10 * m * (n + k)


def write_kernels(folder: Path) -> Path:
    """Write small kernel tables of a made-up card whose laws are known."""
    folder.mkdir(parents=True)
    (folder / "system.yaml").write_text(
        "gpu:\n  mem_bw: 1e12\n  mem_bw_empirical_scaling_factor: 0.5\n"
        "  mem_empirical_constant_latency: 0.000002\n",
        encoding="utf-8",
    )
    m = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384]
    sizes = [1024, 4096, 16384, 65536]
    at = [(x, n, k) for x in m for n in sizes for k in sizes]
    _write(
        folder, "gemm_perf", gemm_dtype=["bfloat16"] * len(at),
        latency=[_flops_ms(*point) for point in at],
        **{name: [point[i] for point in at] for i, name in enumerate("mnk")},
    )  # fmt: skip
    batches, lengths = [1, 2, 4, 8, 16, 32, 64], [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    at = [(b, x, heads) for b in batches for x in lengths for heads in (24, 40)]
    shared = {
        "batch_size": [p[0] for p in at], "num_heads": [p[2] for p in at],
        "num_key_value_heads": [8] * len(at), "head_dim": [128] * len(at),
        "window_size": [0] * len(at), "kv_cache_dtype": ["bfloat16"] * len(at),
    }  # fmt: skip
    prefill = [0.01 + 1e-9 * b * x * x * heads for b, x, heads in at]
    _write(folder, "context_attention_perf", isl=[p[1] for p in at], latency=prefill, **shared)
    decode = [0.01 + 1e-8 * b * x * heads for b, x, heads in at]
    steps = [p[1] - 1 for p in at]
    _write(folder, "generation_attention_perf", step=steps, latency=decode, **shared)
    _write(
        folder, "custom_allreduce_perf", backend=["vllm_graph"] * 2, num_gpus=[2, 2],
        message_size=[1000, 1_000_000], latency=[0.01, 1.009],
    )  # fmt: skip
    return folder


def test_kernel_times_are_put_together_as_the_model_is(tmp_path: Path) -> None:
    """32 heads were not timed: half way between 24 and 40. A decode of one, put together here."""
    profile = import_aiconfigurator(write_kernels(tmp_path / "card"), MODEL, HEADER)
    layer_ms = sum(
        _flops_ms(1, n, k) for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    )
    attention_ms = 0.01 + 1e-8 * 1024 * 32
    head_ms = _flops_ms(1, 65536, 4096) * 128256 / 65536
    # beside the products: four small kernels a layer, and embedding, final norm and sampling once
    moved = 32 * (2 * 4 * 4096 * 2 + 2 * 40 * 128 * 2 + 3 * 14336 * 2) + 6 * 4096 * 2 + 10 * 128256
    other_s = (4 * 32 + 3) * 2e-6 + moved / 0.5e12
    expected_s = (32 * (layer_ms + attention_ms) + head_ms) * 1e-3 + other_s
    work = StepWork(0, 0, 1, 1024, 1, 1024)
    # 1 %: knots that bend a step by less than 0.5 % are dropped in tokens and in attention
    assert profile.step_s(work) == pytest.approx(expected_s, rel=0.01)
    assert {"decode", "prefill"} <= set(profile.errors)


def test_a_prefix_costs_the_triangle_that_is_left(tmp_path: Path) -> None:
    profile = import_aiconfigurator(write_kernels(tmp_path / "card"), MODEL, HEADER)
    on_nothing, on_prefix = StepWork(2048, 2048, 0, 0, 1), StepWork(2048, 4096, 0, 0, 1)
    # attention over 4096 less that over 2048, less that of 2048 alone: 32 layers, 32 heads
    added_s = 32 * 1e-12 * 32 * (4096**2 - 2 * 2048**2)
    found_s = profile.step_s(on_prefix) - profile.step_s(on_nothing)
    assert found_s == pytest.approx(added_s, rel=0.01)


def test_all_reduce_is_by_bytes_of_16_bit_values(tmp_path: Path) -> None:
    reduce_s = all_reduce_curve(write_kernels(tmp_path / "card"), 2)
    assert reduce_s(2000) == pytest.approx(1e-5)
    assert reduce_s(1_001_000) == pytest.approx(5.095e-4)
    with pytest.raises(InvalidInput, match=r"nothing was timed with .*'num_gpus': 3"):
        all_reduce_curve(tmp_path / "card", 3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "system.yaml").unlink(), "gives no mem_bw"),
        (lambda f: next(f.glob("gemm*")).unlink(), r"holds 0 files gemm_perf\."),
        (lambda f: next(f.glob("context*")).rename(f / "gemm_perf.b.parquet"), "holds 2 files"),
    ],
)
def test_a_missing_table_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    folder = write_kernels(tmp_path / "card")
    damage(folder)
    with pytest.raises(InvalidInput, match=message):
        import_aiconfigurator(folder, MODEL, HEADER)


def test_a_latency_that_is_none_and_heads_that_nobody_timed_are_refused(tmp_path: Path) -> None:
    folder = write_kernels(tmp_path / "card")
    with pytest.raises(InvalidInput, match="timed for 24 to 40 heads, not 64"):
        import_aiconfigurator(folder, "Qwen3-32B", HEADER)
    _write(
        folder, "custom_allreduce_perf", backend=["vllm_graph"], num_gpus=[2],
        message_size=[1000], latency=[float("nan")],
    )  # fmt: skip
    with pytest.raises(InvalidInput, match="1 latencies are not finite"):
        all_reduce_curve(folder, 2)
    _write(folder, "custom_allreduce_perf", backend=["vllm_graph"], latency=[1.0])
    with pytest.raises(InvalidInput, match=r"lacks columns \['num_gpus'\]"):
        all_reduce_curve(folder, 2)


@pytest.mark.data
@pytest.mark.parametrize(
    "name",
    ["rtx4090-llama-3.1-8b-tp1", "rtxpro6000-qwen3-32b-tp2", "h100-qwen3-30b-a3b-tp1"],
)
def test_a_bundled_profile_is_what_the_script_makes(public_data: Path, name: str) -> None:
    profile = dict(fits(public_data))[name]()
    assert surface_text(profile) == surface_text(_bundled(name))


def _bundled(name: str) -> SurfaceProfile:
    profile = load_profile(name)
    assert isinstance(profile, SurfaceProfile)
    return profile


def test_every_bundled_surface_has_its_recipe() -> None:
    folder = Path(__file__).parents[2] / "serving_sim" / "profiles"
    surfaces = {p.stem for p in folder.glob("*.json") if '"format"' in p.read_text("utf-8")}
    assert surfaces == {name for name, _ in fits(Path("unused"))}


@pytest.mark.data
def test_the_fitted_profile_replays_the_run_under_kv_pressure(public_data: Path) -> None:
    """The bars of the engine: makespan 0.7 %, mean E2E 1 %, MAPE 2 % (reached: see docs)."""
    run = read_recorded_run(public_data / RUNS / "RTX4090" / MODEL)
    profile = _bundled("rtx4090-llama-3.1-8b-tp1")
    outcome = report(run, profile, replay(run, profile))
    assert abs(outcome.makespan_error) <= 0.007
    assert abs(outcome.e2e.error["mean"]) <= 0.01
    assert outcome.e2e.mape <= 0.02
    assert outcome.e2e.correlation > 0.995


@pytest.mark.data
def test_the_command_replays_with_a_profile_and_refuses_another_models(
    public_data: Path, tmp_path: Path
) -> None:
    folder = str(public_data / RUNS / "RTX4090" / MODEL)
    arguments = ["validate", folder, "--out", str(tmp_path), "--profile"]
    found = CliRunner().invoke(cli, [*arguments, "rtx4090-llama-3.1-8b-tp1", "--strict"])
    assert found.exit_code == 0, found.output
    assert "makespan s" in found.output
    for extra, message in (
        (["h100-qwen3-32b-tp1"], "holds step times of 'Qwen/Qwen3-32B'"),
        (["rtx4090-llama-3.1-8b", "--strict"], "is affine and keeps no range"),
        (["rtx4090-llama-3.1-8b-tp1", "--perf", folder], "give one of them"),
    ):
        refused = CliRunner().invoke(cli, [*arguments, *extra])
        assert isinstance(refused.exception, InvalidInput)
        assert message in str(refused.exception)


@pytest.mark.data
def test_the_profile_stays_near_the_raw_tables_on_real_work(public_data: Path) -> None:
    """Steps of the recorded run, timed by the tables themselves and by what was fitted to them."""
    run = read_recorded_run(public_data / RUNS / "RTX4090" / MODEL)
    raw = load_operator_profile(public_data / "llmservingsim" / "perf" / run.perf_path, MODEL)
    fitted = _bundled("rtx4090-llama-3.1-8b-tp1")
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(500):
        decodes, mean = int(rng.integers(1, 64)), int(rng.integers(50, 1200))
        chunk = int(rng.integers(2, 1500)) if rng.random() < 0.3 else 0
        work = StepWork(chunk, chunk, decodes, decodes * mean, decodes + (chunk > 0), mean)
        errors.append(abs(fitted.step_s(work) / raw.step_s(work) - 1.0))
    assert np.median(errors) < 0.01
    assert np.quantile(errors, 0.99) < 0.06
    assert asdict(fitted.range)["context_tokens"] == 16384
