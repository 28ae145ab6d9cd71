"""Append-only shards of decode runs: what survives a kill, and what a second start skips.

A batch of runs is written in one call and synced before the next batch starts, so a crash at any
moment loses the running batch at most. A torn last line (the crash hit the write) is cut off when
the shard is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from contracts.errors import CollectionStopped, InvalidInput
from contracts.runs import DecodeRun, ProgressRecord

_FIELD_NAMES = tuple(field.name for field in fields(DecodeRun))
_REQUIRED = frozenset(f.name for f in fields(DecodeRun) if f.default is not None)


def run_to_json(run: DecodeRun) -> str:
    """Return the one-line JSON form of a run (progress as lists of six numbers)."""
    row: dict[str, Any] = {name: getattr(run, name) for name in _FIELD_NAMES}
    if run.progress is not None:
        row["progress"] = [[round(value, 6) for value in record] for record in run.progress]
    return json.dumps(row, ensure_ascii=False, allow_nan=False)


def run_from_json(line: str, where: str) -> DecodeRun:
    """Parse what :func:`run_to_json` wrote; raises InvalidInput naming ``where``."""
    try:
        row = json.loads(line)
        if row.get("progress") is not None:
            row["progress"] = tuple(ProgressRecord(*record) for record in row["progress"])
        return DecodeRun(**row)
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{where} is not a decode run: {error}") from None


class RunShard:
    """One append-only JSONL file of runs, owned by one writer at a time.

    Opening an existing shard cuts a torn last line off and reads the keys (request_key, repeat) of
    the runs it holds. Raises InvalidInput when another process writes it. Close it, or use it as a
    context manager.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise InvalidInput(
                f"{path} is being written by another process: wait for it, or give another --out"
            ) from None
        _cut_torn_line(path)
        self.done = {(run.request_key, run.repeat) for run in read_shard(path)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the next writer have the shard."""
        self._file.close()

    def append(self, runs: Sequence[DecodeRun]) -> None:
        """Write ``runs`` at the end and return once the disk has them; known keys are skipped.

        Raises CollectionStopped when the disk takes no more; the shard then holds what it held.
        """
        fresh = [run for run in runs if (run.request_key, run.repeat) not in self.done]
        block = "".join(run_to_json(run) + "\n" for run in fresh).encode()
        before = self.path.stat().st_size
        try:
            write_all(self._file.fileno(), block)
        except OSError as error:
            os.ftruncate(self._file.fileno(), before)
            raise disk_refused(self.path, error) from error
        self.done.update((run.request_key, run.repeat) for run in fresh)


def write_all(descriptor: int, block: bytes) -> None:
    """Write ``block`` to an open file and sync it."""
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)


def disk_refused(path: Path, error: OSError) -> CollectionStopped:
    """Return the error of a collection whose disk took no more."""
    return CollectionStopped(
        f"{path} cannot be written ({error.strerror or error}): make room; the runs before this "
        "batch are safe, and the same command goes on"
    )


def shard_paths(folder: Path) -> list[Path]:
    """Return the shards of a collection, by rank."""
    return sorted(folder.glob("shard-*.jsonl"), key=lambda path: (len(path.name), path.name))


def read_shard(path: Path) -> Iterator[DecodeRun]:
    """Yield the runs of a shard in the order they were written; a torn last line is no run."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith("\n"):
                yield run_from_json(line, f"{path} line {number}")


def _cut_torn_line(path: Path) -> None:
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        keep = data.rfind(b"\n") + 1
        with path.open("r+b") as file:
            file.truncate(keep)
            os.fsync(file.fileno())
