"""Uneven batches of decodes: which are timed, how they are kept, and the share fitted to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.errors import InvalidInput
from serving_sim.calibration.adaptive import CalibrationSettings, calibrate, refit
from serving_sim.calibration.grid import Grid, coarse_grid
from serving_sim.calibration.journal import Journal
from serving_sim.calibration.result import Calibration, work_of
from serving_sim.calibration.run import fit_with
from serving_sim.calibration.skew import with_skew_share
from serving_sim.calibration.steps import StepDoesNotFit, StepShape
from serving_sim.calibration.timing import Timing
from serving_sim.surface import ProfileHeader, SurfaceProfile

HEADER = ProfileHeader("known", "none", "none", "a formula", "none")
IDENTITY = {"model": "known"}


class SkewedBench:
    """A device by formula: decodes cost their mean context and ``share`` of the way to the longest.
    Linear in every size, so that a fit has no error of its own."""

    room_tokens = 300_000

    def __init__(self, share: float) -> None:
        self.share = share

    def time(self, shape: StepShape) -> Timing:
        if shape.kv_tokens > self.room_tokens:
            raise StepDoesNotFit(f"{shape} needs more")
        return Timing(self.seconds(shape), 0.0, 9)

    def seconds(self, shape: StepShape) -> float:
        contexts = shape.decode_contexts
        mean = sum(contexts) / max(1, len(contexts))
        each = mean + self.share * (max(contexts, default=0) - mean)
        prefill = 1e-9 * shape.prefill_chunk_tokens * shape.prefill_tokens_kept
        return 0.002 + 2e-5 * shape.tokens + 3e-8 * shape.num_decodes * each + prefill


def _calibrated(path: Path, grid: Grid, share: float) -> Calibration[SurfaceProfile]:
    return calibrate(
        SkewedBench(share), grid, fit_with(HEADER), Journal(path, IDENTITY), CalibrationSettings(),
        uneven=grid.uneven(),
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
def test_the_share_of_a_known_law_is_found(tmp_path: Path, share: float) -> None:
    """The law is linear, as the tables are: what is left is their rounding in the file's digits
    (1e-4 of a step is five times what is seen), and the share is kept to 0.001."""
    grid = coarse_grid(64, 8192, 2048)
    result = _calibrated(tmp_path / "x.jsonl", grid, share)
    profile, uneven = with_skew_share(result.profile, result.uneven)
    assert profile.skew_share == pytest.approx(share, abs=0.001)
    assert max(probe.error for probe in uneven) <= 1e-4
    assert result.profile.skew_share == 0.0
    other = StepShape(0, 0, 16, 900, 5000)
    step_s = profile.step_s(work_of(other))
    assert step_s == pytest.approx(SkewedBench(share).seconds(other), rel=1e-4)


def test_without_uneven_steps_nothing_changes(tmp_path: Path) -> None:
    grid = coarse_grid(64, 8192, 2048)
    result = _calibrated(tmp_path / "x.jsonl", grid, 0.5)
    assert with_skew_share(result.profile, []) == (result.profile, [])


def test_uneven_steps_come_back_from_the_journal_and_shape_no_table(tmp_path: Path) -> None:
    path, grid = tmp_path / "x.jsonl", coarse_grid(64, 8192, 2048)
    first = _calibrated(path, grid, 0.5)
    again = refit(Journal(path, None), grid, fit_with(HEADER), SkewedBench.room_tokens, 0.03)
    assert again.uneven == first.uneven
    assert again.profile == first.profile
    assert len(first.uneven) == len(grid.uneven())
    assert len(first.measured) + len(first.mixed) + len(first.uneven) == sum(
        "seconds" in line for line in path.read_text().splitlines()
    )


def test_uneven_batches_pair_contexts_and_have_two_decodes_at_least() -> None:
    grid = Grid((16,), (0,), (1, 4), (32, 128, 512), 1024)
    assert grid.uneven() == [
        StepShape(0, 0, 4, short, long) for short, long in ((32, 128), (32, 512), (128, 512))
    ]
    assert Grid((16,), (0,), (1,), (32, 64), 128).uneven() == []


def test_an_uneven_step_counts_its_own_kv() -> None:
    shape = StepShape(0, 0, 4, 100, 1000)
    assert shape.decode_contexts == [100, 100, 100, 1000]
    assert shape.kv_tokens == sum(shape.decode_contexts)
    assert shape.surface == "uneven"
    assert str(shape) == "decode 4 x 100 to 1000"
    work = work_of(shape)
    assert (work.decode_context_tokens, work.max_decode_context_tokens) == (1300, 1000)


def test_a_journal_names_the_longest_of_uneven_steps_only(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    journal = Journal(path, IDENTITY)
    even, uneven = StepShape(0, 0, 4, 100), StepShape(0, 0, 4, 100, 1000)
    for shape in (even, uneven):
        journal.add(shape, Timing(0.01, 0.0, 7))
    lines = path.read_text().splitlines()
    assert ["longest_context_tokens" in line for line in lines] == [False, False, True]
    assert list(Journal(path, None).outcomes) == [even, uneven]


@pytest.mark.parametrize(
    "change",
    [
        ('"num_decodes": 4', '"num_decodes": 1'),
        ('"longest_context_tokens": 1000', '"longest_context_tokens": 100'),
        ('"prefill_chunk_tokens": 0', '"prefill_chunk_tokens": 5'),
        ('"longest_context_tokens": 1000', '"longest_context_tokens": -1'),
    ],
)
def test_a_step_that_cannot_be_is_refused_by_line(tmp_path: Path, change: tuple[str, str]) -> None:
    path = tmp_path / "x.jsonl"
    Journal(path, IDENTITY).add(StepShape(0, 0, 4, 100, 1000), Timing(0.01, 0.0, 7))
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(InvalidInput, match="line 2"):
        Journal(path, None)
