"""The verbs ``card`` (show or rewrite a model card) and ``export`` (write ONNX)."""

from __future__ import annotations

from pathlib import Path

import click

from contracts.errors import InvalidInput

_FOLDER = click.Path(path_type=Path)


@click.command(short_help="Show the model card of a checkpoint.")
@click.argument("folder", type=_FOLDER)
@click.option("--write", is_flag=True, help="Also write it to FOLDER/README.md.")
@click.option("--json", "as_json", is_flag=True, help="Print the checkpoint's configuration.")
def card(folder: Path, write: bool, as_json: bool) -> None:
    """Show the model card of a checkpoint, made from its verified config.json: what it was trained
    on, held-out scores with floors and ceiling, calibration by age, licence."""
    from predictors.card import model_card
    from predictors.checkpoint import need, read_config, write_card
    from predictors.registry import load_predictor
    from preemptbench.options import to_json

    load_predictor(folder)  # a card must not speak for a checkpoint that cannot be loaded
    config = read_config(folder)
    for name in ("target", "phase"):
        need(config, name, str)
    if write:
        write_card(folder, config)
        click.echo(f"wrote {folder / 'README.md'}", err=True)
    click.echo(to_json(config) if as_json else model_card(config), nl=as_json)


@click.command(short_help="Write a checkpoint as ONNX.")
@click.argument("folder", type=_FOLDER)
@click.option("--format", "to", type=click.Choice(["onnx"]), default="onnx", show_default=True)
@click.option("--out", type=_FOLDER, required=True, help="File to write.")
def export(folder: Path, to: str, out: Path) -> None:
    """Write a checkpoint for other runtimes. ONNX is write-only: no verb ever reads one."""
    from predictors.onnx_export import export_onnx
    from predictors.registry import load_predictor

    if out.exists():
        raise InvalidInput(f"--out {out} exists: name a new file, or delete it first")
    export_onnx(load_predictor(folder), out)
    click.echo(f"wrote {out} ({to}, {out.stat().st_size} bytes)", err=True)
