"""Calibration of a fitted predictor on prompts it never saw; see predictors.conformal.

Two ways to such prompts. Split: runs set aside beforehand. Cross: the prompts of the training set
itself, each scored by the fold that never saw it (cross-conformal, Vovk 2015), so that no prompt
is lost to the fit; the final predictor then knows a little more than those that were scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.runs import DecodeRun
from contracts.signals import DistributionalSignal, RoutedSignal, age_rows, signal_request
from predictors.base import Predictor
from predictors.calibrated import Calibrated
from predictors.conformal import ConformalRows, fit_table
from predictors.cqr import CqrRows
from predictors.registry import FamilySettings
from training.crossfit import crossfit
from training.evaluate import assert_unseen
from training.recipe import fit_noted
from training.rows import training_set

STRIDE = 8


def conformal_rows(
    signal: DistributionalSignal, runs: Sequence[DecodeRun], stride: int = STRIDE
) -> ConformalRows:
    """Return the scores of ``signal`` at every ``stride`` tokens of the life of ``runs``.

    A run at its cap has a known served length; one cut below it (or still running, so far as it
    got) is censored. Each prompt weighs the same at an age, however often it ran.
    """
    owner, ages, left, known = _life_rows(runs, stride)
    requests = [signal_request(run) for run in runs]
    asked = [requests[i] for i in owner.tolist()]
    reached = 1.0 - signal.survival(asked, ages, left)
    before = 1.0 - signal.survival(asked, ages, left - 1.0)
    return ConformalRows(
        age=ages,
        # a cut run is longer than what was seen: P(remaining < R) is at least P(remaining <= seen)
        upper=np.where(known, before, reached),
        lower=reached,
        observed=known,
        prompt=_prompt_numbers(runs)[owner],
        weight=_prompt_weights(runs)[owner],
    )


def cqr_rows(
    signal: DistributionalSignal,
    runs: Sequence[DecodeRun],
    coverage: float,
    stride: int = STRIDE,
) -> CqrRows:
    """Return the own quantiles of ``signal`` for intervals of ``coverage`` on the same rows."""
    owner, ages, left, known = _life_rows(runs, stride)
    requests = [signal_request(run) for run in runs]
    asked = [requests[i] for i in owner.tolist()]
    tail = (1.0 - coverage) / 2.0
    return CqrRows(
        age=ages,
        low=signal.quantile(asked, ages, tail),
        high=signal.quantile(asked, ages, 1.0 - tail),
        left=left,
        observed=known,
        prompt=_prompt_numbers(runs)[owner],
        weight=_prompt_weights(runs)[owner],
    )


def calibrate(predictor: Predictor, runs: Sequence[DecodeRun], num_groups: int = 10) -> Calibrated:
    """Return ``predictor`` calibrated on ``runs`` of prompts set aside (split-conformal).

    Raises LeakageError when it was trained on one of them.
    """
    assert_unseen(predictor, runs)
    return Calibrated(predictor, fit_table(conformal_rows(predictor, runs), num_groups))


def cross_calibrate(
    predictor: Predictor,
    runs: Sequence[DecodeRun],
    settings: FamilySettings,
    *,
    num_folds: int = 5,
    num_groups: int = 10,
    seed: int = 0,
    num_threads: int = 1,
) -> Calibrated:
    """Return ``predictor`` calibrated by a cross-fit of ``settings`` on ``runs``, its own
    training runs."""
    family = predictor.family
    signal = crossfit(
        runs, family, num_folds=num_folds, seed=seed, settings=settings, num_threads=num_threads
    )
    return Calibrated(predictor, fit_table(conformal_rows(signal, runs), num_groups))


def calibrate_folds(
    signal: RoutedSignal, runs: Sequence[DecodeRun], num_groups: int = 10
) -> RoutedSignal:
    """Return a cross-fit whose fold f is calibrated on the prompts of all other folds, each scored
    by its own fold: no table has seen a score of a prompt it will answer for."""
    rows = conformal_rows(signal, runs)
    fold_of_prompt = _fold_numbers(signal, runs)[rows.prompt]
    folds: list[Predictor] = []
    for index, fold in enumerate(signal.signals):
        if not isinstance(fold, Predictor):
            raise InvalidInput(f"fold {index} of {signal.name!r} is no predictor: fit it first")
        others = np.flatnonzero(fold_of_prompt != index)
        folds.append(Calibrated(fold, fit_table(_taken(rows, others), num_groups)))
    return RoutedSignal(signal.name, folds, signal.fold_of)


def fit_calibrated(
    runs: Sequence[DecodeRun],
    settings: FamilySettings,
    *,
    num_folds: int = 5,
    seed: int = 0,
    num_threads: int = 1,
) -> Calibrated:
    """Fit on all ``runs`` and calibrate across them; deterministic in its arguments."""
    predictor = fit_noted(settings, training_set(runs), seed=seed, num_threads=num_threads)
    return cross_calibrate(
        predictor, runs, settings, num_folds=num_folds, seed=seed, num_threads=num_threads
    )


def _life_rows(
    runs: Sequence[DecodeRun], stride: int
) -> tuple[IntArray, IntArray, FloatArray, np.ndarray]:
    """Return (run, age, tokens left, whether that is the served length), each (n,)."""
    lengths = np.array([run.output_tokens for run in runs], dtype=np.int64)
    known = np.array([run.has_known_length for run in runs], dtype=bool)
    _, owner, ages = age_rows(lengths, stride)
    return owner, ages, (lengths[owner] - ages).astype(np.float64), known[owner]


def _taken(rows: ConformalRows, chosen: IntArray) -> ConformalRows:
    names = [field.name for field in fields(ConformalRows)]
    return ConformalRows(**{name: getattr(rows, name)[chosen] for name in names})


def _prompt_numbers(runs: Sequence[DecodeRun]) -> IntArray:
    names = [run.prompt_sha256 for run in runs]
    return np.asarray(np.unique(names, return_inverse=True)[1], dtype=np.int64)


def _prompt_weights(runs: Sequence[DecodeRun]) -> FloatArray:
    """Return (n,) shares with which each prompt counts once, however often it ran."""
    prompt = _prompt_numbers(runs)
    return 1.0 / np.bincount(prompt)[prompt] if len(runs) else np.zeros(0)


def _fold_numbers(signal: RoutedSignal, runs: Sequence[DecodeRun]) -> IntArray:
    """Return the fold (p,) of each prompt, numbered as in :func:`_prompt_numbers`."""
    names = np.unique([run.prompt_sha256 for run in runs]).tolist()
    return np.array([signal.fold_of[name] for name in names], dtype=np.int64)
