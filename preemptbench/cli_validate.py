"""``preemptbench validate``: replay a recorded run of a real engine and say how far off we are."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from contracts.errors import InvalidInput
from preemptbench.options import check_out_folder, to_json

if TYPE_CHECKING:
    from eval.recorded_run import RecordedRun
    from eval.validation import ValidationReport
    from serving_sim.profile import StepProfile


@click.command(short_help="Replay a recorded run of a real vLLM and compare.")
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.option(
    "--perf",
    "perf_folder",
    type=click.Path(path_type=Path),
    help="Folder with the operator tables of the run's GPU and model (dense.csv, per_sequence.csv, "
    "attention.csv). Default: where the data set keeps them, beside the runs.",
)
@click.option(
    "--profile",
    "profile_name",
    help="Step times from a bundled profile or a profile file, instead of operator tables.",
)
@click.option(
    "--strict", is_flag=True, help="Refuse a step beyond the range in which --profile was measured."
)
@click.option(
    "--async/--no-async",
    "async_scheduling",
    default=None,
    help="Plan a step ahead or not; default: as the run recorded.",
)
@click.option(
    "--out",
    "out_dir",
    type=click.Path(path_type=Path),
    default=Path("out/validate"),
    show_default=True,
    help="Where validation.json, .svg and .png go.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def validate(
    run_folder: Path,
    perf_folder: Path | None,
    profile_name: str | None,
    strict: bool,
    async_scheduling: bool | None,
    out_dir: Path,
    as_json: bool,
) -> None:
    """Replay a recorded run of a real vLLM and compare times, request by request.

    RUN_FOLDER holds vllm/requests.jsonl, vllm/timeseries.csv, vllm/meta.json and config.json
    (LLMServingSim's layout). Step times come from operators measured on the same GPU, as tables
    or as the --profile fitted to them; nothing is fitted to the run.
    """
    from eval.recorded_run import read_recorded_run
    from eval.validation import replay, report
    from eval.validation_figure import write_figure

    check_out_folder(out_dir)
    run = read_recorded_run(run_folder)
    if async_scheduling is not None:
        run = replace(run, config=replace(run.config, async_scheduling=async_scheduling))
    profile = _profile(run_folder, run, perf_folder, profile_name, strict)
    replayed = replay(run, profile)
    outcome = report(run, profile, replayed)
    text = to_json(asdict(outcome))
    paths = write_figure(run, replayed, out_dir)
    (out_dir / "validation.json").write_text(text + "\n", encoding="utf-8")
    if as_json:
        click.echo(text)
        return
    click.echo(format_report(outcome))
    click.echo(f"figure: {', '.join(map(str, paths))}", err=True)


def _profile(
    run_folder: Path, run: RecordedRun, perf: Path | None, name: str | None, strict: bool
) -> StepProfile:
    """Return the profile that was asked for, which must be of the run's model."""
    from serving_sim.operator_profile import load_operator_profile
    from serving_sim.profile import check_model, load_profile, strictly

    if name is None:
        if strict:
            raise InvalidInput("--strict speaks of a measured range: give --profile as well")
        return load_operator_profile(perf or _tables_beside(run_folder, run), run.model)
    if perf is not None:
        raise InvalidInput("--profile and --perf both name step times: give one of them")
    profile = load_profile(name)
    check_model(profile, run.model)
    return strictly(profile) if strict else profile


def _tables_beside(run_folder: Path, run: RecordedRun) -> Path:
    """Return the data set's folder of operator tables: <set>/runs/<GPU>/<model> is the run's."""
    parents = run_folder.absolute().parents
    folder = parents[min(2, len(parents) - 1)] / "perf" / run.perf_path
    if not folder.is_dir():
        raise InvalidInput(f"no operator tables in {folder}: name their folder with --perf")
    return folder


def format_report(outcome: ValidationReport) -> str:
    """Return the comparison as text for a terminal."""
    e2e = outcome.e2e
    lines = [
        f"{outcome.run}, async scheduling {'on' if outcome.async_scheduling else 'off'}",
        f"{'':<14}{'real':>10} {'simulated':>10} {'error':>8}",
        _line("makespan s", outcome.real_makespan_s, outcome.simulated_makespan_s),
    ]
    for name, unit, factor in (("ttft", "s", 1.0), ("tpot", "ms", 1e3), ("e2e", "s", 1.0)):
        metric = getattr(outcome, name)
        for statistic, real_s in metric.real_s.items():
            simulated_s = metric.simulated_s[statistic]
            lines.append(_line(f"{name} {statistic} {unit}", real_s * factor, simulated_s * factor))
    for name, (real, simulated) in outcome.occupancy.items():
        lines.append(_line(f"mean {name}", real, simulated))
    lines += [
        f"per-request e2e: MAPE {e2e.mape:.2%}, correlation {e2e.correlation:.4f}",
        f"{outcome.num_preemptions} preemptions, {outcome.recomputed_tokens} tokens recomputed, "
        f"{outcome.num_steps} steps, {outcome.wall_s:.2f} s of wall time",
        *(f"note: {note}" for note in outcome.notes),
    ]
    return "\n".join(lines)


def _line(label: str, real: float, simulated: float) -> str:
    if math.isnan(real):
        return f"{label:<14}{'-':>10} {simulated:>10.2f} {'-':>8}"
    error = f"{simulated / real - 1:>+8.2%}" if real else f"{'-':>8}"
    return f"{label:<14}{real:>10.2f} {simulated:>10.2f} {error}"
