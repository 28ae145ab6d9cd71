"""``preemptbench runs``: check, describe, split and import run logs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from contracts.errors import InvalidInput
from preemptbench.options import json_option
from traces.bundled import bundled_runs
from traces.describe import describe_runs, format_summaries
from traces.import_rules import CHARS_PER_4
from traces.importers import import_runs, tokenizer_counter
from traces.runlog import read_runs, write_runs
from traces.split import crossfit_folds, split_runs
from traces.validate import ValidationReport, validate_runs

_SOURCE = click.argument("source", type=click.Path(path_type=Path), default=bundled_runs)


@click.group()
def runs() -> None:
    """Run logs: check, describe, split, import. SOURCE is a Parquet file or a folder of them;
    without it the bundled log is read."""


@runs.command()
@_SOURCE
@click.option(
    "--approximate-caps", is_flag=True, help="Let a run cut by length differ from its cap."
)
@json_option
def check(source: Path, approximate_caps: bool, as_json: bool) -> None:
    """Check schema, ranges, duplicates and censoring rules of a run log."""
    report = validate_runs(source, exact_caps=not approximate_caps)
    if as_json:
        click.echo(json.dumps({"source": str(source), "ok": True, **asdict(report)}))
        return
    click.echo(f"{source}: ok")
    _echo_report(report)


def _echo_report(report: ValidationReport) -> None:
    click.echo(
        f"{report.rows} runs of {report.num_requests} requests ({report.num_prompts} prompts): "
        f"{report.ended} ended, {report.censored} cut, {report.unknown_end} of unknown end"
    )
    for name, count in report.warnings.items():
        click.echo(f"note: {count} runs {name}")


@runs.command()
@_SOURCE
@click.option("--by-family", is_flag=True, help="One row per family of each benchmark.")
@json_option
def describe(source: Path, by_family: bool, as_json: bool) -> None:
    """Lengths, caps and agreement of repeats, per benchmark."""
    rows = describe_runs(read_runs(source), by_family=by_family)
    if as_json:
        click.echo(json.dumps({"source": str(source), "rows": [asdict(row) for row in rows]}))
        return
    click.echo(format_summaries(rows))


@runs.command()
@_SOURCE
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
@click.option("--test-share", default=0.2, show_default=True, help="Share of prompts in test.")
@click.option("--holdout-family", multiple=True, help="Family that goes to test whole.")
@click.option("--folds", type=int, help="Write folds.json for cross-fitting instead.")
@click.option("--seed", default=0, show_default=True)
@json_option
def split(
    source: Path,
    out: Path,
    test_share: float,
    holdout_family: tuple[str, ...],
    folds: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Split by prompt (never by run) into train.parquet and test.parquet, or into folds."""
    log = read_runs(source)
    if folds is not None:
        if holdout_family:
            raise InvalidInput("--folds and --holdout-family exclude each other: choose one")
        fold_of = crossfit_folds(log, num_folds=folds, seed=seed)
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"seed": seed, "num_folds": folds, "fold_of": fold_of}, indent=1)
        (out / "folds.json").write_text(text + "\n", encoding="utf-8")
        sizes = {str(k): list(fold_of.values()).count(k) for k in range(folds)}
        _report(as_json, {"out": str(out / "folds.json"), "prompts_per_fold": sizes})
        return
    parts = split_runs(log, test_share=test_share, seed=seed, holdout_families=holdout_family)
    told: dict[str, object] = {"seed": seed, "test_share": test_share}
    for name, part in (("train", parts.train), ("test", parts.test)):
        origin = {**told, "split": name, "source": source.name, "holdout": list(holdout_family)}
        write_runs(part, out / f"{name}.parquet", origin)
        told |= {f"{name}_runs": len(part), f"{name}_prompts": len(part.codes("prompt_sha256")[1])}
    _report(as_json, {"out": str(out), **told})


def _report(as_json: bool, told: dict[str, object]) -> None:
    if as_json:
        click.echo(json.dumps(told))
    else:
        click.echo("\n".join(f"{name}: {value}" for name, value in told.items()))


@runs.command("import")
@click.argument("kind", metavar="FORMAT")
@click.argument("sources", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Parquet to write.")
@click.option("--map", "mapped", multiple=True, metavar="FIELD=COLUMN", help="Column of a field.")
@click.option("--set", "constants", multiple=True, metavar="FIELD=VALUE", help="One value for all.")
@click.option("--where", multiple=True, metavar="COLUMN=TEXT", help="Keep only such rows.")
@click.option("--tokenizer", help="Folder or Hugging Face id that counts texts [default: chars/4].")
@json_option
def import_(
    kind: str,
    sources: tuple[Path, ...],
    out: Path,
    mapped: tuple[str, ...],
    constants: tuple[str, ...],
    where: tuple[str, ...],
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """Turn another tool's log into a run log. FORMAT is jsonl, csv, parquet, openai, lm-eval or
    vllm-bench; run-log fields without a column of their own name need --map or --set."""
    column_map, fixed = _pairs("--map", mapped), _pairs("--set", constants)
    found, report = import_runs(
        kind,
        sources,
        column_map=column_map,
        constants=fixed,
        where=_pairs("--where", where),
        counter=tokenizer_counter(tokenizer) if tokenizer else CHARS_PER_4,
    )
    checked = validate_runs(found)
    write_runs(found, out, {"import": {**asdict(report), "map": column_map, "set": fixed}})
    if as_json:
        told = {"out": str(out), "import": asdict(report), "check": asdict(checked)}
        click.echo(json.dumps(told))
        return
    click.echo(f"{out}: {report.rows_kept} of {report.rows_read} rows")
    for name, count in {**report.skipped, **report.decided}.items():
        click.echo(f"  {count}: {name}")
    _echo_report(checked)
    click.echo(f"rule for unknown stops: {report.rule}", err=True)


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidInput(f"{option} {text!r} is not of the form NAME=VALUE")
        pairs[name] = value
    return pairs
