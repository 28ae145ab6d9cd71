"""Where the signals of a matrix come from, and the guard that truth and signal share no run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contracts.errors import InvalidInput, LeakageError
from contracts.randomness import keyed_uniform
from contracts.runs import DecodeRun, by_request
from contracts.signals import (
    RemainingGrid,
    RemainingSignal,
    RoutedSignal,
    SignalRequest,
    signal_request,
)
from eval.mismatch import matched_name
from eval.surrogates import SURROGATES
from oracles.degrade import degrade, label, parse_degradations
from oracles.empirical import Clairvoyant, EmpiricalOracle
from oracles.store import is_oracle_folder, load_oracle
from predictors.base import Predictor
from predictors.registry import load_predictor

NO_SIGNAL = "none"
_BUILT_IN = f"{NO_SIGNAL}, oracle, oracle-K, clairvoyant, {', '.join(SURROGATES)}"
_ORACLE = re.compile(r"oracle(?:-([1-9][0-9]*))?")


@dataclass(frozen=True, slots=True)
class SignalSource:
    """A named signal of a matrix.

    ``oracle`` (of all other repeats), ``oracle-4`` (of four of them) and ``clairvoyant`` are built
    for each truth set, and so is a surrogate (eval.surrogates); ``none`` runs a policy without a
    signal; anything else is a folder: a checkpoint, the ``fold-*`` checkpoints of a cross-fit, or
    an oracle that ``oracle build`` wrote. Those names are reserved. A name may go on with
    degradations, as in ``clairvoyant | noise(0.5)`` (:mod:`oracles.degrade`). A checkpoint trained
    for another model or tokenizer than the run log's is refused unless ``allow_mismatch``; results
    are then labelled.
    """

    name: str
    folder: Path | None = None
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        base, steps = parse_degradations(self.name)
        if self.folder is not None and _is_reserved(base):
            raise InvalidInput(
                f"signal name {base!r} is reserved: give the signal in {self.folder} "
                "another name, as in gbm=FOLDER"
            )
        if self.folder is None and not _is_reserved(base):
            raise InvalidInput(
                f"signal {base!r} is not built in ({_BUILT_IN}) and names no folder: give its "
                "checkpoint, as name=FOLDER"
            )
        if steps and base == NO_SIGNAL:
            raise InvalidInput(f"signal {self.name!r}: there is no signal to degrade")

    @staticmethod
    def parse(text: str, *, allow_mismatch: bool = False) -> SignalSource:
        """Read ``none``, ``oracle``, ``oracle-K``, ``clairvoyant`` or ``[name=]FOLDER``, with any
        degradations behind it."""
        base, steps = parse_degradations(text)
        done = "".join(f" | {label(how)}" for how in steps)
        if _is_reserved(base):
            return SignalSource(base + done)
        name, _, folder = base.rpartition("=")
        path = Path(folder)
        if not path.is_dir():
            raise InvalidInput(
                f"signal {base!r} is neither built in ({_BUILT_IN}) nor a folder: "
                "train one with 'preemptbench train' and give its folder"
            )
        return SignalSource((name or path.name) + done, path, allow_mismatch)

    def build(
        self, truth: Sequence[DecodeRun], others: Sequence[DecodeRun], seed: int = 0
    ) -> RemainingSignal | None:
        """Return the signal for a workload whose lengths are ``truth``; ``others`` are the runs
        an oracle may use, ``seed`` keys the noise of degradations."""
        base, steps = parse_degradations(self.name)
        if base in SURROGATES:
            base, steps = "clairvoyant", (*SURROGATES[base].steps, *steps)
        signal = self._base(base, truth, others)
        if signal is None or not steps:
            return signal
        requests = [signal_request(run) for run in truth]
        # the population of ranks: every request once, somewhere in its life
        ages = [
            int(keyed_uniform(seed, "degrade-age", run.run_id) * run.output_tokens) for run in truth
        ]
        return degrade(signal, steps, requests, np.array(ages, dtype=np.int64), seed)

    def _base(
        self, base: str, truth: Sequence[DecodeRun], others: Sequence[DecodeRun]
    ) -> RemainingSignal | None:
        if base == NO_SIGNAL:
            return None
        if self.folder is not None:
            if is_oracle_folder(self.folder):
                return load_oracle(self.folder, base)
            return load_signal(base, self.folder, truth, allow_mismatch=self.allow_mismatch)
        if base == "clairvoyant":
            return Clairvoyant(truth)
        return _oracle(base, truth, others)


def base_name(name: str) -> str:
    """Return the name of a signal without its degradations."""
    return parse_degradations(name)[0]


def _is_reserved(name: str) -> bool:
    return name in (NO_SIGNAL, "clairvoyant", *SURROGATES) or _ORACLE.fullmatch(name) is not None


def split_truth(runs: Iterable[DecodeRun], seed: int) -> tuple[list[DecodeRun], list[DecodeRun]]:
    """Return (truth, others): of each request with K runs, run ``seed mod K`` executes, the other
    K - 1 may serve an oracle. Repeats may be numbered in any way and differ in K."""
    truth: list[DecodeRun] = []
    others: list[DecodeRun] = []
    for group in by_request(runs).values():
        group.sort(key=lambda run: (run.repeat, run.run_id))
        at = seed % len(group)
        truth.append(group[at])
        others += group[at + 1 :] + group[:at]  # cyclic: oracle-K takes the first K of these
    return truth, others


def _oracle(name: str, truth: Sequence[DecodeRun], others: Sequence[DecodeRun]) -> EmpiricalOracle:
    """Build ``oracle``, or ``oracle-K`` from the first K of each request's other runs."""
    match = _ORACLE.fullmatch(name)
    assert match is not None
    groups = by_request(others).values()
    largest = max(map(len, groups), default=0)
    wanted = int(match[1] or max(largest, 1))
    if wanted > largest:
        raise InvalidInput(
            f"signal {name!r} needs {wanted} run(s) of a request beside the one that executes; the "
            f"{len(truth)} requests of this run log have at most {largest}: collect with "
            f"--repeats {wanted + 1} or more"
        )
    return EmpiricalOracle([run for group in groups for run in group[:wanted]], name)


def load_signal(
    name: str, folder: Path, runs: Sequence[DecodeRun], *, allow_mismatch: bool = False
) -> RemainingSignal:
    """Return the predictor of ``folder`` for requests of ``runs``.

    Of a cross-fit, each request is routed to the fold that never saw its prompt. Raises
    LeakageError when a prompt of ``runs`` was in the training set of every predictor there, and
    InvalidInput when it was trained for another model or tokenizer; where that is allowed, the name
    of the signal goes on with what it was trained on (:mod:`eval.mismatch`).
    """
    predictors = load_predictors(folder)
    label = matched_name(predictors, runs, allow_mismatch=allow_mismatch, name=name)
    fold_of: dict[str, int] = {}
    for run in runs:
        fold = _unseen_fold(name, predictors, run)
        if fold_of.setdefault(run.prompt_sha256, fold) != fold:
            raise InvalidInput(f"prompt {run.prompt_id!r} of {folder} belongs to two folds")
    return RoutedSignal(label, predictors, fold_of)


def load_predictors(folder: Path) -> list[Predictor]:
    """Return the predictor of a checkpoint folder, or those of the folds of a cross-fit."""
    folds = sorted(folder.glob("fold-*"))
    if folds and (folder / "config.json").exists():
        raise InvalidInput(
            f"{folder} holds a checkpoint and the folds of a cross-fit: which one is meant? Move "
            "one of them away"
        )
    return [load_predictor(path) for path in folds or [folder]]


def _unseen_fold(name: str, predictors: Sequence[Predictor], run: DecodeRun) -> int:
    for index, predictor in enumerate(predictors):
        if run.prompt_sha256 not in predictor.excluded_prompts:
            return index
    raise LeakageError(
        f"signal {name!r} was trained on prompt {run.prompt_id!r}, which this workload runs: "
        "cross-fit it ('preemptbench train --folds 5'), or use other prompts"
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
