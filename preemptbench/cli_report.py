"""``preemptbench report``, ``rescore`` and ``compare``: what stored studies say."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from contracts.errors import InvalidInput
from preemptbench.options import json_option, to_json
from preemptbench.progress import StageBars

if TYPE_CHECKING:
    from eval.study_compare import StudyComparison
    from eval.study_rescoring import RuleCurve, StudyCurves

_FOLDER = click.Path(path_type=Path)
_MOST_SHOWN = 20


@click.command(short_help="Write the report of a stored study again.")
@click.argument("out", type=_FOLDER)
@json_option
def report(out: Path, as_json: bool) -> None:
    """Write report.html, report.md and tables/ into OUT, the folder of a study, from what is stored
    there. Only the two timelines run an engine, the first time."""
    from eval.stored import load_study
    from eval.study_report import render_study

    stored = load_study(out)
    with StageBars("step") as bars:
        page = render_study(stored, bars.update)
    click.echo(to_json({"report": str(page), "tables": str(out / "tables")}) if as_json else page)


@click.command(short_help="Score a stored study at other deadlines.")
@click.argument("out", type=_FOLDER)
@click.option(
    "--deadlines",
    "deadlines",
    metavar="SECONDS",
    help="FROM:TO:STEP, or a list such as 600,900. Default: 600 to 1800 by 30, as far as requests "
    "were watched.",
)
@click.option(
    "--multiples",
    metavar="NUMBERS",
    help="As --deadlines, but in multiples of each request's own deadline: 1 is what it was "
    "promised, for studies with deadline classes.",
)
@click.option("--cells", is_flag=True, help="Also each cell of the grid, not only its two parts.")
@json_option
def rescore(
    out: Path, deadlines: str | None, multiples: str | None, cells: bool, as_json: bool
) -> None:
    """Score every stored run of OUT at other deadlines: difference to LIFO with a band that holds
    at all of them at once, and reversals. Runs whose policy read a deadline are refused."""
    from eval.stored import load_study
    from eval.study_rescoring import cell_curves, legal_deadlines, part_curves, rescore_study
    from eval.study_summary import PARTS, label

    if deadlines is not None and multiples is not None:
        raise click.UsageError("--deadlines does not go with --multiples: give one of them.")
    given = deadlines if multiples is None else multiples
    wanted = None if given is None else parse_deadlines(given)
    stored = load_study(out)
    with StageBars("file") as bars:
        curves = rescore_study(
            stored,
            wanted or legal_deadlines(stored),
            lambda done, total: bars.update("records", done, total),
            of_own=multiples is not None,
        )
    shown = [curve for part in PARTS for curve in part_curves(curves, part)]
    if cells:
        shown += cell_curves(curves)
    if as_json:
        click.echo(to_json(_curves_object(curves, shown)))
        return
    click.echo(_curves_text(curves, shown, "s" if multiples is None else "x own"))
    for rule in dict.fromkeys(refusal.rule for refusal in curves.refusals):
        mine = [refusal for refusal in curves.refusals if refusal.rule == rule]
        click.echo(f"not rescored: {label(rule)} in {len(mine)} cells: {mine[0].reason}", err=True)


@click.command(short_help="Put two stored studies side by side.")
@click.argument("a", type=_FOLDER)
@click.argument("b", type=_FOLDER)
@click.option("--anyway", is_flag=True, help="Compare although versions or settings differ.")
@json_option
def compare(a: Path, b: Path, anyway: bool, as_json: bool) -> None:
    """Compare the cells that studies A and B have in common: breach of both, and B less A with an
    interval where a seed is the same requests in both."""
    from eval.stored import load_study
    from eval.study_compare import compare_studies

    found = compare_studies(load_study(a), load_study(b), anyway=anyway)
    for line in found.differs:
        click.echo(f"not the same: {line}", err=True)
    click.echo(to_json(asdict(found)) if as_json else _comparison_text(found))


def parse_deadlines(text: str) -> tuple[float, ...]:
    """Read ``FROM:TO:STEP`` (both ends counted) or a list of seconds."""
    try:
        if ":" not in text:
            return tuple(sorted({float(part) for part in text.split(",")}))
        first, last, step = (float(part) for part in text.split(":"))
        if not (step > 0 and last >= first):
            raise ValueError
        return tuple(first + i * step for i in range(int((last - first) / step + 1e-9) + 1))
    except (ValueError, OverflowError):
        raise InvalidInput(
            f"--deadlines {text!r} is neither FROM:TO:STEP nor a list of seconds: write, for "
            "example, 600:1800:30 or 600,900"
        ) from None


def _curves_object(curves: StudyCurves, shown: list[RuleCurve]) -> dict[str, Any]:
    return {
        "deadlines_s": curves.deadlines_s.tolist(),
        "curves": [
            {
                "where": curve.where,
                "policy": curve.rule[0],
                "signal": curve.rule[1],
                "num_cells": curve.num_cells,
                "breach": curve.breach.tolist(),
                "floor": curve.floor.tolist(),
                **(
                    {k: getattr(curve.difference, k).tolist() for k in ("mean", "low", "high")}
                    if curve.difference is not None
                    else {}
                ),
                "reversals": [asdict(reversal) for reversal in curve.reversals],
            }
            for curve in shown
        ],
        "refusals": [asdict(refusal) for refusal in curves.refusals],
    }


def _curves_text(curves: StudyCurves, shown: list[RuleCurve], unit: str) -> str:
    from eval.study_summary import label

    num = len(curves.deadlines_s)
    at = sorted({round(i * (num - 1) / 4) for i in range(5)})
    lines = []
    for where in dict.fromkeys(curve.where for curve in shown):
        here = [curve for curve in shown if curve.where == where]
        width = max(len(label(curve.rule)) for curve in here) + 2
        heads = "".join(f"{f'{curves.deadlines_s[i]:g} {unit}':>24}" for i in at)
        lines += [f"{where}: breach minus LIFO, pp [band]; LIFO: breach", f"{'':<{width}}{heads}"]
        for curve in here:
            d = curve.difference
            cells = [
                f"{curve.breach[i]:.1%}"
                if d is None
                else f"{d.mean[i]:+.1f} [{d.low[i]:+.1f}, {d.high[i]:+.1f}]"
                for i in at
            ]
            lines.append(f"{label(curve.rule):<{width}}" + "".join(f"{c:>24}" for c in cells))
        lines.append("")
    found = [(curve, reversal) for curve in shown for reversal in curve.reversals]
    for curve, r in found:
        lines.append(
            f"reversal: {label(curve.rule)} ({curve.where}) lies below LIFO at "
            f"{r.negative_at_s:g} {unit} and above it at {r.positive_at_s:g} {unit}"
        )
    return "\n".join(lines if found else [*lines, "no reversal"])


def _comparison_text(found: StudyComparison) -> str:
    from eval.study_summary import label

    lines = [f"{len(found.cells)} cells in common; without counterpart: {found.only[0]} engine "
             f"runs of A, {found.only[1]} of B"]  # fmt: skip
    if found.rules:
        lines += ["", "rule over the cells whose seeds pair: breach of A, of B, B less A in pp"]
    for row in found.rules:
        i = row.difference
        lines.append(
            f"  {label(row.rule):<36}{row.breach[0]:>8.1%}{row.breach[1]:>8.1%}"
            f"{i.mean:>+8.2f} [{i.low:+.2f}, {i.high:+.2f}]  {row.num_cells} cells"
        )
    unpaired = [cell for cell in found.cells if cell.difference is None]
    if unpaired:
        lines += ["", "cells that served other requests (no interval): breach of A, of B"]
        lines += [
            f"  {f'{c.source}, {c.pressure}, {label(c.rule)}':<72}"
            f"{c.breach[0]:>8.1%}{c.breach[1]:>8.1%}"
            for c in unpaired[:_MOST_SHOWN]
        ]
        if len(unpaired) > _MOST_SHOWN:
            lines.append(f"  and {len(unpaired) - _MOST_SHOWN} more (--json lists all)")
    return "\n".join(lines)
