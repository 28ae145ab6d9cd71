"""The columns of a run log: one schema on disk, one form in memory, and the way between them.

On disk strings are plain (``datasets`` and pandas read them); in memory every string column is
dictionary-encoded, so that a small file cannot unfold a repeated string into gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.runs import DecodeRun, ProgressRecord

SCHEMA_VERSION = "decode-run/1"

_STR, _INT, _F64 = pa.string(), pa.int32(), pa.float64()
PROGRESS = pa.list_(pa.struct([(name, pa.float32()) for name in ProgressRecord._fields]))
_TYPES: dict[str, pa.DataType] = {
    "run_id": _STR,
    "request_key": _STR,
    "repeat": _INT,
    "prompt_id": _STR,
    "prompt_sha256": _STR,
    "benchmark": _STR,
    "family": _STR,
    "model": _STR,
    "model_revision": _STR,
    "tokenizer_sha256": _STR,
    "chat_template_sha256": _STR,
    "engine": _STR,
    "engine_version": _STR,
    "kernel": _STR,
    "batch_invariant": pa.bool_(),
    "dtype": _STR,
    "device": _STR,
    "batch_size": _INT,
    "concurrency": _INT,
    "temperature": _F64,
    "seed": pa.int64(),
    "max_new_tokens": _INT,
    "prompt_tokens": _INT,
    "output_tokens": _INT,
    "how_counted": _STR,
    "finish_reason": _STR,
    "event_observed": pa.bool_(),
    "licence": _STR,
    "thinking_tokens": _INT,
    "wall_s": _F64,
    "prompt": _STR,
    "text": _STR,
    "text_sha256": _STR,
    "progress_stride": _INT,
    "progress": PROGRESS,
    "hidden_ref": _STR,
}
_NULLABLE = frozenset(
    "event_observed thinking_tokens wall_s prompt text text_sha256 progress_stride progress "
    "hidden_ref".split()
)
SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=name in _NULLABLE) for name, kind in _TYPES.items()],
    metadata={"preemptbench.schema": SCHEMA_VERSION},
)
STRING_COLUMNS = tuple(name for name, kind in _TYPES.items() if kind == _STR)
# repeated strings, worth a Parquet dictionary
REPEATED_COLUMNS = tuple(
    name for name in STRING_COLUMNS if name not in ("run_id", "text", "text_sha256", "hidden_ref")
)
# how_counted of a length that is not the engine's own count begins with one of these
ESTIMATED_COUNTS = ("chars/", "retokenised")
MEMORY_STR = pa.dictionary(pa.int32(), pa.string())
_MISFIT = (pa.ArrowException, ValueError, TypeError, OverflowError)


def check_columns(schema: pa.Schema, path: Path) -> None:
    """Compare a file's columns with :data:`SCHEMA`; other widths of one kind are let through."""
    version = (schema.metadata or {}).get(b"preemptbench.schema", SCHEMA_VERSION.encode())
    if version != SCHEMA_VERSION.encode():
        raise InvalidInput(
            f"{path} has run-log schema {version.decode(errors='replace')!r}; this version reads "
            f"{SCHEMA_VERSION!r}: install the preemptbench that wrote it"
        )
    missing = [name for name in SCHEMA.names if name not in schema.names]
    extra = [name for name in schema.names if name not in SCHEMA.names]
    if missing or extra or len(schema.names) != len(SCHEMA):
        told = f"lacks {missing}" if missing else ""
        told += (" and " if missing and extra else "") + (f"has unknown {extra}" if extra else "")
        raise InvalidInput(
            f"{path} is not a run log: it {told or 'repeats a column'}; rename its columns, or use "
            "`preemptbench runs import` with --map FIELD=COLUMN"
        )
    for field in SCHEMA:
        found = schema.field(field.name).type
        if _kind(found) not in _allowed_kinds(field):
            raise InvalidInput(
                f"{path}: column {field.name!r} is {found}, it must be {field.type} "
                f"({_kind(field.type)}); convert it, or use `preemptbench runs import`"
            )


def _allowed_kinds(field: pa.Field) -> set[str]:
    also = {"null"} if field.nullable else set()
    return also | {_kind(field.type)} | ({"whole number"} if field.type == _F64 else set())


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "string"
    if pa.types.is_integer(kind):
        return "whole number"
    if pa.types.is_floating(kind):
        return "number"
    if pa.types.is_boolean(kind):
        return "true or false"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        record = kind.value_type
        if pa.types.is_struct(record):
            names = tuple(record.field(i).name for i in range(record.num_fields))
            numbers = all(pa.types.is_floating(record.field(i).type) for i in range(len(names)))
            if names == ProgressRecord._fields and numbers:
                return "list of progress records"
    return str(kind)


def memory_table(table: pa.Table, where: str, first_row: int = 0) -> pa.Table:
    """Return ``table`` in the column order and types of memory; nulls only where allowed."""
    columns = []
    fields = [field for field in SCHEMA if field.name in table.column_names]
    for field in fields:
        column = table[field.name].combine_chunks()
        try:
            column = _memory_column(column, field.type)
        except (pa.ArrowException, ValueError) as error:
            raise InvalidInput(
                f"{where}: column {field.name!r} does not fit {field.type}: {error}"
            ) from None
        if not field.nullable and column.null_count:
            row = first_row + int(np.flatnonzero(~column.is_valid().to_numpy(False))[0])
            raise InvalidInput(f"{where} row {row}: {field.name} is null; it must have a value")
        columns.append(column)
    return pa.table(columns, names=[field.name for field in fields])


def _memory_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if kind != _STR:
        return column if column.type == kind else column.cast(kind)
    if not pa.types.is_dictionary(column.type):
        return column.cast(_STR).dictionary_encode()
    if column.type == MEMORY_STR and not column.dictionary.null_count:
        return column
    # cast the dictionary, not the rows: the rows might unfold beyond memory
    values = column.dictionary.cast(_STR)
    if values.null_count:
        raise ValueError("its dictionary holds a null")
    return pa.DictionaryArray.from_arrays(column.indices.cast(pa.int32()), values)


def column_of(runs: list[DecodeRun], field: pa.Field, first_row: int) -> pa.Array:
    """Return one column of ``runs`` as stored; raises InvalidInput naming row, field and value."""
    values = list(map(attrgetter(field.name), runs))
    if not field.nullable and None in values:
        raise InvalidInput(f"row {first_row + values.index(None)}: {field.name} is None")
    try:
        return _stored_column(values, field)
    except _MISFIT:
        pass
    for row, value in enumerate(values):
        try:
            _stored_column([value], field)
        except _MISFIT:
            raise InvalidInput(
                f"row {first_row + row}: {field.name} is {value!r:.80}; it must be a "
                f"{_kind(field.type)} that fits {field.type}"
            ) from None
    raise InvalidInput(f"rows from {first_row} on: {field.name} does not fit {field.type}")


def _stored_column(values: list[Any], field: pa.Field) -> pa.Array:
    if field.type == PROGRESS:
        return _progress_column(values)
    # given the type at once, Arrow would cut 3.5 down to 3 without a word
    column = pa.array(values)
    if _kind(column.type) not in _allowed_kinds(field):
        raise TypeError(f"{column.type} is no {_kind(field.type)}")
    return column.cast(field.type)


def _progress_column(values: list[tuple[ProgressRecord, ...] | None]) -> pa.Array:
    flat = [record for records in values for record in records or ()]
    leaves = np.asarray(flat, dtype=np.float32).reshape(-1, len(ProgressRecord._fields))
    structs = pa.StructArray.from_arrays(
        [pa.array(leaf) for leaf in leaves.T], names=list(ProgressRecord._fields)
    )
    counts = [len(records or ()) for records in values]
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    missing = pa.array([records is None for records in values])
    return pa.ListArray.from_arrays(pa.array(ends), structs, type=PROGRESS, mask=missing)


def decoded(column: pa.ChunkedArray) -> Iterator[str | None]:
    """Yield the strings; rows with one value share one object."""
    for chunk in column.chunks:
        names = chunk.dictionary.to_pylist()
        for index in chunk.indices.to_pylist():
            yield None if index is None else names[index]


def progress_arrays(column: pa.ChunkedArray) -> tuple[IntArray, FloatArray]:
    """Return (records per row, -1 for null; all records (m, 6)); a null value is NaN."""
    lists = column.combine_chunks()
    counts = lists.value_lengths().fill_null(-1).to_numpy(False)
    records = lists.flatten()
    leaves = [part.cast(_F64).to_numpy(False) for part in records.flatten()]
    return counts.astype(np.int64), np.column_stack(leaves).astype(np.float64)
