"""One row watched token by token: when it ends, why, and what it showed on the way."""

from __future__ import annotations

import numpy as np

from contracts.loops import LoopDetector, loop_period
from contracts.progress import ProgressTracker
from contracts.runs import FinishReason
from oracles.backend import DecodeSettings, Generation, HalfArray
from oracles.models import LoadedModel

_LOOP_CHECK_TOKENS = 16  # how often a run that may be stopped early is tested


class RowWatch:
    """The growing output of one row, until its end-of-sequence token, the cap, or a loop."""

    def __init__(self, lm: LoadedModel, settings: DecodeSettings, prompt_ids: list[int]) -> None:
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.hidden: list[HalfArray] = []
        self.wall_s = 0.0
        self._lm, self._settings, self._prompt_ids = lm, settings, prompt_ids
        marks = [i for i in prompt_ids if i in (lm.think_open, lm.think_close)]
        self._starts_thinking = bool(marks) and marks[-1] == lm.think_open
        # without early stops the tail is enough, once, at the cap
        self._loops = LoopDetector() if settings.stop_loops else None
        self._tracker = self._new_tracker(settings.progress_stride)

    def _new_tracker(self, stride: int) -> ProgressTracker | None:
        lm = self._lm
        if not stride:
            return None
        return ProgressTracker(
            stride, lm.think_open, lm.think_close, starts_thinking=self._starts_thinking
        )

    def take(self, token: int, entropy: float, logprob: float, wall_s: float) -> None:
        """Take one generated token; entropy and log-probability are not read without progress."""
        self.ids.append(token)
        if self._loops is not None:
            self._loops.update(token)
        if self._tracker is not None:
            self._tracker.update(token, self._lm.pieces[token], entropy, logprob)
        self.wall_s = wall_s
        if token in self._lm.eos_ids:
            self.finish_reason = "stop"
        elif len(self.ids) >= self._settings.max_new_tokens:
            self.finish_reason = "length" if loop_period(self.ids) is None else "loop"
        elif self._loops is not None and len(self.ids) % _LOOP_CHECK_TOKENS == 0:
            self.finish_reason = None if self._loops.period_tokens is None else "loop"

    def generation(self, concurrency: int) -> Generation:
        """Return the finished run, admitted when ``concurrency`` runs were in flight."""
        assert self.finish_reason is not None
        lm, tracker = self._lm, self._tracker
        layers = len(self._settings.hidden_layers)
        return Generation(
            prompt_tokens=len(self._prompt_ids),
            output_tokens=len(self.ids),
            thinking_tokens=self._thinking_tokens() if lm.think_close is not None else None,
            finish_reason=self.finish_reason,
            text=lm.tokenizer.decode(self.ids, skip_special_tokens=True),
            wall_s=self.wall_s,
            concurrency=concurrency,
            progress=None if tracker is None else tuple(tracker.records),
            hidden=np.array(self.hidden, np.float16).reshape(-1, layers, lm.hidden_size)
            if layers
            else None,
        )

    def _thinking_tokens(self) -> int:
        if self._tracker is not None:
            return self._tracker.thinking_tokens
        count, inside = 0, self._starts_thinking
        for token in self.ids:
            inside = inside or token == self._lm.think_open
            count += inside
            inside = inside and token != self._lm.think_close
        return count
