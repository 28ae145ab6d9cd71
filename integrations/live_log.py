"""The decision log of a running engine: JSON lines, in the order in which things happened.

The first line holds the engine's settings; then come steps as the simulator writes them
(serving_sim/decisions.py), and between them ``arrived`` and ``ended`` lines, because a server does
not know its requests beforehand, and ``returned`` lines, because how far it plans ahead depends on
the day. serving_sim/live_log.py reads it back.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger("vllm.preemptbench")
FLUSH_EVERY_S = 1.0


class LiveLog:
    """Writes such a log; a full disk ends the log, not the engine. Times count from the start."""

    def __init__(self, path: Path, header: Mapping[str, Any], start_s: float) -> None:
        self._start_s = start_s
        self._step = 0
        self._next_flush_s = 0.0
        self._file: TextIO | None = path.open("w", encoding="utf-8")
        self._write({"written_by": "preemptbench", "live_log": 1, **header})

    def arrived(self, row: Mapping[str, Any], arrival_s: float) -> None:
        """Write a request as a driver's row, without the output that nobody knows yet."""
        self._write({"arrived": {**row, "arrival": round(max(0.0, self._since(arrival_s)), 9)}})

    def ended(self, request_id: str, output_tokens: int, reason: str) -> None:
        """Write how a request ended."""
        self._write({"ended": request_id, "output": output_tokens, "reason": reason})

    def step(self, now_s: float, line: Mapping[str, Any]) -> int:
        """Write a planned step; return its number."""
        self._step += 1
        self._write({"step": self._step, "t": round(self._since(now_s), 9), **line})
        return self._step

    def returned(self, step: int) -> None:
        """Write that the output of a step, by its number, was handed out."""
        self._write({"returned": step})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _since(self, at_s: float) -> float:
        return at_s - self._start_s

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(row) + "\n")
            if time.monotonic() >= self._next_flush_s:
                self._next_flush_s = time.monotonic() + FLUSH_EVERY_S
                self._file.flush()
        except (OSError, ValueError) as error:
            self._file = None
            log.warning("the decision log ends here: %s", error)
