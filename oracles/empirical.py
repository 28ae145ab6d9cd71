"""Oracle-K: the empirical length oracle, K earlier temperature-zero runs of the same prompt.

It summarises a prompt-conditioned distribution and never sees the run now executing. Runs cut at
a cap are right-censored (Kaplan-Meier). Where the K runs of a prompt have no answer (all were
shorter than the age asked for, or none exists), it backs off visibly: same prompt -> family ->
model -> the cap itself, and says which level answered.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.runs import DecodeRun
from contracts.signals import SignalRequest, signal_request
from contracts.survival import SurvivalCurve, kaplan_meier

LEVELS = ("prompt", "family", "model", "cap")


@dataclass(frozen=True, slots=True, eq=False)
class OracleAnswer:
    """Answers with their provenance: ``level`` (n,) indexes :data:`LEVELS`, ``num_runs`` (n,) is
    how many runs stood behind each, ``exhausted`` (n,) marks ages beyond every run of a known
    prompt. At level "cap" nothing was ever observed that far: the answer is the bound itself."""

    remaining: FloatArray
    level: IntArray
    num_runs: IntArray
    exhausted: np.ndarray

    def provenance(self) -> dict[str, int]:
        """Return how many answers each level gave."""
        counts = Counter(LEVELS[i] for i in self.level.tolist())
        return {level: counts[level] for level in LEVELS}


class EmpiricalOracle:
    """Oracle-K over ``runs``. K may differ between prompts; K = 1 is allowed and often exhausted.

    ``name`` defaults to ``oracle-K`` with the largest K. Raises InvalidInput without runs.
    """

    clairvoyant = False

    def __init__(self, runs: Sequence[DecodeRun], name: str | None = None) -> None:
        if not runs:
            raise InvalidInput("an oracle needs at least one decode run; the run log is empty")
        self._curves = _curves_by_level(runs)
        largest = max(curve.num_runs for curve in self._curves[0].values())
        self.name = name or f"oracle-{largest}"
        self.source_run_ids = frozenset(run.run_id for run in runs)

    def answer(self, requests: Sequence[SignalRequest], ages: IntArray) -> OracleAnswer:
        """Return remaining tokens and where each answer comes from; never 0, never infinite."""
        caps = _caps(requests)
        remaining, level, num_runs = self._climb(
            requests, lambda curve, rows: curve.mean_residual(ages[rows], caps[rows])
        )
        room = np.maximum(1, caps - ages).astype(np.float64)
        remaining = np.where(np.isnan(remaining), room, remaining)
        known = np.array([_keys(r)[0] in self._curves[0] for r in requests], dtype=bool)
        return OracleAnswer(np.clip(remaining, 1.0, room), level, num_runs, known & (level > 0))

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Expected served remaining tokens; see RemainingSignal."""
        return self.answer(requests, ages).remaining

    def quantile(
        self, requests: Sequence[SignalRequest], ages: IntArray, level: float
    ) -> FloatArray:
        """Quantile of the served remaining length, from the level that answers the mean."""
        caps = _caps(requests)
        answers, _, _ = self._climb(
            requests, lambda curve, rows: curve.residual_quantile(ages[rows], caps[rows], level)
        )
        room = np.maximum(1, caps - ages).astype(np.float64)
        return np.clip(np.where(np.isnan(answers), room, answers), 1.0, room)

    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        """P(remaining > horizon); a step function, 0 from the cap on."""
        caps = _caps(requests)

        def alive(curve: SurvivalCurve, rows: IntArray) -> FloatArray:
            now, then = curve(ages[rows]), curve(ages[rows] + horizon[rows])
            known = (now > 0) & (ages[rows] < curve.last_tokens)
            share: FloatArray = np.where(known, then / np.where(now > 0, now, 1.0), np.nan)
            return share

        answers, _, _ = self._climb(requests, alive)
        inside = horizon < np.maximum(1, caps - ages)
        out: FloatArray = np.where(inside, np.where(np.isnan(answers), 1.0, answers), 0.0)
        return out

    def _climb(
        self, requests: Sequence[SignalRequest], ask: _Ask
    ) -> tuple[FloatArray, IntArray, IntArray]:
        """Ask level after level until every row has an answer; NaN is left where none has."""
        answers = np.full(len(requests), np.nan)
        level = np.full(len(requests), len(LEVELS) - 1)
        num_runs = np.zeros(len(requests), dtype=np.int64)
        for index, curves in enumerate(self._curves):
            groups: dict[str, list[int]] = defaultdict(list)
            for row in np.flatnonzero(np.isnan(answers)).tolist():
                groups[_keys(requests[row])[index]].append(row)
            for key, members in groups.items():
                curve = curves.get(key)
                if curve is None:
                    continue
                rows = np.array(members)
                answers[rows] = ask(curve, rows)
                settled = rows[~np.isnan(answers[rows])]
                level[settled], num_runs[settled] = index, curve.num_runs
        return answers, level, num_runs


def leave_one_out(runs: Sequence[DecodeRun], repeat: int) -> EmpiricalOracle:
    """Return the oracle of every run but those of ``repeat`` (which may then serve as truth)."""
    return EmpiricalOracle([run for run in runs if run.repeat != repeat])


def ladder_shares(runs: Sequence[DecodeRun], stride: int) -> dict[str, int]:
    """Count which level answers when each repeat is left out in turn, at every ``stride`` tokens
    of the life of the runs left out: how often a prompt's own runs are exhausted."""
    counts = dict.fromkeys(LEVELS, 0)
    for repeat in sorted({run.repeat for run in runs}):
        truth = [run for run in runs if run.repeat == repeat]
        if len(truth) == len(runs):
            return counts
        lives = [(run, age) for run in truth for age in range(0, run.output_tokens, stride)]
        requests = [signal_request(run) for run in truth]
        by_run = {run.run_id: request for run, request in zip(truth, requests, strict=True)}
        answer = leave_one_out(runs, repeat).answer(
            [by_run[run.run_id] for run, _ in lives], np.array([age for _, age in lives])
        )
        for level, count in answer.provenance().items():
            counts[level] += count
    return counts


class Clairvoyant:
    """Reads the executing run's own length: an upper bound, never an oracle. Always labelled so."""

    name = "clairvoyant"
    clairvoyant = True

    def __init__(self, runs: Sequence[DecodeRun]) -> None:
        self._length = {run.run_id: run.output_tokens for run in runs}
        self.source_run_ids = frozenset(self._length)

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """The tokens the run will still write; at least 1."""
        try:
            lengths = np.array([self._length[r.run_id] for r in requests], dtype=np.int64)
        except KeyError as missing:
            raise InvalidInput(
                f"the clairvoyant signal holds no run {missing}: build it from the truth runs"
            ) from None
        left: FloatArray = np.maximum(1.0, lengths - ages.astype(np.float64))
        return left


class _Ask(Protocol):
    def __call__(self, curve: SurvivalCurve, rows: IntArray, /) -> FloatArray: ...


def _keys(request: SignalRequest | DecodeRun) -> tuple[str, str, str]:
    """Return the keys of the three levels, most specific first."""
    family = "\x1f".join((request.model, request.benchmark, request.family))
    return request.request_key, family, request.model


def _curves_by_level(runs: Sequence[DecodeRun]) -> tuple[Mapping[str, SurvivalCurve], ...]:
    levels: tuple[dict[str, list[DecodeRun]], ...] = tuple(defaultdict(list) for _ in range(3))
    for run in runs:
        for groups, key in zip(levels, _keys(run), strict=True):
            groups[key].append(run)
    return tuple({key: _curve(group) for key, group in groups.items()} for groups in levels)


def _curve(runs: Sequence[DecodeRun]) -> SurvivalCurve:
    # an unknown ending may have been a cut: it counts as censored, which never invents an event
    lengths = np.array([run.output_tokens for run in runs], dtype=np.int64)
    return kaplan_meier(lengths, np.array([run.event_observed is True for run in runs]))


def _caps(requests: Sequence[SignalRequest]) -> IntArray:
    return np.array([request.max_tokens for request in requests], dtype=np.int64)
