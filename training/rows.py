"""Run logs to training sets: one pass over the runs, keeping what a fit needs and no more."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from contracts.errors import InvalidInput
from contracts.runs import DecodeRun
from contracts.signals import SignalRequest, signal_request
from oracles.shards import read_shard
from oracles.store import load_oracle
from predictors.base import TrainingSet
from predictors.checkpoint import Provenance
from traces.runlog import RunLog, read_runs


def without_oracle(log: RunLog, folder: Path) -> tuple[RunLog, int]:
    """Return ``log`` without the prompts, by hash, that the oracle in ``folder`` was built from,
    and how many runs went: a predictor that saw an oracle's prompts is no fair rival of it."""
    oracle = load_oracle(folder)
    runs = list(log)
    kept = [run for run in runs if not oracle.knows_prompt(run.prompt_sha256)]
    if not kept:
        raise InvalidInput(
            f"the oracle in {folder} knows every prompt of the run log ({len(runs)} runs): nothing "
            "is left to train on; give a log of other prompts, or build the oracle from fewer"
        )
    return RunLog.from_runs(kept), len(runs) - len(kept)


def training_set(runs: Iterable[DecodeRun]) -> TrainingSet:
    """Return the training set of ``runs``; they are read once, in order.

    A run whose ending is unknown counts as cut: that it lasted so long is all anyone knows.
    """
    requests: list[SignalRequest] = []
    lengths: list[int] = []
    observed: list[bool] = []
    seen: dict[str, set[str]] = {
        name: set()
        for name in (
            "model", "model_revision", "tokenizer_sha256", "chat_template_sha256", "licence"
        )
    }  # fmt: skip
    for run in runs:
        requests.append(signal_request(run))
        lengths.append(run.output_tokens)
        observed.append(run.event_observed is True)
        for name, values in seen.items():
            values.add(getattr(run, name))
    if not requests:
        raise InvalidInput("the run log holds no decode run: nothing to train on")
    provenance = Provenance(
        run_ids=_unique(request.run_id for request in requests),
        prompt_sha256s=_unique(request.prompt_sha256 for request in requests),
        models=_unique(seen["model"]),
        model_revisions=_unique(seen["model_revision"]),
        tokenizer_sha256s=_unique(seen["tokenizer_sha256"]),
        chat_template_sha256s=_unique(seen["chat_template_sha256"]),
        licences=_unique(seen["licence"]),
        cap_tokens=max(request.max_tokens for request in requests),
        num_capped=observed.count(False),
    )
    return TrainingSet(
        requests=tuple(requests),
        output_tokens=np.array(lengths, dtype=np.int64),
        event_observed=np.array(observed, dtype=bool),
        provenance=provenance,
    )


def read_run_log(path: Path) -> RunLog:
    """Read a run log (Parquet file or folder), or a collection's raw ``.jsonl`` shard."""
    if path.suffix == ".jsonl":
        if not path.is_file():
            raise InvalidInput(f"run log {path} does not exist: give --runs a file")
        return RunLog.from_runs(read_shard(path))
    return read_runs(path)


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))
