"""Limits of time and memory on one task, kept by a process of its own that can be killed.

A signal handler or a thread is no use against a compiled loop that does not return, so a limited
task runs in a fresh interpreter (about a second more a task), and whoever waits for it kills it.
Plain subprocesses, because the workers of some clusters may not have multiprocessing children.

Task and answer travel by pickle, over open files without a name that only our own parent and child
hold, so nobody else can write what is loaded; JSON can carry neither a function nor an error.
Before a task is killed it is asked where it is (eval.task_trail).
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
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from contracts.errors import InvalidInput
from eval.task_trail import ask_frames, keep_trail, read_trail

_POLL_S = 0.05
_KIB = 1024
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9  # linux/prctl.h


class TaskStopped(Exception):
    """A task that was stopped, or died: ``reason`` is "timeout", "memory" or "died"; ``frames``
    says where in the code it was, the innermost first, empty when it could not."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.frames = ""


class TaskTraceback(Exception):
    """The cause of an error that a task's process raised: the traceback there, as text."""


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

    What the call raises is raised here, caused by a TaskTraceback. Raises TaskStopped when a limit
    was passed or the process died, with the place it was at as a note. Without limits the call
    runs here.
    """
    if not limits.is_set:
        call(*args)
        return
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    unnamed = tempfile.TemporaryFile
    with unnamed() as answer, unnamed() as task, unnamed() as trail:
        pickle.dump((call, tuple(args)), task)
        task.seek(0)
        handle = trail.fileno()
        command = [sys.executable, "-m", "eval.task_limits", str(handle)]
        process = subprocess.Popen(command, stdin=task, stdout=answer, env=env, pass_fds=(handle,))
        try:
            _watch(process, limits, handle)
            _raise_answer(answer, process.returncode)
        except TaskStopped as stopped:
            place, stopped.frames = read_trail(handle)
            if place:
                stopped.add_note(place)
            raise
        finally:
            process.kill()
            process.wait()


def _watch(process: subprocess.Popen[bytes], limits: TaskLimits, trail: int) -> None:
    began_s = time.monotonic()
    while process.poll() is None:
        passed = _limit_passed(process.pid, time.monotonic() - began_s, limits)
        if passed is not None:
            ask_frames(process, trail)
            raise passed
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)


def _limit_passed(pid: int, elapsed_s: float, limits: TaskLimits) -> TaskStopped | None:
    if limits.timeout_s is not None and elapsed_s > limits.timeout_s:
        return TaskStopped("timeout", f"it ran longer than {limits.timeout_s:g} s")
    if limits.memory_bytes is not None and (held := resident_bytes(pid)) > limits.memory_bytes:
        return TaskStopped(
            "memory", f"it held {held / 1e9:.2f} GB, over {limits.memory_bytes / 1e9:g} GB"
        )
    return None


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
        error, told = pickle.load(answer)  # written by our own process into a file without a name
    except (EOFError, pickle.UnpicklingError):
        raise TaskStopped("died", f"its process ended with status {status}") from None
    if error is not None:
        raise error from TaskTraceback(told)


def _child() -> None:
    """Run the task of stdin and write what it raised, or None, and the traceback to stdout."""
    if sys.platform == "linux":  # nobody waits for a task whose worker was killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    keep_trail(int(sys.argv[1]))
    out = os.dup(1)
    os.dup2(2, 1)  # what a task prints is talk
    error: Exception | None = None
    told = ""
    try:
        call, args = pickle.load(sys.stdin.buffer)
        call(*args)
    except Exception as raised:
        error, told = raised, innermost_traceback(raised)
    with os.fdopen(out, "wb") as answer:
        answer.write(pickle.dumps((error, told)))


def innermost_traceback(error: BaseException) -> str:
    """Return the traceback of the first cause of ``error``, which says most about it; that of
    another process as it was written there."""
    while error.__cause__ is not None and not isinstance(error, TaskTraceback):
        error = error.__cause__
    if isinstance(error, TaskTraceback):
        return str(error)
    return "".join(traceback.format_exception(error, chain=False))


if __name__ == "__main__":
    _child()
