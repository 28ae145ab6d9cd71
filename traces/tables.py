"""Parquet and manifest plumbing: atomic writes, and reads that end in one clear message.

A table read here may come from anywhere. Limits hold for the footer, rows are capped, page
checksums are verified where a writer left them, and no Arrow error leaves this package.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from contracts.errors import InvalidInput, PreemptBenchError
from contracts.files import atomic_path, atomic_write_text
from traces.safe_json import parse_json

MAX_ROWS = 20_000_000
BATCH_ROWS = 65_536
_ARROW_ERRORS = (
    pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, KeyError, TypeError,
)  # fmt: skip


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what Arrow says of a damaged file into InvalidInput naming ``path``."""
    try:
        yield
    except PreemptBenchError:
        raise
    except _ARROW_ERRORS as error:
        said = str(error).strip().splitlines()
        raise InvalidInput(
            f"{path} is not a readable Parquet file ({said[0] if said else type(error).__name__}): "
            "it is truncated, damaged or of another format; fetch or write it again"
        ) from None


def open_parquet(path: Path, read_dictionary: Iterable[str] = ()) -> pq.ParquetFile:
    """Open a Parquet file under the limits of this module; refuses 0 rows and too many.

    Columns in ``read_dictionary`` come back dictionary-encoded, so a short file cannot unfold a
    repeated string into gigabytes.
    """
    if not path.is_file():
        raise InvalidInput(f"{path} does not exist: give the path of a Parquet file")
    with readable(path):
        file = pq.ParquetFile(
            path,
            read_dictionary=list(read_dictionary),
            thrift_string_size_limit=1 << 24,
            thrift_container_size_limit=1_000_000,
            page_checksum_verification=True,
        )
        # no look at column-chunk metadata: on a damaged footer pyarrow 26 aborts the process there
        rows = file.metadata.num_rows
    if rows < 1:
        raise InvalidInput(f"{path} holds {rows} rows: there is nothing to read; was it cut short?")
    if rows > MAX_ROWS:
        raise InvalidInput(
            f"{path} claims {rows} rows; the bound is {MAX_ROWS}: split it into smaller files"
        )
    return file


def parquet_files(path: Path) -> list[Path]:
    """Return ``path`` itself, or the *.parquet files of a folder in the order of their names."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise InvalidInput(f"folder {path} holds no *.parquet file: give a run log or its folder")
    return files


def write_parquet(
    path: Path, schema: pa.Schema, tables: Iterable[pa.Table], dictionary_columns: Iterable[str]
) -> int:
    """Write ``tables`` as row groups (zstd, page checksums) and return the number of rows."""
    rows = 0
    with (
        atomic_path(path) as scratch,
        pq.ParquetWriter(
            scratch,
            schema,
            compression="zstd",
            use_dictionary=list(dictionary_columns),
            write_page_checksum=True,
        ) as writer,
    ):
        for table in tables:
            writer.write_table(table)
            rows += len(table)
        if not rows:
            raise InvalidInput(f"nothing to write to {path}: there are 0 rows")
    return rows


def manifest_path(path: Path) -> Path:
    """Return where the JSON manifest of a table lies: beside it, suffix ``.manifest.json``."""
    return path.with_suffix(".manifest.json")


def write_manifest(
    path: Path, fields: Mapping[str, object], schema_version: str, rows: int
) -> None:
    """Write the manifest of the table at ``path``: free fields, then what identifies the file."""
    manifest = {
        **fields,
        "rows": rows,
        "sha256": file_sha256(path),
        "schema": schema_version,
        "software": _software(),
    }
    text = json.dumps(manifest, indent=1, allow_nan=False) + "\n"
    atomic_write_text(manifest_path(path), text)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest beside ``path``, its sha256 compared; None when there is none."""
    beside = manifest_path(path)
    if not beside.is_file():
        return None
    manifest = parse_json(beside.read_text(encoding="utf-8", errors="replace"), str(beside))
    if not isinstance(manifest, dict):
        raise InvalidInput(f"{beside} is a {type(manifest).__name__}: a manifest is an object")
    found = file_sha256(path)
    if manifest.get("sha256") != found:
        raise InvalidInput(
            f"{path} has sha256 {found}, but {beside} names {manifest.get('sha256')!r}: the table "
            "was changed after it was written; fetch both again, or delete the manifest"
        )
    return manifest


def file_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _software() -> dict[str, str]:
    try:
        own = importlib.metadata.version("preemptbench")
    except importlib.metadata.PackageNotFoundError:
        own = "source tree"
    return {
        "preemptbench": own,
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "numpy": np.__version__,
    }
