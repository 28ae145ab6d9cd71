"""Limits of time and memory on one task, kept by a process of its own that can be killed.

A signal handler or a thread is no use against a compiled loop that does not return, so a limited
task runs in a fresh interpreter (about a second more a task), and whoever waits for it kills it.
Plain subprocesses, because the workers of some clusters may not have multiprocessing children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from contracts.errors import InvalidInput

_POLL_S = 0.05
_KIB = 1024
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9  # linux/prctl.h


class TaskStopped(Exception):
    """A task that was stopped, or died: ``reason`` is "timeout", "memory" or "died"."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimits:
    """How long a task may take (seconds, the start of its process included) and how much memory
    its process may hold (resident bytes, looked at 20 times a second); None is no limit."""

    timeout_s: float | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("timeout_s", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidInput(f"{name} is {value}: give a number above 0, or no limit")

    @property
    def is_set(self) -> bool:
        """Whether there is any limit."""
        return self.timeout_s is not None or self.memory_bytes is not None


NO_LIMITS = TaskLimits()


def run_limited(call: Callable[..., object], args: Sequence[Any], limits: TaskLimits) -> None:
    """Run ``call(*args)`` under ``limits``; both are sent to the process by pickle.

    What the call raises is raised here. Raises TaskStopped when a limit was passed or the process
    died. Without limits the call runs here.
    """
    if not limits.is_set:
        call(*args)
        return
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as task:
        pickle.dump((call, tuple(args)), task)
        task.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "eval.task_limits"], stdin=task, stdout=answer, env=env
        )
        try:
            _watch(process, limits)
        finally:
            process.kill()
            process.wait()
        _raise_answer(answer, process.returncode)


def _watch(process: subprocess.Popen[bytes], limits: TaskLimits) -> None:
    began_s = time.monotonic()
    while process.poll() is None:
        elapsed_s = time.monotonic() - began_s
        if limits.timeout_s is not None and elapsed_s > limits.timeout_s:
            raise TaskStopped("timeout", f"it ran longer than {limits.timeout_s:g} s")
        held = resident_bytes(process.pid) if limits.memory_bytes is not None else 0
        if limits.memory_bytes is not None and held > limits.memory_bytes:
            raise TaskStopped(
                "memory", f"it held {held / 1e9:.2f} GB, over {limits.memory_bytes / 1e9:g} GB"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 when it is gone."""
    statm = Path(f"/proc/{pid}/statm")
    if Path("/proc/self/statm").exists():
        try:
            return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0
    found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=False)
    return int(found.stdout or 0) * _KIB


def _raise_answer(answer: IO[bytes], status: int) -> None:
    answer.seek(0)
    try:
        error = pickle.load(answer)  # written by our own process into a file without a name
    except (EOFError, pickle.UnpicklingError):
        raise TaskStopped("died", f"its process ended with status {status}") from None
    if error is not None:
        raise error


def _child() -> None:
    """Run the task of stdin and write what it raised, or None, to stdout."""
    if sys.platform == "linux":  # nobody waits for a task whose worker was killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    out = os.dup(1)
    os.dup2(2, 1)  # what a task prints is talk
    error: Exception | None = None
    try:
        call, args = pickle.load(sys.stdin.buffer)
        call(*args)
    except Exception as raised:
        error = raised
        error.__cause__ = error.__context__ = None  # only its message travels
    with os.fdopen(out, "wb") as answer:
        answer.write(pickle.dumps(error))


if __name__ == "__main__":
    _child()
