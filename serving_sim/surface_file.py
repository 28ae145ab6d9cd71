"""The file of a SurfaceProfile: one JSON object, version 1, that is checked in full when read.

    {"format": "preemptbench-profile/1", <ProfileHeader's fields>, "errors": {surface: FitError},
     "skew_share": 0, "graph_batch_sizes": [], "tables": {name: {axis: [...], ..., "us": [...]}}}

Seconds are written in microseconds, row by row, all axes in the order of surface.TABLES.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from serving_sim.surface import (
    MAX_CELLS,
    TABLES,
    FitError,
    ProfileHeader,
    SurfaceProfile,
    Table,
)

FORMAT = "preemptbench-profile/1"
_S_PER_US = 1e-6
_HEADER = fields(ProfileHeader)
_COUNTS = ("num_layers", "kv_bytes_per_token", "weight_bytes")


def surface_text(profile: SurfaceProfile) -> str:
    """Return the file's text: one line for each field, and for each axis and column of a table."""
    document = surface_document(profile)
    tables = document.pop("tables")
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
    blocks = []
    for name, table in tables.items():
        columns = ",\n".join(
            f"   {json.dumps(key)}: {json.dumps(values, separators=(',', ':'))}"
            for key, values in table.items()
        )
        blocks.append(f"  {json.dumps(name)}: {{\n{columns}\n  }}")
    lines.append(' "tables": {\n' + ",\n".join(blocks) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def surface_document(profile: SurfaceProfile) -> dict[str, Any]:
    """Return what the file holds, as plain values."""
    return {
        "format": FORMAT,
        **asdict(profile.header),
        "errors": {name: asdict(error) for name, error in profile.errors.items()},
        "skew_share": profile.skew_share,
        "graph_batch_sizes": list(profile.graph_batch_sizes),
        "tables": {name: _columns(name, table) for name, table in profile.tables.items()},
    }


def _columns(name: str, table: Table) -> dict[str, list[float]]:
    axes = {
        axis: [_short(x) for x in points]
        for axis, points in zip(TABLES[name], table.axes, strict=True)
    }
    microseconds = (table.seconds / _S_PER_US).ravel().tolist()
    return {**axes, "us": [_short(float(f"{us:.10g}")) for us in microseconds]}


def _short(x: float) -> float:
    return int(x) if x == int(x) else x


def parse_surface(data: Mapping[str, Any], where: str) -> SurfaceProfile:
    """Return the profile in a parsed file; raises InvalidInput for anything that is off."""
    if data.get("format") != FORMAT:
        raise InvalidInput(f"profile {where}: format is {data.get('format')!r}; expected {FORMAT}")
    names = [field.name for field in _HEADER]
    known = ["format", *names, "errors", "skew_share", "graph_batch_sizes", "tables"]
    _known_keys(data, known, where)
    header = ProfileHeader(**{name: _header_value(data, name, where) for name in names})
    errors = _object(data, "errors", where)
    tables = _object(data, "tables", where)
    skew = data.get("skew_share", 0.0)
    sizes = data.get("graph_batch_sizes", [])
    if not _is_number(skew) or not isinstance(sizes, list):
        raise InvalidInput(f"profile {where}: skew_share is a number, graph_batch_sizes a list")
    return SurfaceProfile(
        header=header,
        tables={name: _table(name, value, where) for name, value in tables.items()},
        errors={str(name): _fit_error(value, f"{where}, {name}") for name, value in errors.items()},
        skew_share=float(skew),
        graph_batch_sizes=tuple(sizes),
    )


def _header_value(data: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a field of the header; texts are texts, counts whole numbers, the rest defaults."""
    default = {f.name: None if f.default is MISSING else f.default for f in _HEADER}[name]
    value: Any
    if name == "versions":
        value = _object(data, name, where)
        is_right = len(value) <= 64 and all(isinstance(v, str) for v in value.values())
    elif name in _COUNTS:
        value = data.get(name)
        is_right = value is None or (type(value) is int and 0 < value < 1 << 60)
    elif name == "tensor_parallel":
        value = data.get(name, default)
        is_right = type(value) is int and 0 < value <= 1024
    else:
        value = data.get(name, default)
        is_right = isinstance(value, str) and 0 < len(value) <= 2000
    if not is_right:
        raise InvalidInput(
            f"profile {where}: {name} is {str(value)[:60]!r}; texts are not empty, counts are "
            "whole numbers above 0 (or null), versions go from name to text"
        )
    return value


def _table(name: str, data: object, where: str) -> Table:
    where = f"{where}, table {name!r}"
    if name not in TABLES:
        raise unknown_name(f"table in {where}", name, TABLES)
    if not isinstance(data, Mapping):
        raise InvalidInput(f"profile {where} is a {type(data).__name__}: write a JSON object")
    _known_keys(data, [*TABLES[name], "us"], where)
    axes = [_numbers(data, axis, where) for axis in TABLES[name]]
    values = _numbers(data, "us", where)
    if len(values) != math.prod(map(len, axes)):
        raise InvalidInput(
            f"profile {where}: {len(values)} values for a grid of "
            f"{' x '.join(str(len(axis)) for axis in axes)} points; give one for each"
        )

    seconds = (np.array(values) * _S_PER_US).reshape([len(axis) for axis in axes])
    return Table(tuple(map(tuple, axes)), seconds)


def _numbers(data: Mapping[str, Any], key: str, where: str) -> list[float]:
    values = data.get(key)
    if not isinstance(values, list) or len(values) > MAX_CELLS or not all(map(_is_number, values)):
        raise InvalidInput(
            f"profile {where}: {key} must be a list of at most {MAX_CELLS} numbers, without holes"
        )
    return [float(value) for value in values]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e18


def _fit_error(data: object, where: str) -> FitError:
    names = [field.name for field in fields(FitError)]
    if not isinstance(data, Mapping) or set(data) != set(names):
        raise InvalidInput(f"profile {where}: an error holds {', '.join(names)}")
    if not all(_is_number(value) and value >= 0 for value in data.values()):
        raise InvalidInput(f"profile {where}: an error's figures are numbers >= 0")
    return FitError(**data)


def _object(data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, Mapping):
        raise InvalidInput(f"profile {where}: {key} is a {type(value).__name__}: write an object")
    return value


def _known_keys(data: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in data:
        if key not in known:
            raise unknown_name(f"profile key in {where}", str(key), known)
