"""Cross-fitting: every request is scored by a predictor that never saw its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from contracts.runs import DecodeRun
from contracts.signals import RoutedSignal
from eval.signal_quality import SignalQuality
from predictors.base import Predictor
from predictors.registry import FamilySettings, find_family
from traces.split import crossfit_folds
from training.evaluate import assert_unseen
from training.recipe import fit_noted
from training.rows import training_set


def crossfit(
    runs: Iterable[DecodeRun],
    family: str,
    *,
    num_folds: int = 5,
    seed: int = 0,
    settings: FamilySettings | None = None,
    num_threads: int = 1,
    on_fold: Callable[[int, int], None] | None = None,
) -> RoutedSignal:
    """Fit ``family`` once for each fold of prompts, on the runs of the other folds.

    ``on_fold(done, num_folds)`` is called after each. Deterministic in (runs, family, settings,
    seed). Save the folds with :func:`save_crossfit`.
    """
    runs = list(runs)
    chosen = settings or find_family(family).settings()
    fold_of = crossfit_folds(runs, num_folds=num_folds, seed=seed)
    signals: list[Predictor] = []
    for fold in range(num_folds):
        outside = [run for run in runs if fold_of[run.prompt_id] != fold]
        predictor = fit_noted(chosen, training_set(outside), seed=seed, num_threads=num_threads)
        assert_unseen(predictor, (run for run in runs if fold_of[run.prompt_id] == fold))
        signals.append(predictor)
        if on_fold is not None:
            on_fold(fold + 1, num_folds)
    by_prompt = {run.prompt_sha256: fold_of[run.prompt_id] for run in runs}
    return RoutedSignal(family, signals, by_prompt)


def save_crossfit(signal: RoutedSignal, out_dir: Path, scores: Sequence[SignalQuality]) -> None:
    """Write fold f of a cross-fit as a checkpoint in ``out_dir/fold-f``.

    ``scores`` are those of the whole cross-fit (every run by the fold that never saw its prompt),
    with their floors and ceilings; each fold's card carries them.
    """
    for fold, predictor in enumerate(signal.signals):
        assert isinstance(predictor, Predictor)
        predictor.save_pretrained(out_dir / f"fold-{fold}", [row.as_row() for row in scores])
