"""Synthetic runs with hidden states beside them: noise, but for a direction that tells the rest."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun
from oracles.hidden import save_hidden
from tests.synthetic_runs import STRIDE

WIDTH, LAYERS = 6, (3, 7)


def with_hidden(
    runs: Sequence[DecodeRun], folder: Path | None = None, noise: float = 0.3
) -> list[DecodeRun]:
    """Return ``runs`` with states of two layers in ``folder`` (a new one, removed at exit)."""
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="hidden-runs-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    out = []
    for run in runs:
        count = run.output_tokens // STRIDE
        states = keyed_generator(0, "hidden", run.run_id).standard_normal((count, 2, WIDTH))
        left = run.output_tokens - (np.arange(count) + 1) * STRIDE
        states[:, 1, 0] = np.log1p(left) + noise * states[:, 1, 0]
        ref = save_hidden(folder, run.run_id, states.astype(np.float16), LAYERS, STRIDE)
        out.append(replace(run, hidden_ref=str(folder / ref)))
    return out
