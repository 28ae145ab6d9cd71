"""``preemptbench profiles``: the bundled step-time profiles, their range, error and source."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from contracts.errors import InvalidInput
from preemptbench.options import json_option, to_json

if TYPE_CHECKING:
    from eval.recorded_run import RecordedRun, RequestLog
    from serving_sim.config import EngineConfig
    from serving_sim.profile import AffineProfile
    from serving_sim.surface import SurfaceProfile


@click.group(invoke_without_command=True, short_help="List the bundled step-time profiles.")
@json_option
@click.pass_context
def profiles(context: click.Context, as_json: bool) -> None:
    """List the bundled step-time profiles: model, range and held-out error.

    The error is the median and the 99th percentile of |fitted / measured - 1| over steps that no
    table was fitted to, for decodes, prefill and steps with both. 'profiles show NAME' says all.
    """
    if context.invoked_subcommand is not None:
        return
    from serving_sim.profile import list_profiles, load_profile

    facts = [describe_profile(load_profile(name)) for name in list_profiles()]
    if as_json:
        click.echo(to_json({"profiles": facts}))
        return
    width = max(len(fact["name"]) for fact in facts)
    click.echo(
        f"{'name':<{width}} {'decodes':>7} {'chunk':>6} {'context':>7}  "
        f"{'decode':<16}{'prefill':<16}{'mixed':<16}".rstrip()
    )
    for fact in facts:
        reach, errors = fact["range"], fact["errors"]
        cells = "".join(
            f"{_error(errors.get(kind)):<16}" for kind in ("decode", "prefill", "mixed")
        )
        click.echo(
            f"{fact['name']:<{width}} {reach['decodes']:>7.0f} {reach['chunk_tokens']:>6.0f} "
            f"{reach['context_tokens']:>7.0f}  {cells}".rstrip()
        )


@profiles.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Say all of one profile: NAME is a bundled name or a file that ends in .json."""
    from serving_sim.profile import load_profile

    fact = describe_profile(load_profile(name))
    if as_json:
        click.echo(to_json(fact))
        return
    for key, value in fact.items():
        if isinstance(value, dict):
            for inner, item in value.items():
                text = (
                    _error(item) if isinstance(item, dict) else f"{item:g}" if _real(item) else item
                )
                click.echo(f"{key + ' ' + inner:<26} {text}")
        else:
            click.echo(f"{key.replace('_', ' '):<26} {value}")


@profiles.command()
@click.argument("model")
@click.option(
    "--memory-gib",
    required=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Memory of one GPU, as it reports it (an RTX 4090: 23.5).",
)
@click.option("--tensor-parallel", default=1, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--utilization",
    default=0.9,
    show_default=True,
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="vLLM's gpu_memory_utilization.",
)
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(min=1))
@click.option("--batched-tokens", default=8192, show_default=True, type=click.IntRange(min=1))
@click.option("--seqs", default=256, show_default=True, type=click.IntRange(min=1))
@json_option
def blocks(
    model: str,
    memory_gib: float,
    tensor_parallel: int,
    utilization: float,
    block_size: int,
    batched_tokens: int,
    seqs: int,
    as_json: bool,
) -> None:
    """Say how many KV blocks fit beside MODEL: a known name (Qwen3-32B) or a config.json."""
    from serving_sim.memory import usable_blocks
    from serving_sim.models import architecture, architecture_from_config
    from traces.safe_json import read_json

    is_file = model.endswith(".json")
    shape = architecture_from_config(read_json(Path(model))) if is_file else architecture(model)
    fit = usable_blocks(
        shape,
        int(memory_gib * (1 << 30)),
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=seqs,
        gpu_memory_utilization=utilization,
        tensor_parallel=tensor_parallel,
        block_size=block_size,
    )
    facts = {
        "blocks": fit,
        "tokens": fit * block_size,
        "parameters": shape.num_parameters,
        "weight_bytes": shape.weight_bytes,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
    }
    if as_json:
        click.echo(to_json(facts))
        return
    for key, value in facts.items():
        click.echo(f"{key.replace('_', ' '):<20} {value}")


@profiles.command()
@click.option(
    "--from",
    "log_path",
    required=True,
    type=click.Path(path_type=Path),
    help="requests.jsonl of an engine (request_id, input_toks, output_toks, queued_ts, "
    "first_token_ts, last_token_ts), or a run folder, which also says how the engine was set.",
)
@click.option("--blocks", type=click.IntRange(min=2), help="KV blocks of the engine, of 16 tokens.")
@click.option("--seqs", default=256, show_default=True, type=click.IntRange(min=1))
@click.option("--batched-tokens", default=8192, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--model",
    default="not stated",
    help="The model that was served; default: as a run folder says.",
)
@click.option("--hardware", default="not stated", help="The GPU that served it.")
@click.option(
    "--out",
    "out_path",
    type=click.Path(path_type=Path),
    default=Path("profile.json"),
    show_default=True,
    help="Profile file to write; other verbs take it as --profile FILE.",
)
@json_option
def fit(
    log_path: Path,
    blocks: int | None,
    seqs: int,
    batched_tokens: int,
    model: str,
    hardware: str,
    out_path: Path,
    as_json: bool,
) -> None:
    """Estimate a profile from an engine's own request log.

    For engines that nobody can calibrate. The step engine replays the log with trial step times;
    each round, least squares over the requests' times gives better ones. For a known dense model,
    the bytes of weights and KV tie the cost of context to the fixed one. One request in five is
    left out and says how good the result is.
    """
    from eval.log_profile import context_share_of, fit_from_log
    from eval.recorded_run import RecordedRun
    from preemptbench.progress import Bar
    from serving_sim.models import MODELS, model_key
    from serving_sim.profile import save_profile

    log, config = _read_log(log_path, blocks, seqs, batched_tokens)
    if model == "not stated" and isinstance(log, RecordedRun):
        model = log.model
    shape = MODELS.get(model_key(model))
    share = None if shape is None or shape.num_experts else context_share_of(shape)
    if share is None:
        click.echo(
            f"note: {model} is no dense model known here: context is fitted freely", err=True
        )
    with Bar("round") as bar:
        found = fit_from_log(
            log.workload, config, log.first_token_s, log.end_s, out_path.stem,
            context_share=share, on_round=bar.update,
        )  # fmt: skip
    source = (
        f"estimated from {log_path.name} ({found.num_fitted} requests); end-to-end times of "
        f"{found.num_held_out} others: {found.held_out_median_error:.2%} off at the median"
    )
    profile = replace(found.profile, source=source, model=model, hardware=hardware)
    save_profile(profile, out_path)
    if as_json:
        click.echo(to_json(asdict(replace(found, profile=profile))))
        return
    for key in ("fixed_s", "per_token_s", "per_context_token_s"):
        click.echo(f"{key:<22} {getattr(profile, key):.4g}")
    click.echo(
        f"end-to-end times, simulated against the log: median {found.held_out_median_error:.2%}, "
        f"mean {found.held_out_mean_error:.2%} off ({found.num_held_out} requests left out)"
    )
    click.echo(f"written: {out_path}", err=True)


def _read_log(
    path: Path, blocks: int | None, seqs: int, batched_tokens: int
) -> tuple[RecordedRun | RequestLog, EngineConfig]:
    """Return a log and how its engine was set: as a run folder records it, or as was given."""
    from eval.recorded_run import read_recorded_run, read_request_log
    from serving_sim.config import EngineConfig

    if path.is_dir():
        run = read_recorded_run(path)
        return run, run.config
    if blocks is None:
        raise InvalidInput(
            f"{path} does not say how many KV blocks the engine had: give --blocks (vLLM prints "
            "them when it starts; 'preemptbench profiles blocks' estimates them)"
        )
    config = EngineConfig(
        num_blocks=blocks, max_num_seqs=seqs, max_num_batched_tokens=batched_tokens
    )
    return read_request_log(path, path.stem), config


def describe_profile(profile: AffineProfile | SurfaceProfile) -> dict[str, Any]:
    """Return what a profile says about itself, and seconds of a few steps."""
    from serving_sim.profile import AffineProfile, StepWork

    if isinstance(profile, AffineProfile):
        facts = _describe_affine(profile)
    else:
        facts = asdict(profile.header) | {
            "form": "tables",
            "graph_batch_sizes": len(profile.graph_batch_sizes),
            "skew_share": profile.skew_share,
            "range": asdict(profile.range),
            "errors": {name: asdict(error) for name, error in profile.errors.items()},
        }
    facts["ms"] = {
        "1 decode at 1,024": 1e3 * profile.step_s(StepWork(0, 0, 1, 1024, 1, 1024)),
        "64 decodes at 1,024": 1e3 * profile.step_s(StepWork(0, 0, 64, 64 * 1024, 64, 1024)),
        "prefill of 1,024": 1e3 * profile.step_s(StepWork(1024, 1024, 0, 0, 1)),
    }
    return facts


def _describe_affine(profile: AffineProfile) -> dict[str, Any]:
    fit = profile.fit
    facts: dict[str, Any] = {
        key: getattr(profile, key) for key in ("name", "hardware", "model", "source", "licence")
    }
    facts |= {
        "form": "affine",
        "range": dict.fromkeys(("decodes", "chunk_tokens", "context_tokens"), 0),
    }
    facts["errors"] = {}
    if fit is not None:
        facts["range"] = {
            "decodes": fit.max_num_decodes,
            "chunk_tokens": fit.max_prefill_tokens,
            "context_tokens": fit.max_context_tokens_per_request,
        }
        facts["errors"] = {
            "decode": {"median": fit.decode_median_error, "p90": fit.decode_p90_error},
            "prefill": {"median": fit.prefill_median_error, "p90": fit.prefill_p90_error},
        }
    return facts


def _error(error: dict[str, float] | None) -> str:
    """Return "median / p99"; an affine profile keeps the 90th percentile instead."""
    if error is None:
        return "-"
    upper = f"{error['p99']:.1%}" if "p99" in error else f"{error['p90']:.1%} p90"
    return f"{error['median']:.1%} / {upper}"


def _real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
