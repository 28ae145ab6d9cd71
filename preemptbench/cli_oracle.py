"""``preemptbench oracle``: build the empirical length oracle of a run log, and look at it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
import numpy as np

from contracts.errors import InvalidInput
from contracts.signals import signal_request
from oracles.empirical import LEVELS, MODES, EmpiricalOracle, Mode, leave_one_out
from preemptbench.options import check_out_folder, json_option, runs_option, to_json
from traces.bundled import bundled_runs
from traces.runlog import read_runs

_LOG = click.argument("log", type=click.Path(path_type=Path), default=bundled_runs)


@click.group()
def oracle() -> None:
    """Empirical length oracles from repeated temperature-zero runs."""


@oracle.command()
@_LOG
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="deployment",
    show_default=True,
    help="exact verifies that all runs of a request are alike; deployment takes them as they came.",
)
@json_option
def build(log: Path, out: Path, mode: Mode, as_json: bool) -> None:
    """Build the oracle of LOG in one streaming pass and write it to a folder, which 'simulate
    --signal [name=]FOLDER' takes. LOG is a run log or a folder of them [default: the bundled]."""
    from oracles.run_table import read_run_table
    from oracles.store import save_oracle
    from traces.tables import file_sha256, parquet_files

    check_out_folder(out)
    if out.is_dir() and any(out.iterdir()):
        raise InvalidInput(f"--out {out} is not empty: name a new folder")
    table = read_run_table(log)
    files = {path.name: file_sha256(path) for path in parquet_files(log)}
    manifest = save_oracle(table, out, mode=mode, source={"files": files})
    if as_json:
        click.echo(to_json({"out": str(out), **manifest}))
        return
    least, median, most = manifest["runs_per_request"]
    click.echo(f"{out}: {manifest['name']} ({mode}), {manifest['runs']} runs of ", nl=False)
    click.echo(f"{manifest['requests']} requests, {least} to {most} each (median {median:g})")
    for model, caps in manifest["set_up"]["caps"].items():
        click.echo(f"{model}: cap {', '.join(map(str, caps))} tokens", err=True)


@oracle.command()
@_LOG
@click.option("--figure", type=click.Path(path_type=Path), help="Write a picture (.svg, .png).")
@click.option(
    "--draws",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="Choices of the run left out, for the ceiling.",
)
@click.option("--seed", default=0, show_default=True)
@json_option
def agreement(log: Path, figure: Path | None, draws: int, seed: int, as_json: bool) -> None:
    """How far repeated runs of LOG agree, and the ceiling this sets: what the other runs of a
    request score for the one left out [default: the bundled log]."""
    from eval.agreement import ceiling, measure_agreement, write_agreement_figure
    from eval.signal_quality import quality_table

    runs = list(read_runs(log))
    found, spread = measure_agreement(runs)
    top = ceiling(runs, num_draws=draws, seed=seed)
    if figure is not None:
        click.echo(f"wrote {write_agreement_figure(spread, log.stem, figure)}", err=True)
    if as_json:
        click.echo(to_json({"log": str(log), **asdict(found), "ceiling": top.as_row()}))
        return
    for name, value in asdict(found).items():
        text = ", ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else f"{value:.4g}"
        click.echo(f"{name:<22}{text:>16}")
    click.echo("\n" + quality_table([top]))


@oracle.command()
@_LOG
@click.option(
    "--base", default="clairvoyant", show_default=True, help="clairvoyant, oracle or oracle-K."
)
@click.option(
    "--rung",
    "rungs",
    multiple=True,
    help="A degradation such as 'noise(0.5)' or 'swap(0.5) | stale(64)'. Repeatable; default: the "
    "standard ladder.",
)
@click.option("--seed", default=0, show_default=True)
@json_option
def ladder(log: Path, base: str, rungs: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Degrade a signal along one axis at a time and print what each rung achieved on LOG."""
    from eval.degradation import STANDARD_LADDER, degradation_ladder
    from eval.signal_quality import held_out, quality_table
    from eval.signal_sources import SignalSource, split_truth

    truth, others = split_truth(list(read_runs(log)), seed)
    known = [run for run in truth if run.has_known_length]
    signal = SignalSource.parse(base).build(known, others, seed)
    if signal is None:
        raise InvalidInput("--base none: there is no signal to degrade")
    scores = degradation_ladder(
        signal, held_out(known, seed=seed), rungs or STANDARD_LADDER, seed=seed
    )
    if as_json:
        click.echo(to_json({"log": str(log), "rows": [score.as_row() for score in scores]}))
        return
    click.echo(quality_table(scores))


@oracle.command()
@runs_option
@click.option("--ages", default="0,32,64,128", show_default=True, help="Ages to ask at, tokens.")
@json_option
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
        alive_runs: list[int] = []
        for repeat in repeats if len(repeats) > 1 else []:
            held_out = leave_one_out(runs, repeat)
            alive = [r for r in runs if r.repeat == repeat and r.output_tokens > age]
            requests = [signal_request(run) for run in alive]
            answer = held_out.answer(requests, np.full(len(alive), age, dtype=np.int64))
            for level, count in answer.provenance().items():
                counts[level] += count
            alive_runs += answer.effective_k.tolist()
            truth = np.array([run.output_tokens - age for run in alive])
            errors += np.abs(np.log1p(answer.remaining) - np.log1p(truth)).tolist()
        log_mae = float(np.mean(errors)) if errors else None
        effective_k = float(np.mean(alive_runs)) if alive_runs else None
        told = {"age": age, "alive": len(errors), "log_mae": log_mae, "effective_k": effective_k}
        rows.append({**told, **counts})
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
    click.echo(
        f"{'age':>6}{'alive':>8}{'log-MAE':>9}{'eff. K':>8}" + "".join(f"{x:>16}" for x in LEVELS)
    )
    for row in rows:
        error = "-" if row["log_mae"] is None else f"{row['log_mae']:.3f}"
        effective = "-" if row["effective_k"] is None else f"{row['effective_k']:.1f}"
        levels = "".join(f"{row[level]:>16}" for level in LEVELS)
        click.echo(f"{row['age']:>6}{row['alive']:>8}{error:>9}{effective:>8}{levels}")


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
