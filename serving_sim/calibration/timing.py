"""Seconds of one step: CUDA events on a GPU, perf_counter on a CPU; medians of as many runs as the
wanted certainty needs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from contracts.errors import InvalidInput

Run = Callable[[], object]


class Timer(Protocol):
    """Times runs back to back, the way an engine takes its steps."""

    @property
    def name(self) -> str: ...

    def time(self, run: Run, count: int) -> list[float]:
        """Return the seconds of each of ``count`` runs, in order."""
        ...


class CpuTimer:
    """Wall time of each run, for devices that are done when the call returns."""

    name = "time.perf_counter"

    def time(self, run: Run, count: int) -> list[float]:
        """Return the seconds of each of ``count`` runs, in order."""
        marks = [time.perf_counter()]
        for _ in range(count):
            run()
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]


class CudaTimer:
    """A pair of CUDA events around each run, all queued before the device is waited for, so that
    the host's launches hide behind the run before, as they do in a busy engine.

    ``flush`` empties the L2 cache before each run, outside its events (None: the run finds what the
    one before left, as a step of an engine does). ``while_running`` is called once a batch of runs,
    when all are queued. ``cuda`` is the module ``torch.cuda``.
    """

    name = "torch.cuda.Event"

    def __init__(
        self, cuda: Any, flush: Run | None = None, while_running: Run = lambda: None
    ) -> None:
        self._cuda, self._flush, self._while_running = cuda, flush, while_running

    def time(self, run: Run, count: int) -> list[float]:
        """Return the seconds of each of ``count`` runs, in order."""
        pairs = []
        for _ in range(count):
            if self._flush is not None:
                self._flush()
            start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        self._while_running()
        self._cuda.synchronize()
        return [float(start.elapsed_time(end)) * 1e-3 for start, end in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRules:
    """How often a step is run: ``warm_ups`` that do not count, then batches of ``min_timed`` until
    the median's standard error is ``relative_error`` of it, or ``max_timed`` runs or ``max_s``
    seconds are used up."""

    warm_ups: int = 3
    min_timed: int = 7
    max_timed: int = 49
    relative_error: float = 0.003
    max_s: float = 2.0

    def __post_init__(self) -> None:
        if self.warm_ups < 0 or not 3 <= self.min_timed <= self.max_timed:
            raise InvalidInput(
                f"timing rules with {self.warm_ups} warm-ups and {self.min_timed} to "
                f"{self.max_timed} timed runs: give 0 or more, and 3 <= min_timed <= max_timed"
            )
        if not self.relative_error > 0.0 or not self.max_s > 0.0:
            raise InvalidInput(
                f"timing rules with relative_error {self.relative_error} and max_s {self.max_s}: "
                "both must be above 0"
            )


@dataclass(frozen=True, slots=True)
class Timing:
    """Median and interquartile range of ``num_timed`` runs, in seconds."""

    seconds: float
    spread_s: float
    num_timed: int

    @property
    def relative_error(self) -> float:
        """Standard error of the median over the median. For a normal distribution the former is
        1.2533 sigma / sqrt(n), and sigma is the interquartile range / 1.349."""
        if not self.seconds > 0.0:
            return float("inf")
        return 1.2533 / 1.349 * self.spread_s / float(self.num_timed**0.5) / self.seconds


def measure(run: Run, timer: Timer, rules: TimingRules) -> Timing:
    """Return the time of ``run``, repeated as ``rules`` say."""
    if rules.warm_ups:
        timer.time(run, rules.warm_ups)
    seconds: list[float] = []
    while True:
        seconds += timer.time(run, min(rules.min_timed, rules.max_timed - len(seconds)))
        timing = _summary(seconds)
        if (
            timing.relative_error <= rules.relative_error
            or len(seconds) >= rules.max_timed
            or sum(seconds) >= rules.max_s
        ):
            return timing


def _summary(seconds: list[float]) -> Timing:
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    return Timing(float(middle), float(high - low), len(seconds))
