"""Journals of calibrations with any damage: read whole, or refused with one kind of error."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidInput
from serving_sim.calibration.bench_config import BenchConfig
from serving_sim.calibration.capacity import ModelFacts
from serving_sim.calibration.grid import Grid
from serving_sim.calibration.journal import Journal, _header
from serving_sim.calibration.run import CalibrationPlan, refit_journal
from serving_sim.calibration.steps import StepShape
from serving_sim.calibration.timing import Timing

GRID = Grid((16, 64), (0, 64), (1, 4), (32, 64), 128)
FACTS = ModelFacts("Llama", "float32", 2, 4, 2, 16, 64, 128, 256, 4096, 427_264, 4)
IDENTITY = {"model": "tiny", "hardware": "none", "kernel": "none"}
ABOUT = {"facts": asdict(FACTS), "grid": asdict(GRID), "room_tokens": 1024}
PLAN = CalibrationPlan(bench=BenchConfig(model="tiny"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journals")


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[str]:
    path = folder / "whole.jsonl"
    journal = Journal(path, IDENTITY, ABOUT)
    for at, shape in enumerate(GRID.shapes()):
        journal.add(shape, Timing(0.01 + 0.001 * at, 0.0001, 7))
    journal.add_clock_state("steady")
    return path.read_text().splitlines(keepends=True)


def _refit(folder: Path, data: bytes) -> None:
    path = folder / "damaged.jsonl"
    path.write_bytes(data)
    out = folder / "damaged.json"
    out.unlink(missing_ok=True)
    try:
        refit_journal(PLAN, path, out)
    except InvalidInput:
        assert not out.exists()


@settings(max_examples=150)
@given(data=st.data())
def test_any_bytes_changed(folder: Path, lines: list[str], data: st.DataObject) -> None:
    text = bytearray("".join(lines).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    _refit(folder, bytes(text[: data.draw(st.integers(0, len(text)))]))


_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_ANY = _VALUES | st.lists(st.integers(-2, 300), max_size=4) | st.just(10**400)


@settings(max_examples=150)
@given(name=st.sampled_from([*StepShape._fields, "seconds", "spread_s", "num_timed"]), value=_ANY)
def test_any_value_of_a_step(folder: Path, lines: list[str], name: str, value: object) -> None:
    row = json.loads(lines[1]) | {name: value}
    _refit(folder, "".join([lines[0], json.dumps(row) + "\n", *lines[2:]]).encode())


@settings(max_examples=150)
@given(part=st.sampled_from(["facts", "grid"]), data=st.data(), value=_ANY)
def test_any_value_of_the_header(
    folder: Path, lines: list[str], part: str, data: st.DataObject, value: object
) -> None:
    name = data.draw(st.sampled_from(sorted(ABOUT[part])))
    about = ABOUT | {part: ABOUT[part] | {name: value}}
    header = "{}"
    with contextlib.suppress(ValueError):
        header = _header(IDENTITY, about)
    _refit(folder, "".join([header + "\n", *lines[1:]]).encode())
