"""``preemptbench validate``: replay what a real engine recorded and say how far off we are."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from contracts.errors import InvalidInput
from preemptbench.options import check_out_folder, json_option, to_json

if TYPE_CHECKING:
    from contracts.signals import RemainingGrid
    from eval.log_replay import Difference, LogReplay
    from eval.recorded_run import RecordedRun
    from eval.validation import ValidationReport
    from serving_sim.live_log import Recorded
    from serving_sim.profile import StepProfile


@click.command(short_help="Replay a recorded run, or a decision log, of a real vLLM and compare.")
@click.argument("recorded", metavar="RUN_FOLDER|LOG", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "policy_name",
    help="Of a log: who is to name its victims, a built-in name or path/to/file.py:function. "
    "Default: the policy that the log was written under.",
)
@click.option(
    "--signal",
    "signal_name",
    type=click.Path(path_type=Path),
    help="Of a log: the checkpoint folder, for a policy that reads a signal.",
)
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
@json_option
def validate(
    recorded: Path,
    policy_name: str | None,
    signal_name: Path | None,
    perf_folder: Path | None,
    profile_name: str | None,
    strict: bool,
    async_scheduling: bool | None,
    out_dir: Path,
    as_json: bool,
) -> None:
    """Replay what a real vLLM recorded and compare.

    RUN_FOLDER holds vllm/requests.jsonl, vllm/timeseries.csv, vllm/meta.json and config.json
    (LLMServingSim's layout); times are compared, request by request. Step times come from operators
    measured on the same GPU, as tables or as the --profile fitted to them; nothing is fitted to the
    run.

    LOG is a decision log: what PREEMPTBENCH_DECISIONS made a running vLLM write, or a log of the
    vLLM driver. Steps and victims are compared, one by one.
    """
    check_out_folder(out_dir)
    is_log = recorded.is_file()
    of_folders = (perf_folder, profile_name, async_scheduling, strict or None)
    if is_log and any(option is not None for option in of_folders):
        raise click.UsageError("--perf, --profile, --strict and --async are for run folders.")
    if not is_log and (policy_name is not None or signal_name is not None):
        raise click.UsageError("--policy and --signal are for decision logs.")
    if is_log:
        _validate_log(recorded, policy_name, signal_name, out_dir, as_json)
    else:
        profile = (perf_folder, profile_name, strict)
        _validate_run(recorded, profile, async_scheduling, out_dir, as_json)


def _validate_run(
    run_folder: Path,
    profile_options: tuple[Path | None, str | None, bool],
    async_scheduling: bool | None,
    out_dir: Path,
    as_json: bool,
) -> None:
    from eval.recorded_run import read_recorded_run
    from eval.validation import replay, report
    from eval.validation_figure import write_figure

    run = read_recorded_run(run_folder)
    if async_scheduling is not None:
        run = replace(run, config=replace(run.config, async_scheduling=async_scheduling))
    profile = _profile(run_folder, run, *profile_options)
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


def _validate_log(
    path: Path, policy_name: str | None, signal: Path | None, out_dir: Path, as_json: bool
) -> None:
    from eval.log_replay import replay_log
    from eval.named_policies import checked_policy
    from serving_sim.live_log import read_recorded

    recorded = read_recorded(path)
    name = policy_name or recorded.victims_by
    policy = checked_policy(name) if name is not None else None
    if policy is not None and policy.reads_signal and signal is None:
        raise InvalidInput(
            f"policy {policy.name!r} reads a signal: give --signal, the checkpoint's folder"
        )
    grid = _grid(signal, recorded) if signal is not None else None
    outcome = replay_log(recorded, policy, grid)
    text = to_json(asdict(outcome) | {"is_equal": outcome.is_equal})
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "validation.json").write_text(text + "\n", encoding="utf-8")
    click.echo(text if as_json else format_replay(outcome))


def _grid(folder: Path, recorded: Recorded) -> RemainingGrid:
    from eval.what_if import predictor_grid
    from predictors.registry import load_predictor

    predictor = load_predictor(folder)
    return predictor_grid(
        predictor, recorded.log.workload, stride=recorded.refresh_tokens, whole=True
    )


def format_replay(outcome: LogReplay) -> str:
    """Return the replay of a log as text for a terminal."""
    lines = [
        f"{outcome.log}: {outcome.num_requests} requests, victims by {outcome.policy}"
        + (f" on {outcome.signal}" if outcome.signal != "none" else ""),
        f"steps    {outcome.num_equal_steps} of {outcome.num_steps} planned alike",
        f"victims  {outcome.num_equal_victims} of {outcome.num_victims} named alike",
    ]
    for label, found in (
        ("first step that differs", outcome.first_difference),
        ("first other victim", outcome.first_other_victim),
    ):
        if found is not None:
            lines.append(_difference(label, found))
    if outcome.stopped is not None:
        lines.append(f"the replay stopped in {outcome.stopped}")
    if outcome.num_censored:
        lines.append(
            f"note: {outcome.num_censored} of {outcome.num_requests} requests were cut off; they "
            "end here where the log cut them"
        )
    is_own = outcome.logged_policy in (None, outcome.policy)
    if outcome.first_difference is not None or (is_own and not outcome.is_equal):
        lines.append(
            "note: a log holds no texts: prefixes that requests shared, streamed progress and a "
            "predictor that was late are known causes of such differences"
        )
    return "\n".join(lines)


def _difference(label: str, found: Difference) -> str:
    return (
        f"{label}: step {found.step}, {found.what}\n  logged   {found.logged}\n"
        f"  replayed {found.replayed}"
    )


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
