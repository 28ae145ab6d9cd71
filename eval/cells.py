"""Cells, and how they lie on disk: a Parquet file of cells a task, one of request records beside.

Both are written whole or not at all. The records are what any later score is computed from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from contracts.files import atomic_path
from contracts.records import RequestRecord
from eval.outcomes import BreachScore
from eval.service import ServiceScore

_SCORE_FIELDS = tuple(field.name for field in fields(BreachScore))
_SERVICE_FIELDS = tuple(field.name for field in fields(ServiceScore))


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine run: what was combined, what it scored, and what it cost. ``breach_by_class`` has
    a share for each deadline class, in the order of the matrix; empty without classes."""

    pressure: str
    num_blocks: int
    policy: str
    signal: str
    seed: int
    score: BreachScore
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


def write_task(
    path: Path,
    cells: Sequence[Cell],
    records: Sequence[tuple[Cell, Sequence[RequestRecord]]],
) -> None:
    """Write the tagged records of a task, then its cells: a cells file means that both are there.

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
    beside = path.parent.parent / "records" / path.name
    with atomic_path(beside) as scratch:
        pq.write_table(pa.table(columns), scratch, compression="zstd")
    write_cells(path, cells)


def _check_once(lives: Sequence[RequestRecord]) -> None:
    counts = Counter(life.request_id for life in lives)
    name, most = counts.most_common(1)[0]
    if most > 1:
        raise InvalidInput(f"request {name!r} stands there {most} times: cohorts overlap")


def write_cells(path: Path, cells: Sequence[Cell]) -> None:
    """Write cells as one Parquet file, the fields of the score beside the cell's own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for cell in cells:
        row = asdict(cell)
        score, service = row.pop("score"), row.pop("service")
        rows.append(row | score | service)
    with atomic_path(path) as scratch:
        pq.write_table(pa.Table.from_pylist(rows), scratch, compression="zstd")


def read_cells(path: Path) -> list[Cell]:
    """Read the cells of one task file; a damaged one is an error that says to delete it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return [_cell(row) for row in pq.read_table(path).to_pylist()]
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{path} is damaged ({error}): delete it, and run again to redo it"
        ) from None


def _cell(row: dict[str, Any]) -> Cell:
    score = BreachScore(**{name: row.pop(name) for name in _SCORE_FIELDS})
    service = ServiceScore(**{name: row.pop(name) for name in _SERVICE_FIELDS})
    lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return Cell(score=score, service=service, **row | lists)
