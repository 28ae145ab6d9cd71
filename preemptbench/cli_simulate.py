"""``preemptbench simulate``: a policy beside LIFO on simulated engines; ``policies`` lists them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click

from contracts.conformance import check_policy
from preemptbench.demo import PRESSURES, demo_matrix
from preemptbench.options import check_out_folder, jobs_option, runs_option, to_json
from preemptbench.progress import Bar


@click.command(short_help="Run policies beside LIFO on simulated engines.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="A built-in name, or path/to/file.py:function for one of your own. Repeatable.",
)
@click.option(
    "--signal",
    "signals",
    multiple=True,
    help="oracle, oracle-K, clairvoyant, or the folder of a checkpoint or of 'oracle build', "
    "[name=]FOLDER, for policies that read one; made worse by 'SIGNAL | noise(0.5)' and the like. "
    "Repeatable; default: oracle.",
)
@runs_option
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(path_type=Path),
    help="Replay a measured trace (CSV or Parquet: arrival_s, context_tokens, generated_tokens) "
    "instead of a run log; for policies that read no signal.",
)
@click.option(
    "--blocks",
    multiple=True,
    type=click.IntRange(min=2),
    help="KV blocks of 16 tokens, vLLM's null block included. Repeatable; default: the demo's "
    + ", ".join(str(pressure.num_blocks) for pressure in PRESSURES)
    + ".",
)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Arrivals a second.")
@click.option(
    "--cv",
    type=click.FloatRange(min=0, min_open=True),
    help="Coefficient of variation of the gaps: 1 is Poisson, more is burstier (gamma).",
)
@click.option(
    "--deadline", type=click.FloatRange(min=0, min_open=True), help="Seconds after arrival."
)
@click.option("--tagged", type=click.IntRange(min=1), help="Scored requests a cell.")
@click.option("--profile", help="Step-time profile: a bundled name or a JSON file.")
@click.option(
    "--simulator",
    type=click.Choice(["jump", "step"]),
    default="jump",
    show_default=True,
    help="The compiled engine or the readable one; their results are equal.",
)
@click.option("--seeds", default=10, show_default=True, type=click.IntRange(min=2))
@jobs_option
@click.option(
    "--out",
    "out_dir",
    type=click.Path(path_type=Path),
    default=Path("out/simulate"),
    show_default=True,
    help="Where cells and records go; a second start runs what is missing.",
)
@click.option(
    "--workload",
    "workload_path",
    type=click.Path(path_type=Path),
    help="Instead of the matrix, run one file: a workload of the vLLM driver (.json), or a "
    "decision log (.jsonl, .jsonl.gz), whose header is one. Default policy: the engine's own.",
)
@click.option(
    "--decisions",
    "decisions_path",
    type=click.Path(path_type=Path),
    help="With --workload: write every step's decisions here, in the driver's form.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def simulate(
    context: click.Context,
    policies: tuple[str, ...],
    signals: tuple[str, ...],
    runs_path: Path,
    trace_path: Path | None,
    blocks: tuple[int, ...],
    rate: float | None,
    cv: float | None,
    deadline: float | None,
    tagged: int | None,
    profile: str | None,
    simulator: str,
    seeds: int,
    jobs: int,
    out_dir: Path,
    workload_path: Path | None,
    decisions_path: Path | None,
    as_json: bool,
) -> None:
    """Run policies beside LIFO and print breach, difference, floor and what preemption cost."""
    if workload_path is not None:
        _refuse_matrix_options(context)
        _simulate_file(workload_path, policies, decisions_path, as_json)
        return
    if decisions_path is not None:
        raise click.UsageError("--decisions needs --workload: a matrix is thousands of runs.")
    if not policies:
        raise click.UsageError("Give at least one --policy, or --workload FILE.")
    from eval.matrix import Pressure, run_matrix
    from eval.named_policies import find_policy
    from eval.signal_sources import NO_SIGNAL, SignalSource
    from eval.summary import BASELINE, format_table, summarise

    check_out_folder(out_dir)
    for name in policies:
        check_policy(find_policy(name))
    pressures = tuple(Pressure(f"{n} blocks", n) for n in dict.fromkeys(blocks)) or PRESSURES
    names = tuple(dict.fromkeys((BASELINE, *policies)))
    config = demo_matrix(runs_path, {}, num_seeds=seeds, policies=names, pressures=pressures)
    if trace_path is not None and (rate or cv):
        raise click.UsageError("--rate and --cv do not go with --trace: its gaps are untouched.")
    default = () if trace_path is not None else ("oracle",)
    sources = dict.fromkeys((NO_SIGNAL, *(signals or default)))
    config = replace(
        config,
        signals=tuple(SignalSource.parse(text) for text in sources),
        rate_per_s=rate or config.rate_per_s,
        arrival_cv=cv or config.arrival_cv,
        deadline_s=deadline or config.deadline_s,
        num_tagged=tagged or config.num_tagged,
        profile=profile or config.profile,
        simulator=simulator,
        trace=trace_path,
    )
    with Bar("seed") as bar:
        cells = run_matrix(config, out_dir, num_jobs=jobs, on_seed=bar.update)
    rows = summarise(cells)
    if as_json:
        click.echo(to_json({"rows": [asdict(row) for row in rows]}))
        return
    click.echo(format_table(rows))


def _refuse_matrix_options(context: click.Context) -> None:
    """Say so when an option was given that has no meaning for a single file."""
    kept = ("policies", "workload_path", "decisions_path", "as_json")
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in kept and source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[0]} does not go with --workload.")


def _simulate_file(
    workload_path: Path, policies: tuple[str, ...], decisions_path: Path | None, as_json: bool
) -> None:
    from eval.named_policies import find_policy
    from serving_sim.decisions import read_driver_file, simulate_driver, totals, write_log

    if len(policies) > 1:
        raise click.UsageError("--workload runs once: give one --policy at most.")
    policy = find_policy(policies[0]) if policies else None
    driver = read_driver_file(workload_path)
    if decisions_path is not None:
        result = write_log(driver, decisions_path, policy)
    else:
        result = simulate_driver(driver, policy)
    summary: dict[str, int | float] = {
        **totals(driver, result),
        "recomputed_tokens": result.recomputed_tokens,
        "cache_hit_tokens": result.cache_hit_tokens,
        "simulated_s": round(result.end_s, 6),
    }
    if as_json:
        click.echo(json.dumps(summary))
        return
    for name, value in summary.items():
        click.echo(f"{name:<18} {value:>12}")


@click.command(short_help="List the built-in victim rules.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def policies(as_json: bool) -> None:
    """List the built-in victim rules and say which read a signal."""
    from serving_sim.policies import get_policy, list_policies

    # a family is listed as name(depth): any depth shows what it reads
    rows = [(name, get_policy(name.replace("(depth)", "(0.5)"))) for name in list_policies()]
    if as_json:
        click.echo(json.dumps({name: {"reads_signal": p.reads_signal} for name, p in rows}))
        return
    for name, policy in rows:
        click.echo(f"{name:<20} {'reads a signal' if policy.reads_signal else ''}".rstrip())
