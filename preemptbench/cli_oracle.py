"""``preemptbench oracle``: build the empirical length oracle of a run log and look at it."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from contracts.signals import signal_request
from oracles.empirical import LEVELS, EmpiricalOracle, leave_one_out
from preemptbench.options import runs_option, to_json
from traces.runlog import read_runs


@click.group()
def oracle() -> None:
    """Empirical length oracles from repeated temperature-zero runs."""


@oracle.command()
@runs_option
@click.option("--ages", default="0,32,64,128", show_default=True, help="Ages to ask at, tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def describe(runs_path: Path, ages: str, as_json: bool) -> None:
    """Leave each repeat out in turn and say, at several ages, which level of the ladder answers
    and how far off the answers are."""
    runs = list(read_runs(runs_path))
    at = _ages(ages)
    repeats = sorted({run.repeat for run in runs})
    rows = []
    for age in at:
        counts = dict.fromkeys(LEVELS, 0)
        errors: list[float] = []
        for repeat in repeats if len(repeats) > 1 else []:
            held_out = leave_one_out(runs, repeat)
            alive = [r for r in runs if r.repeat == repeat and r.output_tokens > age]
            requests = [signal_request(run) for run in alive]
            answer = held_out.answer(requests, np.full(len(alive), age, dtype=np.int64))
            for level, count in answer.provenance().items():
                counts[level] += count
            truth = np.array([run.output_tokens - age for run in alive])
            errors += np.abs(np.log1p(answer.remaining) - np.log1p(truth)).tolist()
        log_mae = float(np.mean(errors)) if errors else None
        rows.append({"age": age, "alive": len(errors), "log_mae": log_mae, **counts})
    whole = EmpiricalOracle(runs)
    held_out_name = leave_one_out(runs, repeats[0]).name if len(repeats) > 1 else whole.name
    if as_json:
        click.echo(to_json({"oracle": held_out_name, "runs": len(runs), "by_age": rows}))
        return
    if len(repeats) < 2:
        click.echo(
            f"{whole.name} over {len(runs)} runs: every request ran once, so none can be held out"
        )
        return
    click.echo(f"{held_out_name}: each repeat of {len(runs)} runs answered from the others")
    click.echo(f"{'age':>6}{'alive':>8}{'log-MAE':>9}" + "".join(f"{x:>9}" for x in LEVELS))
    for row in rows:
        error = "-" if row["log_mae"] is None else f"{row['log_mae']:.3f}"
        levels = "".join(f"{row[level]:>9}" for level in LEVELS)
        click.echo(f"{row['age']:>6}{row['alive']:>8}{error:>9}{levels}")


def _ages(text: str) -> list[int]:
    try:
        ages = [int(part) for part in text.split(",")]
    except ValueError:
        ages = [-1]
    if min(ages) < 0:
        raise click.BadParameter(
            f"{text!r} is not a list of whole numbers >= 0 such as 0,32,64", param_hint="--ages"
        )
    return ages
