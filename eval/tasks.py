"""Tasks that may fail: one seed of one matrix, its limits, and the record of a failure.

A failed task leaves a small JSON file in ``failed/`` under its content address. It stays failed
until somebody asks for another try, and its seed is missing from every comparison.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from contracts.errors import NoProgressError, PolicyRaised, PreemptBenchError
from contracts.files import atomic_write_text, remove_leftovers
from eval.cells import damage_of, quarantine_of, set_aside, set_aside_damaged
from eval.matrix import run_seed, task_path
from eval.matrix_config import MatrixConfig
from eval.task_limits import NO_LIMITS, TaskLimits, TaskStopped, innermost_traceback, run_limited
from eval.task_trail import place_of

_TAIL_LINES = 12
_OF_ONE_SEED = (NoProgressError, PolicyRaised)  # the others strike every seed alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a task has no cells. ``reason`` is "timeout", "memory", "died" or "error"; ``seconds``
    is how long it ran; ``task`` is the file it would have written, which holds its key. ``cell``
    is the cell it was at, empty before the first; ``traceback_tail`` holds the frames where it was
    (stopped: the innermost first) or raised."""

    task: str
    seed: int
    reason: str
    detail: str
    seconds: float
    traceback_tail: str = ""
    where: str = ""
    cell: str = ""

    def __str__(self) -> str:
        place = f"{self.where}, " if self.where else ""
        cell = f" at {self.cell}" if self.cell else ""
        return f"{place}seed {self.seed} failed after {self.seconds:.0f} s{cell}: {self.detail}"


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What a task came to; ``note`` names a damaged file that was set aside."""

    failure: Failure | None = None
    note: str | None = None


def run_task(
    config: MatrixConfig,
    seed: int,
    out_dir: Path,
    limits: TaskLimits = NO_LIMITS,
    retry_failed: bool = False,
    where: str = "",
) -> TaskOutcome:
    """Run ``seed`` unless it is finished or failed before; a failure is recorded, not raised.

    Errors of the settings (a leak, a missing file, a policy that fails its check) and of the disk
    are raised: they would strike every seed alike. A policy that raises only now is a failure.
    """
    path = task_path(config, seed, out_dir)
    note = set_aside_damaged(path)
    if path.exists():
        return TaskOutcome(note=note)
    known = stored_failure(path)
    if known is not None and not retry_failed:
        return TaskOutcome(known, note)
    failed = failure_path(path)
    failed.unlink(missing_ok=True)
    began_s = time.monotonic()
    try:
        run_limited(run_seed, (config, seed, out_dir), limits)
    except Exception as error:
        if isinstance(error, OSError):
            raise
        if isinstance(error, PreemptBenchError) and not isinstance(error, _OF_ONE_SEED):
            raise
        failure = _failure(error, path.name, seed, time.monotonic() - began_s, where)
        atomic_write_text(failed, json.dumps(asdict(failure), indent=1) + "\n")
        return TaskOutcome(failure, note)
    return TaskOutcome(note=note)


def _failure(error: Exception, task: str, seed: int, seconds: float, where: str) -> Failure:
    reason, detail = "error", f"{type(error).__name__}: {error}"
    tail = innermost_traceback(error).splitlines()[-_TAIL_LINES:]
    if isinstance(error, TaskStopped):
        reason, detail, tail = error.reason, str(error), error.frames.splitlines()
    elif isinstance(error, MemoryError):
        reason = "memory"
    return Failure(
        task=task,
        seed=seed,
        reason=reason,
        detail=detail,
        seconds=round(seconds, 3),
        traceback_tail="\n".join(tail),
        where=where,
        cell=place_of(error),
    )


def clear_leftovers(out_dir: Path, folders: Sequence[Path]) -> None:
    """Remove what a killed start left half written in ``out_dir`` and in the task ``folders``."""
    own = [out_dir / part for part in ("", "inputs", "tables", "quality", "timelines")]
    of_tasks = [f / part for f in folders for part in ("", "cells", "records", "failed")]
    remove_leftovers([*own, *of_tasks], before_s=time.time())


def failure_path(path: Path) -> Path:
    """Return where the failure of the task that writes ``path`` lies."""
    return path.parent.parent / "failed" / f"{path.stem}.json"


def stored_failure(path: Path) -> Failure | None:
    """Return the recorded failure of the task that writes ``path``; a torn one is set aside."""
    failed = failure_path(path)
    if not failed.exists():
        return None
    try:
        return Failure(**json.loads(failed.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        set_aside(failed)
        return None


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """How many tasks are done, failed and missing, how many files were set aside, and the seconds
    that the missing ones take at the pace of the stored ones (NaN with fewer than two). A task
    whose files are damaged is missing, since a start runs it again; ``damaged`` says how many."""

    done: int
    failed: int
    missing: int
    quarantined: int
    left_s: float
    damaged: int = 0

    def __str__(self) -> str:
        left = f", about {self.left_s:.0f} s left" if self.missing and self.left_s >= 0 else ""
        damaged = f" ({self.damaged} damaged)" if self.damaged else ""
        return (
            f"{self.done} of {self.done + self.failed + self.missing} seeds done, {self.failed} "
            f"failed, {self.missing} missing{damaged}, {self.quarantined} quarantined{left}"
        )


def count_tasks(paths: Sequence[Path]) -> TaskCounts:
    """Count the tasks that write ``paths``, all of one folder; damaged ones stay where they are.
    The pace is the median time between one stored task and the next, so that a pause does not
    count."""
    stored = [path for path in paths if path.exists()]
    done = [path for path in stored if damage_of(path) is None]
    failed = sum(stored_failure(path) is not None for path in paths if path not in stored)
    missing = len(paths) - len(done) - failed
    times_s = sorted(path.stat().st_mtime for path in done)
    pace_s = float(np.median(np.diff(times_s))) if len(times_s) > 1 else float("nan")
    aside = sum(1 for _ in quarantine_of(paths[0]).glob("*")) if paths else 0
    damaged = len(stored) - len(done)
    return TaskCounts(len(done), failed, missing, aside, missing * pace_s, damaged)
