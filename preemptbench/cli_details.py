"""What ``score --details`` and ``--slo-regret`` print: metrics of a checkpoint, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from contracts.runs import DecodeRun
from contracts.signals import RemainingSignal
from preemptbench.options import to_json
from preemptbench.progress import Bar

SLO_SEEDS, SLO_TAGGED = 20, 200


def print_details(
    runs: Sequence[DecodeRun],
    floor: RemainingSignal,
    signal: RemainingSignal,
    ceilings: Sequence[RemainingSignal],
    *,
    seed: int,
    as_json: bool,
    figures: Path | None,
) -> None:
    """Score ``signal`` on ``runs`` between its floor and ceilings; print, and draw the figures."""
    from eval.signal_report import report_signals
    from eval.signal_report_text import report_text, write_figures

    known = [run for run in runs if run.has_known_length]
    click.echo(f"resampling the prompts of {len(known)} runs (seconds, or a minute)", err=True)
    chosen = [("floor", floor), ("signal", signal), *(("ceiling", one) for one in ceilings)]
    rows = report_signals(known, chosen, reference=floor.name, seed=seed)
    if figures is not None:
        for path in write_figures(rows, figures):
            click.echo(f"wrote {path}", err=True)
    click.echo(to_json({"rows": [asdict(row) for row in rows]}) if as_json else report_text(rows))


def print_slo_regret(
    path: Path,
    runs: Sequence[DecodeRun],
    signals: Sequence[RemainingSignal],
    *,
    pressure: float,
    seed: int,
    as_json: bool,
) -> None:
    """Replay what ``signals`` would choose on ``runs`` of the run log ``path``; print."""
    from eval.slo_regret import slo_cell, slo_regret, slo_text
    from oracles.empirical import Clairvoyant
    from preemptbench.demo import demo_matrix

    known = [run for run in runs if run.has_known_length]
    config = replace(
        demo_matrix(path, {}, num_seeds=SLO_SEEDS), num_tagged=SLO_TAGGED, first_seed=seed
    )
    with Bar("seed") as bar:
        report = slo_regret(
            slo_cell(config, known, pressure),
            known,
            [*signals, Clairvoyant(known)],
            on_seed=bar.update,
        )
    click.echo(to_json(asdict(report)) if as_json else slo_text(report))
