"""Checkpoint folders: ``config.json``, ``model.safetensors`` and a model card ``README.md``.

``config.json`` carries the SHA-256 of the arrays and of itself and must stand byte for byte as
written, so a damaged folder is always refused: with one CheckpointError, never with a wrong
answer. No pickle, no import path, no code is ever read. The card is for people and is not read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import numpy as np

from contracts.errors import CheckpointError, InvalidInput, missing_dependency
from contracts.files import atomic_path
from predictors.card import JsonObject, JsonValue, model_card
from traces.safe_json import parse_json

FORMAT = "preemptbench-predictor"
FORMAT_VERSION = 1
TARGET = "served remaining: min(natural length, max_tokens) - age, output tokens"
CONFIG_FILE, TENSOR_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
_MAX_CONFIG_BYTES = 64 << 20
_MAX_TENSOR_BYTES = 1 << 30

MetricRow: TypeAlias = Mapping[str, float | str | None]
_T = TypeVar("_T", int, float, str)


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a predictor was trained on. Lists are sorted and hold each value once.

    ``prompt_sha256s`` are excluded from any honest score; ``num_capped`` of ``run_ids`` were cut.
    """

    run_ids: tuple[str, ...]
    prompt_sha256s: tuple[str, ...]
    models: tuple[str, ...]
    model_revisions: tuple[str, ...]
    tokenizer_sha256s: tuple[str, ...]
    chat_template_sha256s: tuple[str, ...]
    licences: tuple[str, ...]
    cap_tokens: int
    num_capped: int


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A folder read back and verified; the family checks the meaning of its own parts.

    ``fitted_with`` is the seed and the settings of the fit, None where nobody noted them."""

    folder: str
    family: str
    provenance: Provenance
    settings: JsonObject
    metrics: list[JsonValue]
    tensors: dict[str, np.ndarray]
    calibration: JsonValue = None
    fitted_with: JsonObject | None = None


def write_checkpoint(
    folder: Path,
    family: str,
    provenance: Provenance,
    settings: JsonObject,
    metrics: Sequence[MetricRow],
    tensors: Mapping[str, np.ndarray],
    calibration: JsonObject | None = None,
    fitted_with: JsonObject | None = None,
) -> None:
    """Write the folder; ``config.json`` comes last, so a torn write is never a checkpoint.

    ``calibration`` is what predictors.conformal stores, ``fitted_with`` what training.recipe does.
    """
    from safetensors.numpy import save

    blob = save({name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)})
    config: JsonObject = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "family": family,
        "target": TARGET,
        "phase": "whole output, thinking included",
        "settings": settings,
        "training": cast(JsonObject, json.loads(json.dumps(asdict(provenance)))),
        "metrics": [_finite_row(row) for row in metrics],
        "tensors_sha256": hashlib.sha256(blob).hexdigest(),
    }
    if fitted_with is not None:
        config["fitted_with"] = fitted_with
    if calibration is not None:
        config["calibration"] = calibration
    config["config_sha256"] = _digest(config)
    _write(folder / TENSOR_FILE, blob)
    write_card(folder, config)
    _write(folder / CONFIG_FILE, _render(config))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify a folder; raises CheckpointError naming the file and what broke."""
    where = folder / CONFIG_FILE
    config = read_config(folder)
    blob = _tensor_bytes(folder, config)
    settings, metrics = config.get("settings"), config.get("metrics")
    if not isinstance(settings, dict) or not isinstance(metrics, list):
        raise CheckpointError(f"{where}: settings must be an object and metrics a list")
    fitted_with = config.get("fitted_with")
    if fitted_with is not None and not isinstance(fitted_with, dict):
        raise CheckpointError(f"{where}: fitted_with is {fitted_with!r}; it must be an object")
    return Checkpoint(
        folder=str(folder),
        family=need(config, "family", str),
        provenance=_provenance(config.get("training"), str(where)),
        settings=settings,
        metrics=metrics,
        tensors=_parse_tensors(blob, str(folder / TENSOR_FILE)),
        calibration=config.get("calibration"),
        fitted_with=fitted_with,
    )


def read_config(folder: Path) -> JsonObject:
    """Read and verify ``config.json`` alone; raises CheckpointError."""
    where = folder / CONFIG_FILE
    data = _read(where, _MAX_CONFIG_BYTES)
    config = _parse_config(data, str(where))
    if config.get("format") != FORMAT or config.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{where} is {config.get('format')!r} version {config.get('format_version')!r}; this "
            f"release reads {FORMAT!r} version {FORMAT_VERSION}: re-export the checkpoint"
        )
    unsigned = {key: value for key, value in config.items() if key != "config_sha256"}
    if config.get("config_sha256") != _digest(unsigned) or data != _render(config):
        raise CheckpointError(f"{where} was changed after it was written: fetch the folder again")
    return config


def write_card(folder: Path, config: JsonObject) -> None:
    """Write the model card of a verified configuration anew."""
    _write(folder / CARD_FILE, model_card(config).encode())


def _tensor_bytes(folder: Path, config: JsonObject) -> bytes:
    blob = _read(folder / TENSOR_FILE, _MAX_TENSOR_BYTES)
    if hashlib.sha256(blob).hexdigest() != config.get("tensors_sha256"):
        raise CheckpointError(
            f"{folder / TENSOR_FILE} does not match its SHA-256 in {CONFIG_FILE}: it is damaged "
            "or of another checkpoint; fetch the folder again"
        )
    return blob


def push_to_hub(folder: Path, repo_id: str, *, private: bool = True) -> str:
    """Upload a verified checkpoint folder to the Hugging Face Hub; return the commit's address."""
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise missing_dependency("huggingface-hub", "hub", "push_to_hub") from None
    read_checkpoint(folder)
    api = HfApi()
    api.create_repo(repo_id, repo_type="model", private=private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        allow_patterns=[CONFIG_FILE, TENSOR_FILE, CARD_FILE],
        commit_message="Upload a preemptbench predictor",
    )
    return str(commit)


def need(row: Mapping[str, JsonValue], key: str, kind: type[_T]) -> _T:
    """Return ``row[key]`` if it is a ``kind``; raises CheckpointError."""
    value = row.get(key)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise CheckpointError(f"field {key!r} is {value!r}; it must be a {kind.__name__}")
    return value


def need_list(row: Mapping[str, JsonValue], key: str, kind: type[_T]) -> tuple[_T, ...]:
    """Return ``row[key]`` if it is a list of ``kind``; raises CheckpointError."""
    values = row.get(key)
    if not isinstance(values, list):
        raise CheckpointError(f"field {key!r} is {values!r}; it must be a list")
    return tuple(need({key: value}, key, kind) for value in values)


def need_array(
    tensors: Mapping[str, np.ndarray], name: str, kind: type[np.generic], ndim: int = 1
) -> np.ndarray:
    """Return the array ``name`` if it has type, dimensions and finite values; CheckpointError."""
    array = tensors.get(name)
    if array is None or array.dtype != kind or array.ndim != ndim:
        found = "missing" if array is None else f"{array.dtype} with {array.ndim} dimensions"
        raise CheckpointError(
            f"array {name!r} is {found}; it must be {np.dtype(kind).name} with {ndim}"
        )
    if not np.isfinite(array).all():
        raise CheckpointError(f"array {name!r} holds values that are not finite")
    return array


def _parse_config(data: bytes, where: str) -> JsonObject:
    try:
        config = parse_json(data.decode("utf-8"), where)
    except (InvalidInput, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where} is not strict JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{where} is a {type(config).__name__}; it must be an object")
    return config


def _provenance(training: JsonValue, where: str) -> Provenance:
    if not isinstance(training, dict):
        raise CheckpointError(f"{where}: training is {training!r}; it must be an object")
    numbers = ("cap_tokens", "num_capped")
    lists = {
        field.name: need_list(training, field.name, str)
        for field in fields(Provenance)
        if field.name not in numbers
    }
    cap, capped = (need(training, name, int) for name in numbers)
    return Provenance(**lists, cap_tokens=cap, num_capped=capped)


def _parse_tensors(blob: bytes, where: str) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load(blob))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{where} is not a valid safetensors file: {error}") from None


def _finite_row(row: MetricRow) -> JsonObject:
    """A number that does not exist (a floor without a point estimate) is null, never NaN."""
    return {
        key: None if isinstance(value, float) and not np.isfinite(value) else value
        for key, value in row.items()
    }


def _render(config: JsonObject) -> bytes:
    return (json.dumps(config, indent=1, allow_nan=False) + "\n").encode()


def _digest(config: JsonObject) -> str:
    return hashlib.sha256(_render(config)).hexdigest()


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes; the bound is {max_bytes}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): a checkpoint folder holds {CONFIG_FILE} "
            f"and {TENSOR_FILE}"
        ) from None


def _write(path: Path, data: bytes) -> None:
    with atomic_path(path) as scratch:
        scratch.write_bytes(data)
