"""The command-line options of training, shared by ``python -m training.fit`` and the verb."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from traces.bundled import bundled_runs

_PATH = click.Path(path_type=Path)


def train_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``train`` to a click command's function."""
    options = (
        click.option("--config", type=_PATH, help="A TOML recipe, as in training/recipes/."),
        click.option("--family", help="A predictor family, with its default recipe."),
        click.option(
            "--runs", type=_PATH, default=bundled_runs,
            help="Run log: Parquet, or a shard. Default: the bundled one.",
        ),
        click.option("--out", type=_PATH, help="Checkpoint folder to write."),
        click.option(
            "--exclude-oracle", type=_PATH,
            help="Leave out every prompt that this oracle (of 'oracle build') was built from.",
        ),
        click.option(
            "--folds", type=click.IntRange(min=2),
            help="Cross-fit: one checkpoint for each fold of prompts, so that every prompt of the "
            "log can be simulated with a predictor that never saw it.",
        ),
        click.option(
            "--set", "assignments", multiple=True, metavar="KEY=VALUE",
            help="Change one value of the recipe, e.g. settings.boosting.num_trees=300.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command
