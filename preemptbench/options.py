"""Options and outputs that several verbs share."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from contracts.errors import InvalidInput
from traces.bundled import bundled_runs

runs_option = click.option(
    "--runs",
    "runs_path",
    type=click.Path(path_type=Path),
    default=bundled_runs,
    help="Run log (Parquet). Default: the bundled one.",
)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


allow_mismatch_option = click.option(
    "--allow-mismatch",
    is_flag=True,
    help="Use a checkpoint on runs of a model or tokenizer it was not trained on; every row made "
    "with it says so.",
)


data_option = click.option(
    "--data",
    envvar="PREEMPTBENCH_DATA",
    type=click.Path(path_type=Path),
    help="Folder of the public data sets [env: PREEMPTBENCH_DATA].",
)


def need_data(folder: Path | None) -> Path:
    """Return the folder of the public data, or say how to name it."""
    if folder is None:
        raise InvalidInput(
            "this needs the public data sets: give their folder with --data DIR or in "
            "PREEMPTBENCH_DATA"
        )
    return folder


def _nonzero(context: click.Context, option: click.Parameter, value: int) -> int:
    if value == 0:
        raise click.BadParameter(
            "0 processes: give a number, or -1 for every core", context, option
        )
    return value


jobs_option = click.option(
    "--jobs",
    default=-1,
    show_default=True,
    callback=_nonzero,
    help="Processes; -1 takes every core.",
)


deadline_classes_option = click.option(
    "--deadline-class",
    "deadline_classes",
    multiple=True,
    metavar="NAME=SHARE:SECONDS",
    help="That share of requests is due after that many seconds, as in chat=0.3:60. Repeatable; "
    "shares add up to 1. Everybody is scored at its own deadline, and --deadline is not used.",
)


def check_out_folder(path: Path) -> None:
    """Refuse, before any work, an output folder that cannot be one."""
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise InvalidInput(f"--out {path}: {part} is a file; name a folder")


def to_json(value: Any) -> str:
    """Return strict JSON: a number that does not exist is null."""
    return json.dumps(_without_nan(value), allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
