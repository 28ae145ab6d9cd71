"""The rows every signal of a report is asked on, and intervals over their prompts.

Each run gives a grid over its life, one moment for itself, and meetings with others for running
sets. A bootstrap draws prompts with replacement; sets are drawn anew from what it drew, so that a
set's members, its ages and the prompts all vary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun, by_request
from contracts.signals import SignalRequest, age_rows, signal_request
from eval.set_metrics import Meetings, draw_meetings, draw_sets

NUM_SETS, SET_SIZE, MEETINGS_A_RUN, STRIDE = 300, 8, 8, 8
_MAX_ROWS, _MAX_SINGLE = 60_000, 1_500


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric on all prompts, and the percentile interval of it over resampled prompts; NaN where
    a signal has no such number."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, replicates: FloatArray) -> Estimate:
        """Return the first of ``replicates`` with the 95 % percentile interval of the others."""
        others = replicates[1:][~np.isnan(replicates[1:])]
        low, high = np.quantile(others, [0.025, 0.975]) if others.size else (np.nan, np.nan)
        return cls(float(replicates[0]), float(low), float(high))

    def __str__(self) -> str:
        """Return ``value [low, high]`` rounded; a dash where there is no such number."""
        if math.isnan(self.value):
            return "-"
        digits = 3 if abs(self.value) < 10 else 1
        value = f"{self.value:.{digits}f}"
        if math.isnan(self.low):
            return value
        return f"{value} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True, slots=True, eq=False)
class ReportRows:
    """``runs`` (r,) with their ``requests`` and ``prompt`` numbers. Row i of the grid (n,) asks run
    ``owner[i]`` at ``age[i]`` with ``left[i]`` to come, ``exhausted`` where every other run of the
    request has ended by then. Runs ``single`` (s,) are asked once more, at ``single_age``.
    ``weights`` (1 + b, r) count each run in each bootstrap, ones first; ``sets`` has an array
    (m, k) of rows of ``meetings`` for each of them."""

    runs: tuple[DecodeRun, ...]
    requests: tuple[SignalRequest, ...]
    prompt: IntArray
    owner: IntArray
    age: IntArray
    left: IntArray
    exhausted: np.ndarray
    single: IntArray
    single_age: IntArray
    meetings: Meetings
    weights: FloatArray
    sets: tuple[IntArray, ...]

    def asked(self, run: IntArray) -> list[SignalRequest]:
        """Return the request of each of the runs ``run`` (k,)."""
        return [self.requests[i] for i in run.tolist()]

    def once(self) -> tuple[list[SignalRequest], IntArray, FloatArray]:
        """Return each run once: its request, what it had left (s,), its weights (1 + b, s)."""
        lengths = np.array([self.runs[i].output_tokens for i in self.single.tolist()])
        return self.asked(self.single), lengths - self.single_age, self.weights[:, self.single]

    def means(self, values: FloatArray, chosen: np.ndarray) -> FloatArray:
        """Return (1 + b,) means over runs of each run's own mean of ``values`` (n,) over its
        ``chosen`` (n,) rows; NaN in a bootstrap without any."""
        count = np.bincount(self.owner, chosen, len(self.runs))
        total = np.bincount(self.owner, np.where(chosen, values, 0.0), len(self.runs))
        some = count > 0
        means = np.divide(total, count, out=np.zeros(len(count)), where=some)
        weights = self.weights * some
        share = weights.sum(axis=1)
        out: FloatArray = np.full(len(share), np.nan)
        np.divide(weights @ means, share, out=out, where=share > 0)
        return out


def draw_rows(runs: Sequence[DecodeRun], num_bootstraps: int, seed: int) -> ReportRows:
    """Return the rows of ``runs``, whose served lengths are known; deterministic in its arguments.

    Raises InvalidInput for fewer runs than a running set holds.
    """
    runs = tuple(runs)
    if len(runs) < SET_SIZE:
        raise InvalidInput(
            f"there are {len(runs)} runs to score: sets of {SET_SIZE} need as many; give more"
        )
    lengths = np.array([run.output_tokens for run in runs], dtype=np.int64)
    stride = STRIDE
    while (-(-lengths // stride)).sum() > _MAX_ROWS:
        stride *= 2
    _, owner, age = age_rows(lengths, stride)
    _, prompt = np.unique([run.prompt_sha256 for run in runs], return_inverse=True)
    meetings = draw_meetings(lengths, MEETINGS_A_RUN, keyed_generator(seed, "report-meetings"))
    rng = keyed_generator(seed, "report-single")
    single = np.sort(rng.permutation(len(runs))[:_MAX_SINGLE])
    weights = _resampled(prompt, num_bootstraps, seed)
    sets = tuple(
        draw_sets(
            meetings, weight * lengths, NUM_SETS if index else 4 * NUM_SETS,
            min(SET_SIZE, int((weight > 0).sum())), keyed_generator(seed, "report-sets", index),
        )
        for index, weight in enumerate(weights)
    )  # fmt: skip
    return ReportRows(
        runs=runs,
        requests=tuple(signal_request(run) for run in runs),
        prompt=prompt,
        owner=owner,
        age=age,
        left=lengths[owner] - age,
        exhausted=age >= _longest_other(runs)[owner],
        single=single,
        single_age=(rng.random(len(single)) * lengths[single]).astype(np.int64),
        meetings=meetings,
        weights=weights,
        sets=sets,
    )


def _resampled(prompt: IntArray, count: int, seed: int) -> FloatArray:
    """Return (1 + count, n): ones, then how often each bootstrap drew the prompt of each run."""
    num_prompts = int(prompt.max()) + 1
    out = np.ones((1 + count, len(prompt)))
    for index in range(count):
        drawn = keyed_generator(seed, "report-prompts", index).integers(0, num_prompts, num_prompts)
        out[1 + index] = np.bincount(drawn, minlength=num_prompts)[prompt]
    return out


def _longest_other(runs: Sequence[DecodeRun]) -> FloatArray:
    """Return the longest other run (n,) of each run's request; infinity when it has none."""
    lengths = {
        key: sorted(run.output_tokens for run in group) for key, group in by_request(runs).items()
    }
    out = np.full(len(runs), np.inf)
    for index, run in enumerate(runs):
        group = lengths[run.request_key]
        if len(group) > 1:
            out[index] = group[-2] if run.output_tokens == group[-1] else group[-1]
    return out
