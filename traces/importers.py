"""Importers: other tools' logs of generations as decode runs, under stated rules.

Every importer takes files, a counter for texts without token counts, a column map and constants,
and returns (runs, report). Tables (JSONL, CSV, Parquet) are read here through a column map; logs
with fixed fields in traces.import_logs.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput, missing_dependency, unknown_name
from contracts.runs import DecodeRun
from traces.import_logs import LOG_FORMATS
from traces.import_rules import (
    CHARS_PER_4,
    FIELDS,
    ForeignRow,
    ImportReport,
    Tally,
    TokenCounter,
    check_field,
    settle,
)
from traces.safe_json import MAX_LINE_BYTES, iter_jsonl
from traces.tables import BATCH_ROWS, open_parquet, readable

_Table = Iterator[tuple[int, dict[str, Any]]]


def import_runs(
    kind: str,
    paths: Sequence[Path],
    *,
    column_map: Mapping[str, str] | None = None,
    constants: Mapping[str, object] | None = None,
    where: Mapping[str, str] | None = None,
    counter: TokenCounter = CHARS_PER_4,
) -> tuple[list[DecodeRun], ImportReport]:
    """Read ``paths`` in the format ``kind`` (a key of :data:`FORMATS`) as decode runs.

    ``column_map`` (table formats only) names a source column for a run-log field; a column that
    already has a field's name needs no entry. ``constants`` set a field of every row. ``where``
    keeps the rows whose source columns equal the given texts. Raises InvalidInput.
    """
    if kind not in FORMATS:
        raise unknown_name("import format", kind, FORMATS)
    if not paths:
        raise InvalidInput("an import needs at least one file; none was given")
    columns, wanted = column_map or {}, where or {}
    for name in columns:
        check_field(name)
    if kind not in _TABLES and (columns or wanted):
        raise InvalidInput(f"format {kind!r} has fixed columns: drop --map and --where")
    tally = Tally()

    def rows() -> Iterator[ForeignRow]:
        for path in paths:
            if kind in _TABLES:
                table = _TABLES[kind](path, {*columns.values(), *wanted})
                yield from _mapped(path, table, columns, wanted, tally)
            else:
                yield from LOG_FORMATS[kind](path, counter, tally)

    runs = settle(rows(), constants or {}, tally)
    if not runs:
        raise InvalidInput(
            f"no run could be read from {', '.join(map(str, paths))} (rows skipped: "
            f"{dict(tally.skipped)}); check the format and --where"
        )
    report = ImportReport(
        format=kind,
        sources=tuple(path.name for path in paths),
        rows_read=len(runs) + sum(tally.skipped.values()),
        rows_kept=len(runs),
        skipped=dict(sorted((k, n) for k, n in tally.skipped.items() if n)),
        decided=dict(sorted(tally.decided.items())),
    )
    return runs, report


def tokenizer_counter(name: str) -> TokenCounter:
    """Return a counter that uses the tokenizer of a local folder or a Hugging Face id."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing_dependency("transformers", "collect", "--tokenizer") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidInput(
            f"tokenizer {name!r} could not be loaded ({first}): give a local folder or an id"
        ) from None

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return TokenCounter(count, f"retokenised:{name}")


def _mapped(
    path: Path,
    rows: _Table,
    column_map: Mapping[str, str],
    where: Mapping[str, str],
    tally: Tally,
) -> Iterator[ForeignRow]:
    for number, row in rows:
        if any(str(row.get(column)) != text for column, text in where.items()):
            tally.skipped["left out by --where"] += 1
            continue
        values = {name: row[name] for name in FIELDS if name in row}
        values |= {name: row.get(column) for name, column in column_map.items()}
        yield ForeignRow(f"{path} row {number}", values)


def _jsonl_rows(path: Path, needed: set[str]) -> _Table:
    seen: set[str] = set()
    for number, row in iter_jsonl(path):
        seen.update(row)
        yield number, row
    # a line may leave out what it does not know; a name no line has is a slip
    _check_present(path, needed, seen)


def _csv_rows(path: Path, needed: set[str]) -> _Table:
    if not path.is_file():
        raise InvalidInput(f"{path} does not exist: give the path of a CSV file")
    csv.field_size_limit(MAX_LINE_BYTES)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if len(set(header)) != len(header):
                raise InvalidInput(f"{path}: a column name stands twice in {header}")
            _check_present(path, needed, header)
            for number, cells in enumerate(reader, start=1):
                if len(cells) != len(header):
                    raise InvalidInput(
                        f"{path} row {number} has {len(cells)} cells; the header has {len(header)}"
                    )
                yield number, dict(zip(header, cells, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path} near line {reader.line_num}: {error}") from None


def _parquet_rows(path: Path, needed: set[str]) -> _Table:
    file = open_parquet(path)
    with readable(path):
        names = file.schema_arrow.names
    _check_present(path, needed, names)
    wanted = [name for name in names if name in needed | FIELDS]
    batches = file.iter_batches(batch_size=BATCH_ROWS, columns=wanted)
    number = 0
    while True:
        with readable(path):
            batch = next(batches, None)
            rows = batch.to_pylist() if batch is not None else []
        if not rows:
            return
        for row in rows:
            yield number, row
            number += 1


def _check_present(path: Path, needed: set[str], columns: Iterable[str]) -> None:
    for column in sorted(needed):
        if column not in columns:
            raise unknown_name(f"column of {path}", column, columns)


_TABLES: dict[str, Callable[[Path, set[str]], _Table]] = {
    "jsonl": _jsonl_rows,
    "csv": _csv_rows,
    "parquet": _parquet_rows,
}
FORMATS = (*_TABLES, *LOG_FORMATS)
