"""OnlinePredictor: what a serving engine calls. Tokens in as they come, remaining lengths out.

Each running request costs constant space (sums of its progress records, a repetition window) and
an answer equals the batch grid of the same predictor (:func:`contracts.signals.build_grid`) at
every age: refreshed every ``stride`` tokens, counted down in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.progress import ProgressTracker
from contracts.signals import NUM_PROGRESS, SignalRequest
from predictors.base import Predictor
from predictors.calibrated import Calibrated
from predictors.features import (
    AGE_FEATURES,
    PROGRESS_FEATURES,
    PROGRESS_START,
    PROMPT_FEATURES,
    TrackSummary,
    largest_number,
    progress_features,
    prompt_row,
)
from predictors.gbm_hazard import GbmHazard
from predictors.targets import reach_cap

_START_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class _Running:
    """A request, its row in the arrays, and its tracker."""

    request: SignalRequest
    row: int
    tracker: ProgressTracker


class OnlinePredictor:
    """Streaming answers of ``predictor`` for the requests that run.

    ``stride`` is how many tokens an answer serves, ``progress_stride`` how many a progress record
    covers (that of the run log it was trained on). ``think_open``, ``think_close`` are token ids.
    Families that read single progress records, not their sums, are refused when first asked.
    Not thread-safe: call it from the engine's loop.
    """

    def __init__(
        self,
        predictor: Predictor,
        *,
        stride: int = 8,
        progress_stride: int = 8,
        think_open: int | None = None,
        think_close: int | None = None,
    ) -> None:
        if stride < 1:
            raise InvalidInput(f"stride is {stride}: an answer must serve at least 1 token")
        self.predictor, self.stride, self.progress_stride = predictor, stride, progress_stride
        self._marks = (think_open, think_close)
        base = predictor.base if isinstance(predictor, Calibrated) else predictor
        self._fast = base if isinstance(base, GbmHazard) else None
        self._running: dict[str, _Running] = {}
        self._free: list[int] = []
        self._age = np.zeros(0, np.int64)
        self._asked_age = np.zeros(0, np.int64)  # the last multiple of the stride
        self._count = np.zeros((0, 2), np.int64)  # records: now, at the asked age
        self._sums = np.zeros((0, 2, NUM_PROGRESS))
        self._last = np.zeros((0, 2, NUM_PROGRESS))
        self._prompt = np.zeros((0, len(PROMPT_FEATURES)))
        self._level = np.zeros(0)  # of the request's model, where the predictor tells models apart
        self._cap = np.zeros(0, np.int64)
        self._answer = np.zeros(0)
        self._answer_age = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._running)

    def start(self, request: SignalRequest, *, starts_thinking: bool = False) -> None:
        """Admit a request under its ``run_id``; its ``progress`` is not read."""
        name = request.run_id
        if name in self._running:
            raise InvalidInput(f"request {name!r} already runs: forget it first")
        if not self._free:
            self._grow()
        row = self._free.pop()
        tracker = ProgressTracker(
            self.progress_stride, *self._marks, starts_thinking=starts_thinking
        )
        self._running[name] = _Running(replace(request, progress=None), row, tracker)
        self._age[row] = self._asked_age[row] = 0
        self._count[row], self._sums[row], self._last[row] = 0, 0.0, 0.0
        self._prompt[row] = prompt_row(request)
        if self._fast is not None and self._fast.levels is not None:
            self._level[row] = self._fast.levels.of([request])[0]
        self._cap[row] = request.max_tokens
        self._answer_age[row] = -1

    def update(
        self,
        request_id: str,
        tokens: Sequence[int],
        pieces: Sequence[str],
        entropies: Sequence[float],
        logprobs: Sequence[float],
    ) -> None:
        """Take the tokens a request wrote since the last call: ids, texts, entropies (nats) and
        log-probabilities, one each. O(1) a token."""
        running = self._find(request_id)
        if len({len(tokens), len(pieces), len(entropies), len(logprobs)}) != 1:
            raise InvalidInput(
                f"request {request_id!r}: {len(tokens)} tokens, {len(pieces)} pieces, "
                f"{len(entropies)} entropies and {len(logprobs)} logprobs; give one each a token"
            )
        row, tracker = running.row, running.tracker
        for token, piece, entropy, logprob in zip(tokens, pieces, entropies, logprobs, strict=True):
            tracker.update(token, piece, entropy, logprob)
            self._age[row] += 1
            if tracker.records:
                self._last[row, 0] = tracker.records.pop()
                self._sums[row, 0] += self._last[row, 0]
                self._count[row, 0] += 1
            if self._age[row] % self.stride == 0:
                self._asked_age[row] = self._age[row]
                self._last[row, 1], self._sums[row, 1] = self._last[row, 0], self._sums[row, 0]
                self._count[row, 1] = self._count[row, 0]

    def remaining(self, request_ids: Sequence[str]) -> FloatArray:
        """Return the expected served remaining tokens (n,), at least 1."""
        rows = np.array([self._find(name).row for name in request_ids], dtype=np.int64)
        stale = np.flatnonzero(self._answer_age[rows] != self._asked_age[rows])
        if stale.size:
            some = rows[stale]
            self._answer[some] = self._ask([request_ids[i] for i in stale.tolist()], some)
            self._answer_age[some] = self._asked_age[some]
        return np.maximum(1.0, self._answer[rows] - (self._age[rows] - self._asked_age[rows]))

    def upper(self, request_ids: Sequence[str], level: float = 0.9) -> FloatArray:
        """Return the quantile (n,) at ``level``, calibrated if the predictor is."""
        rows = np.array([self._find(name).row for name in request_ids], dtype=np.int64)
        asked = self._asked_age[rows]
        bound = self.predictor.quantile(self._requests(request_ids), asked, level)
        return np.maximum(1.0, bound - (self._age[rows] - asked))

    def reach_cap(self, request_ids: Sequence[str]) -> FloatArray:
        """Return the chance (n,) that each request still writes when it comes to its cap, given
        that it wrote so far."""
        rows = np.array([self._find(name).row for name in request_ids], dtype=np.int64)
        asked, since = self._asked_age[rows], self._age[rows] - self._asked_age[rows]
        requests = self._requests(request_ids)
        reached = reach_cap(self.predictor, requests, asked)
        alive = self.predictor.survival(requests, asked, since.astype(np.float64))
        share = np.divide(reached, alive, out=np.ones(len(rows)), where=alive > 0)
        return np.clip(share, 0.0, 1.0)

    def forget(self, request_id: str) -> None:
        """Drop a request that ended; its place is used again."""
        self._free.append(self._find(request_id).row)
        del self._running[request_id]

    def _find(self, request_id: str) -> _Running:
        if request_id not in self._running:
            raise InvalidInput(
                f"request {request_id!r} is not among the {len(self)} that run: start it first"
            )
        return self._running[request_id]

    def _ask(self, request_ids: Sequence[str], rows: IntArray) -> FloatArray:
        asked = self._asked_age[rows]
        if self._fast is None:
            return self.predictor.remaining(self._requests(request_ids), asked)
        alive = self._fast.survival_of(self._known(rows))
        return self._fast.mean_of(alive, np.maximum(1, self._cap[rows] - asked))

    def _known(self, rows: IntArray) -> FloatArray:
        """Return what feature_matrix would say of these rows, from the arrays."""
        asked, prompt, count = self._asked_age[rows], self._prompt[rows], self._count[rows, 1]
        out = np.full((len(rows), PROGRESS_START + len(PROGRESS_FEATURES)), np.nan)
        out[:, 0], out[:, 1] = asked, np.log1p(asked)
        out[:, len(AGE_FEATURES) : PROGRESS_START] = prompt
        some = np.flatnonzero(count)
        at = rows[some]
        out[some, PROGRESS_START:] = progress_features(
            self._last[at, 1], self._sums[at, 1], count[some], self.progress_stride,
            largest_number(prompt[some]),
        )  # fmt: skip
        if self._fast is not None and self._fast.levels is not None:
            out = np.column_stack([out, self._level[rows]])
        return out

    def _requests(self, request_ids: Sequence[str]) -> list[SignalRequest]:
        """Return each request with the summary of its progress at the asked age."""
        out = []
        for name in request_ids:
            running = self._running[name]
            row = running.row
            summary = TrackSummary(
                stride=self.progress_stride,
                values=self._last[row, 1:].copy(),
                sums=self._sums[row, 1].copy(),
                num_records=int(self._count[row, 1]),
            )
            out.append(replace(running.request, progress=summary))
        return out

    def _grow(self) -> None:
        """Double the room of every array; rows are never moved."""
        old = len(self._age)
        new = max(_START_CAPACITY, 2 * old)
        for name in (
            "_age", "_asked_age", "_count", "_sums", "_last", "_prompt", "_level", "_cap",
            "_answer", "_answer_age",
        ):  # fmt: skip
            array = getattr(self, name)
            wider = np.zeros((new, *array.shape[1:]), dtype=array.dtype)
            wider[:old] = array
            setattr(self, name, wider)
        self._free = list(range(new - 1, old - 1, -1))
