"""How good a signal is on runs it never saw, before any engine: error, order, and victims.

The truth of a row is the *served* remaining length R = output_tokens - age. For a run cut at the
cap that is exact, not censored, as long as the serving cap equals the collection cap, which is
what a request's ``max_tokens`` says; so no run is dropped and none is guessed. Runs cut for
another reason (abort, error) have no known R and are refused.

Error is averaged per request first, so a long run does not outweigh many short ones. Order and
victims are judged in co-running sets: requests that could stand in one batch, at ages as an
onlooker meets them (a run is met in proportion to its length, anywhere in its life). Every signal
meets the same sets, and so do the rules that read no signal: LIFO, FIFO and random are floors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun
from contracts.signals import (
    DistributionalSignal,
    RemainingSignal,
    SignalRequest,
    build_grid,
    signal_request,
)
from contracts.text_table import aligned
from eval.set_metrics import concordance, early_kills, pick_share, top_1

COVERAGE_LEVELS = (0.8, 0.9)
FLOORS = ("lifo", "fifo", "random")


@dataclass(frozen=True, slots=True)
class SignalQuality:
    """One row of the table; NaN where a rule has no such number.

    ``log_mae`` is the per-request mean of |log1p(answer) - log1p(R)|, ``mae`` the same in tokens.
    ``kendall_tau`` (tau-b) orders requests, each once, at one age drawn over its life.
    ``concordance`` is the share of pairs in a running set put in the right order (ties count
    half), ``top1`` how often the longest-remaining request was picked, ``victim_regret`` the mean
    of (max R - R of the pick) / max R, ``early_kills`` how often the pick had less left than the
    set's median; ties for the pick share it. ``cover80`` and ``cover90`` are the shares of
    R <= that quantile, which should be 0.8 and 0.9 (more where the quantile is the cap).
    """

    signal: str
    log_mae: float
    mae: float
    kendall_tau: float
    concordance: float
    top1: float
    victim_regret: float
    early_kills: float
    cover80: float
    cover90: float
    num_requests: int
    num_sets: int

    def as_row(self) -> dict[str, float | str | None]:
        """Return the fields by name, for JSON and model cards."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class RunningSets:
    """``run`` (s, k) indexes the held-out runs, ``age`` (s, k) is how far each was met,
    ``remaining`` (s, k) what it still had to write, ``draw`` (s, k) a uniform number each."""

    run: IntArray
    age: IntArray
    remaining: IntArray
    draw: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """The rows every signal is asked for: all requests at each ``stride`` tokens of their life,
    each request once at ``single_age``, and the running sets."""

    requests: tuple[SignalRequest, ...]
    lengths: IntArray
    stride: int
    single_age: IntArray
    sets: RunningSets


def held_out(
    runs: Sequence[DecodeRun],
    *,
    stride: int = 8,
    num_sets: int = 1000,
    set_size: int = 8,
    seed: int = 0,
) -> HeldOut:
    """Fix the rows on which signals are compared; keyed by ``seed``, the same for all of them.

    Raises InvalidInput for too few runs, or a run whose served length nobody knows.
    """
    runs = list(runs)
    if len(runs) < 2:
        raise InvalidInput(f"there are {len(runs)} held-out runs: comparing needs at least 2")
    for run in runs:
        if not run.has_known_length:
            raise InvalidInput(
                f"run {run.run_id!r} stopped at {run.output_tokens} tokens "
                f"({run.finish_reason}), below its cap of {run.max_new_tokens}, and was not seen "
                "to end: its served length is unknown; leave it out of a score"
            )
    lengths = np.array([run.output_tokens for run in runs], dtype=np.int64)
    uniform = keyed_generator(seed, "single-age").random(len(runs))
    return HeldOut(
        requests=tuple(signal_request(run) for run in runs),
        lengths=lengths,
        stride=stride,
        single_age=(uniform * lengths).astype(np.int64),
        sets=draw_running_sets(lengths, num_sets, min(set_size, len(runs)), seed),
    )


def draw_running_sets(lengths: IntArray, num_sets: int, set_size: int, seed: int) -> RunningSets:
    """Draw sets of distinct runs, each met with a chance that grows with its length, at an age
    uniform over its life (length-biased sampling)."""
    run = np.empty((num_sets, set_size), dtype=np.int64)
    uniform = np.empty((2, num_sets, set_size))
    for index in range(num_sets):
        rng = keyed_generator(seed, "running-set", index)
        # exponential races: the k smallest of Exp(1) / weight are a weighted draw without repeats
        race = rng.standard_exponential(len(lengths)) / lengths
        run[index] = np.argpartition(race, set_size - 1)[:set_size]
        uniform[:, index] = rng.random((2, set_size))
    age = (uniform[0] * lengths[run]).astype(np.int64)
    return RunningSets(run, age, lengths[run] - age, uniform[1])


def score_signal(signal: RemainingSignal, rows: HeldOut) -> SignalQuality:
    """Score one signal; it is asked once for the grid and once for sets and single ages."""
    sets, count = rows.sets, len(rows.requests)
    asked_run = np.concatenate([np.arange(count), sets.run.ravel()])
    asked_age = np.concatenate([rows.single_age, sets.age.ravel()])
    answers = _finite(signal, [rows.requests[i] for i in asked_run.tolist()], asked_age)
    in_sets = answers[count:].reshape(sets.run.shape)
    log_mae, mae, coverage = _errors(signal, rows)
    return SignalQuality(
        signal=signal.name,
        log_mae=log_mae,
        mae=mae,
        kendall_tau=_tau_b(answers[:count], rows.lengths - rows.single_age),
        **order_scores(in_sets, sets.remaining),
        cover80=coverage[0],
        cover90=coverage[1],
        num_requests=count,
        num_sets=len(sets.run),
    )


def score_floors(rows: HeldOut) -> list[SignalQuality]:
    """Score what needs no signal: LIFO picks the youngest of a set (all decode in step, so it was
    admitted last), FIFO the oldest, random any."""
    sets = rows.sets
    picks = (-sets.age.astype(np.float64), sets.age.astype(np.float64), sets.draw)
    nothing = float("nan")
    return [
        SignalQuality(
            signal=name,
            log_mae=nothing,
            mae=nothing,
            kendall_tau=nothing,
            **order_scores(scores, sets.remaining),
            cover80=nothing,
            cover90=nothing,
            num_requests=len(rows.requests),
            num_sets=len(sets.run),
        )
        for name, scores in zip(FLOORS, picks, strict=True)
    ]


def mean_quality(signal: str, scores: Sequence[SignalQuality]) -> SignalQuality:
    """Return the mean of ``scores`` (of one signal on several draws) under the name ``signal``;
    counts are those of the first."""
    names = [field.name for field in fields(SignalQuality)][1:-2]
    means = {name: float(np.mean([getattr(score, name) for score in scores])) for name in names}
    first = scores[0]
    return SignalQuality(signal, **means, num_requests=first.num_requests, num_sets=first.num_sets)


def quality_table(rows: Sequence[SignalQuality]) -> str:
    """Return the rows as aligned text; a dash where a rule has no such number."""
    heads = [field.name for field in fields(SignalQuality)][:-2]
    cells = [heads] + [[_cell(getattr(row, head)) for head in heads] for row in rows]
    return aligned(cells)


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "-" if np.isnan(value) else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _finite(
    signal: RemainingSignal, requests: Sequence[SignalRequest], ages: IntArray
) -> FloatArray:
    answers = signal.remaining(requests, ages)
    bad = np.flatnonzero(~np.isfinite(answers))
    if bad.size:
        raise InvalidInput(
            f"signal {signal.name!r} answers {answers[bad[0]]} for run "
            f"{requests[int(bad[0])].run_id!r} at age {ages[bad[0]]}: answers must be finite"
        )
    return answers


def _errors(signal: RemainingSignal, rows: HeldOut) -> tuple[float, float, tuple[float, float]]:
    """Return log-MAE, MAE and the coverage of both quantiles, each a mean of request means."""
    grid = build_grid(signal, rows.requests, stride=rows.stride, horizons=rows.lengths - 1)
    counts = np.diff(grid.offsets)
    owner = np.repeat(np.arange(len(counts)), counts)
    age = (np.arange(len(owner)) - grid.offsets[owner]) * rows.stride
    truth = (rows.lengths[owner] - age).astype(np.float64)

    def request_mean(values: FloatArray) -> float:
        return float(np.mean(np.bincount(owner, values, len(counts)) / counts))

    log_mae = request_mean(np.abs(np.log1p(grid.remaining) - np.log1p(truth)))
    mae = request_mean(np.abs(grid.remaining - truth))
    coverage = [float("nan"), float("nan")]
    if isinstance(signal, DistributionalSignal):
        asked = [rows.requests[i] for i in owner.tolist()]
        for index, level in enumerate(COVERAGE_LEVELS):
            bound = signal.quantile(asked, age, level)
            covered = np.where(np.isnan(bound), np.nan, truth <= bound)
            coverage[index] = request_mean(covered)
    return log_mae, mae, (coverage[0], coverage[1])


def order_scores(scores: FloatArray, remaining: IntArray) -> dict[str, float]:
    """Return the metrics of running sets from each request's score (highest is picked); sets whose
    members all have as much left say nothing of their order."""
    longest = remaining.max(axis=1, keepdims=True)
    right = concordance(scores, remaining)
    right = right[~np.isnan(right)]
    lost = pick_share(scores) * (longest - remaining) / longest
    return {
        "concordance": float(right.mean()) if right.size else float("nan"),
        "top1": float(np.mean(top_1(scores, remaining))),
        "victim_regret": float(np.mean(lost.sum(axis=1))),
        "early_kills": float(np.mean(early_kills(scores, remaining))),
    }


def _tau_b(answers: FloatArray, truth: IntArray) -> float:
    from scipy.stats import kendalltau

    return float(kendalltau(answers, truth).statistic)
