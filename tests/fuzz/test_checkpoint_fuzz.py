"""Damage: whatever happens to a checkpoint's bytes, the answer is one CheckpointError."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from contracts.errors import CheckpointError
from predictors.boosting import BoostingSettings
from predictors.checkpoint import CONFIG_FILE, TENSOR_FILE
from predictors.gbm_hazard import GbmHazardSettings
from predictors.registry import load_predictor
from tests.synthetic_runs import synthetic_runs
from training.rows import training_set

NUM_MUTATIONS = 240


def _mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip one bit, replace a byte, cut the end off, drop a slice or repeat one."""
    at = int(rng.integers(0, len(data)))
    kind = int(rng.integers(0, 6))
    if kind <= 1:
        return data[:at] + bytes([data[at] ^ (1 << int(rng.integers(0, 8)))]) + data[at + 1 :]
    if kind == 2:
        other = (data[at] + int(rng.integers(1, 256))) % 256
        return data[:at] + bytes([other]) + data[at + 1 :]
    if kind == 3:
        return data[:at]
    end = min(len(data), at + int(rng.integers(1, 64)))
    if kind == 4:
        return data[:at] + data[end:]
    return data[:end] + data[at:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    settings = GbmHazardSettings(boosting=BoostingSettings(num_trees=10))
    settings.fit(training_set(synthetic_runs(num_prompts=20))).save_pretrained(path)
    load_predictor(path)
    return path


@pytest.mark.parametrize("name", [CONFIG_FILE, TENSOR_FILE])
def test_every_mutation_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    try:
        for number in range(NUM_MUTATIONS // 2):
            bad = _mutated(good, rng)
            assert bad != good, number
            path.write_bytes(bad)
            with pytest.raises(CheckpointError):
                load_predictor(folder)
    finally:
        path.write_bytes(good)


def test_garbage_tensors_under_a_fitting_hash_are_refused(folder: Path) -> None:
    """A stranger can sign anything: the safetensors bytes themselves may be nonsense."""
    from predictors.checkpoint import _parse_tensors

    good = (folder / TENSOR_FILE).read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(NUM_MUTATIONS):
        head = bytearray(good[:400])
        for at in rng.integers(0, len(head), 3):
            head[at] = int(rng.integers(0, 256))
        try:
            _parse_tensors(bytes(head) + good[400:], "tensors")
        except CheckpointError:
            continue
