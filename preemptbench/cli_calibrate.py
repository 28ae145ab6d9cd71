"""``preemptbench calibrate``: time a model's steps on a device and fit a profile to them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from contracts.errors import InvalidInput
from preemptbench.options import json_option, to_json
from preemptbench.progress import Bar
from serving_sim.calibration.adaptive import CalibrationSettings
from serving_sim.calibration.bench_config import BACKENDS, BenchConfig
from serving_sim.calibration.roofline import gpu_peak
from serving_sim.calibration.run import (
    LONGEST_CHUNK_TOKENS,
    LONGEST_CONTEXT_TOKENS,
    CalibrationPlan,
    journal_path,
    refit_journal,
    run_calibration,
    summary,
)
from serving_sim.calibration.shapes import SHAPES
from serving_sim.calibration.timing import TimingRules
from serving_sim.roofline import Peak

if TYPE_CHECKING:
    from collections.abc import Callable

_BENCH, _PLAN = BenchConfig(model=""), CalibrationPlan(bench=BenchConfig(model=""))
_RULES, _SETTINGS = TimingRules(), CalibrationSettings()
_PATH = click.Path(path_type=Path)


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option(
            "--model", default="llama-3.1-8b", show_default=True,
            help=f"{', '.join(SHAPES)}; a config.json or a folder with one; or a Hugging Face id, "
            "of which the config alone is fetched. Weights are random.",
        ),
        click.option(
            "--backend", default=_BENCH.backend, show_default=True,
            help=f"Whose steps: {', '.join(BACKENDS)} (the model over contiguous caches; "
            "transformers' continuous batching; a vLLM engine).",
        ),
        click.option("--dtype", default=_BENCH.dtype, show_default=True),
        click.option(
            "--device", default=_BENCH.device, show_default=True, help="auto, cpu, cuda, cuda:1 …"
        ),
        click.option(
            "--attention", default=_BENCH.attention, show_default=True,
            help="Kernel: flash, math, or auto (flash for 16-bit types on a GPU).",
        ),
        click.option(
            "--graph-max-tokens", default=_BENCH.graph_max_tokens, show_default=True,
            help="Steps up to this size replay a CUDA graph; 0 launches all eagerly.",
        ),
        click.option(
            "--fuse", is_flag=True,
            help="Compile norms and feed-forward parts (torch.compile), as engines fuse them.",
        ),
        click.option(
            "--flush-l2", is_flag=True,
            help="Empty the L2 cache before each run: for models so small that they stay in it.",
        ),
        click.option(
            "--memory-share", default=_BENCH.memory_share, show_default=True,
            help="Share of the device's free memory that may be used.",
        ),
        click.option("--max-batch", default=_PLAN.max_batch, show_default=True),
        click.option(
            "--max-context", type=click.IntRange(min=1),
            help=f"Default: the model's, at most {LONGEST_CONTEXT_TOKENS}.",
        ),
        click.option(
            "--max-chunk", type=click.IntRange(min=1),
            help=f"Default: half of it, at most {LONGEST_CHUNK_TOKENS}.",
        ),
        click.option(
            "--target-error", default=_SETTINGS.target_error, show_default=True,
            help="Stop when the median error on steps the fit has not seen is this share.",
        ),
        click.option(
            "--budget-s", default=_SETTINGS.budget_s, show_default=True,
            help="Stop after so many seconds; the same command goes on.",
        ),
        click.option(
            "--max-timed", default=_RULES.max_timed, show_default=True,
            help="Runs of a step at most; fewer when the median is certain before.",
        ),
        click.option("--name", default="", help="The profile's name. Default: GPU-model-dtype."),
        click.option("--licence", default=_PLAN.licence, show_default=True, help="Of the profile."),
        click.option("--bandwidth-gb-s", type=float, help="GPU's memory, for the roofline."),
        click.option("--peak-tflops", type=float, help="GPU's dense 16-bit rate, likewise."),
        click.option("--report", type=_PATH, help="Write the surfaces and errors: .html or .png."),
        click.option(
            "--from-journal", "journal_file", type=_PATH,
            help="Time nothing: fit the timings in this .jsonl, made on another machine.",
        ),
        click.option("--out", type=_PATH, required=True, help="The profile to write (.json)."),
        json_option,
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command(short_help="Time a model's steps on a GPU and fit a profile to them.")
@_options
def calibrate(
    out: Path, report: Path | None, journal_file: Path | None, as_json: bool, **given: Any
) -> None:
    """Time decode and prefill steps of a model with random weights, and fit a profile to them.

    Every timed step is on disk (OUT with .jsonl) before the next. Ctrl-C, a crash or the end of the
    budget lose at most the running one; the same command goes on where it stopped.
    """
    from serving_sim.calibration.report import check_report_path, write_report

    if out.suffix != ".json":
        raise InvalidInput(f"--out {out}: name a file that ends in .json")
    if report is not None:
        check_report_path(report)
    peaks, plan = _peaks(given), _plan(given)
    try:
        if journal_file is not None:
            outcome = refit_journal(plan, journal_file, out)
        else:
            with Bar("step", "calibrate") as bar:
                outcome = run_calibration(plan, out, bar.update)
    except KeyboardInterrupt:
        click.echo(
            f"\ninterrupted: the timed steps are safe in {journal_path(out)}; run the same command "
            "again to go on",
            err=True,
        )
        raise
    for note in outcome.calibration.notes:
        click.echo(f"note: {note}", err=True)
    facts = summary(outcome, out)
    if report is not None:
        found = peaks or gpu_peak(outcome.header.hardware)
        rows = [(key.replace("_", " "), str(value)) for key, value in facts.items()]
        write_report(outcome.calibration, outcome.facts, found, rows, report)
        click.echo(f"report: {report}", err=True)
    click.echo(to_json(facts) if as_json else format_summary(facts))


def _plan(given: dict[str, Any]) -> CalibrationPlan:
    bench = BenchConfig(
        model=given["model"],
        backend=given["backend"],
        dtype=given["dtype"],
        device=given["device"],
        attention=given["attention"],
        graph_max_tokens=given["graph_max_tokens"],
        fuse=given["fuse"],
        memory_share=given["memory_share"],
        flush_l2=given["flush_l2"],
        rules=TimingRules(
            min_timed=min(_RULES.min_timed, given["max_timed"]), max_timed=given["max_timed"]
        ),
    )
    return CalibrationPlan(
        bench=bench,
        max_batch=given["max_batch"],
        max_context_tokens=given["max_context"],
        max_chunk_tokens=given["max_chunk"],
        settings=CalibrationSettings(
            target_error=given["target_error"], budget_s=given["budget_s"]
        ),
        name=given["name"],
        licence=given["licence"],
    )


def _peaks(given: dict[str, Any]) -> Peak | None:
    bandwidth, peak = given["bandwidth_gb_s"], given["peak_tflops"]
    if bandwidth is None and peak is None:
        return None
    if not all(rate is not None and 0.0 < rate < math.inf for rate in (bandwidth, peak)):
        raise InvalidInput(
            f"--bandwidth-gb-s {bandwidth} and --peak-tflops {peak}: a roofline needs both, above 0"
        )
    return Peak(peak * 1e12, bandwidth * 1e9)


def format_summary(facts: dict[str, Any]) -> str:
    """Return the summary as text for a terminal."""
    lines = []
    for key, value in facts.items():
        text = str(value)
        if key.endswith("_error"):
            text = "-" if math.isnan(value) else f"{value:.2%}"
        lines.append(f"{key.replace('_', ' '):<16} {text}")
    return "\n".join(lines)
