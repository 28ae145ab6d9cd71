"""Calibration without a device: timers, clocks, grid, journal, and the loop on known times."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import InvalidInput
from serving_sim.calibration.adaptive import CalibrationSettings, calibrate, refit
from serving_sim.calibration.capacity import ModelFacts, arena_tokens
from serving_sim.calibration.clocks import ClockLog, open_clock_log
from serving_sim.calibration.device import free_bytes
from serving_sim.calibration.grid import Grid, coarse_grid
from serving_sim.calibration.journal import Journal
from serving_sim.calibration.report import draw
from serving_sim.calibration.result import work_of
from serving_sim.calibration.roofline import GPUS, gpu_peak, step_roofline_s
from serving_sim.calibration.run import fit_with
from serving_sim.calibration.steps import StepDoesNotFit, StepShape
from serving_sim.calibration.timing import CpuTimer, CudaTimer, Timing, TimingRules, measure
from serving_sim.roofline import PEAKS, Peak
from serving_sim.surface import ProfileHeader, SurfaceProfile

GIB = 1 << 30
LLAMA_8B = ModelFacts(
    architecture="LlamaForCausalLM", dtype="bfloat16", num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, hidden_size=4096, intermediate_size=14_336, vocab_size=128_256,
    max_context_tokens=131_072, weight_bytes=2 * 8_030_261_248, bytes_per_value=2,
)  # fmt: skip
HEADER = ProfileHeader("known", "no GPU", "llama-3.1-8b", "a formula", "none")
IDENTITY = {"model": "known", "hardware": "no GPU"}


# timers


class FakeCuda:
    """What CudaTimer uses of torch.cuda: a device that is done only when it is waited for."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.clock_ms, self.calls = list(seconds), 0.0, []

    def run(self) -> None:
        self.calls.append("run")
        self.clock_ms += 1e3 * self.seconds.pop(0)

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802  (torch's name)
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at_ms = cuda, math.nan

    def record(self) -> None:
        self.at_ms = self.cuda.clock_ms

    def elapsed_time(self, end: FakeEvent) -> float:
        assert "synchronize" in self.cuda.calls, "read before the device was waited for"
        return end.at_ms - self.at_ms


def test_cuda_events_give_each_run_its_own_seconds_and_one_wait() -> None:
    cuda = FakeCuda([0.5, 0.25, 0.125])
    timer = CudaTimer(cuda, while_running=lambda: cuda.calls.append("sample"))
    assert timer.time(cuda.run, 3) == [0.5, 0.25, 0.125]
    assert cuda.calls == ["run", "run", "run", "sample", "synchronize"]


def test_the_flush_is_outside_the_events() -> None:
    cuda = FakeCuda([0.5, 0.25])

    def flush() -> None:
        cuda.calls.append("flush")
        cuda.clock_ms += 1e6

    assert CudaTimer(cuda, flush).time(cuda.run, 2) == [0.5, 0.25]
    assert cuda.calls[:4] == ["flush", "run", "flush", "run"]


def test_the_cpu_timer_counts_the_runs() -> None:
    calls: list[int] = []
    seconds = CpuTimer().time(lambda: calls.append(1), 5)
    assert len(calls) == len(seconds) == 5
    assert min(seconds) >= 0.0


class ScriptedTimer:
    name = "scripted"

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.counts = seconds, []

    def time(self, run: object, count: int) -> list[float]:
        self.counts.append(count)
        taken, self.seconds = self.seconds[:count], self.seconds[count:]
        return taken


def test_a_steady_step_is_timed_once_and_an_unsteady_one_until_the_bound() -> None:
    rules = TimingRules(warm_ups=2, min_timed=5, max_timed=12, relative_error=0.01, max_s=1e9)
    steady = ScriptedTimer([9.0, 9.0] + [1.0] * 5)
    assert measure(lambda: None, steady, rules) == Timing(1.0, 0.0, 5)
    assert steady.counts == [2, 5]  # the warm-ups' 9 s count for nothing
    unsteady = ScriptedTimer([9.0, 9.0] + [1.0, 2.0] * 6)
    timing = measure(lambda: None, unsteady, rules)
    assert unsteady.counts == [2, 5, 5, 2]
    assert (timing.seconds, timing.spread_s, timing.num_timed) == (1.5, 1.0, 12)


def test_a_long_step_stops_at_its_seconds() -> None:
    timer = ScriptedTimer([1.0, 2.0] * 50)
    rules = TimingRules(warm_ups=0, min_timed=3, max_timed=99, max_s=4.0)
    assert measure(lambda: None, timer, rules).num_timed == 3


@pytest.mark.parametrize(
    "rules", [{"min_timed": 2}, {"max_timed": 5}, {"warm_ups": -1}, {"max_s": 0.0}]
)
def test_bad_timing_rules_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="timing rules"):
        TimingRules(**rules)


# clocks


class FakeNvml:
    """A GPU that is capped by power in one sample, and whose driver has no memory clock."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.samples = iter([(1980, 0x0), (1710, 0x4), (1980, 0x1)])
        self.bits = 0

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        if kind == self.NVML_CLOCK_MEM:
            raise self.NVMLError
        mhz, self.bits = next(self.samples)
        return mhz

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        return self.bits


def test_clocks_keep_their_extremes_and_idleness_is_no_throttling() -> None:
    log = ClockLog(FakeNvml(), "gpu")
    log.sample()
    assert str(log) == "SM 1980-1980 MHz; temperature 61-61 C; throttling: none seen"
    log.sample()
    log.sample()
    assert str(log) == "SM 1710-1980 MHz; temperature 61-61 C; throttling: power cap"


def test_the_gpu_is_found_by_its_uuid_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml(FakeNvml):
        def nvmlInit(self) -> None:  # noqa: N802
            asked.append("init")

        def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
            asked.append(name)
            if "mig" in name:
                raise self.NVMLError
            return "gpu"

    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    log = open_clock_log("1234-ab")
    assert log is not None
    assert asked == ["init", "GPU-1234-ab"]
    assert open_clock_log("MIG-mig") is None
    assert asked[-1] == "MIG-mig"
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert open_clock_log("1234-ab") is None


# memory and roofline


def test_llama_8b_has_the_kv_of_its_published_shape() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 131_072  # 32 layers x 8 heads x 128 x (key, value) x 2 B


def test_the_arena_takes_what_the_grid_needs_or_what_fits() -> None:
    shapes = [StepShape(0, 0, 1, 1024), StepShape(0, 0, 64, 1024)]
    assert arena_tokens(LLAMA_8B, shapes, 139 * GIB) == 64 * 1024
    some = arena_tokens(LLAMA_8B, shapes, 20 * GIB)
    assert 1024 <= some < 64 * 1024
    assert LLAMA_8B.weight_bytes + some * LLAMA_8B.kv_bytes_per_token < 20 * GIB


def test_a_model_that_does_not_fit_is_refused_with_the_sum() -> None:
    with pytest.raises(InvalidInput, match=r"weights 14.96 GiB \+ KV .* exceed the 12.00 GiB"):
        arena_tokens(LLAMA_8B, [StepShape(0, 0, 1, 1024)], 12 * GIB)


def test_free_memory_is_a_share_of_this_machines() -> None:
    assert 0 < free_bytes("cpu", 0.5) < 1 << 50
    with pytest.raises(InvalidInput, match="memory share 0"):
        free_bytes("cpu", 0.0)


def test_a_gpu_is_found_by_the_longest_name() -> None:
    assert gpu_peak("NVIDIA H100 80GB HBM3") == PEAKS["h100"]
    assert gpu_peak("NVIDIA L40S") == GPUS["NVIDIA L40S"]
    assert gpu_peak("NVIDIA L4") == GPUS["NVIDIA L4"]
    assert gpu_peak("NVIDIA H200 NVL") == PEAKS["h200"]
    assert gpu_peak("cpu x2") is None


def test_the_roofline_of_a_lone_decode_is_weights_and_kv_over_bandwidth() -> None:
    """Norms, 266,240 weights, are left out of the bytes."""
    matrices = 2 * (8_030_261_248 - 128_256 * 4096 - 266_240)
    step = step_roofline_s(StepShape(0, 0, 1, 1000), LLAMA_8B, Peak(1e15, 1e12))
    assert step == pytest.approx((matrices + 1000 * 131_072) / 1e12, rel=1e-12)


def test_the_roofline_of_a_long_prefill_is_operations_over_peak() -> None:
    body = 8_030_261_248 - 2 * 128_256 * 4096 - 266_240
    pairs = 512 * 512 / 2
    operations = 2 * body * 512 + 2 * 128_256 * 4096 + 4 * 32 * 32 * 128 * pairs
    step = step_roofline_s(StepShape(512, 0), LLAMA_8B, Peak(1e12, 1e15))
    assert step == pytest.approx(operations / 1e12, rel=1e-12)


# the grid


def test_the_coarse_grid_reaches_its_bounds_and_no_further() -> None:
    grid = coarse_grid(256, 32_768, 8192)
    assert grid.batches == (1, 4, 16, 64, 256)
    assert grid.contexts == (32, 128, 512, 2048, 8192, 32_768)
    assert grid.chunks == (16, 64, 256, 1024, 4096, 8192)
    assert grid.prefixes == (0, 512, 2048, 8192, 24_576)
    shapes = grid.shapes()
    assert len(set(shapes)) == len(shapes)
    assert max(s.prefill_tokens_kept for s in shapes) <= 32_768
    assert {s.surface for s in shapes} == {"decode", "prefill", "mixed"}
    assert max(s.tokens for s in shapes) == 8192  # a mixed step is full, not overfull


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((1, 1024, 256), "max batch 1: give at least 4"),
        ((8, 16, 8), "max context 16"),
        ((8, 1024, 16), "max chunk 16"),
        ((8, 1024, 1024), "a chunk must be smaller than the context"),
    ],
)
def test_bounds_that_leave_no_grid_are_refused(bounds: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        coarse_grid(*bounds)


def test_gaps_are_geometric_means_and_the_steps_past_a_full_tile() -> None:
    grid = Grid((16, 64, 256), (0, 512), (1, 16), (32, 40), 1024)
    assert grid.gaps("chunks") == [(32,), (65,), (128, 129)]
    assert grid.gaps("prefixes") == [(256,)]
    assert grid.gaps("batches") == [(4,)]
    assert grid.gaps("contexts") == []  # a quarter apart: near enough
    assert grid.joined("chunks", (128, 129)).chunks == (16, 64, 128, 129, 256)
    assert grid.line("chunks", 900) == [StepShape(900, 0)]  # 900 + 512 is beyond the context


# the journal

SHAPE, TIMING = StepShape(0, 0, 4, 128), Timing(0.25, 0.001, 9)


def test_a_journal_gives_back_what_it_was_told(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    journal = Journal(path, IDENTITY, {"room_tokens": 5})
    journal.add(SHAPE, TIMING)
    journal.add(StepShape(16, 0), "no room")
    journal.add_clock_state("steady")
    for again in (Journal(path, IDENTITY), Journal(path, None)):
        assert again.outcomes == {SHAPE: TIMING, StepShape(16, 0): "no room"}
        assert (again.identity, again.about) == (IDENTITY, {"room_tokens": 5})
        assert (again.clock_states, again.notes) == (["steady"], [])


def test_a_line_that_was_cut_off_is_dropped_and_said(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    journal = Journal(path, IDENTITY)
    journal.add(SHAPE, TIMING)
    journal.add(StepShape(16, 0), TIMING)
    path.write_bytes(path.read_bytes()[:-20])
    again = Journal(path, IDENTITY)
    assert again.outcomes == {SHAPE: TIMING}
    assert "the last line was cut off" in again.notes[0]
    again.add(StepShape(16, 0), TIMING)  # on a line of its own
    assert Journal(path, IDENTITY).outcomes == {SHAPE: TIMING, StepShape(16, 0): TIMING}


def test_a_journal_whose_header_was_cut_off_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"format": "preem')
    journal = Journal(path, IDENTITY)
    assert journal.outcomes == {}
    assert "cut off" in journal.notes[0]


def test_another_configuration_is_refused_by_the_first_difference(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    Journal(path, IDENTITY)
    with pytest.raises(InvalidInput, match="with hardware = 'no GPU'; this one has 'GPU'"):
        Journal(path, IDENTITY | {"hardware": "GPU"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2 is not valid JSON"),
        ("[1]", "line 2 is no timed step"),
        ('{"prefill_chunk_tokens": 1}', "line 2 is no timed step"),
        (json.dumps(SHAPE._asdict() | {"seconds": -1.0, "spread_s": 0.0, "num_timed": 3}), "-1.0"),
        (json.dumps(SHAPE._asdict() | {"seconds": 1.0, "spread_s": 0.0, "num_timed": 0}), "line 2"),
        (json.dumps(SHAPE._asdict() | {"num_decodes": -4, "skipped": "x"}), "whole numbers"),
        ('{"seconds": NaN}', "NaN"),
    ],
)
def test_a_damaged_line_is_refused_by_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    Journal(path, IDENTITY).add(StepShape(16, 0), TIMING)
    header, step = path.read_text().splitlines()
    path.write_text(f"{header}\n{line}\n{step}\n")
    with pytest.raises(InvalidInput, match=message):
        Journal(path, IDENTITY)


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"run_id": 1}\n')
    with pytest.raises(InvalidInput, match="no header of format preemptbench-calibration/1"):
        Journal(path, IDENTITY)
    header = {"format": "preemptbench-calibration/1", "configuration": IDENTITY, "about": {}}
    path.write_text(json.dumps(header | {"sha256": "0"}) + "\n")
    with pytest.raises(InvalidInput, match="sha256 does not belong"):
        Journal(path, IDENTITY)
    with pytest.raises(InvalidInput, match="holds no calibration"):
        Journal(tmp_path / "none.jsonl", None)


# the loop


class KnownBench:
    """A GPU by formula: 1.2 ms of launches, weights or tiles of 128 tokens, and attention."""

    room_tokens = 500_000

    def __init__(self) -> None:
        self.times = 0

    def time(self, shape: StepShape) -> Timing:
        if shape.kv_tokens > self.room_tokens:
            raise StepDoesNotFit(f"{shape} needs more")
        self.times += 1
        seconds = self.seconds(shape)
        return Timing(seconds, 0.002 * seconds, 9)

    @staticmethod
    def seconds(shape: StepShape) -> float:
        chunk, prefix, decodes, context, _ = shape
        tokens = shape.tokens if shape.tokens <= 128 else -(-shape.tokens // 128) * 128
        dense = ((2.5e-5 * tokens) ** 4 + 0.004**4) ** 0.25
        attention = 3.6e-8 * decodes * context + 1.3e-9 * chunk * (prefix + chunk / 2)
        return 0.0012 + dense + attention


@pytest.fixture(scope="module")
def grid() -> Grid:
    return coarse_grid(256, 8192, 2048)


def test_the_loop_finds_the_tiles_and_predicts_what_it_never_saw(
    tmp_path: Path, grid: Grid
) -> None:
    bench, journal = KnownBench(), Journal(tmp_path / "x.jsonl", IDENTITY)
    steps: list[tuple[int, int]] = []
    result = calibrate(
        bench, grid, fit_with(HEADER), journal, CalibrationSettings(),
        on_step=lambda done, total, note: steps.append((done, total)),
    )  # fmt: skip
    assert result.stopped == "target met"
    assert result.held_out_error <= 0.03
    assert result.mixed_error <= 0.03  # the formula adds up, so must the surfaces
    assert bench.times == len(result.measured) + len(result.mixed)
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    assert any("needs more" in why for why in result.skipped.values())
    off = []
    for decodes in range(3, 256, 11):
        for context in (50, 700, 1500):
            shape = StepShape(0, 0, decodes, context)
            off.append(abs(result.profile.step_s(work_of(shape)) / bench.seconds(shape) - 1.0))
    off.sort()
    assert off[len(off) // 2] <= 0.03
    assert off[-1] <= 0.10  # the bar for the 99th percentile
    errors = result.profile.errors
    assert errors["decode"].num_points >= 5  # the probes between the knots count as held out


def test_the_picture_has_the_roofline_of_16_bit_models_only(tmp_path: Path, grid: Grid) -> None:
    journal = Journal(tmp_path / "x.jsonl", IDENTITY)
    result = calibrate(KnownBench(), grid, fit_with(HEADER), journal, CalibrationSettings())
    figure = draw(result, LLAMA_8B, PEAKS["h200"])
    decode, prefill, errors, ratio = figure.axes
    for ax in (decode, prefill):  # dots, lines and dashes, a set for each of six values at most
        assert 9 <= len(ax.lines) <= 18
        assert len(ax.lines) % 3 == 0
    assert ratio.get_ylabel() == "times the roofline"
    assert len(errors.get_legend().texts) == 3
    bare = draw(result, replace(LLAMA_8B, bytes_per_value=4), PEAKS["h200"])
    assert not bare.axes[3].axison
    assert len(bare.axes[0].lines) == len(decode.lines) * 2 // 3


def test_a_second_session_times_nothing_twice_and_decides_the_same(
    tmp_path: Path, grid: Grid
) -> None:
    path, settings = tmp_path / "x.jsonl", CalibrationSettings()
    first = calibrate(KnownBench(), grid, fit_with(HEADER), Journal(path, IDENTITY), settings)
    bench = KnownBench()
    again = calibrate(bench, grid, fit_with(HEADER), Journal(path, IDENTITY), settings)
    assert bench.times == 0
    without = refit(Journal(path, None), grid, fit_with(HEADER), bench.room_tokens, 0.03)
    for other in (again, without):
        assert other.profile == first.profile
        assert other.rounds == first.rounds
        assert other.measured == first.measured


def test_an_interrupted_calibration_goes_on_to_the_same_end(tmp_path: Path, grid: Grid) -> None:
    class Interrupted(KnownBench):
        def time(self, shape: StepShape) -> Timing:
            if self.times == 70:
                raise KeyboardInterrupt
            return super().time(shape)

    path, settings = tmp_path / "x.jsonl", CalibrationSettings()
    with pytest.raises(KeyboardInterrupt):
        calibrate(Interrupted(), grid, fit_with(HEADER), Journal(path, IDENTITY), settings)
    bench = KnownBench()
    result = calibrate(bench, grid, fit_with(HEADER), Journal(path, IDENTITY), settings)
    assert bench.times == len(result.measured) + len(result.mixed) - 70
    whole = Journal(tmp_path / "y.jsonl", IDENTITY)
    assert calibrate(KnownBench(), grid, fit_with(HEADER), whole, settings).profile == (
        result.profile
    )


def test_a_budget_that_ends_in_the_coarse_grid_says_how_to_go_on(
    tmp_path: Path, grid: Grid
) -> None:
    journal = Journal(tmp_path / "x.jsonl", IDENTITY)
    with pytest.raises(InvalidInput, match=r"ended after 0 of \d+ steps .*x\.jsonl"):
        calibrate(
            KnownBench(), grid, fit_with(HEADER), journal, CalibrationSettings(budget_s=1.0),
            started_s=-1e9,
        )  # fmt: skip


def test_a_budget_that_ends_later_leaves_a_profile(tmp_path: Path, grid: Grid) -> None:
    """The clock is the bench's own: the coarse grid fits the budget, no probe does."""
    path = tmp_path / "x.jsonl"
    coarse = Journal(path, IDENTITY)
    bench = KnownBench()
    for shape in grid.shapes():
        try:
            coarse.add(shape, bench.time(shape))
        except StepDoesNotFit as error:
            coarse.add(shape, str(error))
    settings = CalibrationSettings(budget_s=1.0)
    result = calibrate(KnownBench(), grid, fit_with(HEADER), coarse, settings, started_s=-1e9)
    assert (result.stopped, result.rounds) == ("budget used", [])
    assert isinstance(result.profile, SurfaceProfile)
    assert math.isnan(result.held_out_error)


def test_an_unfinished_journal_is_fitted_and_says_so(tmp_path: Path, grid: Grid) -> None:
    path, bench = tmp_path / "x.jsonl", KnownBench()
    journal = Journal(path, IDENTITY)
    for shape in grid.shapes()[::2]:
        if shape.kv_tokens <= bench.room_tokens:
            journal.add(shape, bench.time(shape))
    result = refit(Journal(path, None), grid, fit_with(HEADER), bench.room_tokens, 0.03)
    assert "steps of the grid were not timed" in result.notes[0]
    assert len(result.measured) + len(result.mixed) == bench.times


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget_s": 0.0}, "budget of 0.0 s"),
        ({"budget_s": -5.0}, "budget of -5.0 s"),
        ({"budget_s": math.nan}, "budget of nan s"),
        ({"target_error": 0.0}, "target error 0.0"),
        ({"max_rounds": 0}, "max_rounds 0"),
    ],
)
def test_settings_without_an_end_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(CalibrationSettings(), **change)
