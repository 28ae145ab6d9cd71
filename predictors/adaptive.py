"""Bounds that stay honest while traffic shifts: adaptive conformal inference over completions.

Two loops, both fed by completed requests. Fast: the level asked for moves by ``step`` times the
last error (Gibbs and Candès, NeurIPS 2021), so coverage returns however wrong the predictor became.
Slow: every ``refresh_every`` completions the table by age is refitted on the last ``window`` of
them and on the requests still running, which enter as cut at the age they have reached. Without
those, a window of completions is biased to short runs: the long ones are still running.

What shall hold is the share of all tokens at which the bound was right, as a scheduler meets it;
so a long run counts more in both loops, in the fast one up to ``_MAX_PULL`` times the usual.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.policy import FloatArray, IntArray
from contracts.settings import require
from contracts.signals import DistributionalSignal, SignalRequest
from predictors.base import check_level, room
from predictors.calibrated import quantile_by_group
from predictors.conformal import CalibrationTable, ConformalRows, fit_table, joined_rows

_AGES_A_RUN = 16
_MAX_PULL = 3.0


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """``step`` is the gain of the fast loop in level per missed request; 0 turns a loop off."""

    step: float = 0.02
    window: int = 200
    refresh_every: int = 25
    num_groups: int = 5

    def __post_init__(self) -> None:
        require(
            self,
            ("step", 0.0 <= self.step < 1.0, "at least 0 and below 1"),
            ("window", self.window >= 20, "at least 20 completions"),
            ("refresh_every", self.refresh_every >= 0, "at least 0"),
            ("num_groups", 1 <= self.num_groups <= 100, "between 1 and 100"),
        )


class AdaptiveBound:
    """The upper bound (or, with ``level`` below 0.5, the lower one) of a running system.

    ``base`` answers without calibration; ``table`` is where to start. Memory is bounded by
    ``window`` completions of 16 ages each.
    """

    def __init__(
        self,
        base: DistributionalSignal,
        table: CalibrationTable,
        level: float = 0.9,
        settings: AdaptiveSettings | None = None,
    ) -> None:
        check_level(level)
        self.base, self.table, self.level = base, table, level
        self.settings = settings or AdaptiveSettings()
        self.asked_level = level
        self.num_completed = 0
        self._mean_tokens = 0.0
        self._window: deque[ConformalRows] = deque(maxlen=self.settings.window)

    def bound(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return the bound (n,) in tokens, the cap (or one token) where no level is safe enough."""
        if not 0.0 < self.asked_level < 1.0:
            limit = room(requests, ages) if self.asked_level >= 1.0 else np.ones(len(ages))
            return limit.astype(np.float64)
        asked = self.table.asked_at(self.asked_level)
        return quantile_by_group(self.base, requests, ages, self.table, asked)

    def complete(
        self,
        request: SignalRequest,
        output_tokens: int,
        running: Sequence[SignalRequest] = (),
        running_ages: IntArray | None = None,
    ) -> float:
        """Learn from a completed request; return the share of its life that the bound held.

        ``running`` at ``running_ages`` are the requests in flight, for the slow loop.
        """
        rows = _rows(self.base, request, output_tokens, True, self.num_completed)
        left = (output_tokens - rows.age).astype(np.float64)
        bound = self.bound([request] * len(rows.age), rows.age)
        held = float(np.mean(left <= bound if self.level >= 0.5 else left >= bound))
        # a missed upper bound raises the level, a missed lower bound lowers it
        wanted = self.level if self.level >= 0.5 else 1.0 - self.level
        self._mean_tokens += (output_tokens - self._mean_tokens) / min(
            self.num_completed + 1, self.settings.window
        )
        pull = min(output_tokens / self._mean_tokens, _MAX_PULL)
        move = self.settings.step * pull * (wanted - held)
        self.asked_level += move if self.level >= 0.5 else -move
        self.asked_level = float(np.clip(self.asked_level, 0.0, 1.0))
        self._window.append(rows)
        self.num_completed += 1
        every = self.settings.refresh_every
        if every and self.num_completed % every == 0:
            self.refresh(running, np.zeros(0, np.int64) if running_ages is None else running_ages)
        return held

    def refresh(self, running: Sequence[SignalRequest], running_ages: IntArray) -> None:
        """Refit the table by age on the window and on what runs."""
        flight = [
            _rows(self.base, request, age, False, self.num_completed + 1 + index)
            for index, (request, age) in enumerate(zip(running, running_ages.tolist(), strict=True))
            if age > 0
        ]
        rows = joined_rows([*self._window, *flight])
        self.table = fit_table(rows, self.settings.num_groups)


def _rows(
    base: DistributionalSignal, request: SignalRequest, tokens: int, ended: bool, number: int
) -> ConformalRows:
    """Return the scores of one request that wrote ``tokens`` so far, at evenly spaced ages."""
    ages = np.unique(np.linspace(0, tokens - 1, min(_AGES_A_RUN, tokens)).astype(np.int64))
    left, asked = (tokens - ages).astype(np.float64), [request] * len(ages)
    reached = 1.0 - base.survival(asked, ages, left)
    return ConformalRows(
        age=ages,
        upper=1.0 - base.survival(asked, ages, left - 1.0) if ended else reached,
        lower=reached,
        observed=np.full(len(ages), ended),
        prompt=np.full(len(ages), number),
        weight=np.full(len(ages), tokens / len(ages)),  # tokens that a row stands for
    )
