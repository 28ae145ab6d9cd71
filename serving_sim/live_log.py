"""Reads the decision log of a running engine (integrations/live_log.py) as a driver log.

A server does not know its requests beforehand, so their lengths stand where they ended. A request
that was cut off (the client left, the engine stopped) is *censored*: its length is at least what it
had written, and it is replayed as if it ended there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InvalidInput
from serving_sim.decisions import (
    DriverLog,
    open_log,
    parse_object,
    read_driver_file,
    readable,
    version_of,
)
from serving_sim.driver_rows import check_row, workload_of
from serving_sim.profile import AffineProfile

ENDED_REASONS = ("stop", "length", "repetition")  # of vLLM; any other leaves the length unknown


@dataclass(frozen=True, eq=False)
class Recorded:
    """A log that can be replayed: what it decided, and how much of the truth it holds.

    The requests ``censored`` were cut off. ``victims_by`` names the policy of a live log, ``seed``
    keys its draws, and its signal was asked every ``refresh_tokens``. ``events`` are the lines of a
    live log after its header, in order; none of a driver's log. ``steps`` are the planned ones.
    """

    log: DriverLog
    steps: tuple[dict[str, Any], ...]
    censored: frozenset[str] = frozenset()
    victims_by: str | None = None
    seed: int = 0
    refresh_tokens: int = 8
    events: tuple[dict[str, Any], ...] | None = None

    @property
    def num_steps(self) -> int:
        """Steps that were logged."""
        return len(self.steps)

    @property
    def num_preemptions(self) -> int:
        """Victims that were logged."""
        return sum(len(step.get("preempted", ())) for step in self.steps)

    @property
    def num_censored(self) -> int:
        """Requests that were cut off."""
        return len(self.censored)

    @cached_property
    def profile(self) -> AffineProfile:
        """What a step took: the clock of a driver's log, or fitted to a live one. Raises
        InvalidInput on fewer than ten timed steps."""
        if self.events is None:
            return self.log.profile
        return measured_profile(self.log.path, list(self.steps))


def read_recorded(path: Path) -> Recorded:
    """Read a live log, or a driver's log or workload. Raises InvalidInput naming file and line."""
    if not path.is_file():
        raise InvalidInput(f"{path} does not exist: give a decision log")
    with readable(path), open_log(path) as file:
        first = file.readline(1_000_000)
    if '"live_log"' in first:
        return _read_live(path, parse_object(first, f"{path} line 1"))
    log = read_driver_file(path)
    return Recorded(log, tuple(log.steps()))


def _read_live(path: Path, header: dict[str, Any]) -> Recorded:
    """Collect the requests of a live log from between its steps."""
    if header["live_log"] != 1:
        raise InvalidInput(f"{path}: live_log is {header['live_log']!r}; this release reads 1")
    rows: dict[str, dict[str, Any]] = {}
    ended: dict[str, dict[str, Any]] = {}
    decoded: Counter[str] = Counter()
    events: list[dict[str, Any]] = []
    for number, line in _lines(path):
        where = f"{path} line {number}"
        if "arrived" in line:
            row = _checked_arrival(line["arrived"], where)
            if row["id"] in rows:
                raise InvalidInput(
                    f"{where}: request {row['id']!r} arrives a second time; a log can be replayed "
                    "when every request has an id of its own"
                )
            rows[row["id"]] = row
        elif "ended" in line:
            ended[_checked_end(line, where)["ended"]] = line
        elif "returned" in line:
            _checked_return(line, where)
        else:
            decoded.update(
                name for name, n in _checked_step(line, where)["sched"].items() if n == 1
            )
        events.append(line)
    if not rows:
        raise InvalidInput(f"{path} holds no request yet: let the engine serve some first")
    censored = set()
    for name, row in rows.items():
        end = ended.get(name)
        if end is None or end["reason"] not in ENDED_REASONS:
            censored.add(name)
        written = end["output"] if end is not None else decoded[name]
        row["output"] = min(max(1, written), row["max_tokens"])
    engine = header.get("engine")
    if not isinstance(engine, dict):
        raise InvalidInput(f"{path}: field 'engine' is {engine!r:.80}; it must be an object")
    version = version_of(path, header.get("vllm_version"))
    return Recorded(
        log=DriverLog(path, engine, workload_of(path.name, list(rows.values())), {}, version),
        steps=tuple(line for line in events if "sched" in line),
        censored=frozenset(censored),
        victims_by=str(header.get("victims_by", "lifo")),
        seed=_whole(header, "seed", 0, path),
        refresh_tokens=max(1, _whole(header, "refresh_tokens", 64, path)),
        events=tuple(events),
    )


def _whole(header: dict[str, Any], key: str, default: int, path: Path) -> int:
    value = header.get(key, default)
    if type(value) is not int:
        raise InvalidInput(f"{path}: field {key!r} is {value!r:.80}; it must be a whole number")
    return value


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines after the header; the last one may be torn (the engine was killed)."""
    with readable(path), open_log(path) as file:
        texts = file.read().split("\n")
    if texts[-1]:
        texts[-1] = ""  # torn: a whole line ends with a newline
    for number, text in enumerate(texts[1:], start=2):
        if text:
            yield number, parse_object(text, f"{path} line {number}")


def _checked_arrival(row: Any, where: str) -> dict[str, Any]:
    """Return a copy of a request's row; its output is not known yet."""
    known = {"output": 1, **row} if isinstance(row, dict) else row
    check_row(known, where)
    if "max_tokens" not in known:
        raise InvalidInput(f"{where} has no 'max_tokens': {row!r:.80}")
    return dict(known)


def _checked_end(line: dict[str, Any], where: str) -> dict[str, Any]:
    for key, kind, wanted in (
        ("ended", str, "an id"),
        ("output", int, "whole tokens"),
        ("reason", str, "a word"),
    ):
        if type(line.get(key)) is not kind:
            raise InvalidInput(f"{where}: {key} is {line.get(key)!r:.80}; it must be {wanted}")
    return line


def _checked_return(line: dict[str, Any], where: str) -> None:
    if type(line["returned"]) is not int:
        raise InvalidInput(f"{where}: returned is {line['returned']!r:.80}; it must be a step")


def _checked_step(line: dict[str, Any], where: str) -> dict[str, Any]:
    kinds = {"t": (int, float), "sched": (dict,), "preempted": (list,)}
    for key, kind in kinds.items():
        if not isinstance(line.get(key), kind):
            raise InvalidInput(f"{where}: field {key!r} is {line.get(key)!r:.80}: not a step")
    wrong = [tokens for tokens in line["sched"].values() if type(tokens) is not int]
    if wrong or not math.isfinite(line["t"]):
        raise InvalidInput(
            f"{where}: tokens and t must be numbers, not {[*wrong, line['t']]!r:.80}"
        )
    return line


def measured_profile(path: Path, steps: list[dict[str, Any]]) -> AffineProfile:
    """Return seconds = fixed + per_token x tokens, fitted to the times between the log's steps.

    Gaps above ten times the median are idle time and left out. Least squares; a negative
    coefficient becomes 0. Raises InvalidInput on fewer than ten steps.
    """
    times = np.array([step["t"] for step in steps], dtype=np.float64)
    tokens = np.array([sum(step["sched"].values()) for step in steps], dtype=np.float64)
    gaps, tokens = np.diff(times), tokens[:-1]
    used = (gaps > 0.0) & (tokens > 0.0)
    gaps, tokens = gaps[used], tokens[used]
    if len(gaps) < 10:
        raise InvalidInput(
            f"{path} holds {len(gaps)} timed steps; at least 10 are needed to learn what a step "
            "takes: let the engine serve longer, or name a profile"
        )
    busy = gaps <= 10.0 * np.median(gaps)
    gaps, tokens = gaps[busy], tokens[busy]
    design = np.column_stack([np.ones(len(gaps)), tokens])
    fixed_s, per_token_s = np.linalg.lstsq(design, gaps, rcond=None)[0].tolist()
    if per_token_s <= 0.0 or fixed_s < 0.0:
        per_token_s = max(0.0, per_token_s) if fixed_s >= 0.0 else float(gaps.sum() / tokens.sum())
        fixed_s = float(gaps.mean()) if per_token_s == 0.0 else 0.0
    return AffineProfile(
        name="measured-in-log",
        fixed_s=fixed_s,
        per_token_s=per_token_s,
        per_context_token_s=0.0,
        source=f"{len(gaps)} steps of {path.name}",
    )
