"""``preemptbench demo``: the whole job on bundled data, one table and one report."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from preemptbench.options import check_out_folder, jobs_option, json_option, runs_option, to_json
from preemptbench.progress import Bar


@click.command(short_help="Run everything on bundled data: a table and a report.")
@click.option(
    "--out",
    "out_dir",
    type=click.Path(path_type=Path),
    default=Path("out/demo"),
    show_default=True,
    help="Where report, checkpoints and results go.",
)
@runs_option
@click.option("--seeds", default=10, show_default=True, type=click.IntRange(min=2))
@jobs_option
@json_option
def demo(out_dir: Path, runs_path: Path, seeds: int, jobs: int, as_json: bool) -> None:
    """Describe the bundled run log, build the oracle, train the predictors, simulate every
    policy and signal at three KV pressures, print the table and write a report."""
    from preemptbench.demo import run_demo
    from preemptbench.demo_report import closing_text, opening_text, write_demo_report

    started = time.perf_counter()
    check_out_folder(out_dir)
    with Bar("seed") as bar:
        result = run_demo(
            runs_path, out_dir, num_seeds=seeds, num_jobs=jobs, say=_say, on_seed=bar.update
        )
    report = write_demo_report(result, out_dir / "report.html")
    elapsed_s = time.perf_counter() - started
    if as_json:
        rows = [asdict(row) for row in result.rows]
        quality = [row.as_row() for row in result.quality]
        facts = {"rows": rows, "quality": quality, "report": str(report), "wall_s": elapsed_s}
        click.echo(to_json(facts))
        return
    click.echo(opening_text(result))
    click.echo(closing_text(result))
    click.echo(f"\nreport: {report}   cells: {out_dir / 'cells.parquet'}   {elapsed_s:.0f} s")


def _say(stage: str) -> None:
    click.echo(f"- {stage} ...", err=True)
