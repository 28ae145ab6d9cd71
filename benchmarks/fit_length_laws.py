"""Fit the bundled length laws from public runs of seven reasoning families on two benchmarks.

    python -m benchmarks.fit_length_laws [--data ../shared/data] [--check]

Writes traces/data/length_profiles.json (fitted figures and their sources only) and prints how far
quantiles of drawn lengths are from those of the runs. Family names of the two sources are mapped by
FAMILIES below. Prompt tokens are characters / 4 of the prompt's text: the sources count none.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from traces.length_profiles import LengthLaw, draw_runs, fit_law

FAMILIES = {
    "DeepSeek-R1-0528": ("deepseek-r1-0528", "deepseek-r1-0528"),
    "Qwen3-235B-A22B": ("qwen3-235b-a22b-think", "qwen3-235b-a22b-think"),
    "GLM-Z1-32B": ("glm-z1-32b", "glm-z1-32b"),
    "Nemotron-Super-49B": ("llama-3.3-nemotron-super-49b-v1", "ll3.3-nemotron-49b-v1-thk"),
    "DeepHermes-3-24B": ("DeepHermes-3-Mistral-24B-Pre", "DeepHermes-3-Mistral-24B-Pre"),
    "Gemini-2.5-Flash": ("gemini-2.5-flash-high", "gemini-2.5-flash-high"),
    "Grok-3-mini": ("grok-3-mini-think", "grok-3-mini-think"),
}
"""Family: its name in LRMTokenEconomy, and in MisguidedAttention."""
SOURCES = {
    "LRMTokenEconomy": "cpldcpu/LRMTokenEconomy @ d5cc353, Apache-2.0",
    "MisguidedAttention": "cpldcpu/MisguidedAttention @ bbae011, CC0-1.0",
}
CAP_TOKENS = 30_000  # the largest recorded cap of these families; several record none
OUT = Path(__file__).parents[1] / "traces" / "data" / "length_profiles.json"
QUANTILES = (0.1, 0.5, 0.9, 0.99)


def read_lengths(data: Path) -> dict[tuple[str, str], dict[str, list[int]]]:
    """Return (source, model) -> prompt -> lengths, of reasoning answers."""
    columns = ["source", "model", "prompt_id", "output_tokens", "reasoning_mode"]
    table = pq.read_table(data / "reasoning_lengths" / "lengths.parquet", columns=columns)
    out: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in table.to_pylist():
        if row["source"] in SOURCES and row["reasoning_mode"] and (row["output_tokens"] or 0) > 0:
            out[row["source"], row["model"]][row["prompt_id"]].append(row["output_tokens"])
    return out


def read_prompt_tokens(data: Path) -> dict[str, list[int]]:
    """Return benchmark -> characters / 4 of its prompts."""
    table = pq.read_table(data / "reasoning_lengths" / "prompts.parquet")
    out: dict[str, list[int]] = defaultdict(list)
    for row in table.to_pylist():
        out[row["source"]].append(max(1, len(row["prompt"]) // 4))
    return out


def main() -> None:
    """Fit, write, and print the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--check", action="store_true", help="print only, write nothing")
    options = parser.parse_args()
    lengths, prompt_tokens = read_lengths(options.data), read_prompt_tokens(options.data)
    laws = []
    for family, names in FAMILIES.items():
        for (source, origin), name in zip(SOURCES.items(), names, strict=True):
            by_prompt = lengths[source, name]
            law = fit_law(
                by_prompt,
                prompt_tokens[source],
                model_family=family,
                benchmark=source,
                cap_tokens=CAP_TOKENS,
                source=f"{origin}, {name}",
            )
            laws.append(law)
            report(law, np.concatenate([np.array(x) for x in by_prompt.values()]))
    if not options.check:
        rows = [asdict(law) for law in laws]
        rows = [{name: _short(value) for name, value in row.items()} for row in rows]
        OUT.write_text(json.dumps({"laws": rows}, indent=1) + "\n", encoding="utf-8")


def _short(value: object) -> object:
    """Return a figure with four decimals; a law is not known better."""
    if isinstance(value, tuple):
        return [round(x, 4) for x in value]
    return round(value, 4) if isinstance(value, float) else value


def report(law: LengthLaw, observed: np.ndarray) -> None:
    """Print fitted against observed quantiles."""
    drawn = [r.output_tokens for r in draw_runs(law, num_prompts=4000, repeats=1, seed=0)]
    pairs = zip(np.quantile(observed, QUANTILES), np.quantile(drawn, QUANTILES), strict=True)
    shown = "  ".join(f"{a:7,.0f} {b:7,.0f}" for a, b in pairs)
    print(
        f"{law.name:42} {law.num_prompts:3} x {law.num_runs / law.num_prompts:.1f}  {shown}  "
        f"within {law.within:.2f} spread {law.spread:.2f}"
    )


if __name__ == "__main__":
    main()
