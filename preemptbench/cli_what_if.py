"""``preemptbench what-if``: a recorded decision log under other victim policies."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from contracts.errors import InvalidInput
from preemptbench.options import json_option, to_json

if TYPE_CHECKING:
    from contracts.signals import RemainingGrid
    from eval.what_if import WhatIf
    from serving_sim.live_log import Recorded


@click.command("what-if", short_help="Replay a decision log under other victim policies.")
@click.argument("log_path", metavar="LOG", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "names",
    multiple=True,
    help="A built-in name, or path/to/file.py:function. Repeatable; default: all that read no "
    "signal. lifo always comes first.",
)
@click.option(
    "--signal",
    "signal_name",
    help="'clairvoyant' (an upper bound), or a checkpoint folder, for policies that read one.",
)
@click.option(
    "--profile",
    "profile_name",
    help="Step times from a bundled profile or a profile file. Default: fitted to the log.",
)
@click.option(
    "--deadline", type=click.FloatRange(min=0, min_open=True), help="Seconds after arrival."
)
@click.option("--seed", default=0, show_default=True, help="Keys the draws of random policies.")
@json_option
def what_if(
    log_path: Path,
    names: tuple[str, ...],
    signal_name: str | None,
    profile_name: str | None,
    deadline: float | None,
    seed: int,
    as_json: bool,
) -> None:
    """Replay a decision log under other victim policies, beside LIFO.

    LOG is what PREEMPTBENCH_DECISIONS made a running vLLM write (docs/deploy.md), or a log or
    workload of the vLLM driver. The requests, the engine and the step times are the log's; only the
    victims differ. Requests that were cut off count as ending where they were cut, and are counted.
    """
    from eval.named_policies import checked_policy
    from eval.what_if import what_if as replay
    from serving_sim.live_log import read_recorded
    from serving_sim.policies import get_policy, list_policies
    from serving_sim.profile import load_profile

    recorded = read_recorded(log_path)
    chosen = names or tuple(
        name for name in list_policies() if "(" not in name and not get_policy(name).reads_signal
    )
    logged = recorded.victims_by
    if logged and logged not in chosen and not get_policy(logged).reads_signal:
        chosen = (logged, *chosen)  # its replay beside what was logged says how far to trust this
    policies = [get_policy("lifo")]
    for name in chosen:
        policy = checked_policy(name)
        if policy.name != "lifo":
            policies.append(policy)
    profile = load_profile(profile_name) if profile_name is not None else None
    signal = _signal(signal_name, recorded)
    rows = replay(recorded, policies, signal, profile, deadline, seed)
    if as_json:
        click.echo(to_json(_as_object(recorded, rows)))
        return
    click.echo(format_rows(recorded, rows))


def _signal(name: str | None, recorded: Recorded) -> RemainingGrid | None:
    from eval.what_if import clairvoyant_grid, predictor_grid
    from predictors.registry import load_predictor

    if name is None:
        return None
    if name == "clairvoyant":
        return clairvoyant_grid(recorded.log.workload)
    if not Path(name).is_dir():
        raise InvalidInput(f"signal {name!r} is neither 'clairvoyant' nor a checkpoint folder")
    return predictor_grid(load_predictor(name), recorded.log.workload)


def _as_object(recorded: Recorded, rows: list[WhatIf]) -> dict[str, object]:
    return {
        "log": str(recorded.log.path),
        "num_requests": len(recorded.log.workload),
        "num_censored": recorded.num_censored,
        "logged_policy": recorded.victims_by,
        "logged_preemptions": recorded.num_preemptions,
        "logged_steps": recorded.num_steps,
        "profile": asdict(recorded.profile),
        "policies": [asdict(row) for row in rows],
    }


def format_rows(recorded: Recorded, rows: list[WhatIf]) -> str:
    """Return the table for a terminal, and what must be known to read it."""
    count, censored = len(recorded.log.workload), recorded.num_censored
    lines = [
        f"{recorded.log.path.name}: {count} requests, {recorded.num_steps} steps, "
        f"{recorded.num_preemptions} preemptions logged"
        + (f" under {recorded.victims_by}" if recorded.victims_by else ""),
        f"{'policy':<22}{'preempted':>10}{'recomputed':>11}{'tax':>8}{'mean e2e s':>12}"
        f"{'p99 e2e s':>11}{'p99 ttft s':>11}{'late':>6}{'moved':>7}",
    ]
    lines += [
        f"{row.policy:<22}{row.num_preemptions:>10}{row.recomputed_tokens:>11}"
        f"{row.recompute_tax:>8.2%}{row.mean_e2e_s:>12.3f}{row.p99_e2e_s:>11.3f}"
        f"{row.p99_ttft_s:>11.3f}{'-' if row.late is None else row.late:>6}{row.moved:>7}"
        for row in rows
    ]
    lines.append(f"step times: {recorded.profile.name} ({recorded.profile.source})")
    if censored:
        lines.append(
            f"note: {censored} of {count} requests were cut off; their lengths are lower bounds, "
            "so what comes after the cut is missing under every policy"
        )
    return "\n".join(lines)
