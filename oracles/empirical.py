"""Oracle-K: the empirical length oracle, K earlier temperature-zero runs of the same prompt.

It summarises a prompt-conditioned distribution and never sees the run now executing. Runs cut at
a cap are right-censored (Kaplan-Meier). Where the K runs of a prompt have no answer (all were
shorter than the age asked for, or none exists), it backs off visibly (:mod:`oracles.ladder`) and
says which level answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from contracts.log_t import log_t_residual_quantile, log_t_residual_survival
from contracts.policy import FloatArray, IntArray
from contracts.runs import DecodeRun
from contracts.signals import SignalRequest, signal_request
from contracts.survival_many import SurvivalCurves
from oracles.ladder import FOREVER, LEVELS, Ladder
from oracles.run_table import BoolArray, HashArray, RunTable, hash64, request_keys, run_table

__all__ = ["LEVELS", "Clairvoyant", "EmpiricalOracle", "OracleAnswer", "leave_one_out"]

SAMPLED_LABEL = " (sampled)"
Mode = Literal["deployment", "exact"]
MODES: tuple[str, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True, eq=False)
class OracleAnswer:
    """Answers with their provenance, all (n,). ``level`` indexes :data:`LEVELS`.

    ``num_runs`` is how many runs stand behind the answer, ``effective_k`` how many of them
    outlived the age (all of them at level log-t). ``exhausted`` marks ages beyond every run of a
    known prompt; ``lower_bound`` answers that rest on cut runs only ("at least this long");
    ``extrapolated`` answers to a serving cap beyond what their level observed.
    """

    remaining: FloatArray
    level: IntArray
    num_runs: IntArray
    effective_k: IntArray
    exhausted: BoolArray
    lower_bound: BoolArray
    extrapolated: BoolArray

    def provenance(self) -> dict[str, int]:
        """Return how many answers each level gave."""
        counts = Counter(LEVELS[i] for i in self.level.tolist())
        return {level: counts[level] for level in LEVELS}


class RunIds:
    """The ids of the runs an oracle was built from, kept as sorted hashes; ask with ``in``."""

    def __init__(self, run_hash: HashArray) -> None:
        self._sorted = np.sort(run_hash)

    def __contains__(self, run_id: object) -> bool:
        wanted = np.uint64(hash64(str(run_id)))
        at = int(np.searchsorted(self._sorted, wanted))
        return at < len(self._sorted) and bool(self._sorted[at] == wanted)

    def __len__(self) -> int:
        return len(self._sorted)


class EmpiricalOracle:
    """Oracle-K over ``runs``. K may differ between prompts; K = 1 is allowed and often exhausted.

    ``name`` defaults to ``oracle-K`` with the largest K; sampled runs (temperature above zero)
    add ``(sampled)`` to any name. ``mode`` "exact" demands batch-invariant kernels and at least
    two runs of every request, all alike; "deployment" takes runs as the batch made them.
    ``levels`` picks rungs of the ladder. Raises InvalidInput without runs, for a log that breaks
    its mode, mixes both, or holds a model whose runs two tokenizers counted.
    """

    clairvoyant = False
    source_run_ids: Container[str]

    def __init__(
        self,
        runs: Iterable[DecodeRun] | RunTable,
        name: str | None = None,
        *,
        mode: Mode = "deployment",
        levels: Sequence[str] = LEVELS,
    ) -> None:
        if isinstance(runs, RunTable):
            table, self.source_run_ids = runs, RunIds(runs.run_hash)
        else:
            runs = list(runs)
            table, self.source_run_ids = run_table(runs), frozenset(run.run_id for run in runs)
        check_set_up(table, mode)
        label = SAMPLED_LABEL if table.facts.is_sampled else ""
        largest_k = int(table.runs_per_request().max())
        self.name = (name or f"oracle-{largest_k}").removesuffix(label) + label
        self.mode: Mode = mode
        self.facts = table.facts
        self._prompts = RunIds(table.prompt_hash)
        self._ladder = Ladder(table, levels)

    def knows_prompt(self, prompt_sha256: str) -> bool:
        """Say whether a prompt was run: a predictor trained on it is no fair rival."""
        return prompt_sha256 in self._prompts

    def answer(
        self, requests: Sequence[SignalRequest], ages: IntArray, *, natural: bool = False
    ) -> OracleAnswer:
        """Return remaining tokens and where each answer comes from; never 0, never infinite.

        With ``natural`` no serving cap applies: the mean is restricted to the longest observation
        of its level, and a lower bound where longer runs remain possible.
        """
        caps, room = _bounds(requests, ages)
        asked = np.full_like(caps, FOREVER) if natural else caps
        climb = self._ladder.climb(_keys(requests), ages, asked)
        unanswered = np.isnan(climb.mean)
        own = self._ladder.rungs["prompt"]
        known = own.find(climb.keys[:, 0]) >= 0
        remaining = np.maximum(1.0, np.where(unanswered, room, climb.mean))
        return OracleAnswer(
            remaining=remaining if natural else np.minimum(remaining, room),
            level=climb.level,
            num_runs=climb.num_runs,
            effective_k=climb.effective_k,
            exhausted=known & (climb.level > 0),
            lower_bound=climb.all_cut | (natural & (climb.open_end | unanswered)),
            extrapolated=climb.open_end & (climb.last < caps),
        )

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Expected served remaining tokens; see RemainingSignal."""
        return self.answer(requests, ages).remaining

    def median(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Median of the served remaining length."""
        return self.quantile(requests, ages, 0.5)

    def quantile(
        self,
        requests: Sequence[SignalRequest],
        ages: IntArray,
        level: float,
        *,
        natural: bool = False,
    ) -> FloatArray:
        """Quantile of the served remaining length, from the level that answers the mean.

        With ``natural`` no cap applies, and a quantile beyond every observation is infinite.
        """
        if not 0.0 < level < 1.0:
            raise InvalidInput(f"quantile level is {level}: it must lie between 0 and 1")
        caps, room = _bounds(requests, ages)
        caps = np.full_like(caps, FOREVER) if natural else caps

        def of_curve(curves: SurvivalCurves, curve: IntArray, rows: IntArray) -> FloatArray:
            return curves.residual_quantile(curve, ages[rows], caps[rows], level)

        def of_tail(location: FloatArray, scale: FloatArray, rows: IntArray) -> FloatArray:
            return log_t_residual_quantile(location, scale, ages[rows], caps[rows], level)

        answers = self._ladder.ask(_keys(requests), ages, of_curve, of_tail)
        unknown = np.isnan(answers)
        if natural:
            beyond = unknown | (answers + ages >= FOREVER)
            return np.where(beyond, np.inf, np.maximum(1.0, answers))
        return np.clip(np.where(unknown, room, answers), 1.0, room)

    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        """P(remaining > horizon); a step function, 0 from the cap on, 1 where nothing is known."""
        _, room = _bounds(requests, ages)
        whole = np.floor(np.minimum(horizon, room)).astype(np.int64)

        def of_curve(curves: SurvivalCurves, curve: IntArray, rows: IntArray) -> FloatArray:
            return curves.residual_survival(curve, ages[rows], whole[rows])

        def of_tail(location: FloatArray, scale: FloatArray, rows: IntArray) -> FloatArray:
            return log_t_residual_survival(location, scale, ages[rows], whole[rows])

        answers = self._ladder.ask(_keys(requests), ages, of_curve, of_tail)
        return np.where(horizon < room, np.where(np.isnan(answers), 1.0, answers), 0.0)

    def reach_cap(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """P(a request still writes its cap's last token): what a reservation must cover."""
        _, room = _bounds(requests, ages)
        return self.survival(requests, ages, (room - 1).astype(np.float64))


def check_set_up(table: RunTable, mode: Mode) -> None:
    """Raise InvalidInput unless the runs of ``table`` may stand behind one oracle of ``mode``."""
    if mode not in MODES:
        raise unknown_name("oracle mode", mode, MODES)
    facts = table.facts
    for model, tokenizers in facts.tokenizers.items():
        if len(tokenizers) > 1:
            raise InvalidInput(
                f"runs of {model!r} were counted by {len(tokenizers)} tokenizers "
                f"({', '.join(tokenizers)}): their lengths do not compare; filter the log to one"
            )
    if len(facts.batch_invariant) > 1:
        raise InvalidInput(
            "the log mixes runs of batch-invariant kernels with others: an oracle is either exact "
            "or of deployment; filter the log on batch_invariant"
        )
    if mode == "exact":
        _check_exact(table)


def _check_exact(table: RunTable) -> None:
    """Every request ran twice or more with one length and one text."""
    if table.facts.is_sampled or not all(table.facts.batch_invariant):
        why = "were sampled" if table.facts.is_sampled else "come from batch-dependent kernels"
        raise InvalidInput(
            f"an exact oracle was asked for, but runs of this log {why}: use mode 'deployment', or "
            "collect again with batch-invariant kernels"
        )
    once = int((table.runs_per_request() < 2).sum())
    if once:
        raise InvalidInput(
            f"{once} of {table.num_requests} requests ran once: an exact oracle needs 2 runs of "
            "each to verify that they agree; collect with --repeats 2 or use mode 'deployment'"
        )
    first = np.unique(table.request_of, return_index=True)[1][table.request_of]
    differs = (table.output_tokens != table.output_tokens[first]) | (
        table.text_hash != table.text_hash[first]
    )
    count = len(np.unique(table.request_of[differs]))
    if count:
        raise InvalidInput(
            f"the runs of {count} of {table.num_requests} requests differ in length or text: this "
            "log is not exact; use mode 'deployment'"
        )


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


def _keys(requests: Sequence[SignalRequest]) -> HashArray:
    """Return the keys (n, 4) of ``requests``; a request asked at many ages is hashed once."""
    seen: dict[int, tuple[int, ...]] = {}
    rows = []
    for request in requests:
        keys = seen.get(id(request))
        if keys is None:
            keys = seen[id(request)] = request_keys(
                request_key=request.request_key,
                prompt=request.prompt,
                prompt_sha256=request.prompt_sha256,
                model=request.model,
                benchmark=request.benchmark,
                family=request.family,
            )
        rows.append(keys)
    return np.array(rows, dtype=np.uint64).reshape(-1, 4)


def _bounds(requests: Sequence[SignalRequest], ages: IntArray) -> tuple[IntArray, IntArray]:
    """Return caps and the tokens left to them (n,), at least 1: at its cap a request is over."""
    if len(ages) and ages.min() < 0:
        raise InvalidInput(f"an age is {ages.min()}: it counts output tokens and starts at 0")
    caps = np.array([request.max_tokens for request in requests], dtype=np.int64)
    return caps, np.maximum(1, caps - ages)
