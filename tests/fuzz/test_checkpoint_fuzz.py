"""Damage: whatever happens to a checkpoint's bytes, the answer is one CheckpointError."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import CheckpointError, PreemptBenchError
from contracts.signals import signal_request
from predictors.boosting import BoostingSettings
from predictors.card import JsonValue
from predictors.checkpoint import (
    CONFIG_FILE,
    TENSOR_FILE,
    Checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from predictors.gbm_hazard import GbmHazardSettings
from predictors.registry import load_predictor
from tests.hidden_runs import with_hidden
from tests.quick_families import QUICK
from tests.synthetic_runs import synthetic_runs
from training.rows import training_set

NUM_MUTATIONS = int(os.environ.get("PREEMPTBENCH_FUZZ", "400"))  # `make nightly`: 10,000
NUM_NONSENSE = NUM_MUTATIONS // 4
RUNS = with_hidden(synthetic_runs(num_prompts=20))


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


@pytest.fixture(scope="module", params=sorted(QUICK))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    path = tmp_path_factory.mktemp(request.param)
    QUICK[request.param].fit(training_set(RUNS)).save_pretrained(path)
    return read_checkpoint(path)


def _wild_array(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Other values, another shape or another type, each in a way a reader might trust."""
    kind = int(rng.integers(0, 8))
    if kind == 0 or not array.size:
        return array.astype(rng.choice(["f2", "f8", "i4", "i8", "u1"]))
    if kind == 1:
        return array[: int(rng.integers(0, len(array)))] if array.ndim else array
    if kind == 2:
        return array.ravel() if array.ndim > 1 else array[:, None]
    if kind == 3:
        return array[::-1].copy()
    wild = array.copy()
    values = [0, -1, 1, 7, 2**31, -(2**40)]
    values += [np.nan, np.inf, 1e300] if array.dtype.kind == "f" else []
    with np.errstate(over="ignore", invalid="ignore"):
        wild.flat[int(rng.integers(0, array.size))] = np.array(rng.choice(values)).astype(
            array.dtype
        )
    return wild


def test_signed_nonsense_is_refused_or_answers_within_bounds(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A stranger can sign anything: arrays and settings that make no sense under fitting hashes."""
    requests, ages = [signal_request(run) for run in RUNS[:6]], np.arange(6) * 7
    room = np.array([request.max_tokens for request in requests]) - ages
    family, rng, refused = checkpoint.family, np.random.default_rng(2), 0
    for _ in range(NUM_NONSENSE):
        settings, tensors = dict(checkpoint.settings), dict(checkpoint.tensors)
        if rng.random() < 0.3 and settings:
            key = str(rng.choice(sorted(settings)))
            junk: list[JsonValue] = [None, -1, 0, 10**12, 0.5, "x", [], ["x"], [1], {}]
            settings[key] = junk[int(rng.integers(0, len(junk)))]
        else:
            name = str(rng.choice(sorted(tensors)))
            tensors[name] = _wild_array(tensors[name], rng)
        write_checkpoint(tmp_path, family, checkpoint.provenance, settings, (), tensors)
        try:
            predictor = load_predictor(tmp_path)
        except CheckpointError:
            refused += 1
            continue
        try:
            with np.errstate(all="ignore"):
                answers = predictor.remaining(requests, ages)
        except PreemptBenchError:  # an encoder is loaded, and compared, when first asked
            refused += 1
            continue
        assert ((answers >= 1.0) & (answers <= room)).all(), (settings, name)
    assert refused > NUM_NONSENSE // 4


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
