"""Damaged run logs: whatever bytes change, only PreemptBenchError escapes, or reading succeeds."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contracts.errors import InvalidInput, PreemptBenchError
from contracts.randomness import keyed_generator
from tests.unit.test_runlog import make_runs
from traces.runlog import read_runs, write_runs
from traces.safe_json import parse_json
from traces.validate import validate_runs


def _mutants(data: bytes, count: int) -> list[bytes]:
    """Truncations, flipped bytes, overwritten stretches, and footers with flipped bytes."""
    rng = keyed_generator(7, "runlog-fuzz")
    out = []
    for number in range(count):
        at = int(rng.integers(len(data)))
        body = bytearray(data)
        if number % 5 == 0:
            body = body[:at]
        elif number % 5 == 1:
            body[at : at + 16] = rng.bytes(16)
        elif number % 5 == 2:
            body[at] ^= int(rng.integers(1, 256))
        else:  # the footer: where a reader believes what it reads
            at = len(data) - 1 - int(rng.integers(min(len(data), 6000)))
            body[at] ^= int(rng.integers(1, 256))
        out.append(bytes(body))
    return out


def _read_all(path: Path) -> bool:
    """Read, iterate and validate; say whether it was refused."""
    try:
        assert all(run.run_id is not None for run in read_runs(path))
        validate_runs(path)
    except PreemptBenchError as error:
        assert str(path) in str(error)
        return True
    return False


@pytest.mark.parametrize("checksums", [True, False])
def test_mutated_parquet(tmp_path: Path, checksums: bool) -> None:
    path = tmp_path / "log.parquet"
    write_runs(make_runs(6), path)
    path.with_suffix(".manifest.json").unlink()
    if not checksums:  # a file of another writer, of which damaged pages are decoded
        pq.write_table(pq.read_table(path), path, compression="none")
    refused = 0
    for mutant in _mutants(path.read_bytes(), 150):
        path.write_bytes(mutant)
        refused += _read_all(path)
    assert refused > 100 if checksums else refused > 50


def test_hostile_column_types(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    write_runs(make_runs(2), path)
    good = pq.read_table(path)
    hostile = [
        pa.array([b"\xff\xfe", b"x"]),
        pa.array([[1], [2]]),
        pa.array([{"a": 1}, {"a": 2}]),
        pa.array([1.5, None]),
        pa.nulls(2),
        pa.array([True, False]),
    ]
    for name in good.column_names:
        for column in hostile:
            if name in ("event_observed", "batch_invariant") and column.type == pa.bool_():
                continue
            if column.type == pa.null() and good.schema.field(name).nullable:
                continue
            if column.type == pa.float64() and name in ("temperature", "wall_s"):
                continue
            index = good.column_names.index(name)
            pq.write_table(good.set_column(index, name, column), path)
            with pytest.raises(InvalidInput, match=name):
                read_runs(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ('{"a": 1e999}', "beyond the range"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ("[" * 40 + "]" * 40, "deeper than 32"),
        ("[" * 100_000, "deeper than 32"),
        ('{"a": ' * 33 + "1" + "}" * 33, "deeper than 32"),
        ("9" * 5000, "not valid JSON"),
        ('{"a"', "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_hostile_json(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"here .*{message}"):
        parse_json(text, "here")


def test_json_at_the_depth_bound_is_read() -> None:
    assert parse_json("[" * 32 + "]" * 32, "here") is not None
