"""Prompt sets for collection: JSONL with prompt_id, benchmark, family and prompt on every line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from traces.safe_json import iter_jsonl

_FIELDS = ("prompt_id", "benchmark", "family", "prompt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a set; ``family`` groups prompts of one kind (a predictor may hold it out)."""

    prompt_id: str
    benchmark: str
    family: str
    prompt: str


def read_prompts(path: Path) -> list[Prompt]:
    """Read and check a prompt set; raises InvalidInput naming file, line, field and value."""
    prompts: dict[str, Prompt] = {}
    for number, row in iter_jsonl(path):
        prompt = _prompt_of(row, f"{path} line {number}")
        if prompt.prompt_id in prompts:
            raise InvalidInput(
                f"{path} line {number}: prompt_id {prompt.prompt_id!r} stands there twice; "
                "ids must be unique"
            )
        prompts[prompt.prompt_id] = prompt
    if not prompts:
        raise InvalidInput(f"{path} holds no prompt: write one JSON object a line")
    return list(prompts.values())


def _prompt_of(row: dict[str, Any], where: str) -> Prompt:
    for field in _FIELDS:
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise InvalidInput(
                f"{where}: field {field!r} is {row.get(field)!r}; it must be a non-empty string"
            )
    return Prompt(*(row[field] for field in _FIELDS))
