"""Temperature-zero collection: every prompt K times, each repeat in other batches.

Greedy lengths in low precision depend on which batch a request ran in, so repeat r uses its own
batch size and its own order (keyed by the seed). The plan is fixed beforehand; a second start
reads the shard, skips what is there, and runs the rest of the same plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from contracts.errors import InvalidInput
from contracts.files import atomic_write_text
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun, make_request_key, sha256_text
from oracles.generate import Generation, LoadedModel, generate_batch
from oracles.prompts import Prompt
from oracles.shards import RunShard, read_shard
from traces.safe_json import read_json


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """What a collection is; kept beside its shard, and compared when a second start resumes it."""

    repeats: int = 5
    max_new_tokens: int = 256
    batch_sizes: tuple[int, ...] = (32, 16, 8, 4, 2)
    progress_stride: int = 8
    seed: int = 0
    licence: str = "Apache-2.0"

    def __post_init__(self) -> None:
        for name in ("repeats", "max_new_tokens", "progress_stride"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidInput(f"{name} is {value}: it must be at least 1")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise InvalidInput(f"batch_sizes is {self.batch_sizes}: give sizes of at least 1")


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that decode together, as repeat ``repeat`` of each."""

    repeat: int
    batch_size: int
    prompts: tuple[Prompt, ...]


def plan_batches(prompts: Sequence[Prompt], config: CollectConfig) -> list[Batch]:
    """Return the whole plan: for each repeat a keyed order, cut at that repeat's batch size."""
    batches = []
    for repeat in range(config.repeats):
        size = config.batch_sizes[repeat % len(config.batch_sizes)]
        order = keyed_generator(config.seed, "collect-order", repeat).permutation(len(prompts))
        for start in range(0, len(order), size):
            chosen = tuple(prompts[int(i)] for i in order[start : start + size])
            batches.append(Batch(repeat, size, chosen))
    return batches


def collect_runs(
    lm: LoadedModel,
    prompts: Sequence[Prompt],
    out_dir: Path,
    config: CollectConfig,
    on_batch: Callable[[int, int, int], None] | None = None,
) -> list[DecodeRun]:
    """Run the plan into ``out_dir`` and return every run it holds.

    ``on_batch(runs done, runs planned, new tokens)`` is called after each batch. Raises
    InvalidInput when ``out_dir`` holds a collection of another configuration.
    """
    _check_same_collection(out_dir, lm, prompts, config)
    shard = RunShard(out_dir / "shard-0.jsonl")
    total = len(prompts) * config.repeats
    report = on_batch or (lambda *_: None)
    report(len(shard.done), total, 0)
    for batch in plan_batches(prompts, config):
        keys = [(_request_key(lm, prompt, config), batch.repeat) for prompt in batch.prompts]
        if all(key in shard.done for key in keys):
            continue
        texts = [prompt.prompt for prompt in batch.prompts]
        outputs = generate_batch(lm, texts, config.max_new_tokens, config.progress_stride)
        shard.append(list(_runs_of(lm, batch, outputs, config)))
        report(len(shard.done), total, sum(output.output_tokens for output in outputs))
    return list(read_shard(shard.path))


def _request_key(lm: LoadedModel, prompt: Prompt, config: CollectConfig) -> str:
    return make_request_key(
        model=lm.name,
        prompt_sha256=sha256_text(prompt.prompt),
        chat_template_sha256=lm.chat_template_sha256,
        temperature=0.0,
        max_new_tokens=config.max_new_tokens,
        dtype=lm.dtype,
    )


def _runs_of(
    lm: LoadedModel, batch: Batch, outputs: Sequence[Generation], config: CollectConfig
) -> Iterator[DecodeRun]:
    for prompt, output in zip(batch.prompts, outputs, strict=True):
        key = _request_key(lm, prompt, config)
        yield DecodeRun(
            run_id=f"{key[:16]}-{batch.repeat}",
            request_key=key,
            repeat=batch.repeat,
            prompt_id=prompt.prompt_id,
            prompt_sha256=sha256_text(prompt.prompt),
            benchmark=prompt.benchmark,
            family=prompt.family,
            model=lm.name,
            model_revision=lm.revision,
            tokenizer_sha256=lm.tokenizer_sha256,
            chat_template_sha256=lm.chat_template_sha256,
            engine="transformers",
            engine_version=lm.engine_version,
            kernel=lm.kernel,
            batch_invariant=False,
            dtype=lm.dtype,
            device=lm.device,
            batch_size=batch.batch_size,
            concurrency=len(batch.prompts),
            temperature=0.0,
            seed=config.seed,
            max_new_tokens=config.max_new_tokens,
            prompt_tokens=output.prompt_tokens,
            output_tokens=output.output_tokens,
            thinking_tokens=output.thinking_tokens,
            how_counted="generated ids, end-of-sequence token included",
            finish_reason=output.finish_reason,
            event_observed=output.finish_reason == "stop",
            licence=config.licence,
            wall_s=round(output.wall_s, 4),
            prompt=prompt.prompt,
            text=output.text,
            text_sha256=sha256_text(output.text),
            progress_stride=config.progress_stride,
            progress=output.progress,
        )


def _check_same_collection(
    out_dir: Path, lm: LoadedModel, prompts: Sequence[Prompt], config: CollectConfig
) -> None:
    """Write the identity of this collection, or compare it with the one that is there."""
    identity = json.loads(
        json.dumps(
            asdict(config)
            | {
                "model": lm.name,
                "model_revision": lm.revision,
                "kernel": lm.kernel,
                "tokenizer_sha256": lm.tokenizer_sha256,
                "dtype": lm.dtype,
                "engine_version": lm.engine_version,
                "chat_template_sha256": lm.chat_template_sha256,
                "prompts_sha256": sha256_text("\n".join(repr(prompt) for prompt in prompts)),
            }
        )
    )
    path = out_dir / "collection.json"
    if not path.exists():
        atomic_write_text(path, json.dumps(identity, indent=1) + "\n")
        return
    before = read_json(path)
    for field, value in identity.items():
        if before.get(field) != value:
            raise InvalidInput(
                f"{out_dir} holds a collection with {field} = {before.get(field)!r}; this one has "
                f"{value!r}: use the same settings to resume, or another --out folder"
            )
