"""Where the signals of a matrix come from, and the guard that truth and signal share no run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import InvalidInput, LeakageError
from contracts.runs import DecodeRun
from contracts.signals import RemainingGrid, RemainingSignal, RoutedSignal, SignalRequest
from oracles.empirical import Clairvoyant, EmpiricalOracle
from predictors.base import Predictor
from predictors.registry import load_predictor

NO_SIGNAL = "none"
_ORACLE = re.compile(r"oracle(?:-([1-9][0-9]*))?")


@dataclass(frozen=True, slots=True)
class SignalSource:
    """A named signal of a matrix.

    ``oracle`` (of all other repeats), ``oracle-4`` (of four of them) and ``clairvoyant`` are built
    for each truth set; ``none`` runs a policy without a signal; anything else is a folder: a
    checkpoint, or the ``fold-*`` checkpoints of a cross-fit.
    """

    name: str
    folder: Path | None = None

    @staticmethod
    def parse(text: str) -> SignalSource:
        """Read ``none``, ``oracle``, ``oracle-K``, ``clairvoyant`` or ``[name=]FOLDER``."""
        if text in (NO_SIGNAL, "clairvoyant") or _ORACLE.fullmatch(text):
            return SignalSource(text)
        name, _, folder = text.rpartition("=")
        path = Path(folder)
        if not path.is_dir():
            raise InvalidInput(
                f"signal {text!r} is neither none, oracle, oracle-K, clairvoyant nor a folder: "
                "train one with 'preemptbench train' and give its folder"
            )
        return SignalSource(name or path.name, path)

    def build(
        self, truth: Sequence[DecodeRun], others: Sequence[DecodeRun]
    ) -> RemainingSignal | None:
        """Return the signal for a workload whose lengths are ``truth``; ``others`` are the runs
        an oracle may use."""
        if self.name == NO_SIGNAL:
            return None
        if self.folder is not None:
            return load_signal(self.name, self.folder, truth)
        if self.name == "clairvoyant":
            return Clairvoyant(truth)
        return _oracle(self.name, truth, others)


def _oracle(name: str, truth: Sequence[DecodeRun], others: Sequence[DecodeRun]) -> EmpiricalOracle:
    """Build ``oracle`` or ``oracle-K`` from the repeats that come after the truth's, cyclically."""
    match = _ORACLE.fullmatch(name)
    if match is None:
        raise InvalidInput(f"signal {name!r} names no folder and is not an oracle")
    repeats = sorted({run.repeat for run in others})
    wanted = int(match[1] or len(repeats))
    if not 0 < wanted <= len(repeats):
        raise InvalidInput(
            f"signal {name!r} needs {max(wanted, 1)} repeats that are not the truth; this run log "
            f"has {len(repeats)}: collect with --repeats {max(wanted, 1) + 1} or more"
        )
    first = truth[0].repeat
    chosen = sorted(repeats, key=lambda repeat: (repeat < first, repeat))[:wanted]
    return EmpiricalOracle([run for run in others if run.repeat in chosen], name)


def load_signal(name: str, folder: Path, truth: Sequence[DecodeRun]) -> RemainingSignal:
    """Return the predictor of ``folder`` for requests whose lengths are ``truth``.

    Of a cross-fit, each request is routed to the fold that never saw its prompt. Raises
    LeakageError when a prompt of ``truth`` was in the training set of every predictor there.
    """
    folds = [load_predictor(path) for path in sorted(folder.glob("fold-*"))]
    predictors = folds or [load_predictor(folder)]
    prompts = {run.prompt_id: run.prompt_sha256 for run in truth}
    fold_of = {
        prompt_id: _unseen_fold(name, predictors, prompt_id, sha256)
        for prompt_id, sha256 in prompts.items()
    }
    return RoutedSignal(name, predictors, fold_of)


def _unseen_fold(
    name: str, predictors: Sequence[Predictor], prompt_id: str, prompt_sha256: str
) -> int:
    for index, predictor in enumerate(predictors):
        if prompt_sha256 not in predictor.excluded_prompts:
            return index
    raise LeakageError(
        f"signal {name!r} was trained on prompt {prompt_id!r}, which this workload runs: "
        "cross-fit it ('preemptbench train --folds 5'), or simulate other prompts"
    )


def check_pairing(requests: Sequence[SignalRequest], grid: RemainingGrid) -> None:
    """Raise LeakageError when a request would be answered from the very run that executes.

    Only the clairvoyant signal may do that, under its own name.
    """
    if grid.clairvoyant:
        return
    for request, source in zip(requests, grid.source_of.tolist(), strict=True):
        if request.run_id in grid.sources[source]:
            raise LeakageError(
                f"signal {grid.name!r} was built from run {request.run_id!r}, which is also the "
                "truth of this workload: build it from other runs (leave one repeat out, or "
                "cross-fit by prompt), or name it clairvoyant"
            )
