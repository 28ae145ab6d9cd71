"""The trail of a task: which cell it is at, and where in the code it was when it was stopped.

A task in a process of its own shares one open file with whoever waits for it. Its first line names
the cell now running; below it, faulthandler writes the Python frames of every thread when the
process gets SIGUSR1 or crashes. Its handler is compiled: a loop that never returns does not keep it
waiting. The file has no name, so that nothing is left behind by a kill.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_OURS = re.compile(r"(contracts|traces|predictors|oracles|serving_sim|eval|training)/")
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+ in ')
_NOT_IN_TASK = "task_limits.py"  # the frames that start every task
_MOST_FRAMES = 12
_POLL_S, _PATIENCE_S = 0.02, 1.0

_handle: int | None = None  # of this process's trail, when it is a task of its own


def keep_trail(handle: int) -> None:
    """Keep this process's trail in the open file ``handle`` from here on."""
    global _handle
    _handle = handle
    _write_place("")
    faulthandler.enable(file=handle)
    faulthandler.register(signal.SIGUSR1, file=handle)


@contextlib.contextmanager
def at_place(place: str) -> Iterator[None]:
    """Name what runs inside: in the trail, and as a note on an error that leaves it."""
    _write_place(place)
    try:
        yield
    except Exception as error:
        error.add_note(place)
        raise
    _write_place("")


def place_of(error: BaseException) -> str:
    """Return where an error arose, as :func:`at_place` noted; empty when it did not."""
    return "; ".join(getattr(error, "__notes__", ()))


def _write_place(place: str) -> None:
    if _handle is not None:
        os.ftruncate(_handle, 0)
        os.lseek(_handle, 0, os.SEEK_SET)
        os.write(_handle, f"{place}\n".encode())


def ask_frames(process: subprocess.Popen[bytes], handle: int) -> None:
    """Have ``process`` write its frames into its trail; wait a second for them at most."""
    size = os.fstat(handle).st_size
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)
    until_s = time.monotonic() + _PATIENCE_S
    written = size
    while process.poll() is None and time.monotonic() < until_s:
        time.sleep(_POLL_S)
        before, written = written, os.fstat(handle).st_size
        if before == written > size:
            return


def read_trail(handle: int) -> tuple[str, str]:
    """Return the cell that was running and the frames written below it, the innermost first: those
    of this project and of the user's own files, a dozen at most; either may be empty."""
    text = os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace")
    place, _, dump = text.partition("\n")
    frames = [line for line in dump.splitlines() if (m := _FRAME.match(line)) and _told(m["file"])]
    return place, "\n".join(frames[:_MOST_FRAMES])


def _told(file: str) -> bool:
    path = Path(file)
    if path.is_relative_to(_ROOT) and _OURS.match(f"{path.relative_to(_ROOT)}"):
        return path.name != _NOT_IN_TASK
    return not file.startswith(("<", *_LIBRARIES))
