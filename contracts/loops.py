"""The one rule by which a run counts as looping: its tail repeats, token for token, with a period.

A greedy run that repeats itself is unlikely to end by itself, so its cut length says "at least"
and nothing else (its cause is recorded as ``loop``). Text that counts up, fills a table or
repeats a phrase with other words between breaks the period and is no loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LOOP_MAX_PERIOD_TOKENS = 128
LOOP_COPIES = 4  # the repeated block stands this often in a row, the first included
LOOP_MIN_TOKENS = 96  # a ruled line or a row of zeros is shorter

# no more than this much of the tail can matter
LOOP_WINDOW_TOKENS = max(LOOP_MIN_TOKENS, (LOOP_COPIES - 1) * LOOP_MAX_PERIOD_TOKENS) + (
    LOOP_MAX_PERIOD_TOKENS
)

_BLANK = -1  # no token has this id
_NEEDED = np.maximum(
    np.arange(LOOP_MAX_PERIOD_TOKENS + 1) * (LOOP_COPIES - 1), LOOP_MIN_TOKENS
).astype(np.int32)


class LoopDetector:
    """The streaming state of the test: for every period p, how many tokens in a row equalled the
    token p before them. Memory and the cost of a token are constant."""

    def __init__(self) -> None:
        size = LOOP_MAX_PERIOD_TOKENS
        # the last `size` tokens lie side by side, oldest first, in a strip that is rewound when
        # full, so that comparing with all periods needs no shuffling
        self._strip = np.full(8 * size, _BLANK, dtype=np.int64)
        self._start = 0
        self._matched = np.zeros(size, dtype=np.int32)

    def update(self, token_id: int) -> None:
        """Take one generated token."""
        size, start = LOOP_MAX_PERIOD_TOKENS, self._start
        if start + size == len(self._strip):
            self._strip[:size] = self._strip[start:]
            start = 0
        matched = self._matched
        matched += 1
        matched *= self._strip[start : start + size] == token_id
        self._strip[start + size] = token_id
        self._start = start + 1

    @property
    def period_tokens(self) -> int | None:
        """Length of the block that the tail repeats now; None when it is no loop."""
        looping = np.flatnonzero(self._matched[::-1] >= _NEEDED[1:])
        return int(looping[0]) + 1 if looping.size else None


def loop_period(token_ids: Sequence[int]) -> int | None:
    """Return the period that the tail of a whole run repeats, or None; what a detector that had
    watched the run would say, at a cost that does not grow with the run."""
    detector = LoopDetector()
    for token in token_ids[-LOOP_WINDOW_TOKENS:]:
        detector.update(token)
    return detector.period_tokens
