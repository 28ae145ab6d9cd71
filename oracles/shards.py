"""Append-only shards of decode runs: what survives a kill, and what a second start skips.

A batch of runs is written in one call and synced before the next batch starts, so a crash at any
moment loses the running batch at most. A torn last line (the crash hit the write) is cut off when
the shard is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
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
    """One append-only JSONL file of runs, owned by one writer.

    Opening an existing shard reads the keys (request_key, repeat) of the runs it already holds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        _cut_torn_line(path)
        self.done = {(run.request_key, run.repeat) for run in read_shard(path)}

    def append(self, runs: Sequence[DecodeRun]) -> None:
        """Write ``runs`` at the end and return once the disk has them; known keys are skipped."""
        fresh = [run for run in runs if (run.request_key, run.repeat) not in self.done]
        block = "".join(run_to_json(run) + "\n" for run in fresh).encode()
        with self.path.open("ab") as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
        self.done.update((run.request_key, run.repeat) for run in fresh)


def read_shard(path: Path) -> Iterator[DecodeRun]:
    """Yield the runs of a shard in the order they were written."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            yield run_from_json(line, f"{path} line {number}")


def _cut_torn_line(path: Path) -> None:
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        keep = data.rfind(b"\n") + 1
        with path.open("r+b") as file:
            file.truncate(keep)
            os.fsync(file.fileno())
