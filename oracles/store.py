"""An oracle in a folder: ``oracle.json`` says what it is, ``runs.safetensors`` holds its runs.

The runs are saved as the compact table the oracle is built from (hashes and lengths, no text), and
its curves are built again on loading: a damaged or edited file cannot make a curve that no runs
would give. Nothing is unpickled; the manifest names the SHA-256 of the arrays and of itself, so the
label of sampled runs, say, cannot get lost on the way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InvalidInput
from contracts.files import atomic_path, atomic_write_text
from oracles.empirical import EmpiricalOracle, Mode
from oracles.run_table import NEAR_DUPLICATE_RULE, LogFacts, RunTable
from traces.safe_json import read_json

MANIFEST_FILE = "oracle.json"
ARRAY_FILE = "runs.safetensors"
FORMAT = "oracle/1"
_MAX_ARRAY_BYTES = 2 << 30
_ARRAYS = {
    "keys": np.uint64,
    "prompt_hash": np.uint64,
    "request_of": np.int32,
    "repeat": np.int32,
    "output_tokens": np.int32,
    "event_observed": np.bool_,
    "run_hash": np.uint64,
    "text_hash": np.uint64,
}


def is_oracle_folder(folder: Path) -> bool:
    """Say whether ``folder`` was written by :func:`save_oracle`."""
    return (folder / MANIFEST_FILE).is_file()


def save_oracle(
    table: RunTable, folder: Path, *, mode: Mode, source: Mapping[str, object]
) -> dict[str, Any]:
    """Build the oracle of ``table``, write it to ``folder`` and return its manifest.

    ``source`` names the log it comes from. Raises InvalidInput for a log that breaks ``mode``.
    """
    from safetensors.numpy import save

    oracle = EmpiricalOracle(table, mode=mode)
    blob = save({name: np.ascontiguousarray(getattr(table, name)) for name in _ARRAYS})
    counts = table.runs_per_request()
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "name": oracle.name,
        "mode": mode,
        "runs": len(table),
        "requests": table.num_requests,
        "runs_per_request": [int(counts.min()), float(np.median(counts)), int(counts.max())],
        "cut_share": float(1.0 - table.event_observed.mean()),
        "near_duplicates": NEAR_DUPLICATE_RULE,
        "set_up": asdict(table.facts),
        "source": dict(source),
        "arrays_sha256": hashlib.sha256(blob).hexdigest(),
    }
    with atomic_path(folder / ARRAY_FILE) as scratch:
        scratch.write_bytes(blob)
    manifest = sealed(manifest)
    atomic_write_text(folder / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")
    return manifest


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with the SHA-256 of its content (of what it says, not of its layout)."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def load_oracle(folder: Path, name: str | None = None) -> EmpiricalOracle:
    """Return the oracle of ``folder``, called ``name`` or what it was saved as.

    Raises InvalidInput when a file is missing, damaged, changed or of another version.
    """
    manifest = read_json(folder / MANIFEST_FILE)
    if manifest.get("format") != FORMAT:
        raise InvalidInput(
            f"{folder} has oracle format {manifest.get('format')!r}; this version reads "
            f"{FORMAT!r}: build it again with 'preemptbench oracle build'"
        )
    if manifest.get("sha256") != sealed(manifest)["sha256"]:
        raise InvalidInput(
            f"{folder / MANIFEST_FILE} does not carry the SHA-256 of its content: it was changed "
            "or damaged; build it again with 'preemptbench oracle build'"
        )
    table = _read_table(folder, manifest)
    mode: Any = str(manifest.get("mode"))
    return EmpiricalOracle(table, name or str(manifest.get("name")), mode=mode)


def _read_table(folder: Path, manifest: Mapping[str, Any]) -> RunTable:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = folder / ARRAY_FILE
    if not path.is_file() or path.stat().st_size > _MAX_ARRAY_BYTES:
        raise InvalidInput(f"{path} is missing or above {_MAX_ARRAY_BYTES} bytes: build it again")
    blob = path.read_bytes()
    found = hashlib.sha256(blob).hexdigest()
    if found != manifest.get("arrays_sha256"):
        raise InvalidInput(
            f"{path} has sha256 {found}, but {MANIFEST_FILE} names "
            f"{manifest.get('arrays_sha256')!r}: it was changed or damaged; build it again"
        )
    try:
        arrays = load(blob)
        table = RunTable(**{name: arrays[name] for name in _ARRAYS}, facts=_facts(manifest))
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(f"{folder} is not an oracle ({error}): build it again") from None
    _check_table(table, path)
    return table


def _facts(manifest: Mapping[str, Any]) -> LogFacts:
    told = manifest["set_up"]
    return LogFacts(
        caps={str(model): tuple(map(int, caps)) for model, caps in told["caps"].items()},
        tokenizers={str(m): tuple(map(str, texts)) for m, texts in told["tokenizers"].items()},
        temperatures=tuple(map(float, told["temperatures"])),
        batch_invariant=tuple(map(bool, told["batch_invariant"])),
    )


def _check_table(table: RunTable, path: Path) -> None:
    requests, runs = table.keys.shape[0], table.request_of.shape[0]
    shapes = {
        name: (requests, 4) if name == "keys" else (requests if name == "prompt_hash" else runs,)
        for name in _ARRAYS
    }
    for name, kind in _ARRAYS.items():
        array = getattr(table, name)
        if array.dtype != kind or array.shape != shapes[name]:
            raise InvalidInput(
                f"{path}: {name} is {array.dtype} of shape {array.shape}; it must be "
                f"{np.dtype(kind)} of shape {shapes[name]}: build the oracle again"
            )
    used = np.unique(table.request_of)
    if not runs or table.output_tokens.min() < 1 or not np.array_equal(used, np.arange(requests)):
        raise InvalidInput(
            f"{path}: every run must have at least 1 token and every request a run: build it again"
        )
