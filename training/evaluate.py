"""Held-out metrics of fitted signals, between their floors and their ceiling.

Floors: victims picked by LIFO, FIFO and at random in the same running sets, and ``age-km``.
Ceiling: oracle-K, each run judged by the other runs of its own prompt. A predictor is measured
by how much of the way between them it goes, not by its distance from zero.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from contracts.errors import InvalidInput, LeakageError
from contracts.policy import FloatArray, IntArray
from contracts.runs import DecodeRun
from contracts.signals import RemainingSignal, SignalRequest
from eval.signal_quality import SignalQuality, held_out, score_floors, score_signal
from oracles.empirical import SAMPLED_LABEL, EmpiricalOracle, leave_one_out
from predictors.base import Predictor


class LeaveOneOut:
    """Oracle-K over a whole run log: each run is answered by the log without its own repeat.

    It holds every run, so it is for scoring signals only; the simulator's matrix refuses it.
    """

    clairvoyant = False

    def __init__(self, runs: Sequence[DecodeRun]) -> None:
        self._repeat_of = {run.run_id: run.repeat for run in runs}
        self._oracles: dict[int, EmpiricalOracle] = {
            repeat: leave_one_out(runs, repeat) for repeat in sorted({run.repeat for run in runs})
        }
        most = max(Counter(run.request_key for run in runs).values())
        sampled = any(oracle.facts.is_sampled for oracle in self._oracles.values())
        self.name = f"oracle-{most - 1}{SAMPLED_LABEL if sampled else ''} (ceiling)"
        self.source_run_ids = frozenset(self._repeat_of)

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """See RemainingSignal."""
        out = np.empty(len(requests))
        for repeat, rows in self._by_repeat(requests).items():
            chosen = [requests[i] for i in rows.tolist()]
            out[rows] = self._oracles[repeat].remaining(chosen, ages[rows])
        return out

    def quantile(
        self, requests: Sequence[SignalRequest], ages: IntArray, level: float
    ) -> FloatArray:
        """See DistributionalSignal."""
        out = np.empty(len(requests))
        for repeat, rows in self._by_repeat(requests).items():
            chosen = [requests[i] for i in rows.tolist()]
            out[rows] = self._oracles[repeat].quantile(chosen, ages[rows], level)
        return out

    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        """See DistributionalSignal."""
        out = np.empty(len(requests))
        for repeat, rows in self._by_repeat(requests).items():
            chosen = [requests[i] for i in rows.tolist()]
            out[rows] = self._oracles[repeat].survival(chosen, ages[rows], horizon[rows])
        return out

    def _by_repeat(self, requests: Sequence[SignalRequest]) -> dict[int, IntArray]:
        groups: dict[int, list[int]] = defaultdict(list)
        for row, request in enumerate(requests):
            if request.run_id not in self._repeat_of:
                raise InvalidInput(f"run {request.run_id!r} is not in the log of the ceiling")
            groups[self._repeat_of[request.run_id]].append(row)
        return {repeat: np.array(rows) for repeat, rows in groups.items()}


def has_repeats(runs: Iterable[DecodeRun]) -> bool:
    """Say whether some request of a log was run more than once."""
    return max(Counter(run.request_key for run in runs).values(), default=0) > 1


def assert_unseen(predictor: Predictor, runs: Iterable[DecodeRun]) -> None:
    """Raise LeakageError when ``predictor`` was trained on a prompt of ``runs``."""
    for run in runs:
        if run.prompt_sha256 in predictor.excluded_prompts:
            raise LeakageError(
                f"predictor {predictor.name!r} was trained on prompt {run.prompt_id!r}: score it "
                "on prompts it never saw, or cross-fit (training.crossfit)"
            )


def unseen_runs(predictors: Sequence[Predictor], runs: Sequence[DecodeRun]) -> list[DecodeRun]:
    """Return the runs of prompts that at least one of ``predictors`` (a predictor, or the folds of
    a cross-fit) was not trained on; LeakageError if none is left."""
    fresh = [
        run for run in runs if any(run.prompt_sha256 not in p.excluded_prompts for p in predictors)
    ]
    if not fresh:
        raise LeakageError(
            f"predictor {predictors[0].name!r} was trained on every prompt of these {len(runs)} "
            "runs: score it on other prompts"
        )
    return fresh


def evaluate(
    signals: Sequence[RemainingSignal],
    runs: Iterable[DecodeRun],
    *,
    extra_signals: Sequence[RemainingSignal] = (),
    stride: int = 8,
    num_sets: int = 1000,
    set_size: int = 8,
    seed: int = 0,
) -> list[SignalQuality]:
    """Score ``signals`` on ``runs`` beside the floors, then ``extra_signals`` (ceilings).

    Runs of unknown served length (aborted, failed) are left out for every signal alike. Raises
    LeakageError when a predictor among ``signals`` was trained on one of the prompts.
    """
    scored = [run for run in runs if run.has_known_length]
    for signal in signals:
        if isinstance(signal, Predictor):
            assert_unseen(signal, scored)
    rows = held_out(scored, stride=stride, num_sets=num_sets, set_size=set_size, seed=seed)
    return score_floors(rows) + [
        score_signal(signal, rows) for signal in (*signals, *extra_signals)
    ]
