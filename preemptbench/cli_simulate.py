"""``preemptbench simulate``: a policy beside LIFO on simulated engines."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from preemptbench.demo import PRESSURES, demo_matrix
from preemptbench.engine_options import chosen_engine, engine_options
from preemptbench.options import (
    allow_mismatch_option,
    check_out_folder,
    deadline_classes_option,
    jobs_option,
    json_option,
    runs_option,
    to_json,
)
from preemptbench.progress import Bar
from preemptbench.timelines import (
    check_timeline_paths,
    record_timelines,
    timeline_option,
    timeline_seed_option,
)
from preemptbench.workload_run import simulate_file

if TYPE_CHECKING:
    from eval.matrix_config import MatrixConfig
    from eval.one_cell import OneCell
    from serving_sim.config import EngineConfig, LoadRule, OffloadSettings


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
    help="oracle, oracle-K, clairvoyant, surrogate-gbm (clairvoyant made as bad as a predictor), "
    "or the folder of a checkpoint or of 'oracle build', [name=]FOLDER, for policies that read "
    "one; made worse by 'SIGNAL | noise(0.5)' and the like. "
    "Repeatable; default: oracle.",
)
@allow_mismatch_option
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
@deadline_classes_option
@click.option("--tagged", type=click.IntRange(min=1), help="Scored requests a cell.")
@click.option("--profile", help="Step-time profile: a bundled name or a JSON file.")
@click.option(
    "--strict", is_flag=True, help="Refuse steps beyond the range that the profile was measured in."
)
@click.option(
    "--simulator",
    type=click.Choice(["jump", "step"]),
    default="jump",
    show_default=True,
    help="The compiled engine or the readable one; their results are equal.",
)
@click.option(
    "--faults",
    "faults_path",
    type=click.Path(path_type=Path),
    help="TOML or JSON file of faults and fault rates; all policies meet the same ones.",
)
@click.option(
    "--offload",
    "offload_gb_per_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Move preempted KV to a slower tier with so many GB (10^9 bytes) a second.",
)
@click.option(
    "--offload-gib",
    type=click.FloatRange(min=0),
    help="Size of that tier in GiB. Default: unlimited.",
)
@click.option(
    "--offload-rule",
    type=click.Choice(["always_load", "always_recompute", "cheaper"]),
    default="always_load",
    show_default=True,
    help="Whether a resumed request loads its KV or computes it again.",
)
@engine_options
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
@timeline_option
@timeline_seed_option
@json_option
@click.pass_context
def simulate(
    context: click.Context,
    policies: tuple[str, ...],
    signals: tuple[str, ...],
    allow_mismatch: bool,
    runs_path: Path,
    trace_path: Path | None,
    blocks: tuple[int, ...],
    rate: float | None,
    cv: float | None,
    deadline: float | None,
    deadline_classes: tuple[str, ...],
    tagged: int | None,
    profile: str | None,
    strict: bool,
    simulator: str,
    faults_path: Path | None,
    offload_gb_per_s: float | None,
    offload_gib: float | None,
    offload_rule: str,
    scheduler: str | None,
    config_path: Path | None,
    assignments: tuple[str, ...],
    seeds: int,
    jobs: int,
    out_dir: Path,
    workload_path: Path | None,
    decisions_path: Path | None,
    timeline_paths: tuple[Path, ...],
    timeline_seed: int,
    as_json: bool,
) -> None:
    """Run policies beside LIFO and print breach, difference, floor and what preemption cost."""
    others = (workload_path, decisions_path, runs_path, trace_path, config_path, faults_path)
    check_timeline_paths(timeline_paths, others)
    offload = _offload(context, offload_gb_per_s, offload_gib, offload_rule)
    if workload_path is not None:
        _refuse_matrix_options(context)
        simulate_file(
            workload_path, policies, scheduler, decisions_path, timeline_paths, faults_path,
            offload, as_json,
        )  # fmt: skip
        return
    if decisions_path is not None:
        raise click.UsageError("--decisions needs --workload: a matrix is thousands of runs.")
    if not policies:
        raise click.UsageError("Give at least one --policy, or --workload FILE.")
    from eval.matrix import run_matrix
    from eval.matrix_config import Pressure
    from eval.named_policies import checked_policy
    from eval.signal_sources import NO_SIGNAL, SignalSource
    from eval.summary import BASELINE, format_table, summarise
    from serving_sim.fault_rates import read_faults
    from traces.arrivals import trace_rate_per_s
    from traces.deadlines import parse_deadline_class

    check_out_folder(out_dir)
    for name in policies:
        checked_policy(name)
    pressures = tuple(Pressure(f"{n} blocks", n) for n in dict.fromkeys(blocks)) or PRESSURES
    names = tuple(dict.fromkeys((BASELINE, *policies)))
    config = demo_matrix(runs_path, {}, num_seeds=seeds, policies=names, pressures=pressures)
    if trace_path is not None and (rate or cv):
        raise click.UsageError("--rate and --cv do not go with --trace: its gaps are untouched.")
    default = () if trace_path is not None else ("oracle",)
    sources = dict.fromkeys((NO_SIGNAL, *(signals or default)))
    config = replace(
        config,
        signals=tuple(SignalSource.parse(text, allow_mismatch=allow_mismatch) for text in sources),
        rate_per_s=rate or config.rate_per_s,
        arrival_cv=cv or config.arrival_cv,
        deadline_s=deadline or config.deadline_s,
        deadline_classes=tuple(map(parse_deadline_class, deadline_classes)),
        num_tagged=tagged or config.num_tagged,
        profile=profile or config.profile,
        engine=_engine(config.engine, scheduler, config_path, assignments, offload),
        strict_profile=strict,
        simulator=simulator,
        trace=trace_path,
        faults=read_faults(faults_path) if faults_path is not None else None,
    )
    if trace_path is not None:
        trace_rate_per_s(trace_path)  # what is wrong with a trace is said before workers start
    which = _timeline_cell(config, policies, timeline_seed) if timeline_paths else None
    if profile is not None and trace_path is None:
        _note_other_model(config)
    with Bar("seed") as bar:
        cells = run_matrix(config, out_dir, num_jobs=jobs, on_seed=bar.update)
    if which is not None:
        _draw_cell(timeline_paths, config, which)
    rows = summarise(cells)
    if as_json:
        click.echo(to_json({"rows": [asdict(row) for row in rows]}))
        return
    click.echo(format_table(rows))


def _engine(
    base: EngineConfig,
    scheduler: str | None,
    config_path: Path | None,
    assignments: tuple[str, ...],
    offload: OffloadSettings | None,
) -> EngineConfig:
    engine = chosen_engine(base, scheduler, config_path, assignments)
    return engine if offload is None else replace(engine, offload=offload)


def _timeline_cell(config: MatrixConfig, policies: tuple[str, ...], seed: int) -> OneCell:
    """Return the cell that --timeline shows; an error, before any work, when that is not clear."""
    from eval.one_cell import only_cell

    names = tuple(dict.fromkeys(policies))
    if len(names) > 1:
        raise click.UsageError(
            f"--timeline shows one cell, but there are {len(names)} policies "
            f"({', '.join(names)}): give one --policy."
        )
    return only_cell(config, names[0], seed)


def _draw_cell(paths: tuple[Path, ...], config: MatrixConfig, which: OneCell) -> None:
    from eval.one_cell import run_one_cell

    source = config.runs if config.trace is None else config.trace
    mode = ", SGLang's scheduler" if config.engine.sglang is not None else ""
    record_timelines(
        paths,
        lambda on_step: run_one_cell(config, which, on_step)[1],
        title=f"{which.title}, {source.stem}{mode}",
        rule=f"policy {which.policy}",
        usable_blocks=which.pressure.num_blocks - 1,
        num_requests=config.num_warmup + config.num_tagged + config.num_filler,
    )


def _note_other_model(config: MatrixConfig) -> None:
    """Say so when lengths and step times are of different models; that is allowed, and a choice."""
    from serving_sim.models import model_key
    from serving_sim.profile import model_name
    from traces.runlog import read_runs

    timed = config.step_profile()
    others = sorted({run.model for run in read_runs(config.runs)} - {timed.model})
    others = [model for model in others if model_key(model) != model_name(timed)]
    if others:
        click.echo(
            f"note: lengths are of {', '.join(others)}, step times of {timed.model}: the load is "
            "theirs together",
            err=True,
        )


def _refuse_matrix_options(context: click.Context) -> None:
    """Say so when an option was given that has no meaning for a single file."""
    kept = (
        "policies", "scheduler", "workload_path", "decisions_path", "timeline_paths",
        "faults_path", *_OFFLOAD, "as_json",
    )  # fmt: skip
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in kept and source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[0]} does not go with --workload.")


_OFFLOAD = ("offload_gb_per_s", "offload_gib", "offload_rule")


def _offload(
    context: click.Context, gb_per_s: float | None, gib: float | None, rule: str
) -> OffloadSettings | None:
    """Return the tier that the options describe."""
    from serving_sim.config import OffloadSettings

    if gb_per_s is None:
        for name in _OFFLOAD[1:]:
            if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                option = "--" + name.replace("_", "-")
                raise click.UsageError(f"{option} needs --offload, the tier's GB a second.")
        return None
    capacity_bytes = None if gib is None else gib * 2**30
    return OffloadSettings(
        bytes_per_s=gb_per_s * 1e9, capacity_bytes=capacity_bytes, rule=cast("LoadRule", rule)
    )
