"""Temperature-zero collection: every prompt K times, each repeat in other batches.

Greedy lengths in low precision depend on which batch a request ran in, so repeat r uses its own
batch size and its own order (keyed by the seed). The plan is fixed beforehand; a second start
reads the shards, skips what is there, and runs the rest of the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from contracts.errors import InvalidInput
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun, FinishReason, make_request_key, sha256_text
from contracts.settings import require_at_least
from oracles.backend import Backend, DecodeSettings, EngineFacts, Generation, Refused
from oracles.folder import Rank, claim_folder, finish, keys_done, unfinish
from oracles.hidden import save_hidden
from oracles.prompts import Prompt
from oracles.shards import RunShard

# whether the model itself ended the run; every other reason is a cut
_EVENT_OF: dict[FinishReason, bool | None] = {"stop": True, "unknown": None}


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """What a collection is; kept beside its shards, and compared when a second start resumes it.

    ``batch_sizes[r]`` is the batch, or the number of requests in flight, of repeat r.
    """

    repeats: int = 5
    max_new_tokens: int = 256
    batch_sizes: tuple[int, ...] = (32, 16, 8, 4, 2)
    progress_stride: int = 8
    seed: int = 0
    licence: str = "Apache-2.0"
    stop_loops: bool = False
    hidden_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_at_least(self, repeats=1, max_new_tokens=1, progress_stride=0)
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise InvalidInput(f"batch_sizes is {self.batch_sizes}: give sizes of at least 1")
        if self.hidden_layers and not self.progress_stride:
            raise InvalidInput(
                "hidden states are kept at the stride: progress_stride must not be 0"
            )

    @property
    def settings(self) -> DecodeSettings:
        """How one prompt is decoded."""
        return DecodeSettings(
            self.max_new_tokens,
            self.progress_stride,
            self.hidden_layers,
            self.stop_loops,
            self.seed,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that decode together, as repeat ``repeat`` of each."""

    repeat: int
    batch_size: int
    prompts: tuple[Prompt, ...]


class Collected(NamedTuple):
    """What one process did: the merged runs (None while other ranks still work), and prompts it
    left out, with reasons, by prompt_id."""

    runs: list[DecodeRun] | None
    refused: dict[str, str]


def plan_batches(
    prompts: Sequence[Prompt], config: CollectConfig, flows: bool = False
) -> list[Batch]:
    """Return the whole plan: for each repeat a keyed order, cut at that repeat's batch size (or
    uncut, for an engine that refills itself)."""
    batches = []
    for repeat in range(config.repeats):
        size = config.batch_sizes[repeat % len(config.batch_sizes)]
        order = keyed_generator(config.seed, "collect-order", repeat).permutation(len(prompts))
        step = max(len(order), 1) if flows else size
        for start in range(0, len(order), step):
            chosen = tuple(prompts[int(i)] for i in order[start : start + step])
            batches.append(Batch(repeat, size, chosen))
    return batches


def collect_runs(
    backend: Backend,
    prompts: Sequence[Prompt],
    out_dir: Path,
    config: CollectConfig,
    on_batch: Callable[[int, int, int], None] | None = None,
    rank: Rank | None = None,
) -> Collected:
    """Run this rank's share of the plan into ``out_dir``; the last rank to finish merges.

    ``on_batch(runs done, runs planned, new tokens)`` is called after each write. Raises
    InvalidInput when ``out_dir`` holds a collection of another configuration, and
    CollectionStopped when it cannot go on; finished runs are on disk.
    """
    rank, report = rank or Rank(), on_batch or (lambda *_: None)
    backend.check(config.settings)
    claim_folder(out_dir, _identity(backend.facts, prompts, config))
    unfinish(out_dir, rank)
    own = [prompt for prompt in prompts if rank.owns(prompt)]
    refused = _refused_before(backend, own, config)
    own = [prompt for prompt in own if prompt.prompt_id not in refused]
    job = _Job(backend, config, out_dir, refused)
    with RunShard(out_dir / f"shard-{rank.rank}.jsonl") as shard:
        shard.done |= keys_done(out_dir)
        planned = {job.key(prompt, repeat) for prompt in own for repeat in range(config.repeats)}
        report(len(planned & shard.done), len(planned), 0)
        for batch in plan_batches(own, config, backend.flows):
            with closing(job.decode(batch, shard.done)) as portions:
                for runs in portions:
                    shard.append(runs)
                    tokens = sum(run.output_tokens for run in runs)
                    report(len(planned & shard.done), len(planned), tokens)
    return Collected(finish(out_dir, rank, prompts, refused), refused)


def _refused_before(
    backend: Backend, prompts: Sequence[Prompt], config: CollectConfig
) -> dict[str, str]:
    """Return the prompts the engine will not take, by prompt_id, with its reasons."""
    reasons = {p.prompt_id: backend.refuses(p.prompt, config.max_new_tokens) for p in prompts}
    return {prompt_id: reason for prompt_id, reason in reasons.items() if reason is not None}


class _Job:
    """One process's decoding: batches in, decode runs out; ``refused`` grows on the way."""

    def __init__(
        self, backend: Backend, config: CollectConfig, out_dir: Path, refused: dict[str, str]
    ) -> None:
        self._backend, self._config, self._out_dir = backend, config, out_dir
        self._refused = refused

    def key(self, prompt: Prompt, repeat: int) -> tuple[str, int]:
        """Return (request_key, repeat), which names a run."""
        facts = self._backend.facts
        request_key = make_request_key(
            model=facts.model,
            prompt_sha256=sha256_text(prompt.prompt),
            chat_template_sha256=facts.chat_template_sha256,
            temperature=0.0,
            max_new_tokens=self._config.max_new_tokens,
            dtype=facts.dtype,
        )
        return request_key, repeat

    def decode(
        self, batch: Batch, done: Set[tuple[str, int]]
    ) -> Generator[list[DecodeRun], None, None]:
        """Yield finished runs in the portions that should reach the disk together.

        A static batch with anything missing decodes as a whole, so that the rest of it runs in
        the company the plan gave it; a flowing engine gets only what is missing.
        """
        missing = [p for p in batch.prompts if self.key(p, batch.repeat) not in done]
        missing = [p for p in missing if p.prompt_id not in self._refused]
        if not missing:
            return
        prompts = missing if self._backend.flows else list(batch.prompts)
        texts = [prompt.prompt for prompt in prompts]
        runs = []
        answers = self._backend.run(texts, batch.batch_size, self._config.settings)
        with closing(answers):  # an engine with threads of its own must not outlive an error
            for index, outcome in answers:
                if isinstance(outcome, Refused):
                    self._refused[prompts[index].prompt_id] = outcome.reason
                    continue
                runs.append(self._run_of(prompts[index], batch, outcome))
                if self._backend.flows:
                    yield [runs.pop()]
        if runs:
            yield runs

    def _run_of(self, prompt: Prompt, batch: Batch, output: Generation) -> DecodeRun:
        config = self._config
        request_key, repeat = self.key(prompt, batch.repeat)
        run_id = f"{request_key[:16]}-{repeat}"
        hidden_ref = None
        if output.hidden is not None:
            hidden_ref = save_hidden(
                self._out_dir, run_id, output.hidden, config.hidden_layers, config.progress_stride
            )
        return DecodeRun(
            **asdict(self._backend.facts),
            run_id=run_id,
            request_key=request_key,
            repeat=repeat,
            prompt_id=prompt.prompt_id,
            prompt_sha256=sha256_text(prompt.prompt),
            benchmark=prompt.benchmark,
            family=prompt.family,
            batch_size=batch.batch_size,
            concurrency=output.concurrency,
            temperature=0.0,
            seed=config.seed,
            max_new_tokens=config.max_new_tokens,
            prompt_tokens=output.prompt_tokens,
            output_tokens=output.output_tokens,
            thinking_tokens=output.thinking_tokens,
            how_counted=output.how_counted,
            finish_reason=output.finish_reason,
            event_observed=_EVENT_OF.get(output.finish_reason, False),
            licence=config.licence,
            wall_s=None if output.wall_s is None else round(output.wall_s, 4),
            prompt=prompt.prompt,
            text=output.text,
            text_sha256=sha256_text(output.text),
            progress_stride=None if output.progress is None else config.progress_stride,
            progress=output.progress,
            hidden_ref=hidden_ref,
        )


def _identity(
    facts: EngineFacts, prompts: Sequence[Prompt], config: CollectConfig
) -> Mapping[str, Any]:
    """What must not change under a collection; the device may (ranks have their own)."""
    engine = {name: value for name, value in asdict(facts).items() if name != "device"}
    listed = sha256_text("\n".join(repr(prompt) for prompt in prompts))
    return asdict(config) | engine | {"prompts_sha256": listed}
