"""Policies by name: one of the user's own is checked where it can be stopped."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from contracts.errors import ConformanceError, InvalidInput
from eval.named_policies import checked_policy
from eval.task_limits import TaskLimits

SPINNING = """
import numba

@numba.njit
def _spin(number):
    while number < 1.0:  # never grows
        number *= 0.5
    return number

{where}

def mine(view):
    return {score}

mine.reads_signal = False
mine.reads_deadline = False
"""


def _file(folder: Path, where: str = "", score: str = "1.0 * view.admission_seq") -> str:
    path = folder / "mine.py"
    path.write_text(SPINNING.format(where=where, score=score), encoding="utf-8")
    return f"{path}:mine"


@pytest.mark.parametrize("planted", [{"where": "_spin(0.5)"}, {"score": "_spin(0.5)"}])
def test_compiled_code_that_never_returns_is_stopped(
    tmp_path: Path, planted: dict[str, str]
) -> None:
    name = _file(tmp_path, **planted)
    began_s = time.monotonic()
    said = r'ran longer than 12 s \(File ".*mine.py", line \d+ in .*loop that does not end'
    with pytest.raises(ConformanceError, match=said):
        checked_policy(name, TaskLimits(timeout_s=12.0))
    assert time.monotonic() - began_s < 60.0  # seconds of starting a process on a busy machine


def test_a_process_that_dies_in_the_check_is_an_error_of_the_policy(tmp_path: Path) -> None:
    name = _file(tmp_path, where="import os; os._exit(3)")
    with pytest.raises(ConformanceError, match="ended with status 3"):
        checked_policy(name)


def test_what_the_check_finds_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(ConformanceError, match="every score must be finite"):
        checked_policy(_file(tmp_path, score="float('nan')"))
    with pytest.raises(InvalidInput, match="does not exist"):
        checked_policy(str(tmp_path / "none.py:mine"))


def test_a_good_policy_and_a_built_in_one_pass(tmp_path: Path) -> None:
    assert checked_policy(_file(tmp_path)).name == "mine"
    assert checked_policy("lifo").name == "lifo"
