"""The small data this package ships: a prompt set, and the run log collected on it."""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).parent / "data"


def bundled_prompts() -> Path:
    """Return the prompt set of our own: 216 prompts in 18 families (Apache-2.0)."""
    return _DATA / "prompts.jsonl"


def bundled_runs() -> Path:
    """Return the bundled run log: SmolLM2-135M-Instruct at temperature zero on those prompts."""
    return _DATA / "smollm2-everyday.parquet"


def bundled_runs_512() -> Path:
    """Return the same model on the same prompts at a cap of 512 tokens, loops told from lengths."""
    return _DATA / "smollm2-everyday-512.parquet"
