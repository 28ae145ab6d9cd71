"""``preemptbench study``: the whole question, from sources of lengths to verdicts."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from contracts.errors import InvalidInput
from preemptbench.options import (
    allow_mismatch_option,
    check_out_folder,
    deadline_classes_option,
    json_option,
    to_json,
)
from preemptbench.progress import StageBars
from preemptbench.task_options import backend_context, memory_bytes, say, task_options

if TYPE_CHECKING:
    from eval.study_config import Source, StudyConfig


@click.command(short_help="Answer the question on a grid of model families and pressures.")
@click.option(
    "--preset",
    type=click.Choice(["quick", "paper", "real", "real-text"]),
    default="quick",
    show_default=True,
    help="quick: two drawn sources, about two minutes. paper: seven families x two benchmarks, "
    "drawn from bundled length laws. real: the same families from public runs (--data). real-text: "
    "those whose whole texts are stored, with gbm-hazard as a signal (--data).",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    envvar="PREEMPTBENCH_DATA",
    help="Folder of the public data, for --preset real and real-text.",
)
@click.option(
    "--runs",
    "own_runs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A run log of your own as one more source. Repeatable.",
)
@click.option("--only-own", is_flag=True, help="With --runs: leave the sources of the preset out.")
@click.option(
    "--policy", "policies", multiple=True, help="One more policy: a name or file.py:function."
)
@click.option(
    "--signal",
    "signals",
    multiple=True,
    help="One more signal: oracle-K, clairvoyant, one of them with degradations such as "
    "'clairvoyant | noise(0.5)', age-km, or surrogate-gbm (a surrogate, not a predictor).",
)
@click.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    help="A trained predictor as one more signal of every source, as name=FOLDER; --only-own keeps "
    "it to your --runs.",
)
@allow_mismatch_option
@click.option("--seeds", type=click.IntRange(min=2), help="Study seeds. Default: the preset's.")
@click.option(
    "--looks",
    metavar="N,N,…",
    help="Numbers of seeds at which to look, and stop once every rule "
    "has a verdict; the 5 % are shared out among the looks.",
)
@click.option("--deadline", type=click.FloatRange(min=0, min_open=True), help="Seconds.")
@deadline_classes_option
@click.option(
    "--concurrency",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests that would run on average if each ran alone; sets the rate.",
)
@click.option("--margin", type=click.FloatRange(min=0, min_open=True), help="δ, in pp.")
@click.option("--profile", help="Step-time profile: a bundled name or a JSON file.")
@task_options
@click.option("--out", "out_dir", type=click.Path(path_type=Path), help="Default: out/PRESET.")
@json_option
def study(
    preset: str,
    data: Path | None,
    own_runs: tuple[Path, ...],
    only_own: bool,
    policies: tuple[str, ...],
    signals: tuple[str, ...],
    checkpoints: tuple[str, ...],
    allow_mismatch: bool,
    seeds: int | None,
    looks: str | None,
    deadline: float | None,
    deadline_classes: tuple[str, ...],
    concurrency: float | None,
    margin: float | None,
    profile: str | None,
    jobs: int,
    backend: str,
    address: str | None,
    timeout_s: float | None,
    memory_gb: float | None,
    retry_failed: bool,
    out_dir: Path | None,
    status: bool,
    as_json: bool,
) -> None:
    """Run a study and print what may be said: every policy x signal against LIFO, with family-wise
    p-values and equivalence verdicts, in the low-breach regime and beyond it.

    Finished seeds are kept in --out; a second start runs what is missing. A seed that fails is
    left out of every comparison, and said. The report is report.html there.
    """
    from eval.named_policies import checked_policy
    from eval.study import study_status
    from eval.study_looks import run_until_clear
    from eval.study_report import write_study_report
    from eval.task_limits import TaskLimits
    from preemptbench.study_presets import PRESETS
    from preemptbench.study_text import study_object, study_text
    from traces.deadlines import parse_deadline_class

    if only_own and not own_runs:
        raise click.UsageError("--only-own leaves no source: give --runs.")
    if looks is not None and seeds is not None:
        raise click.UsageError("--seeds and --looks do not go together: the last look says both.")
    planned = _looks(looks) if looks is not None else ()
    for name in policies:
        checked_policy(name)
    base = PRESETS[preset]
    named = dict(_named(text) for text in checkpoints)
    config = replace(
        base,
        policies=tuple(dict.fromkeys((*base.policies, *policies))),
        signals=tuple(dict.fromkeys((*base.signals, *signals, *named))),
        num_seeds=planned[-1] if planned else seeds or base.num_seeds,
        looks=planned,
        deadline_s=deadline or base.deadline_s,
        observe_s=base.observe_s * (deadline or base.deadline_s) / base.deadline_s,
        concurrency=concurrency or base.concurrency,
        margin_pp=margin or base.margin_pp,
        deadline_classes=tuple(map(parse_deadline_class, deadline_classes)),
        profile=profile or base.profile,
    )
    place = out_dir or Path("out") / preset
    check_out_folder(place)
    sources = _sources(config, place, data, own_runs, only_own, named, allow_mismatch)
    if status:
        rows = study_status(config, sources, place)
        click.echo(to_json({"sources": [asdict(row) for row in rows]}) if as_json else
                   "\n".join(map(str, rows)))  # fmt: skip
        return
    limits = TaskLimits(timeout_s=timeout_s, memory_bytes=memory_bytes(memory_gb))
    with backend_context(backend, address), StageBars("task") as bars:
        result = run_until_clear(
            config, sources, place, num_jobs=jobs, on_task=bars.update, limits=limits,
            retry_failed=retry_failed, on_note=say,
        )  # fmt: skip
        page = write_study_report(result, place, _command(), bars.update)
    click.echo(to_json(study_object(result)) if as_json else study_text(result))
    click.echo(f"report: {page}", err=True)


def _sources(
    config: StudyConfig,
    place: Path,
    data: Path | None,
    own_runs: tuple[Path, ...],
    only_own: bool,
    checkpoints: dict[str, Path],
    allow_mismatch: bool,
) -> list[Source]:
    """Return the preset's sources and the user's own, all with the user's checkpoints."""
    from preemptbench.study_presets import drawn_sources, own_source, real_sources, text_sources

    sources: list[Source] = []
    if not only_own:
        if config.name in ("real", "real-text"):
            if data is None:
                raise click.UsageError(
                    f"--preset {config.name} reads public runs: give --data FOLDER or set "
                    "PREEMPTBENCH_DATA."
                )
            of_preset = real_sources if config.name == "real" else text_sources
            sources = of_preset(config, data, place)
        else:
            sources = drawn_sources(config, place)
    sources += [own_source(path, config, place) for path in own_runs]
    return [_with(source, checkpoints, allow_mismatch) for source in sources]


def _with(source: Source, checkpoints: dict[str, Path], allow_mismatch: bool) -> Source:
    """Return ``source`` with the user's checkpoints; raises InvalidInput, before any pilot runs,
    when one was trained for another model than its runs are of, unless that is allowed."""
    from eval.mismatch import matched_name
    from eval.signal_sources import load_predictors
    from traces.runlog import read_runs

    runs = list(read_runs(source.runs)) if checkpoints else []
    for name, folder in checkpoints.items():
        try:
            matched_name(load_predictors(folder), runs, allow_mismatch=allow_mismatch, name=name)
        except InvalidInput as error:
            raise InvalidInput(
                f"{source.name}: {error}; --only-own leaves the sources of the preset out"
            ) from None
    every = (*source.checkpoints, *checkpoints.items())
    return replace(source, checkpoints=every, allow_mismatch=allow_mismatch)


def _command() -> str:
    """Return the command as it was given, to be written into the report."""
    return shlex.join(["preemptbench", *sys.argv[1:]])


def _looks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list such as 8,12,20", param_hint="--looks"
        ) from None


def _named(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not equals or not name or not Path(folder).is_dir():
        raise click.BadParameter(
            f"{text!r} is not name=FOLDER with a checkpoint's folder", param_hint="--checkpoint"
        )
    return name, Path(folder)
