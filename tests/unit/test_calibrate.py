"""Calibration of a tiny random Llama on the CPU: timing, fit, file, simulation; bad input."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from contracts.errors import InvalidInput, PreemptBenchError
from preemptbench.cli import cli
from serving_sim.calibration import bench as bench_module
from serving_sim.calibration.attention import KvArena
from serving_sim.calibration.bench import TorchBench
from serving_sim.calibration.bench import open_torch_bench as open_bench
from serving_sim.calibration.bench_config import BenchConfig
from serving_sim.calibration.fusion import fuse
from serving_sim.calibration.graphs import capture
from serving_sim.calibration.run import CalibrationPlan
from serving_sim.calibration.shapes import SHAPES, published_name, read_config
from serving_sim.calibration.shapes import TINY as TINY_NAME
from serving_sim.calibration.steps import StepDoesNotFit, StepShape
from serving_sim.calibration.timing import CpuTimer, Run, TimingRules
from serving_sim.config import EngineConfig
from serving_sim.engine import simulate
from serving_sim.models import MODELS
from serving_sim.profile import StepWork, load_profile
from serving_sim.surface import SurfaceProfile
from tests.by_hand import workload

pytest.importorskip("torch")
pytest.importorskip("transformers")

TINY = BenchConfig(
    model="tiny-llama", dtype="float32", device="cpu", rules=TimingRules(min_timed=3, max_timed=3)
)
BOUNDS = ("--max-batch", "4", "--max-context", "64", "--max-chunk", "32")
QUICK = ("--device", "cpu", "--dtype", "float32", "--max-timed", "3", "--target-error", "0.99")


@pytest.fixture(scope="module")
def tiny() -> TorchBench:
    return open_bench(TINY, [StepShape(8, 8, 3, 16)])


# the step is the model's own


def test_chunks_decodes_and_both_at_once_give_the_logits_of_the_whole_sequence(
    tiny: TorchBench,
) -> None:
    """One sequence three ways: plain transformers; in two chunks and a decode; and its decode
    beside a chunk of another. float32 sums in another order: 1e-5 of logits of size 0.1 to 1."""
    import torch

    model, tokens = tiny._model, torch.randint(256, (1, 9))

    def step(shape: StepShape, ids: list[int], places: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([places]),
                use_cache=False,
                step_kv=arena.view(shape),
            ).logits[0]

    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        whole = model(input_ids=tokens, use_cache=False).logits[0]
    model.set_attn_implementation("preemptbench_step")
    arena = KvArena(2, 32, 2, 16, torch.float32, "cpu")
    ids = tokens[0].tolist()
    first = step(StepShape(5, 0), ids[:5], [0, 1, 2, 3, 4])
    second = step(StepShape(3, 5), ids[5:8], [5, 6, 7])
    last = step(StepShape(0, 0, 1, 9), ids[8:], [8])
    torch.testing.assert_close(torch.cat([first, second, last]), whole, rtol=0.0, atol=1e-5)

    for layer in arena.layers:  # the sequence's KV moves behind a chunk of four
        for tensor in layer:
            tensor[4:13] = tensor[0:9].clone()
    both = step(StepShape(4, 0, 1, 9), [*ids[:4], ids[8]], [0, 1, 2, 3, 8])
    torch.testing.assert_close(both[:4], whole[:4], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(both[4], whole[8], rtol=0.0, atol=1e-5)


def test_the_arena_is_viewed_not_copied(tiny: TorchBench) -> None:
    assert tiny._arena is not None
    kv = tiny._arena.view(StepShape(8, 8, 2, 16))
    base = tiny._arena.layers[0][0]
    assert kv.prefill[0][0].data_ptr() == base.data_ptr()
    assert kv.decodes[0][0].data_ptr() == base[16:].data_ptr()
    assert kv.decodes[0][0].shape == (2, 16, 2, 16)


def test_a_step_beyond_the_arena_does_not_fit(tiny: TorchBench) -> None:
    with pytest.raises(StepDoesNotFit, match="KV of 80 tokens; there is room for 64"):
        tiny.time(StepShape(0, 0, 5, 16))


def test_the_facts_of_a_model_are_its_own(tiny: TorchBench) -> None:
    weights = sum(parameter.numel() for parameter in tiny._model.parameters())
    facts = tiny.facts
    assert facts.weight_bytes == 4 * weights
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert tiny.identity["kernel"] == "torch sdpa auto, eager"
    assert tiny.identity["timer"] == "time.perf_counter"


@pytest.mark.parametrize("name", sorted(set(SHAPES) - {TINY_NAME}))
def test_every_named_shape_has_the_weights_it_was_published_with(name: str) -> None:
    model = bench_module.build(read_config(name), BenchConfig(model=name), "meta")
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert weights == MODELS[published_name(name)].num_parameters
    known = {"llama-3.1-8b": 8_030_261_248, "qwen3-8b": 8_190_735_360}  # of the files on the hub
    assert weights == known.get(name, weights)


# from the command to a simulation


def _calibrate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["calibrate", *map(str, arguments)])


def _refused(*arguments: str | Path) -> str:
    result = _calibrate(*arguments)
    assert isinstance(result.exception, PreemptBenchError), result.output
    return str(result.exception)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one calibration through the command line, with both kinds of report."""
    folder = tmp_path_factory.mktemp("calibrated")
    result = _calibrate(
        "--model", "tiny-llama", *QUICK, *BOUNDS, "--out", folder / "p.json",
        "--report", folder / "r.html", "--bandwidth-gb-s", "10", "--peak-tflops", "0.1", "--json",
    )  # fmt: skip
    assert result.exception is None, result.output
    (folder / "stdout").write_text(result.stdout)
    return folder


def test_bounds_nobody_gave_are_the_models() -> None:
    """tiny-llama takes 4,096 tokens, below the longest context that is timed by default."""
    plan = CalibrationPlan(bench=TINY)
    assert plan.grid.max_context_tokens == 4096
    assert max(plan.grid.chunks) == 2048
    assert CalibrationPlan(bench=TINY, max_context_tokens=1000).grid.max_context_tokens == 1000
    big = CalibrationPlan(bench=replace(TINY, model="llama-3.1-8b")).grid
    assert (big.max_context_tokens, max(big.chunks)) == (32_768, 8192)


def test_a_calibration_ends_in_a_profile_that_simulates(calibrated: Path) -> None:
    facts = json.loads((calibrated / "stdout").read_text())
    assert facts["steps_timed"] == len(_timed_lines(calibrated))
    assert facts["rounds"] >= 1  # how it stopped depends on how busy the machine is
    profile = load_profile(calibrated / "p.json")
    assert isinstance(profile, SurfaceProfile)
    assert profile.header.model == "tiny-llama"
    assert profile.header.kv_bytes_per_token == 512
    assert profile.step_s(StepWork(0, 0, 4, 4 * 64, 4, 64)) > 0.0
    load, config = (
        workload([20, 30, 10], [5, 8, 3]),
        EngineConfig(num_blocks=64, max_num_batched_tokens=32),
    )
    records = simulate(load, config, profile).records
    assert [record.output_tokens for record in records] == [5, 8, 3]
    # 8 tokens take a prefill and 7 decode steps at least, none cheaper than a lone decode
    lone_s = profile.step_s(StepWork(0, 0, 1, 32, 1, 32))
    assert max(record.end_s or 0.0 for record in records) >= 8 * 0.999 * lone_s


def _timed_lines(folder: Path) -> list[str]:
    return [line for line in (folder / "p.jsonl").read_text().splitlines() if "seconds" in line]


def test_the_report_shows_the_surfaces_and_the_facts(calibrated: Path) -> None:
    page = (calibrated / "r.html").read_text()
    assert page.startswith("<!doctype html>")
    for words in ("decode steps", "prefill steps", "no roofline", "held out error"):
        assert words in page


def test_a_second_start_times_nothing_and_writes_the_same(
    calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, lines = (calibrated / "p.json").read_text(), _timed_lines(calibrated)

    def refuse(*_: object) -> None:
        raise AssertionError("timed again")

    monkeypatch.setattr(bench_module, "measure", refuse)
    arguments = ("--model", "tiny-llama", *QUICK, *BOUNDS, "--out", calibrated / "p.json")
    result = _calibrate(*arguments, "--report", calibrated / "r.png")
    assert result.exception is None, result.output
    assert _timed_lines(calibrated) == lines
    assert (calibrated / "p.json").read_text() == before
    assert (calibrated / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_journal_can_be_fitted_elsewhere(
    calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving_sim.calibration.run.open_bench", None)  # no device is opened
    out = tmp_path / "q.json"
    result = _calibrate("--from-journal", calibrated / "p.jsonl", *QUICK, "--out", out)
    assert result.exception is None, result.output
    assert out.read_text() == (calibrated / "p.json").read_text()


def test_another_configuration_does_not_resume(calibrated: Path) -> None:
    before = (calibrated / "p.jsonl").read_bytes()
    message = _refused(
        "--model", "tiny-llama", *QUICK, "--max-batch", "8", *BOUNDS[2:],
        "--out", calibrated / "p.json",
    )  # fmt: skip
    assert "p.jsonl holds a calibration with grid = " in message
    assert (calibrated / "p.jsonl").read_bytes() == before


def test_an_interrupt_says_where_the_timings_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("preemptbench.cli_calibrate.run_calibration", interrupt)
    result = _calibrate("--model", "tiny-llama", *QUICK, *BOUNDS, "--out", tmp_path / "p.json")
    assert result.exit_code == 1
    assert f"the timed steps are safe in {tmp_path / 'p.jsonl'}" in result.output


# bad input


def test_bad_options_are_one_clear_message_each(tmp_path: Path) -> None:
    out, tiny = tmp_path / "p.json", ("--model", "tiny-llama")
    folder, model = tmp_path / "empty", tmp_path / "model.json"
    folder.mkdir()
    model.write_text('{"model_type": "lama"}')
    for arguments, words in (
        ((*tiny, "--out", tmp_path / "p.txt"), "ends in .json"),
        ((*tiny, "--out", out, "--report", tmp_path / "r.pdf"), "ends in .html or .png"),
        ((*tiny, "--out", out, "--budget-s", "0"), "budget of 0.0 s: give a finite number above 0"),
        ((*tiny, "--out", out, "--device", "tpu"), "unknown device 'tpu'"),
        ((*tiny, "--out", out, "--dtype", "int4"), "unknown dtype 'int4'"),
        ((*tiny, "--out", out, "--attention", "paged"), "unknown attention 'paged'"),
        ((*tiny, "--out", out, "--peak-tflops", "9"), "a roofline needs both"),
        (
            (*tiny, *QUICK, "--max-context", "8192", "--out", out),
            "a context of 8192 tokens is asked for; tiny-llama goes",
        ),
        (("--model", "llama-3.1-8", *QUICK, "--out", out), "did you mean 'llama-3.1-8b'"),
        (("--model", folder, *QUICK, "--out", out), "holds no config.json"),
        (("--model", tmp_path / "none.json", *QUICK, "--out", out), "does not exist"),
        (("--model", model, *QUICK, "--out", out), "did you mean 'llama'"),
        (("--model", "no/such", *QUICK, "--out", out), "'no/such' has no config that can be read"),
        (("--from-journal", tmp_path / "none.jsonl", "--out", out), "holds no calibration"),
    ):
        assert words in _refused(*arguments), arguments
        assert not out.exists()


def test_without_torch_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    message = _refused("--model", "tiny-llama", *QUICK, *BOUNDS, "--out", tmp_path / "p.json")
    assert "pip install 'preemptbench[collect]'" in message


def test_cuda_without_cuda_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(InvalidInput, match=r"'cuda': torch .* sees 0 CUDA devices"):
        open_bench(BenchConfig(model="tiny-llama", device="cuda"), [StepShape(0, 0, 1, 16)])


def test_a_model_larger_than_the_memory_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[str] = []
    build = bench_module.build

    def spy(config: object, bench: BenchConfig, device: str) -> object:
        built.append(device)
        return build(config, bench, device)

    monkeypatch.setattr(bench_module, "build", spy)
    monkeypatch.setattr(bench_module, "free_bytes", lambda device, share: 8 << 30)
    with pytest.raises(InvalidInput, match="LlamaForCausalLM in bfloat16 does not fit"):
        open_bench(BenchConfig(model="llama-3.1-8b", device="cpu"), [StepShape(0, 0, 1, 16)])
    assert built == ["meta"]


def _config_file(folder: Path, **change: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(dict(SHAPES["tiny-llama"]) | change))
    return str(path)


def test_models_that_are_not_covered_say_why(tmp_path: Path) -> None:
    shapes = [StepShape(0, 0, 1, 16)]

    def refused(**change: object) -> str:
        model = _config_file(tmp_path, **change)
        config = BenchConfig(model=model, dtype="float32", device="cpu")
        with pytest.raises(InvalidInput) as caught:
            open_bench(config, shapes)
        return str(caught.value)

    assert "sliding window of 8 tokens" in refused(model_type="mistral", sliding_window=8)
    assert "is no causal language model" in refused(model_type="vit")
    assert "transformers refuses its config" in refused(hidden_size="wide")


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    _config_file(tmp_path)
    assert read_config(str(tmp_path)).num_hidden_layers == 2


def test_a_fixed_kernel_is_used_and_named() -> None:
    config = BenchConfig(model="tiny-llama", dtype="float32", device="cpu", attention="math")
    found = open_bench(config, [StepShape(0, 0, 1, 16)])
    assert found.identity["kernel"] == "torch sdpa math, eager"
    assert isinstance(found._timer, CpuTimer)


# what only a GPU runs, as far as a machine without one can tell


class FakeGraphs:
    """torch.cuda as far as a capture uses it: it notes what happens on which stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.on = "main"

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"capture asked for torch.cuda.{name}")

    def Stream(self) -> FakeStream:  # noqa: N802
        return FakeStream(self, "side")

    def current_stream(self) -> FakeStream:
        return FakeStream(self, "main")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.on, before = stream.name, self.on
        yield
        self.on = before

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802
        return FakeGraph(self)

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph, stream: FakeStream) -> Iterator[None]:
        self.on = f"capture on {stream.name}"
        yield
        self.on = "main"


@dataclass
class FakeStream:
    cuda: FakeGraphs
    name: str

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


@dataclass
class FakeGraph:
    cuda: FakeGraphs

    def replay(self) -> None:
        self.cuda.log.append("replay")


def test_a_capture_warms_up_where_it_captures_and_replays_without_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeGraphs()
    monkeypatch.setattr("torch.cuda", cuda)
    replay = capture(lambda: cuda.log.append(f"run, {cuda.on}"), warm_ups=2)
    assert cuda.log == [
        "side waits for main", "run, side", "run, side", "main waits for side", "synchronize",
        "run, capture on side",
    ]  # fmt: skip
    cuda.log.clear()
    replay()
    replay()
    assert cuda.log == ["replay", "replay"]


def test_fused_parts_compute_the_same(tiny: TorchBench) -> None:
    """Compiled without code generation: what is tested is which parts are taken, and that the model
    runs through them. Two layers with two norms and an MLP each, and the last norm."""
    import torch

    model = open_bench(TINY, [StepShape(0, 0, 1, 16)])._model
    ids = torch.arange(6)[None]
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        before = model(input_ids=ids, use_cache=False).logits
        assert fuse(model, backend="eager") == 7
        after = model(input_ids=ids, use_cache=False).logits
    compiled = sum(part._compiled_call_impl is not None for part in model.modules())
    assert compiled == 7
    torch.testing.assert_close(after, before, rtol=0.0, atol=1e-6)


def test_only_small_steps_replay_a_graph(tiny: TorchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Run] = []

    def spy(run: Run) -> Run:
        captured.append(run)
        return run

    monkeypatch.setattr(bench_module, "capture", spy)
    monkeypatch.setattr(tiny, "_graph_max_tokens", 8)
    tiny.time(StepShape(8, 0))
    assert len(captured) == 1
    assert tiny.kernel == "torch sdpa auto, CUDA graphs up to 8 tokens"
    tiny.time(StepShape(8, 0, 1, 8))
    assert len(captured) == 1


def test_a_model_that_cannot_be_captured_is_timed_eagerly_and_says_so(
    tiny: TorchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: Run) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(bench_module, "capture", refuse)
    monkeypatch.setattr(tiny, "_graph_max_tokens", 8)
    monkeypatch.setattr(tiny, "notes", [])
    tiny._try_graphs()
    assert "operation not permitted" in tiny.notes[0]
    assert tiny.kernel == "torch sdpa auto, eager"


def test_a_step_that_runs_out_of_memory_is_left_out(
    tiny: TorchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    emptied: list[bool] = []

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench_module, "measure", refuse)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    with pytest.raises(StepDoesNotFit, match="working memory"):
        tiny.time(StepShape(8, 0))
    assert emptied == [True]


# the script for a GPU machine, on a machine that has torch and transformers only

_WITHOUT = """
import importlib.util, runpy, sys

class Without:
    names = {"numba", "scipy", "matplotlib", "click", "pyarrow", "lightgbm", "sklearn"}
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(name, name=name)

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in Without.names else found(name, *rest)
sys.meta_path.insert(0, Without())
sys.argv = ["calibrate_gpu", *sys.argv[1:]]
runpy.run_module("benchmarks.calibrate_gpu", run_name="__main__")
"""


def test_the_gpu_script_times_with_torch_alone_and_is_fitted_elsewhere(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, "--models", "tiny-llama", "no-such", "--device", "cpu",
         "--dtype", "float32", *BOUNDS, "--out", str(tmp_path), "--budget-s", "300"],
        capture_output=True, text=True, cwd=root, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "summary.json").read_text())
    assert facts["tiny-llama"]["stopped"] == "every step timed"
    assert "unknown model 'no-such'" in facts["no-such"]["error"]
    out = tmp_path / "p.json"
    result = _calibrate("--from-journal", tmp_path / "tiny-llama.jsonl", "--out", out)
    assert result.exception is None, result.output
    assert load_profile(out).name == "cpu-x1-tiny-llama-float32"
