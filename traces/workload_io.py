"""Workloads on disk: Parquet (zstd), and a JSON manifest beside it with the name and origin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from contracts.errors import InvalidInput
from traces.tables import (
    manifest_path,
    open_parquet,
    read_manifest,
    readable,
    write_manifest,
    write_parquet,
)
from traces.workload import Workload

SCHEMA_VERSION = "workload/2"
SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("arrival_s", pa.float64()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("max_tokens", pa.int64()),
        ("priority", pa.int64()),
        ("deadline_s", pa.float64()),
        ("cohort", pa.int64()),
        ("capped", pa.bool_()),
        ("run_id", pa.string()),
        ("prefix_group", pa.int64()),
        ("prefix_tokens", pa.int64()),
    ]
)


def write_workload(workload: Workload, path: Path) -> None:
    """Write a workload and its manifest, each atomically."""
    columns = {name: getattr(workload, name) for name in SCHEMA.names[1:-3]}
    nobody = [None] * len(workload)
    groups = workload.prefix_groups
    table = pa.table(
        {
            "request_id": workload.request_ids,
            **columns,
            "run_id": workload.run_ids if workload.run_ids is not None else nobody,
            "prefix_group": nobody if groups is None else groups[:, 0],
            "prefix_tokens": nobody if groups is None else groups[:, 1],
        },
        SCHEMA,
    )
    rows = write_parquet(path, SCHEMA, [table], ["run_id"])
    fields = {"name": workload.name, "workload": workload.manifest}
    write_manifest(path, fields, SCHEMA_VERSION, rows)


def read_workload(path: Path) -> Workload:
    """Read what :func:`write_workload` wrote; raises InvalidInput naming the file and the rule."""
    file = open_parquet(path)
    with readable(path):
        if not file.schema_arrow.equals(SCHEMA):
            raise InvalidInput(f"{path}: {_schema_difference(file.schema_arrow)}")
        table = file.read()
        table.validate(full=True)
        holes = [name for name in SCHEMA.names[:-3] if table[name].null_count]
        columns = {
            name: table[name].to_pylist()
            for name in ("request_id", "run_id", "prefix_group", "prefix_tokens")
        }
    if holes:
        row = table[holes[0]].to_pylist().index(None)
        raise InvalidInput(
            f"{path}: columns {holes} hold nulls (the first in row {row}); a workload has none "
            "there: give every request a value"
        )
    manifest = read_manifest(path)
    if manifest is None or not isinstance(manifest.get("workload"), dict):
        raise InvalidInput(f"{manifest_path(path)} is missing or names no workload: copy it along")
    arrays = {
        name: np.array(table[name].to_numpy()) for name in SCHEMA.names if name not in columns
    }
    known = None not in columns["run_id"]
    groups = list(zip(columns["prefix_group"], columns["prefix_tokens"], strict=True))
    shares = all(None not in pair for pair in groups)
    return Workload(
        name=str(manifest.get("name")),
        request_ids=tuple(columns["request_id"]),
        run_ids=tuple(columns["run_id"]) if known else None,
        prefix_groups=np.array(groups, dtype=np.int64) if shares else None,
        manifest=manifest["workload"],
        **arrays,
    )


def _schema_difference(found: pa.Schema) -> str:
    """Say how ``found`` differs from SCHEMA, and what to do."""
    lacks = [name for name in SCHEMA.names if name not in found.names]
    odd = [name for name in found.names if name not in SCHEMA.names]
    typed = [
        f"{field.name} is {found.field(field.name).type}, not {field.type}"
        for field in SCHEMA
        if field.name in found.names and not found.field(field.name).type.equals(field.type)
    ]
    said = [
        f"column {lacks[0]!r} is missing ({len(lacks)} in all)" if lacks else "",
        f"column {odd[0]!r} is unknown ({len(odd)} in all)" if odd else "",
        "; ".join(typed),
    ]
    what = "; ".join(part for part in said if part) or "its columns stand in another order"
    return f"{what}; a workload has {', '.join(SCHEMA.names)}: write it with write_workload"
