"""Files that are either whole or absent: write beside, sync, rename, sync the folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

_SCRATCH = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp")


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a scratch path in the folder of ``path``; on success it becomes ``path``.

    On an exception the scratch file is removed and ``path`` keeps what it held. It is locked while
    its writer lives, so that :func:`remove_leftovers` can tell what a killed one left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    scratch = Path(name)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: age has to do
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield scratch
        with scratch.open("rb+") as file:
            os.fsync(file.fileno())
        scratch.chmod(0o644)
        os.replace(scratch, path)
        _sync_folder(path.parent)
    finally:
        os.close(handle)
        scratch.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path`` all at once."""
    with atomic_path(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def remove_leftovers(folders: Iterable[Path], before_s: float) -> list[Path]:
    """Remove what killed writers left directly in ``folders``, and return it: scratch files of
    :func:`atomic_path` that nobody holds, last changed before ``before_s`` (seconds since 1970).
    """
    found = [path for folder in folders for path in sorted(folder.glob(".*.tmp"))]
    return [p for p in found if _SCRATCH.fullmatch(p.name) and _removed(p, before_s)]


def _removed(path: Path, before_s: float) -> bool:
    try:
        if path.is_symlink() or path.stat().st_mtime >= before_s:
            return False
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:  # it is held, gone, no file, or not ours to open
        return False
    return True


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
