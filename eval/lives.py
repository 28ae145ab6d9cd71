"""Lives: what a score at a deadline needs of one engine run's tagged cohort, as arrays.

Records of a study run to tens of millions; read as columns, a run's cohort costs microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.records import RequestRecord

ENDED = ("completed", "length_capped")
KEY = ("pressure", "policy", "signal", "seed")
_TEXTS = ("request_id", "state", "end_reason")
_TIMES = ("arrival_s", "end_s", "censor_s", "single_stream_s", "deadline_s", "deadline_seen")


@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """The accepted tagged requests of one engine run, one entry each; times in seconds, NaN where
    a thing never happened (``end_s``), was never promised (``deadline_s``, the request's own) or
    never read (``deadline_seen``)."""

    request_id: npt.NDArray[np.str_]
    state: npt.NDArray[np.str_]
    end_reason: npt.NDArray[np.str_]
    arrival_s: FloatArray
    end_s: FloatArray
    censor_s: FloatArray
    single_stream_s: FloatArray
    deadline_s: FloatArray
    deadline_seen: FloatArray

    def __len__(self) -> int:
        return len(self.state)

    @property
    def has_ended(self) -> npt.NDArray[np.bool_]:
        """Whether each came to its end: stopped, or reached its cap."""
        return np.isin(self.state, ENDED)


@dataclass(frozen=True, slots=True, order=True)
class RunKey:
    """Which engine run of a task: pressure and policy by name, and the seed."""

    pressure: str
    policy: str
    signal: str
    seed: int


def lives_of(records: Sequence[RequestRecord]) -> Lives:
    """Return the accepted tagged cohort of ``records``."""
    cohort = [r for r in records if r.cohort == "tagged" and r.state != "rejected"]
    return _lives(
        {name: [getattr(record, name) for record in cohort] for name in (*_TEXTS, *_TIMES)}
    )


def read_records(path: Path) -> Iterator[tuple[RunKey, Lives]]:
    """Yield each engine run of a task's records file (eval.cells.write_task) with its cohort.

    Raises InvalidInput for a damaged file, which says to delete it, and for a request that stands
    in a run twice: its cohorts overlap.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    wanted = [*KEY, "cohort", *_TEXTS, *_TIMES]
    try:
        table = pq.read_table(path, columns=wanted)
        missing = [name for name in wanted if name not in table.column_names]
        if missing:
            raise InvalidInput(f"{path} has no column {', '.join(missing)}: run again to redo it")
        keys = [table[name].to_pylist() for name in KEY]
        ids = table["request_id"].to_numpy()
        keep = pc.and_(
            pc.equal(table["cohort"], "tagged"), pc.not_equal(table["state"], "rejected")
        ).to_numpy()
        columns = {name: table[name].to_numpy() for name in (*_TEXTS, *_TIMES)}
    except (pa.ArrowException, OSError) as error:
        raise InvalidInput(
            f"{path} is damaged ({error}): delete it with its cells, and run again to redo it"
        ) from None
    for key, start, stop in _stretches(list(zip(*keys, strict=True))):
        run = RunKey(*key)
        _check_disjoint(path, run, ids[start:stop])
        inside = keep[start:stop]
        yield run, _lives({name: column[start:stop][inside] for name, column in columns.items()})


def _stretches(keys: Sequence[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], int, int]]:
    """Yield each run of equal keys with its first row and the row after its last."""
    start = 0
    for row in range(1, len(keys) + 1):
        if row == len(keys) or keys[row] != keys[start]:
            yield keys[start], start, row
            start = row


def _check_disjoint(path: Path, run: RunKey, ids: npt.NDArray[Any]) -> None:
    names, counts = np.unique(ids.astype(str), return_counts=True)
    if (counts > 1).any():
        raise InvalidInput(
            f"{path}, {run}: request {names[counts.argmax()]!r} stands there {counts.max()} times: "
            "cohorts overlap, so it would be scored more than once; delete the file and run again"
        )


def _lives(columns: dict[str, Any]) -> Lives:
    values: dict[str, Any] = {name: np.asarray(columns[name], dtype=str) for name in _TEXTS}
    values |= {name: np.asarray(columns[name], dtype=np.float64) for name in _TIMES}
    return Lives(**values)
