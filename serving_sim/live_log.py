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


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A log that can be replayed: what it decided, and how much of the truth it holds.

    ``num_censored`` of its requests were cut off. ``victims_by`` names the policy of a live log.
    ``num_preemptions`` and ``num_steps`` are the log's own.
    """

    log: DriverLog
    num_censored: int
    num_preemptions: int
    num_steps: int
    victims_by: str | None
    profile: AffineProfile


def read_recorded(path: Path) -> Recorded:
    """Read a live log, or a driver's log or workload. Raises InvalidInput naming file and line."""
    if not path.is_file():
        raise InvalidInput(f"{path} does not exist: give a decision log")
    with readable(path), open_log(path) as file:
        first = file.readline(1_000_000)
    if '"live_log"' in first:
        return _read_live(path, parse_object(first, f"{path} line 1"))
    log = read_driver_file(path)
    steps = list(log.steps())
    num_preemptions = sum(len(step.get("preempted", ())) for step in steps)
    return Recorded(log, 0, num_preemptions, len(steps), None, log.profile)


def _read_live(path: Path, header: dict[str, Any]) -> Recorded:
    """Collect the requests of a live log from between its steps."""
    if header["live_log"] != 1:
        raise InvalidInput(f"{path}: live_log is {header['live_log']!r}; this release reads 1")
    rows: dict[str, dict[str, Any]] = {}
    ended: dict[str, dict[str, Any]] = {}
    decoded: Counter[str] = Counter()
    steps: list[dict[str, Any]] = []
    for number, line in _lines(path):
        where = f"{path} line {number}"
        if "arrived" in line:
            row = _checked_arrival(line["arrived"], where)
            rows[row["id"]] = row
        elif "ended" in line:
            ended[_checked_end(line, where)["ended"]] = line
        else:
            steps.append(_checked_step(line, where))
            decoded.update(name for name, tokens in line["sched"].items() if tokens == 1)
    if not rows:
        raise InvalidInput(f"{path} holds no request yet: let the engine serve some first")
    num_censored = 0
    for name, row in rows.items():
        end = ended.get(name)
        known = end is not None and end["reason"] in ENDED_REASONS
        num_censored += not known
        written = end["output"] if end is not None else decoded[name]
        row["output"] = min(max(1, written), row["max_tokens"])
    engine = header.get("engine")
    if not isinstance(engine, dict):
        raise InvalidInput(f"{path}: field 'engine' is {engine!r:.80}; it must be an object")
    version = version_of(path, header.get("vllm_version"))
    log = DriverLog(path, engine, workload_of(path.name, list(rows.values())), {}, version)
    num_preemptions = sum(len(step["preempted"]) for step in steps)
    victims_by = str(header.get("victims_by", "lifo"))
    return Recorded(
        log, num_censored, num_preemptions, len(steps), victims_by, measured_profile(path, steps)
    )


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
