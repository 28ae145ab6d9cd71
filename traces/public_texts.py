"""Public reasoning texts as decode runs with progress read from their words."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from contracts.runs import DecodeRun
from traces.importers import import_runs
from traces.text_pieces import with_text_progress

SOURCES = ("LRMTokenEconomy", "MisguidedAttention", "ATTS-self", "crosslingual-s1.1")
# closed models: what is stored as thinking is a summary or a part (the data's README)
CLOSED = ("claude", "gemini", "grok", "o1", "o3", "o4", "gpt-4", "gpt-5")
STRIDE = 64


def read_source(data: Path, source: str, max_repeats: int) -> list[DecodeRun]:
    """Return the runs of one of SOURCES with text, known length and text progress; capped ones too.

    ``data`` holds the folder reasoning_lengths. Of a request, the first ``max_repeats`` runs.
    Raises InvalidInput where a row cannot be read or the tables of texts are not there.
    """
    import pyarrow.parquet as pq

    if not (data / "reasoning_lengths" / "texts" / f"{source}.parquet").is_file():
        raise InvalidInput(
            f"{data / 'reasoning_lengths' / 'texts'} holds no {source}.parquet: give the folder "
            "that holds reasoning_lengths with its texts"
        )
    folder = data / "reasoning_lengths"
    texts = pq.read_table(folder / "texts" / f"{source}.parquet").to_pylist()
    text_of = {_key(row): row for row in texts}
    lengths = pq.read_table(folder / "lengths.parquet", filters=[("source", "=", source)])
    prompts = pq.read_table(folder / "prompts.parquet").to_pylist()
    prompt_of = {(row["benchmark"], row["prompt_id"]): row["prompt"] for row in prompts}
    rows = []
    for row in lengths.to_pylist():
        row |= text_of.get(_key(row), {"thinking": None})
        if not _is_open(row):
            continue
        # variants of one question (crosslingual-s1.1) stand in for repeats of it
        row["prompt"] = prompt_of.get((row["benchmark"], row["prompt_id"])) or row["prompt_id"]
        row["text"] = f"{row['thinking']}\n{row['answer'] or ''}"
        row["temperature"] = -1.0 if row["temperature"] is None else row["temperature"]
        row["prompt_tokens"] = row["prompt_tokens"] or max(1, len(row["prompt"]) // 4)
        row["family"] = row["benchmark"]
        rows.append(row)
    return _imported(rows, max_repeats)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("source", "model", "benchmark", "prompt_id", "sample_idx", "variant")
    return tuple(row[name] for name in names)


def _is_open(row: Mapping[str, Any]) -> bool:
    name = row["model"].lower().split("/")[-1]
    return bool(row["thinking"]) and not name.startswith(CLOSED)


def _imported(rows: list[dict[str, Any]], max_repeats: int) -> list[DecodeRun]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows.sort(
        key=lambda r: (
            r["model"],
            r["benchmark"],
            r["prompt_id"],
            r["variant"] or "",
            r["sample_idx"],
        )
    )
    keep: tuple[str, ...] = (
        "model",
        "benchmark",
        "family",
        "prompt_id",
        "prompt",
        "prompt_tokens",
        "text",
    )
    keep += (
        "text",
        "temperature",
        "output_tokens",
        "how_counted",
        "max_tokens",
        "truncated",
        "licence",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.parquet"
        pq.write_table(pa.Table.from_pylist([{k: r[k] for k in keep} for r in rows]), path)
        runs, report = import_runs("parquet", [path], column_map={"max_new_tokens": "max_tokens"})
    thinking = [len(row["thinking"] or "") for row in rows]
    if len(runs) != len(rows):
        raise InvalidInput(f"{len(rows) - len(runs)} rows cannot be read: {report.skipped}")
    return [
        with_text_progress(run, STRIDE, chars)
        for run, chars in zip(runs, thinking, strict=True)
        if run.has_known_length and run.repeat < max_repeats and run.output_tokens >= 2
    ]
