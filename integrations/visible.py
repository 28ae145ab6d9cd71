"""The progress records that a scheduler can see: repetition and thinking, from token ids alone;
entropy and log-probability of requests that ask for log-probabilities.

contracts/progress.py defines them one token at a time; this is the same for many tokens at once
(tests/unit/test_integrations.py holds the two to each other). What needs a token's text is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from contracts.policy import FloatArray
from contracts.progress import REPETITION_NGRAM, REPETITION_WINDOW_TOKENS
from contracts.runs import ProgressRecord

UNSEEN_FIELDS = ("newline_rate", "hesitation_rate")
SAMPLED_FIELDS = ("mean_entropy", "mean_logprob")  # seen where a request asks for logprobs
_SAMPLED = [ProgressRecord._fields.index(name) for name in SAMPLED_FIELDS]
_REPETITION = ProgressRecord._fields.index("repetition")
_THINKING = ProgressRecord._fields.index("in_thinking")
_ODD = np.uint64(0x9E3779B97F4A7C15)
# n-grams are told apart by 64-bit hashes; these stand for those before the first token
_BEFORE = (np.arange(1, REPETITION_WINDOW_TOKENS + 1, dtype=np.uint64) << np.uint64(40)) * _ODD


class VisibleProgress:
    """The records of one request. ``stride``, ``think_open`` and ``think_close`` are those of
    :class:`~contracts.progress.ProgressTracker`."""

    def __init__(self, stride: int, think_open: int | None, think_close: int | None) -> None:
        self.stride = stride
        self.values: FloatArray = np.empty((0, len(ProgressRecord._fields)))
        self._marks = (think_open, think_close)
        self._in_thinking = False
        self._told: list[tuple[float, float]] = []  # of tokens since the last closed record

    def tell(self, at: int, drawn: Sequence[tuple[float, float]]) -> None:
        """Take (entropy in nats, log-probability) of the output tokens from number ``at`` on.

        Tell of tokens in order. A record with a token that was never told of has neither.
        """
        told = self._told
        missed = at - len(self.values) * self.stride - len(told)
        if missed:
            told += [(math.nan, math.nan)] * missed
        told += drawn

    def read(self, tokens: Sequence[int], age: int) -> FloatArray:
        """Close the records up to ``age``; return all, float64 (age // stride, 6).

        ``tokens`` are the request's output tokens, at least ``age``; what was read stays read.
        """
        first, stride = len(self.values), self.stride
        count = age // stride - first
        if count <= 0:
            return self.values[: age // stride]
        before = REPETITION_WINDOW_TOKENS + REPETITION_NGRAM - 1
        start = max(0, first * stride - before)
        window = np.array(tokens[start : (first + count) * stride], dtype=np.uint64)
        ends = np.arange(first + 1, first + count + 1) * stride - start
        rows = np.full((count, len(ProgressRecord._fields)), math.nan)
        rows[:, _REPETITION] = _repetition(window, ends)
        rows[:, _THINKING] = self._thinking(window, ends, first * stride - start)
        if self._told:
            rows[:, _SAMPLED] = self._means_told(count)
        self.values = np.concatenate([self.values, rows])
        return self.values

    def _means_told(self, count: int) -> FloatArray:
        """Return the means (count, 2) of what was told, one row a record, and forget it. Added up
        one by one, as a tracker does."""
        wanted = count * self.stride
        told = self._told[:wanted]
        told += [(math.nan, math.nan)] * (wanted - len(told))
        del self._told[:wanted]
        sums = np.cumsum(np.reshape(told, (count, self.stride, 2)), axis=1)[:, -1]
        return np.asarray(sums / self.stride)

    def _thinking(self, window: np.ndarray, ends: np.ndarray, unread: int) -> FloatArray:
        """Say of each end whether the token before it left the request thinking."""
        if self._marks == (None, None):
            return np.zeros(len(ends))
        states = np.empty(len(ends))
        for index, end in enumerate(ends.tolist()):
            for token in window[unread:end].tolist():
                if token in self._marks:
                    self._in_thinking = token != self._marks[1]
            states[index], unread = self._in_thinking, end
        return states


def _repetition(window: np.ndarray, ends: np.ndarray) -> FloatArray:
    """Return, for each end, the share of the last n-grams before it that were seen before."""
    count = len(window) - REPETITION_NGRAM + 1
    grams = np.zeros(max(0, count), dtype=np.uint64)
    for offset in range(REPETITION_NGRAM):
        grams = (grams ^ window[offset : offset + len(grams)]) * _ODD
        grams ^= grams >> np.uint64(29)
    padded = np.concatenate([_BEFORE, grams])
    known = np.maximum(0, ends - REPETITION_NGRAM + 1)
    last = padded[known[:, None] + np.arange(REPETITION_WINDOW_TOKENS)]
    last.sort(axis=1)
    distinct = 1 + (last[:, 1:] != last[:, :-1]).sum(axis=1)
    real = np.minimum(known, REPETITION_WINDOW_TOKENS)
    new = distinct - (REPETITION_WINDOW_TOKENS - real)
    return np.asarray(np.where(real > 0, 1.0 - new / np.maximum(1, real), 0.0))
