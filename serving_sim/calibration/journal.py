"""Every timed step on disk before the next is timed, so that a calibration can go on where it was
stopped: a JSONL file, first a header with the configuration, then one line a step."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from contracts.files import atomic_write_text
from serving_sim.calibration.steps import StepShape
from serving_sim.calibration.timing import Timing
from traces.safe_json import MAX_FILE_BYTES, parse_json

FORMAT = "preemptbench-calibration/1"
*_SHAPE, _LONGEST = StepShape._fields  # an even step does not name the longest
_CLOCKS = "clock_state"
_TIMING = ("seconds", "spread_s", "num_timed")

Outcome = Timing | str  # a time, or the reason why there is none


class Journal:
    """The outcomes known so far; :meth:`add` makes one more durable.

    ``identity`` says what is timed (None: whatever the file, which must exist, holds); ``about`` is
    kept beside it and compared with nothing. A last line that was cut off is dropped and noted; any
    other damage, and the header of another configuration, is refused.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, str] | None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.outcomes: dict[StepShape, Outcome] = {}
        self.clock_states: list[str] = []
        self.notes: list[str] = []
        lines = self._whole_lines()
        if not lines:
            if identity is None:
                raise InvalidInput(f"{path} holds no calibration: name the .jsonl of one")
            atomic_write_text(path, _header(identity, about or {}) + "\n")
            lines = path.read_text(encoding="utf-8").splitlines()
        self.identity, self.about = _check_header(path, lines[0], identity)
        for number, line in enumerate(lines[1:], start=2):
            self._read_line(line, f"{path} line {number}")
        if self.notes:
            atomic_write_text(path, "".join(f"{line}\n" for line in lines))

    def _whole_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        if self.path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidInput(f"{self.path} has more than {MAX_FILE_BYTES} bytes: no journal")
        *lines, cut = self.path.read_bytes().split(b"\n")
        if cut:
            self.notes.append(
                f"{self.path}: the last line was cut off ({len(cut)} bytes) and is dropped; that "
                "step is timed again"
            )
        try:
            return [line.decode("utf-8") for line in lines]
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{self.path} is not UTF-8 at byte {error.start}") from None

    def add(self, shape: StepShape, outcome: Outcome) -> None:
        """Append one outcome; it is on the disk when this returns."""
        row: dict[str, Any] = shape._asdict()
        if not shape.is_uneven:
            del row[_LONGEST]
        if isinstance(outcome, str):
            row["skipped"] = outcome
        else:
            row |= {name: getattr(outcome, name) for name in _TIMING}
        self._append(row)
        self.outcomes[shape] = outcome

    def add_clock_state(self, text: str) -> None:
        """Append how the clocks stood while one session timed its steps."""
        self._append({_CLOCKS: text})
        self.clock_states.append(text)

    def _append(self, row: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read_line(self, line: str, where: str) -> None:
        row = parse_json(line, where)
        if isinstance(row, dict) and set(row) == {_CLOCKS}:
            self.clock_states.append(str(row[_CLOCKS]))
            return
        shape, outcome = _read_step(row, where)
        self.outcomes[shape] = outcome


def _digest(identity: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _header(identity: Mapping[str, str], about: Mapping[str, Any]) -> str:
    return json.dumps(
        {
            "format": FORMAT,
            "sha256": _digest(dict(identity)),
            "configuration": dict(identity),
            "about": dict(about),
        }
    )


def _check_header(
    path: Path, line: str, identity: Mapping[str, str] | None
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return configuration and ``about`` of the header; refuse another configuration's."""
    header = parse_json(line, f"{path} line 1")
    header = header if isinstance(header, dict) else {}
    before, about = header.get("configuration"), header.get("about")
    if header.get("format") != FORMAT or not (isinstance(before, dict) and isinstance(about, dict)):
        raise InvalidInput(f"{path} line 1 is no header of format {FORMAT}: name another --out")
    identity = before if identity is None else identity
    for name in sorted({*before, *identity}):
        if before.get(name) != identity.get(name):
            raise InvalidInput(
                f"{path} holds a calibration with {name} = {before.get(name)!r}; this one has "
                f"{identity.get(name)!r}: resume with the same settings, or name another --out"
            )
    if not all(isinstance(value, str) for value in before.values()):
        raise InvalidInput(f"{path} line 1: the configuration must hold texts only")
    if header.get("sha256") != _digest(before):
        raise InvalidInput(f"{path} line 1: sha256 does not belong to the configuration beside it")
    return before, about


def _read_step(row: object, where: str) -> tuple[StepShape, Outcome]:
    keys = {*_SHAPE, "skipped"}, {*_SHAPE, *_TIMING}
    if not isinstance(row, dict) or set(row) - {_LONGEST} not in keys:
        raise InvalidInput(f"{where} is no timed step: it needs {', '.join((*_SHAPE, *_TIMING))}")
    sizes = [*(row[name] for name in _SHAPE), row.get(_LONGEST, 0)]
    if not all(type(size) is int and 0 <= size < 1 << 40 for size in sizes):
        raise InvalidInput(f"{where}: sizes {sizes} must be whole numbers >= 0")
    shape = StepShape(*sizes)
    skewed = shape.num_decodes > 1 and shape.longest_context_tokens > shape.decode_context_tokens
    if shape.kv_tokens >= 1 << 53 or (
        shape.is_uneven and not (skewed and shape.surface == "uneven")
    ):
        raise InvalidInput(f"{where}: no step has the sizes {sizes}; delete the line")
    if "skipped" in row:
        return shape, str(row["skipped"])
    seconds, spread_s, count = (row[name] for name in _TIMING)
    numbers = all(isinstance(x, int | float) for x in (seconds, spread_s)) and type(count) is int
    if not numbers or not (0.0 < seconds < 1e6 and 0.0 <= spread_s < 1e6 and 0 < count < 1 << 31):
        raise InvalidInput(
            f"{where}: seconds {seconds!r}, spread_s {spread_s!r} and num_timed {count!r} are no "
            "measurement; delete the line to time the step again"
        )
    return shape, Timing(float(seconds), float(spread_s), count)
