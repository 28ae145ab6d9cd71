"""``preemptbench sweep``: a matrix over engine settings, described by a TOML file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from contracts.text_table import aligned
from preemptbench.options import check_out_folder, json_option, to_json
from preemptbench.progress import StageBars
from preemptbench.task_options import backend_context, memory_bytes, say, task_options

if TYPE_CHECKING:
    from eval.sweep import SweepResult
    from eval.tables import Table


@click.command(short_help="Compare policies and signals over a grid of engine settings.")
@click.argument("file", type=click.Path(path_type=Path))
@task_options
@click.option("--out", "out_dir", type=click.Path(path_type=Path), help="Default: out/NAME.")
@json_option
def sweep(
    file: Path,
    jobs: int,
    backend: str,
    address: str | None,
    timeout_s: float | None,
    memory_gb: float | None,
    retry_failed: bool,
    status: bool,
    out_dir: Path | None,
    as_json: bool,
) -> None:
    """Run the matrix that FILE (TOML, docs/sweeps.md) describes and print one table: breach per
    engine setting x policy x signal, and the paired difference to LIFO of the same setting.

    Finished seeds are kept in --out; a second start runs what is missing. table.csv,
    table.parquet and report.md lie there.
    """
    from eval.sweep import run_sweep, sweep_status, sweep_table
    from eval.tables import write_tables
    from eval.task_limits import TaskLimits
    from preemptbench.sweep_file import read_sweep

    place = out_dir or Path("out") / file.stem
    check_out_folder(place)
    config = read_sweep(file, place)
    if status:
        counts = sweep_status(config, place)
        parts = [{"part": name} | asdict(found) for name, found in counts.items()]
        lines = [f"{name}: {found}" for name, found in counts.items()]
        click.echo(to_json({"parts": parts}) if as_json else "\n".join(lines))
        return
    limits = TaskLimits(timeout_s=timeout_s, memory_bytes=memory_bytes(memory_gb))
    with backend_context(backend, address), StageBars("task") as bars:
        result = run_sweep(
            config, place, num_jobs=jobs, on_task=bars.update, limits=limits,
            retry_failed=retry_failed, on_note=say,
        )  # fmt: skip
    table = sweep_table(result)
    write_tables([table], place)
    page = _write_report(result, table, place)
    click.echo(_object(result) if as_json else _text(table))
    for failure in result.failures:
        say(f"{failure} (--retry-failed runs it again)")
    click.echo(f"report: {page}", err=True)


def _text(table: Table) -> str:
    from eval.tables import show

    rows = [[column.title for column in table.columns]]
    rows += [
        [show(value, column.kind) for value, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    return aligned(rows, {i for i, column in enumerate(table.columns) if column.kind == "text"})


def _object(result: SweepResult) -> str:
    return to_json(
        {
            "sweep": result.config.study.name,
            "deadline_s": result.config.study.deadline_s,
            "seeds": result.config.study.num_seeds,
            "rows": [asdict(row) for row in result.rows],
            "failures": [asdict(failure) for failure in result.failures],
        }
    )


def _write_report(result: SweepResult, table: Table, place: Path) -> Path:
    from contracts.files import atomic_write_text
    from eval.tables import markdown_table

    study = result.config.study
    failed = "\n".join(f"- {failure}" for failure in result.failures) or "None."
    text = (
        f"# Sweep {study.name}\n\nDeadline {study.deadline_s:g} s, {study.num_seeds} seeds, "
        f"{study.num_pilots} pilot seeds apart, step times {study.profile}. Pools and rate of a "
        "source were placed by its pilots with the plain engine and hold in every setting.\n\n"
        f"## Results\n\n{markdown_table(table)}\n## Failed seeds\n\n{failed}\n"
    )
    atomic_write_text(place / "report.md", text)
    return place / "report.md"
