"""Fit the surrogates of eval/surrogates.py: clairvoyant, degraded until as good as gbm-hazard.

    python -m benchmarks.fit_surrogate --data DIR [--source LRMTokenEconomy …] [--seeds 4]

gbm-hazard answers for runs whose prompts it never saw (benchmarks.predictors_real: the same folds,
landmarks and running sets). Its concordance is that of pairs whose prompts are in one fold, so
which one predictor answers, as a server has one: predictors of different folds saw different
prompts, and where prompts are few, a long one that is held out makes the rest look short.

The chain ``shrink(a) | noise(b) | wander(c, tokens) | bias(d) | refresh(e)`` is applied to the
clairvoyant signal of each model's runs, as a study has a source for each model, and its numbers
minimise the squared distance in log-MAE (unit .05) and in concordance (unit .01) over geometric,
uniform and equal-age landmarks. How much of the noise wanders is read off the correlation of
gbm-hazard's errors over a run's life, not fitted to those figures.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.predictors_real import (
    KINDS,
    SET_SIZE,
    Rows,
    answers_of,
    landmark_rows,
    methods,
    score,
)
from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_uniform
from contracts.runs import DecodeRun
from contracts.signals import RemainingSignal, SignalRequest, signal_request
from eval.surrogates import SURROGATES
from oracles.degradations import Bias, Degradation, Noise, Refresh, Shrink, Wander, label
from oracles.degrade import degrade, parse_degradations
from oracles.empirical import Clairvoyant
from traces.public_texts import read_source
from traces.split import crossfit_folds

PREDICTOR = "gbm-hazard"
UNITS = (0.05, 0.01)  # of log-MAE and of concordance
NUM_FOLDS = 4
MEMORY_TOKENS = 1024  # of the part of the noise that wanders
MAX_TRIES = 70
MIN_RUNS = 50
REFRESHES = (1, 64, 128, 256, 512)  # tokens between two answers; 1: always asked
_NEAR, _FAR = 4, 16  # ages this many times apart are near, or far, in the life of a run

Figures = dict[str, tuple[float, float]]
"""(log-MAE, concordance) by landmark kind."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One source: its runs, the rows of each seed, gbm-hazard's means on them, and the fold of each
    run (n,)."""

    runs: list[DecodeRun]
    rows: list[dict[str, Rows]]
    folds: list[IntArray]
    answers: list[Mapping[str, FloatArray]]


def measure(data: Path, source: str, num_seeds: int) -> Target:
    """Return what gbm-hazard answers, cross-fitted, on ``num_seeds`` splits."""
    runs = read_source(data, source, 5)
    rows = [{kind: landmark_rows(runs, kind, seed) for kind in KINDS} for seed in range(num_seeds)]
    chosen = {PREDICTOR: methods()[PREDICTOR]}
    answers, folds = [], []
    for seed, own in enumerate(rows):
        answers.append(answers_of(runs, own, seed, NUM_FOLDS, chosen)[0][PREDICTOR])
        fold_of = crossfit_folds(runs, num_folds=NUM_FOLDS, seed=seed)
        folds.append(np.array([fold_of[run.prompt_id] for run in runs]))
    return Target(runs, rows, folds, [{kind: both[0] for kind, both in a.items()} for a in answers])


def figures(
    target: Target, answers: Sequence[Mapping[str, FloatArray]], *, is_cross_fitted: bool
) -> Figures:
    """Return the figures of ``answers``, means over seeds."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    first, second = np.triu_indices(SET_SIZE, k=1)
    for rows, fold, said in zip(target.rows, target.folds, answers, strict=True):
        for kind, where in rows.items():
            scored = score(np.stack([said[kind]] * 2), where, target.runs)
            own = fold[where.set_run]
            counts = own[:, first] == own[:, second] if is_cross_fitted else True
            order = np.nanmean(np.where(counts, scored.right, np.nan))
            found[kind].append((float(scored.error.mean()), float(order)))
    means = {kind: np.mean(values, axis=0) for kind, values in found.items()}
    return {kind: (float(error), float(order)) for kind, (error, order) in means.items()}


def error_by_age(target: Target, answers: Sequence[Mapping[str, FloatArray]]) -> dict[int, float]:
    """Return the mean |log error| at each geometric landmark that MIN_RUNS runs reach."""
    length = np.array([run.output_tokens for run in target.runs])
    found: dict[int, list[float]] = {}
    for rows, said in zip(target.rows, answers, strict=True):
        where = rows["geometric"]
        gap = np.log1p(said["geometric"][: len(where.run)])
        gap -= np.log1p(length[where.run] - where.age)
        for age in np.unique(where.age).tolist():
            inside = where.age == age
            if inside.sum() >= MIN_RUNS:
                found.setdefault(age, []).append(float(np.abs(gap[inside]).mean()))
    return {age: float(np.mean(values)) for age, values in found.items()}


def surrogate_answers(
    target: Target, steps: Sequence[Degradation]
) -> list[Mapping[str, FloatArray]]:
    """Return what the degraded clairvoyant answers on the same rows, each model apart."""
    requests = [signal_request(run) for run in target.runs]
    model = np.array([run.model for run in target.runs])
    out: list[Mapping[str, FloatArray]] = []
    for seed, rows in enumerate(target.rows):
        said = {k: np.empty(len(r.run) + r.set_run.size) for k, r in rows.items()}
        for name in sorted(set(model.tolist())):
            signal = _surrogate_of(target, requests, np.flatnonzero(model == name), steps, seed)
            for kind, where in rows.items():
                run = np.concatenate([where.run, where.set_run.ravel()])
                age = np.concatenate([where.age, where.set_age.ravel()])
                mine = np.flatnonzero(model[run] == name)
                asked = [requests[i] for i in run[mine].tolist()]
                said[kind][mine] = signal.remaining(asked, age[mine])
        out.append(said)
    return out


def of_surrogate(target: Target, steps: Sequence[Degradation]) -> Figures:
    """Return the figures of the degraded clairvoyant."""
    return figures(target, surrogate_answers(target, steps), is_cross_fitted=False)


def _surrogate_of(
    target: Target,
    requests: Sequence[SignalRequest],
    inside: np.ndarray,
    steps: Sequence[Degradation],
    seed: int,
) -> RemainingSignal:
    runs = [target.runs[i] for i in inside.tolist()]
    ages = [int(keyed_uniform(seed, "degrade-age", r.run_id) * r.output_tokens) for r in runs]
    population = [requests[i] for i in inside.tolist()]
    return degrade(Clairvoyant(runs), steps, population, np.array(ages, dtype=np.int64), seed)


def persistence(target: Target) -> tuple[float, float]:
    """Return the mean correlation of gbm-hazard's errors at two ages of a run that lie near
    each other, and far from each other (errors less their mean at that age)."""
    rows, said = target.rows[0]["geometric"], target.answers[0]["geometric"]
    left = np.array([r.output_tokens for r in target.runs])[rows.run] - rows.age
    error = np.log1p(said[: len(rows.run)]) - np.log1p(left)
    ages = [age for age in np.unique(rows.age).tolist() if age and (rows.age == age).sum() > 100]
    table = np.full((len(ages), len(target.runs)), np.nan)
    for at, age in enumerate(ages):
        inside = rows.age == age
        table[at, rows.run[inside]] = error[inside] - error[inside].mean()
    near, far = [], []
    for i, first in enumerate(ages):
        for j, second in enumerate(ages[i + 1 :], i + 1):
            both = ~np.isnan(table[i] + table[j])
            (near if second <= _NEAR * first else far if second >= _FAR * first else []).append(
                float(np.corrcoef(table[i, both], table[j, both])[0, 1])
            )
    return float(np.mean(near)), float(np.mean(far))


def chain(
    share: float, sigma: float, factor: float, far: float, refresh_tokens: int
) -> list[Degradation]:
    """Return the degradations: the part ``far`` of the noise's variance stays all life long."""
    steps: list[Degradation] = [
        Shrink(_rounded(share)),
        Noise(_rounded(sigma * np.sqrt(far))),
        Wander(_rounded(sigma * np.sqrt(1.0 - far)), MEMORY_TOKENS),
        Bias(_rounded(factor)),
    ]
    return steps if refresh_tokens == 1 else [*steps, Refresh(refresh_tokens)]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def distance(found: Figures, wanted: Figures) -> float:
    """Return the sum of squared distances in UNITS."""
    gaps = [(np.array(found[kind]) - np.array(wanted[kind])) / UNITS for kind in wanted]
    return float(sum((gap * gap).sum() for gap in gaps))


def fit(target: Target, wanted: Figures, far: float) -> list[Degradation]:
    """Return the chain nearest to ``wanted``, of the nearest with each of REFRESHES."""
    fits = [_fit(target, wanted, far, tokens) for tokens in REFRESHES]
    return min(fits, key=lambda found: found[0])[1]


def _fit(
    target: Target, wanted: Figures, far: float, refresh_tokens: int
) -> tuple[float, list[Degradation]]:
    """Return distance and chain by Nelder-Mead on share, log sigma and log factor."""
    from scipy.optimize import minimize

    def steps_at(x: FloatArray) -> list[Degradation]:
        share, sigma, factor = float(np.clip(x[0], 0.0, 1.0)), np.exp(x[1]), np.exp(x[2])
        return chain(share, float(sigma), float(factor), far, refresh_tokens)

    def loss(x: FloatArray) -> float:
        return distance(of_surrogate(target, steps_at(x)), wanted)

    start = np.array([[0.6, 0.0, 0.0], [0.3, 0.0, 0.0], [0.6, -0.7, 0.0], [0.6, 0.0, 0.4]])
    options = {"initial_simplex": start, "maxfev": MAX_TRIES, "xatol": 0.01, "fatol": 0.1}
    found = minimize(loss, start[0], method="Nelder-Mead", options=options)
    return float(found.fun), steps_at(found.x)


def one_source(
    data: Path, source: str, num_seeds: int, other: Figures, steps: Sequence[Degradation]
) -> None:
    """Print the figures of gbm-hazard, or the ``other`` ones that are wanted, and of the chain:
    ``steps``, or the nearest one if there are none."""
    target = measure(data, source, num_seeds)
    wanted = other or figures(target, target.answers, is_cross_fitted=True)
    near, far = persistence(target)
    steps = steps or fit(target, wanted, max(0.0, far))
    said = surrogate_answers(target, steps)
    found = figures(target, said, is_cross_fitted=False)
    print(
        f"\n## {source}, {num_seeds} seeds: errors correlate {near:.2f} near, {far:.2f} far apart"
    )
    print(f"chain: {' | '.join(label(how) for how in steps)}")
    print(f"distance {distance(found, wanted):.1f}\n")
    print("| landmarks | log-MAE, wanted | surrogate | concordance, wanted | surrogate |")
    print("| --- | --- | --- | --- | --- |")
    for kind in wanted:
        (error, order), (own_error, own_order) = wanted[kind], found[kind]
        print(f"| {kind} | {error:.3f} | {own_error:.3f} | {order:.3f} | {own_order:.3f} |")
    print("\n| age | log-MAE, gbm-hazard | surrogate |\n| --- | --- | --- |")
    own = error_by_age(target, said)
    for age, error in error_by_age(target, target.answers).items():
        print(f"| {age} | {error:.2f} | {own[age]:.2f} |")
    print("", flush=True)


def main() -> None:
    """Print every source asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = os.environ.get("PREEMPTBENCH_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--source", action="append", choices=["LRMTokenEconomy", "ATTS-self"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--chain", default="", help="measure this one, or a surrogate by its name")
    parser.add_argument(
        "--want",
        action="append",
        default=[],
        metavar="KIND=LOG_MAE:CONCORDANCE",
        help=f"figures to reach instead of the measured ones; kinds: {', '.join(KINDS)}",
    )
    args = parser.parse_args()
    other: Figures = {}
    for text in args.want:
        kind, _, pair = text.partition("=")
        error, _, order = pair.partition(":")
        other[kind] = float(error), float(order)
    known = SURROGATES.get(args.chain)
    steps = (
        known.steps if known else parse_degradations(f"x | {args.chain}")[1] if args.chain else ()
    )
    if not (args.data / "reasoning_lengths").is_dir():
        parser.error(f"{args.data} holds no reasoning_lengths: give --data or PREEMPTBENCH_DATA")
    for source in args.source or ["LRMTokenEconomy", "ATTS-self"]:
        one_source(args.data, source, args.seeds, other, steps)


if __name__ == "__main__":
    main()
