"""JSON from strangers: no NaN, no duplicate key, bounded size and depth, one kind of error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput

MAX_LINE_BYTES = 1_000_000
MAX_FILE_BYTES = 512 << 20
MAX_DEPTH = 32


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text; raises InvalidInput naming ``where`` and the rule."""
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_float=_finite_float,
        )
    except RecursionError:
        raise InvalidInput(f"{where} nests deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise InvalidInput(f"{where} is not valid JSON: {error}") from None
    # the walk is only worth it where so many levels are possible at all
    if text.count("[") + text.count("{") > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        raise InvalidInput(f"{where} nests deeper than {MAX_DEPTH} levels")
    return value


def iter_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a JSONL file; blank lines are passed over."""
    _must_exist(path)
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path} line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise InvalidInput(f"{where} is longer than {MAX_LINE_BYTES} bytes")
            if not line.strip():
                continue
            row = parse_json(_decode(line, where), where)
            if not isinstance(row, dict):
                raise InvalidInput(f"{where} is a {type(row).__name__}: write one object a line")
            yield number, row


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    _must_exist(path)
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise InvalidInput(f"{path} has {size} bytes; the bound is {MAX_FILE_BYTES}")
    value = parse_json(_decode(path.read_bytes(), str(path)), str(path))
    if not isinstance(value, dict):
        raise InvalidInput(f"{path} is a {type(value).__name__}: it must hold one JSON object")
    return value


def _must_exist(path: Path) -> None:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InvalidInput(f"{path} {what}: give the path of a file")


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} stands twice in one object")
    return row


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number JSON knows")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the range of a float")
    return value


def _deeper_than(value: Any, limit: int) -> bool:
    layer = [value]
    for _ in range(limit):
        nested = (v for v in layer if isinstance(v, dict | list))
        layer = [c for v in nested for c in (v.values() if isinstance(v, dict) else v)]
        if not layer:
            return False
    return any(isinstance(v, dict | list) for v in layer)
