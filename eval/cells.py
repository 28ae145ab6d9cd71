"""Cells, and how they lie on disk: a Parquet file of cells a task, one of request records beside.

Both are written whole or not at all. The records are what any later score is computed from.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from contracts.files import atomic_path
from contracts.records import RequestRecord
from eval.outcomes import BreachScore
from eval.service import ServiceScore

_RECORDS_SHA256 = b"preemptbench.records_sha256"
# torn or foreign files: ArrowInvalid is a ValueError, ArrowIOError an OSError
_DAMAGE = (ValueError, OSError, KeyError, TypeError, NotImplementedError)
_SCORE_FIELDS = tuple(field.name for field in fields(BreachScore))
_SERVICE_FIELDS = tuple(field.name for field in fields(ServiceScore))


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine run: what was combined, what it scored, and what it cost. ``breach_by_class`` has
    a share for each deadline class, in the order of the matrix; empty without classes.
    ``accepted_digest`` names the set of requests that the score is of."""

    pressure: str
    num_blocks: int
    policy: str
    signal: str
    seed: int
    score: BreachScore
    accepted_digest: str
    service: ServiceScore
    preemptions_per_1000: float
    recompute_tax: float
    num_preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    cache_hit_tokens: int
    signal_fallbacks: int
    breach_by_half: tuple[float, float]
    breach_by_class: tuple[float, ...]
    num_steps: int
    end_s: float
    drained: bool


def same_cohort(cells: Sequence[Cell], baseline: Sequence[Cell]) -> bool:
    """Say whether two rules accepted the same requests in every seed; ``cells`` and ``baseline``
    are in one order of seeds. The breaches of different requests do not compare."""
    return [c.accepted_digest for c in cells] == [c.accepted_digest for c in baseline]


def write_task(
    path: Path,
    cells: Sequence[Cell],
    records: Sequence[tuple[Cell, Sequence[RequestRecord]]],
) -> None:
    """Write the tagged records of a task, then its cells: a cells file means that both are there,
    and holds the hash of the records.

    Warm-up and filler only load the system; they are most requests, and no score reads them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, list[Any]] = {
        name: [] for name in ("pressure", "policy", "signal", "seed")
    } | {field.name: [] for field in fields(RequestRecord)}
    for cell, lives in records:
        _check_once(lives)
        for life in (life for life in lives if life.cohort == "tagged"):
            for name in ("pressure", "policy", "signal", "seed"):
                columns[name].append(getattr(cell, name))
            for field in fields(RequestRecord):
                columns[field.name].append(getattr(life, field.name))
    beside = _records_beside(path)
    with atomic_path(beside) as scratch:
        pq.write_table(pa.table(columns), scratch, compression="zstd", write_page_checksum=True)
    write_cells(path, cells, {_RECORDS_SHA256: _sha256(beside)})


def damage_of(path: Path) -> str | None:
    """Say how a task's files are damaged; None when they are whole, or there is no such task.

    Checked: the cells' pages (checksums) and columns, and the hash of the records beside.
    """
    if not path.exists():
        return None
    try:
        table = _read_table(path)
        _cells_of(table)
        beside = _records_beside(path)
        metadata: dict[bytes, bytes] = table.schema.metadata or {}
        if not beside.exists():
            return "its records are missing"
        if metadata.get(_RECORDS_SHA256) != _sha256(beside):
            return "its records have another hash than when they were written"
    except _DAMAGE as error:
        return f"it does not read: {str(error).splitlines()[0]}"
    return None


def set_aside_damaged(path: Path) -> str | None:
    """Move a damaged task's files (:func:`damage_of`) into ``quarantine/`` and return a line that
    names the damage; None when there is none."""
    damage = damage_of(path)
    if damage is None:
        return None
    moved = set_aside(path)
    if _records_beside(path).exists():
        set_aside(_records_beside(path))
    return f"{path} is damaged ({damage}): moved to {moved.parent}, and run again"


def quarantine_of(path: Path) -> Path:
    """Return the folder into which a damaged file of a task's folder goes."""
    return path.parent.parent / "quarantine"


def set_aside(path: Path) -> Path:
    """Move a damaged file of a task into the quarantine, beside what lies there, and return it."""
    folder = quarantine_of(path)
    folder.mkdir(parents=True, exist_ok=True)
    number = sum(1 for _ in folder.glob(f"{path.parent.name}-*-{path.name}"))
    moved = folder / f"{path.parent.name}-{number}-{path.name}"
    os.replace(path, moved)
    return moved


def _records_beside(path: Path) -> Path:
    return path.parent.parent / "records" / path.name


def _sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def _check_once(lives: Sequence[RequestRecord]) -> None:
    counts = Counter(life.request_id for life in lives)
    name, most = counts.most_common(1)[0]
    if most > 1:
        raise InvalidInput(f"request {name!r} stands there {most} times: cohorts overlap")


def write_cells(
    path: Path, cells: Sequence[Cell], metadata: Mapping[bytes, bytes] | None = None
) -> None:
    """Write cells as one Parquet file, the fields of the score beside the cell's own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for cell in cells:
        row = asdict(cell)
        score, service = row.pop("score"), row.pop("service")
        rows.append(row | score | service)
    with atomic_path(path) as scratch:
        table = pa.Table.from_pylist(rows).replace_schema_metadata(metadata)
        pq.write_table(table, scratch, compression="zstd", write_page_checksum=True)


def read_cells(path: Path) -> list[Cell]:
    """Read the cells of one task file; a damaged one is an error that says to delete it."""
    try:
        return _cells_of(_read_table(path))
    except _DAMAGE as error:
        raise InvalidInput(
            f"{path} is damaged ({error}): delete it, and run again to redo it"
        ) from None


def _read_table(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(path, page_checksum_verification=True)


def _cells_of(table: Any) -> list[Cell]:
    return [_cell(row) for row in table.to_pylist()]


def _cell(row: dict[str, Any]) -> Cell:
    score = BreachScore(**{name: row.pop(name) for name in _SCORE_FIELDS})
    service = ServiceScore(**{name: row.pop(name) for name in _SERVICE_FIELDS})
    lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return Cell(score=score, service=service, **row | lists)
