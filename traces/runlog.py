"""Run logs: decode runs as Parquet, written in row groups, read under an allow-list of columns.

In memory every string column is dictionary-encoded: a log repeats its strings, and a small file
cannot unfold into gigabytes. Metadata on disk stays plain, so ``datasets`` and pandas read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.runs import DecodeRun, ProgressRecord
from traces.run_columns import (
    MEMORY_STR,
    PROGRESS,
    REPEATED_COLUMNS,
    SCHEMA,
    SCHEMA_VERSION,
    STRING_COLUMNS,
    check_columns,
    column_of,
    decoded,
    memory_table,
    progress_arrays,
)
from traces.tables import (
    BATCH_ROWS,
    MAX_ROWS,
    open_parquet,
    parquet_files,
    readable,
    write_manifest,
    write_parquet,
)

BoolArray = NDArray[np.bool_]


class PromptRow(NamedTuple):
    """A distinct prompt of a log; one prompt may stand in several rows if its labels differ."""

    prompt_id: str
    prompt_sha256: str
    benchmark: str
    family: str
    prompt: str | None


@dataclass(frozen=True, slots=True, eq=False)
class RunLog:
    """Decode runs as columns; iterate it for DecodeRun. Every array has shape (len(log),).

    ``folder`` is where the log was read from; runs name their hidden states by a path below it, and
    DecodeRun by the whole path.
    """

    table: pa.Table
    folder: Path | None = None

    @classmethod
    def from_runs(cls, runs: Iterable[DecodeRun]) -> RunLog:
        """Return the log of ``runs``; raises InvalidInput on a value its column cannot hold."""
        tables = [memory_table(table, "the runs") for table in _tables_of(runs)]
        if not tables:
            raise InvalidInput("a run log needs at least one run; there are 0")
        return cls(_joined(tables))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[DecodeRun]:
        return _runs_of(self.table, self.folder)

    def ints(self, name: str) -> IntArray:
        """Return a whole-number column as int64; it must hold no null."""
        return np.asarray(self.table[name].to_numpy(), dtype=np.int64)

    def floats(self, name: str) -> FloatArray:
        """Return a number column as float64, NaN where it holds none."""
        return np.asarray(self.table[name].cast(pa.float64()).to_numpy(), dtype=np.float64)

    def strings(self, name: str) -> list[str]:
        """Return a string column that holds no null."""
        return [value for value in decoded(self.table[name]) if value is not None]

    def codes(self, name: str) -> tuple[IntArray, list[str]]:
        """Return a string column as (codes, names in rising order); code -1 stands for null."""
        column = self.table[name].combine_chunks()
        raw = np.asarray(column.indices.fill_null(-1).to_numpy(), dtype=np.int64)
        values = column.dictionary.to_pylist()
        used = np.unique(raw[raw >= 0])
        names = sorted({values[i] for i in used.tolist()})
        rank = {value: code for code, value in enumerate(names)}
        lookup = np.full(len(values) + 1, -1, dtype=np.int64)
        lookup[used] = [rank[values[i]] for i in used.tolist()]
        return lookup[raw], names

    @property
    def output_tokens(self) -> IntArray:
        """Served lengths in tokens."""
        return self.ints("output_tokens")

    @property
    def prompt_tokens(self) -> IntArray:
        """Prompt lengths in tokens."""
        return self.ints("prompt_tokens")

    @property
    def max_new_tokens(self) -> IntArray:
        """Caps in tokens."""
        return self.ints("max_new_tokens")

    @property
    def repeat(self) -> IntArray:
        """Number of the run among the repeats of its request."""
        return self.ints("repeat")

    @property
    def event_observed(self) -> BoolArray:
        """True where the model ended the run; a cut and an unknown end are both False."""
        return np.asarray(self.table["event_observed"].fill_null(False).to_numpy(), dtype=bool)

    @property
    def event_known(self) -> BoolArray:
        """True where the log says how the run ended."""
        return np.asarray(self.table["event_observed"].is_valid().to_numpy(), dtype=bool)

    def progress(self) -> tuple[IntArray, FloatArray]:
        """Return (records per run, -1 for none; all records (m, 6) in the order of the runs)."""
        return progress_arrays(self.table["progress"])

    def filter(self, mask: BoolArray) -> RunLog:
        """Return the runs where ``mask`` (n,) is True."""
        return RunLog(self.table.filter(pa.array(np.asarray(mask, dtype=bool))), self.folder)

    def prompts(self) -> list[PromptRow]:
        """Return the distinct prompts in the order they first appear."""
        columns = [self.codes(name) for name in PromptRow._fields]
        key = np.zeros(len(self), dtype=np.int64)
        for codes, names in columns:
            # re-ranking after each column keeps the mixed number far from overflow
            key = np.unique(key * (len(names) + 1) + codes + 1, return_inverse=True)[1].reshape(-1)
        first = np.sort(np.unique(key, return_index=True)[1]).tolist()
        picked = [
            [names[code] if code >= 0 else None for code in codes[first].tolist()]
            for codes, names in columns
        ]
        return [PromptRow(*row) for row in zip(*picked, strict=True)]


def write_runs(
    runs: Iterable[DecodeRun], path: Path, manifest: Mapping[str, object] | None = None
) -> int:
    """Write a run log (Parquet, zstd) and its manifest, both atomically; return its rows.

    ``runs`` is streamed one row group at a time. Raises InvalidInput naming row, column and value
    when a value does not fit its column, and when there is no run. Hidden states stay where they
    are: a log written elsewhere does not name them.
    """
    here = (_below(run, path.parent) for run in runs)
    rows = write_parquet(path, SCHEMA, _tables_of(here), REPEATED_COLUMNS)
    write_manifest(path, manifest or {}, SCHEMA_VERSION, rows)
    return rows


def read_runs(path: Path) -> RunLog:
    """Read a run log: a Parquet file, or a folder of them.

    A log whose texts pass 2 GB does not fit one column: stream it with :func:`iter_runs`.
    Raises InvalidInput naming file, column and next step.
    """
    tables = [table for _, _, table in iter_tables(path)]
    with readable(path):
        return RunLog(_joined(tables), folder_of(path))


def iter_runs(path: Path) -> Iterator[DecodeRun]:
    """Yield the runs of a log, holding one batch in memory at a time."""
    for _, _, table in iter_tables(path):
        yield from _runs_of(table, folder_of(path))


def folder_of(path: Path) -> Path:
    """Return the folder in which a log's own files lie: that of the file, or the log itself."""
    return path if path.is_dir() else path.parent


def iter_tables(
    path: Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[Path, int, pa.Table]]:
    """Yield (file, number of its first row, batch) over a log; batches are checked and typed.

    With ``columns`` only these are read, which is what a pass over ten million runs needs.
    """
    total = 0
    for file_path in parquet_files(path):
        file = open_parquet(file_path, STRING_COLUMNS)
        with readable(file_path):
            schema = file.schema_arrow
        check_columns(schema, file_path)
        row = 0
        batches = _batches(file, columns)
        while (batch := _next_batch(batches, file_path)) is not None:
            table = memory_table(pa.table(batch), str(file_path), row)
            yield file_path, row, table
            row += len(table)
        total += row
        if total > MAX_ROWS:
            raise InvalidInput(f"{path} holds over {MAX_ROWS} rows: read its files one by one")


def _batches(file: pq.ParquetFile, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """Yield batches a few row groups at a time: one reader for all of them would carry the
    dictionary of every run id seen so far, which in ten million runs is gigabytes."""
    groups, rows = file.num_row_groups, file.metadata.num_rows
    lot = max(1, groups * BATCH_ROWS // rows)
    for first in range(0, groups, lot):
        some = list(range(first, min(first + lot, groups)))
        yield from file.iter_batches(batch_size=BATCH_ROWS, row_groups=some, columns=columns)


def _next_batch(batches: Iterator[pa.RecordBatch], path: Path) -> pa.RecordBatch | None:
    with readable(path):
        batch = next(batches, None)
        if batch is not None:
            batch.validate(full=True)
        return batch


def _joined(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _runs_of(table: pa.Table, folder: Path | None) -> Iterator[DecodeRun]:
    columns = [_values(table[name]) for name in SCHEMA.names]
    for row in zip(*columns, strict=True):
        run = DecodeRun(**dict(zip(SCHEMA.names, row, strict=True)))
        if folder is not None and run.hidden_ref is not None:
            run = replace(run, hidden_ref=_found(run.hidden_ref, folder))
        yield run


def _found(ref: str, folder: Path) -> str:
    """Return the whole path of a file that ``ref`` names below ``folder``, else ``ref`` as it is:
    a log points nowhere outside its folder, and a name without a file stays a name."""
    try:
        whole = (folder / ref).resolve()
    except ValueError:  # a NUL byte
        return ref
    return str(whole) if whole.is_relative_to(folder.resolve()) and whole.is_file() else ref


def _below(run: DecodeRun, folder: Path) -> DecodeRun:
    """Return ``run`` as a log in ``folder`` names its hidden states: by a path below it, or not at
    all where they lie elsewhere."""
    if run.hidden_ref is None or not Path(run.hidden_ref).is_absolute():
        return run
    whole, base = Path(run.hidden_ref), folder.resolve()
    ref = str(whole.relative_to(base)) if whole.is_relative_to(base) else None
    return replace(run, hidden_ref=ref)


def _values(column: pa.ChunkedArray) -> list[object]:
    if column.type == MEMORY_STR:
        return list(decoded(column))
    if column.type == PROGRESS:
        counts, values = progress_arrays(column)
        records = iter(values.tolist())
        return [
            None if count < 0 else tuple(ProgressRecord(*r) for r in islice(records, count))
            for count in counts.tolist()
        ]
    return list(column.to_pylist())


def _tables_of(runs: Iterable[DecodeRun]) -> Iterator[pa.Table]:
    source = iter(runs)
    row = 0
    while chunk := list(islice(source, BATCH_ROWS)):
        yield pa.table([column_of(chunk, field, row) for field in SCHEMA], schema=SCHEMA)
        row += len(chunk)
