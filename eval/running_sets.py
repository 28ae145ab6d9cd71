"""Signals judged on a study's own running sets: what each said when somebody had to go.

The sets are those that LIFO met, at the moments it chose a victim: the same for every signal, since
LIFO reads none. They differ from the sets of eval.signal_quality, which no engine made: here old
and young requests stand together as the queue brought them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from contracts.policy import FloatArray, IntArray, Policy, RunningViews
from contracts.signals import RemainingGrid
from eval.matrix import SeedInputs, prepare_seed, source_runs
from eval.matrix_config import MatrixConfig, Pressure
from eval.signal_sources import NO_SIGNAL
from serving_sim.jump import ENGINES
from serving_sim.policies import get_policy

MAX_SETS = 200
"""Decisions of a run that are judged, evenly spread over all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningSet:
    """Who ran when a victim was chosen: ``request`` (k,) numbers the workload, ``age`` (k,) is
    what each had written, ``remaining`` (k,) what each still had to write (tokens)."""

    request: IntArray
    age: IntArray
    remaining: IntArray


@dataclass(frozen=True, slots=True)
class SetQuality:
    """A signal on running sets, each number a mean over sets (NaN without any).

    ``concordance`` is the share of pairs in the right order (equal answers count half),
    ``kendall_tau`` tau-b of answers and truth (0 where all answers are equal), ``log_mae`` the
    members' mean |log1p(answer) - log1p(R)|. ``num_sets`` have two requests with different R.
    """

    signal: str
    concordance: float
    kendall_tau: float
    log_mae: float
    num_sets: int


def judge_signals(
    config: MatrixConfig, seeds: Sequence[int], max_sets: int = MAX_SETS
) -> list[SetQuality]:
    """Return the quality of each signal of ``config`` on the sets of ``seeds``, over all its
    pressures; ``max_sets`` of each run. Signals answer as they did in the study."""
    runs = source_runs(config)
    answers: dict[str, list[FloatArray]] = {s.name: [] for s in config.signals}
    answers.pop(NO_SIGNAL, None)
    truth: list[IntArray] = []
    for seed in seeds:
        inputs = prepare_seed(config, runs, seed)
        for pressure in config.pressures:
            met = met_sets(config, inputs, pressure, seed, max_sets)
            truth += [one.remaining for one in met]
            for name, own in answers.items():
                grid = inputs.grids[name]
                assert grid is not None
                own += [read_all(grid, one.request, one.age) for one in met]
    return [score_sets(name, own, truth) for name, own in answers.items()]


def met_sets(
    config: MatrixConfig, inputs: SeedInputs, pressure: Pressure, seed: int, max_sets: int
) -> list[RunningSet]:
    """Run LIFO and return up to ``max_sets`` of the running sets in which it chose a victim."""
    seen: list[tuple[IntArray, IntArray]] = []

    def note(views: RunningViews) -> None:
        if len(views.request_id) > 1:
            seen.append((views.request_id.copy(), views.generated_tokens.copy()))

    ENGINES[config.simulator](
        inputs.workload,
        replace(config.engine, num_blocks=pressure.num_blocks, drain_s=config.watched_s),
        config.step_profile(),
        _listening(get_policy("lifo"), note),
        seed=seed,
        faults=inputs.faults,
    )
    chosen = np.unique(np.linspace(0, len(seen) - 1, min(max_sets, len(seen))).round().astype(int))
    length = inputs.workload.output_tokens
    sets = (seen[at] for at in chosen.tolist())
    return [RunningSet(request, age, length[request] - age) for request, age in sets]


def _listening(policy: Policy, listen: Callable[[RunningViews], None]) -> Policy:
    def score(views: RunningViews) -> FloatArray:
        listen(views)
        return policy.score(views)

    return Policy(f"{policy.name}, noted", score)


def read_all(grid: RemainingGrid, request: IntArray, age: IntArray) -> FloatArray:
    """Return ``grid.read`` of each pair (k,), the answers only."""
    slot = grid.offsets[request] + age // grid.stride
    return np.asarray(np.maximum(1.0, grid.remaining[slot] - age % grid.stride))


def score_sets(name: str, answers: Sequence[FloatArray], truth: Sequence[IntArray]) -> SetQuality:
    """Return the quality of ``answers`` on sets whose members have ``truth`` left; both one array
    a set."""
    scored = [
        _score_set(said, left)
        for said, left in zip(answers, truth, strict=True)
        if len(np.unique(left)) > 1
    ]
    if not scored:
        return SetQuality(name, float("nan"), float("nan"), float("nan"), 0)
    concordance, tau, log_mae = np.mean(scored, axis=0).tolist()
    return SetQuality(name, concordance, tau, log_mae, len(scored))


def _score_set(said: FloatArray, left: IntArray) -> tuple[float, float, float]:
    first, second = np.triu_indices(len(said), k=1)
    guess = np.sign(said[first] - said[second])
    truth = np.sign(left[first] - left[second])
    agree, known = float((guess * truth).sum()), int((truth != 0).sum())
    told = int((guess != 0).sum())
    tau = agree / float(np.sqrt(known * told)) if told else 0.0
    log_mae = float(np.abs(np.log1p(said) - np.log1p(left)).mean())
    return 0.5 * (1.0 + agree / known), tau, log_mae
