"""A table once: typed values under named columns, shown as HTML or Markdown, kept as CSV and
Parquet. Shown values are rounded; kept ones are not."""

from __future__ import annotations

import csv
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from contracts.files import atomic_path

Kind = Literal["text", "count", "share", "pp", "seconds", "number", "p"]
Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Column:
    """``key`` names it in files (unit included), ``title`` on a page; ``kind`` says how a value is
    shown: a share of 1 as a percentage, ``pp`` with its sign."""

    key: str
    title: str
    kind: Kind = "text"


@dataclass(frozen=True, slots=True)
class Table:
    """``name`` is its file name without suffix; ``caption`` says what to see."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]


def show(value: Value, kind: Kind) -> str:
    """Return ``value`` as a reader sees it; what does not exist is a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if kind == "text" or isinstance(value, str):
        return str(value)
    match kind:
        case "share":
            return f"{value:.1%}"
        case "pp":
            return f"{value:+.2f}" if abs(value) < 1 else f"{value:+.1f}"
        case "count" | "seconds":
            return f"{value:,.0f}"
        case "p":
            return f"{value:.3f}" if value >= 0.001 else "< 0.001"
    return f"{value:.3g}"


def html_table(table: Table) -> str:
    """Return the table for a page of eval.report, sortable by a click on a head."""
    heads = "".join(
        f'<th scope=col class={c.kind[0]} aria-sort="none"><button>{html.escape(c.title)}</button>'
        "</th>"
        for c in table.columns
    )
    lines = "".join(
        "<tr>"
        + "".join(_cell(v, c.kind) for v, c in zip(row, table.columns, strict=True))
        + "</tr>"
        for row in table.rows
    )
    caption = html.escape(table.caption)
    return (
        f'<p class="caption">{caption}</p><div class="scroll"><table class="sortable" '
        f'aria-label="{html.escape(table.name)}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _cell(value: Value, kind: Kind) -> str:
    text = html.escape(show(value, kind))
    if kind == "text" or value is None or isinstance(value, str):
        return f"<td class=t>{text}</td>" if kind == "text" else f"<td>{text}</td>"
    return f'<td data-v="{value:.6g}">{text}</td>'


def markdown_table(table: Table) -> str:
    """Return the table in Markdown, its caption above."""
    lines = [
        "| " + " | ".join(c.title for c in table.columns) + " |",
        "|" + "".join(" --- |" if c.kind == "text" else " ---: |" for c in table.columns),
    ]
    for row in table.rows:
        shown = (
            show(v, c.kind).replace("|", "\\|") for v, c in zip(row, table.columns, strict=True)
        )
        lines.append("| " + " | ".join(shown) + " |")
    return f"{table.caption}\n\n" + "\n".join(lines) + "\n"


def write_tables(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write each table as NAME.csv and NAME.parquet into ``folder``; return the paths."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = []
    for table in tables:
        keys = [column.key for column in table.columns]
        text = folder / f"{table.name}.csv"
        with atomic_path(text) as scratch, scratch.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([keys, *table.rows])
        columns = zip(*table.rows, strict=True) if table.rows else ([] for _ in keys)
        data = pa.table({key: list(values) for key, values in zip(keys, columns, strict=True)})
        binary = folder / f"{table.name}.parquet"
        with atomic_path(binary) as scratch:
            pq.write_table(data, scratch, compression="zstd")
        paths += [text, binary]
    return paths
