"""The model card of a checkpoint, written from its ``config.json`` and nothing else."""

from __future__ import annotations

from typing import TypeAlias

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]

_CARD = """---
library_name: preemptbench
license: {licence}
tags: [output-length, llm-serving, preemption, survival-analysis]
---

# `{family}`: how many tokens will a running request still write?

- **Target**: {target}.
- **Phase**: {phase}.
- **Trained on**: {num_runs} temperature-zero decode runs of {num_prompts} prompts, model
  {models} ({revisions}); {num_capped} runs were cut at a cap of {cap} tokens and are
  right-censored, never dropped.
- **Not for**: another model's lengths, sampled decoding, or a serving cap above {cap} tokens
  (beyond it every answer is the cap itself).

```python
from predictors.registry import load_predictor

predictor = load_predictor("path/to/this/folder")
predictor.remaining(requests, ages)  # float64, one a request
```

## Settings

{settings}

## Held-out scores, with floors and ceiling

{metrics}

## Calibration by age

{calibration}

The {num_prompts} training prompts are listed by SHA-256 in `config.json`: a score on one of them
says nothing. `config.json` and `model.safetensors` are checked byte for byte on load.
"""


def model_card(config: JsonObject) -> str:
    """Return the Markdown card of a checkpoint's configuration."""
    training = config["training"]
    settings = config["settings"]
    assert isinstance(training, dict) and isinstance(settings, dict)
    return _CARD.format(
        licence=_joined(training["licences"]).lower() or "other",
        family=config["family"],
        target=config["target"],
        phase=config["phase"],
        num_runs=_count(training["run_ids"]),
        num_prompts=_count(training["prompt_sha256s"]),
        num_capped=training["num_capped"],
        models=_joined(training["models"]),
        revisions=_joined(training["model_revisions"]),
        cap=training["cap_tokens"],
        settings="\n".join(f"- `{key}`: {_shown(value)}" for key, value in settings.items()),
        metrics=_table(config["metrics"]),
        calibration=_calibration(config.get("calibration")),
    )


def _calibration(table: JsonValue) -> str:
    """Say what the bounds were calibrated on; the table of predictors.conformal."""
    if not isinstance(table, dict):
        return "None: quantiles are the model's own."
    columns = [table[key] for key in ("age_edges", "levels", "asked", "num_prompts", "raw_cover90")]
    edges, levels, asked, prompts, cover = (c if isinstance(c, list) else [] for c in columns)
    low, high = levels.index(0.1), levels.index(0.9)
    starts = [0, *edges]
    rows: list[JsonValue] = [
        {
            "ages": f"{_shown(first)} to {_shown(last)}",
            "effective prompts": number,
            "own 0.9 bound held": share,
            "asked for 0.9": row[high] if isinstance(row, list) else None,
            "asked for 0.1": row[low] if isinstance(row, list) else None,
        }
        for first, last, number, share, row in zip(
            starts, [*edges, "cap"], prompts, cover, asked, strict=True
        )
    ]
    return f"{table['method']}; a level asked of the model makes a bound that holds.\n\n" + _table(
        rows
    )


def _table(metrics: JsonValue) -> str:
    rows = [row for row in metrics if isinstance(row, dict)] if isinstance(metrics, list) else []
    if not rows:
        return "None were recorded with this checkpoint."
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    lines += ["| " + " | ".join(_shown(row.get(head)) for head in heads) + " |" for row in rows]
    return "\n".join(lines)


def _shown(value: JsonValue) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return _joined(value) if isinstance(value, list) else str(value)


def _joined(value: JsonValue) -> str:
    return ", ".join(_shown(item) for item in value) if isinstance(value, list) else str(value)


def _count(value: JsonValue) -> int:
    return len(value) if isinstance(value, list) else 0
