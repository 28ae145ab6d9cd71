"""Tasks that fail, hang, eat memory or lie damaged on disk: recorded, set aside, never averaged."""

from __future__ import annotations

import ctypes
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest
from click.testing import CliRunner

from contracts.errors import ConformanceError, InvalidInput, LeakageError
from eval.named_policies import checked_policy
from eval.stored import load_study, store_study
from eval.study import StudyResult, run_study, study_status
from eval.study_pilots import find_pilot, matrix_of
from eval.study_summary import cell_tables, compare_cells, grid_rows
from eval.task_limits import NO_LIMITS, TaskLimits, TaskStopped, innermost_traceback, run_limited
from eval.task_trail import at_place, place_of
from eval.tasks import run_task, stored_failure
from preemptbench.cli import cli
from preemptbench.study_text import study_object, study_text
from tests.unit.test_study import CONFIG, LAW, source_in

SMALL = replace(CONFIG, policies=("lifo", "fifo"), signals=(), num_seeds=3)


@numba.njit  # type: ignore[untyped-decorator]
def _spin(values: np.ndarray) -> None:
    at = 0
    while values[0] < 1.0:  # never: nobody writes the first
        values[1] += at
        at += 1


def endless() -> None:
    _spin(np.zeros(2))


def greedy() -> None:
    held = []
    while True:
        held.append(np.ones(2_000_000))


def failing() -> None:
    raise InvalidInput("seen from outside")


def dying() -> None:
    os._exit(9)


@pytest.mark.parametrize(
    ("call", "limits", "reason"),
    [
        (endless, TaskLimits(timeout_s=12.0), "timeout"),  # a busy machine imports for seconds
        (greedy, TaskLimits(timeout_s=60.0, memory_bytes=700_000_000), "memory"),
        (dying, TaskLimits(timeout_s=60.0), "died"),
    ],
)
def test_a_task_beyond_its_limits_is_stopped(call, limits, reason) -> None:
    began_s = time.monotonic()
    with pytest.raises(TaskStopped) as stopped:
        run_limited(call, (), limits)
    assert stopped.value.reason == reason
    assert time.monotonic() - began_s < 30.0
    if call is not dying:  # the loop of endless is compiled, and still says who called it
        assert f"in {call.__name__}" in stopped.value.frames
        assert "numba" not in stopped.value.frames and "runpy" not in stopped.value.frames


def crashing() -> None:
    with at_place("the crash"):
        ctypes.string_at(0)


def test_a_task_that_crashes_says_where() -> None:
    with pytest.raises(TaskStopped) as stopped:
        run_limited(crashing, (), TaskLimits(timeout_s=60.0))
    assert stopped.value.reason == "died" and place_of(stopped.value) == "the crash"
    assert "in crashing" in stopped.value.frames


def test_an_error_names_its_place_and_keeps_its_traceback() -> None:
    with pytest.raises(InvalidInput) as raised:
        run_limited(failing_somewhere, (), TaskLimits(timeout_s=60.0))
    assert place_of(raised.value) == "cell 7"
    assert "in failing\n" in innermost_traceback(raised.value)


def failing_somewhere() -> None:
    with at_place("cell 6"):
        pass
    with at_place("cell 7"):
        failing()


def test_what_a_limited_task_raises_is_raised_here() -> None:
    with pytest.raises(InvalidInput, match="seen from outside"):
        run_limited(failing, (), TaskLimits(timeout_s=60.0))
    with pytest.raises(InvalidInput, match="above 0"):
        TaskLimits(timeout_s=0.0)


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """A study of two sources whose seed 1 failed in the second."""
    folder = tmp_path_factory.mktemp("tasks")
    other = replace(LAW, locations=(4.0, 4.5, 5.5))
    sources = [source_in(folder), source_in(folder, other, "Other")]
    out = folder / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.tasks.run_seed", _fails_on_seed_1_of_other)
        return run_study(SMALL, sources, out, num_jobs=1)


def _fails_on_seed_1_of_other(config, seed, out_dir):
    from eval.matrix import run_seed

    if seed == 1 and "Other" in out_dir.name:
        raise MemoryError("no room")
    return run_seed(config, seed, out_dir)


def test_a_failed_seed_is_left_out_everywhere_and_said(hurt: StudyResult) -> None:
    (failure,) = hurt.failures
    assert (failure.seed, failure.reason, failure.where) == (1, "memory", "Other on Toy")
    assert "no room" in failure.traceback_tail
    assert hurt.seeds == (0, 2)
    assert {cell.seed for source in hurt.sources for cell in source.cells} == {0, 2}
    assert all(table.breach.shape[0] == 2 for table in cell_tables(hurt))
    first = hurt.sources[0]
    fifo = next(r for r in compare_cells(hurt) if r.rule[0] == "fifo")
    own = [
        cell.score.breach for cell in first.cells
        if (cell.policy, cell.pressure) == ("fifo", fifo.pressure)
    ]  # fmt: skip
    assert fifo.breach == pytest.approx(np.mean(own))
    assert grid_rows(hurt, "beyond")
    assert "1 of 3 seeds missing" in study_text(hurt) and "no room" in study_text(hurt)
    assert study_object(hurt)["failures"][0]["seed"] == 1


def test_failures_are_stored_with_the_study_and_in_its_status(hurt: StudyResult) -> None:
    out = hurt.sources[0].out_dir.parents[1]
    store_study(hurt, out, "study")
    stored = load_study(out)
    assert stored.study.failures == hurt.failures
    assert stored.study.sources[1].cells == hurt.sources[1].cells
    rows = study_status(SMALL, [s.source for s in hurt.sources], out)
    assert [(r.counts.done, r.counts.failed, r.counts.missing) for r in rows] == [
        (3, 0, 0), (2, 1, 0),
    ]  # fmt: skip
    assert "1 failed" in str(rows[1])


def test_failed_seeds_run_again_only_when_asked(hurt: StudyResult) -> None:
    sources, out = [s.source for s in hurt.sources], hurt.sources[0].out_dir.parents[1]
    again = run_study(SMALL, sources, out, num_jobs=1)
    assert again.failures == hurt.failures
    retried = run_study(SMALL, sources, out, num_jobs=1, retry_failed=True)
    assert retried.failures == () and retried.seeds == (0, 1, 2)
    assert not list(out.rglob("failed/*.json"))


def test_nothing_is_compared_when_too_few_seeds_are_left(tmp_path: Path) -> None:
    source = source_in(tmp_path)
    with pytest.raises(InvalidInput, match="pilots of Tiny on Toy failed"):
        run_study(SMALL, [source], tmp_path, num_jobs=1, limits=TaskLimits(timeout_s=0.1))
    run = run_study(SMALL, [source], tmp_path, num_jobs=1)
    for path in (tmp_path / "sources").rglob("cells/*"):
        path.unlink()
    with pytest.raises(InvalidInput, match=r"3 of 3 seeds missing.*(?s:.)*longer than 0.1 s"):
        run_study(SMALL, [run.sources[0].source], tmp_path, num_jobs=1,
                  limits=TaskLimits(timeout_s=0.1))  # fmt: skip


@pytest.mark.parametrize("damage", ["torn", "flipped", "records", "no records"])
def test_a_damaged_task_is_set_aside_and_run_again(damage: str, tmp_path: Path) -> None:
    source = source_in(tmp_path)
    config = replace(SMALL, num_seeds=2)
    whole = run_study(config, [source], tmp_path / "out", num_jobs=1)
    cells = sorted(whole.sources[0].out_dir.glob("cells/*"))[1]
    records = whole.sources[0].out_dir / "records" / cells.name
    good = cells.read_bytes(), records.read_bytes()
    if damage == "torn":
        cells.write_bytes(good[0][: len(good[0]) // 2])
    elif damage == "flipped":
        at = 60
        cells.write_bytes(good[0][:at] + bytes([good[0][at] ^ 1]) + good[0][at + 1 :])
    elif damage == "records":
        records.write_bytes(good[1][:-20])
    else:
        records.unlink()
    (row,) = study_status(config, [source], tmp_path / "out")
    assert (row.seeds_done, row.counts.missing, row.counts.damaged) == (1, 1, 1)
    assert "1 of 2 seeds done, 0 failed, 1 missing (1 damaged), 0 quarantined" in str(row)
    notes: list[str] = []
    again = run_study(config, [source], tmp_path / "out", num_jobs=1, on_note=notes.append)
    assert len(notes) == 1 and str(cells) in notes[0] and "quarantine" in notes[0]
    assert (cells.read_bytes(), records.read_bytes()) == good
    assert again.sources[0].cells == whole.sources[0].cells
    (row,) = study_status(config, [source], tmp_path / "out")
    assert (row.counts.done, row.counts.damaged) == (2, 0)
    assert row.counts.quarantined == (1 if damage == "no records" else 2)


def test_a_damaged_pilot_is_set_aside(tmp_path: Path) -> None:
    source, config = source_in(tmp_path), replace(SMALL, num_seeds=2)
    run_study(config, [source], tmp_path / "out", num_jobs=1)
    (pilot,) = (tmp_path / "out").rglob("pilot-*.json")
    good = pilot.read_bytes()
    pilot.write_bytes(good[:30])
    with pytest.warns(UserWarning, match="pilot-.* is damaged"):
        run_study(config, [source], tmp_path / "out", num_jobs=1)
    assert pilot.read_bytes() == good


SLOW = '''
import os

def stuck(view):
    """Evict the youngest, but never come back the first time that anybody asks."""
    try:
        os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return -float(view.rank_from_youngest)
    while True:
        pass

stuck.reads_signal = False
'''


def test_a_policy_that_never_ends_costs_one_seed(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()  # the check of the policy must come back
    policy = tmp_path / "mine" / "stuck.py"
    policy.parent.mkdir()
    policy.write_text(SLOW.format(flag=str(flag)), encoding="utf-8")
    source = source_in(tmp_path)
    config = replace(SMALL, policies=("lifo", f"{policy}:stuck"))
    flag.unlink()
    found = run_study(
        config, [source], tmp_path / "out", num_jobs=1, limits=TaskLimits(timeout_s=12.0)
    )
    (failure,) = found.failures
    assert failure.reason == "timeout" and len(found.seeds) == 2
    path = found.sources[0].out_dir / "cells" / failure.task
    assert stored_failure(path) == failure
    record = json.loads(next((tmp_path / "out").rglob("failed/*.json")).read_text())
    assert record["seconds"] > 11.0
    assert record["cell"].startswith("pressure ") and f"policy {policy}:stuck" in record["cell"]
    assert re.search(rf'"{policy}", line 1[01] in stuck', record["traceback_tail"])
    assert failure.cell in str(failure)


ENDLESS = '''
import os

import numba

@numba.njit
def spin(at):
    while at >= 0.0:
        at = at + 1.0
    return at

def endless(view):
    """Evict the youngest, but enter a compiled loop without an end once the flag is there."""
    if os.path.exists({flag!r}):
        spin(0.0)
    return -float(view.rank_from_youngest)

endless.reads_signal = False
'''


def test_a_compiled_loop_without_end_names_policy_and_pressure(tmp_path: Path) -> None:
    flag, policy = tmp_path / "flag", tmp_path / "mine" / "endless.py"
    policy.parent.mkdir()
    policy.write_text(ENDLESS.format(flag=str(flag)), encoding="utf-8")
    study = replace(SMALL, policies=("lifo", f"{policy}:endless"))
    source, out = source_in(tmp_path), tmp_path / "out"
    matrix = matrix_of(study, source, find_pilot(study, source, out))
    flag.touch()
    failure = run_task(matrix, 0, out, TaskLimits(timeout_s=15.0)).failure
    assert failure is not None and failure.reason == "timeout"
    pressure, rule, _ = failure.cell.split(", ")
    assert pressure in {f"pressure {p.name}" for p in matrix.pressures}
    assert rule == f"policy {policy}:endless"
    frames = failure.traceback_tail.splitlines()
    assert f'"{policy}"' in frames[0] and frames[0].endswith("in endless")
    assert any(frame.endswith("in run_cell") for frame in frames)


RAISING = '''
import os

def picky(view):
    """Evict the youngest, but raise the first time that anybody asks."""
    try:
        os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return -float(view.rank_from_youngest)
    raise KeyError("a table that ends here")

picky.reads_signal = False
'''


@pytest.mark.parametrize("limits", [NO_LIMITS, TaskLimits(timeout_s=100.0)])
def test_a_policy_that_raises_in_one_seed_costs_that_seed(
    limits: TaskLimits, tmp_path: Path
) -> None:
    flag, policy = tmp_path / "flag", tmp_path / "mine" / "picky.py"
    policy.parent.mkdir()
    policy.write_text(RAISING.format(flag=str(flag)), encoding="utf-8")
    name = f"{policy}:picky"
    with pytest.raises(ConformanceError, match="raised KeyError near line 10"):
        checked_policy(name)  # before the run it is an error of the settings
    checked_policy(name)
    flag.unlink()
    config, source = replace(SMALL, policies=("lifo", name)), source_in(tmp_path)
    found = run_study(config, [source], tmp_path / "out", num_jobs=1, limits=limits)
    (failure,) = found.failures
    assert failure.reason == "error" and len(found.seeds) == 2
    assert f"policy {name}" in failure.cell and "PolicyRaised" in failure.detail
    assert 'raise KeyError("a table that ends here")' in failure.traceback_tail
    assert "run_limited" not in failure.traceback_tail  # it is that of the task, not of the parent


def test_other_errors_of_a_task_end_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaks(*_: object) -> None:
        raise LeakageError("truth and signal share a run")

    monkeypatch.setattr("eval.tasks.run_seed", leaks)
    with pytest.raises(LeakageError):
        run_study(SMALL, [source_in(tmp_path)], tmp_path / "out", num_jobs=1)


def test_limits_are_options_of_the_verb(tmp_path: Path) -> None:
    runs = source_in(tmp_path).runs
    arguments = [
        "study", "--only-own", "--runs", str(runs), "--seeds", "2", "--deadline", "3",
        "--concurrency", "12", "--jobs", "1", "--out", str(tmp_path / "out"),
        "--task-timeout", "0.05",
    ]  # fmt: skip
    done = CliRunner().invoke(cli, arguments)
    assert isinstance(done.exception, InvalidInput) and "longer than 0.05 s" in str(done.exception)
