"""Prompt sets for collection: JSONL with prompt_id, benchmark, family and prompt on every line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import InvalidInput

_FIELDS = ("prompt_id", "benchmark", "family", "prompt")
_MAX_LINE_CHARS = 1_000_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a set; ``family`` groups prompts of one kind (a predictor may hold it out)."""

    prompt_id: str
    benchmark: str
    family: str
    prompt: str


def read_prompts(path: Path) -> list[Prompt]:
    """Read and check a prompt set; raises InvalidInput naming file, line, field and value."""
    if not path.is_file():
        raise InvalidInput(f"prompt set {path} does not exist: give --prompts a JSONL file")
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        prompt = _parse_line(line, f"{path} line {number}")
        if prompt.prompt_id in seen:
            raise InvalidInput(
                f"{path} line {number}: prompt_id {prompt.prompt_id!r} stands there twice; "
                "ids must be unique"
            )
        seen.add(prompt.prompt_id)
        prompts.append(prompt)
    if not prompts:
        raise InvalidInput(f"{path} holds no prompt: write one JSON object a line")
    return prompts


def _parse_line(line: str, where: str) -> Prompt:
    if len(line) > _MAX_LINE_CHARS:
        raise InvalidInput(f"{where} has {len(line)} characters; the bound is {_MAX_LINE_CHARS}")
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON ({error}): write one object a line") from None
    if not isinstance(row, dict):
        raise InvalidInput(f"{where} is a {type(row).__name__}: write a JSON object")
    for field in _FIELDS:
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise InvalidInput(
                f"{where}: field {field!r} is {row.get(field)!r}; it must be a non-empty string"
            )
    return Prompt(*(row[field] for field in _FIELDS))
