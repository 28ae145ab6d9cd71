"""Greedy decoding of static batches with a transformers model, watched token by token.

The batch is left-padded; rows that end leave the cache, as they would leave an engine's batch, so
a long row does not pay for its finished neighbours. torch and transformers load inside functions.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from contracts.errors import CollectionStopped, InvalidInput
from oracles.backend import DecodeSettings, EngineFacts, Generation, Outcomes
from oracles.models import LoadedModel, check_layers, prompt_ids, too_long
from oracles.watch import RowWatch

if TYPE_CHECKING:
    import torch

_COMPACT_BELOW = 0.75  # drop finished rows from the cache once they are a quarter of the batch


class StaticBatches:
    """The backend that decodes one batch to its end. When memory runs out the batch halves, and
    later batches stay that small; ``say`` is told."""

    flows = False

    def __init__(self, lm: LoadedModel, say: Callable[[str], None] = lambda _: None) -> None:
        self.facts: EngineFacts = lm.facts("transformers", lm.kernel)
        self._lm, self._say = lm, say
        self._fitting: int | None = None

    def check(self, settings: DecodeSettings) -> None:
        """Raise InvalidInput for a hidden layer that the model does not have."""
        check_layers(settings.hidden_layers, self._lm.num_layers)

    def refuses(self, prompt: str, max_new_tokens: int) -> str | None:
        """Say why ``prompt`` does not fit the context; None when it does."""
        return too_long(self._lm, len(prompt_ids(self._lm, prompt)), max_new_tokens)

    def run(self, prompts: Sequence[str], size: int, settings: DecodeSettings) -> Outcomes:
        """Yield the outcome of every prompt, batch by batch."""
        rows = [prompt_ids(self._lm, prompt) for prompt in prompts]
        start = 0
        while start < len(rows):
            part = rows[start : start + min(size, self._fitting or size)]
            outputs = self._attempt(part, settings)
            if outputs is not None:
                yield from enumerate(outputs, start)
                start += len(part)

    def _attempt(self, rows: list[list[int]], settings: DecodeSettings) -> list[Generation] | None:
        """Decode ``rows``; None when memory ran out and fewer should be tried."""
        try:
            return generate_batch(self._lm, rows, settings)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            if len(rows) == 1:
                raise CollectionStopped(
                    f"out of memory with one prompt of {len(rows[0])} tokens and a cap of "
                    f"{settings.max_new_tokens}: lower --max-new-tokens, take a smaller --dtype or "
                    "a larger device; finished runs are safe, the same command goes on"
                ) from error
        # out here the failed attempt's tensors are no longer held by a traceback
        _free_memory()
        self._fitting = (len(rows) + 1) // 2
        self._say(f"out of memory with {len(rows)} rows: going on with {self._fitting}")
        return None


def _is_out_of_memory(error: BaseException) -> bool:
    # torch.cuda.OutOfMemoryError is a RuntimeError; the CPU allocator raises a bare one
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(
        sign in said
        for sign in ("out of memory", "can't allocate memory", "cannot allocate memory")
    )


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def generate_batch(
    lm: LoadedModel, rows: Sequence[list[int]], settings: DecodeSettings
) -> list[Generation]:
    """Decode token ids ``rows`` greedily as one batch until every row ended.

    Raises InvalidInput when a row and the cap do not fit the context.
    """
    import torch
    from transformers import DynamicCache

    for row in rows:
        if (reason := too_long(lm, len(row), settings.max_new_tokens)) is not None:
            raise InvalidInput(reason)
    started = time.perf_counter()
    encoded = lm.tokenizer.pad({"input_ids": list(rows)}, return_tensors="pt").to(lm.model.device)
    mask = encoded["attention_mask"]
    inputs: dict[str, Any] = {"input_ids": encoded["input_ids"], "logits_to_keep": 1}
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=lm.model.config)
    reuse = {cache_argument(lm.model): cache, "use_cache": True, "return_dict": True}
    watches = [RowWatch(lm, settings, row) for row in rows]
    alive = watches
    with torch.inference_mode():
        for age in itertools.count(1):
            wants_states = bool(settings.hidden_layers) and age % settings.progress_stride == 0
            reuse["output_hidden_states"] = wants_states
            out = lm.model(**inputs, attention_mask=mask, position_ids=positions, **reuse)
            if wants_states:
                _keep_states(out.hidden_states, alive, settings)
            token = _take_tokens(out.logits[:, -1], alive, settings, started)
            keep = [j for j, watch in enumerate(alive) if watch.finish_reason is None]
            if not keep:
                break
            if len(keep) <= _COMPACT_BELOW * len(alive):
                chosen = torch.tensor(keep, device=mask.device)
                cache.batch_select_indices(chosen)
                mask, token, positions = mask[chosen], token[chosen], positions[chosen]
                alive = [alive[j] for j in keep]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            positions = positions[:, -1:] + 1
            inputs = {"input_ids": token[:, None]}
    return [watch.generation(len(rows)) for watch in watches]


def _take_tokens(
    logits: torch.Tensor, watches: list[RowWatch], settings: DecodeSettings, started: float
) -> torch.Tensor:
    """Give every row that still runs its next token; return all of them, (rows,)."""
    if settings.progress_stride:
        token, entropy, logprob = greedy(logits)
        signals = zip(token.tolist(), entropy.tolist(), logprob.tolist(), strict=True)
    else:
        token = logits.argmax(-1)
        signals = ((pick, 0.0, 0.0) for pick in token.tolist())  # type: ignore[assignment]
    wall_s = time.perf_counter() - started
    for watch, (pick, doubt, confidence) in zip(watches, signals, strict=True):
        if watch.finish_reason is None:
            watch.take(pick, doubt, confidence, wall_s)
    return token


def _keep_states(
    states: Sequence[torch.Tensor], watches: list[RowWatch], settings: DecodeSettings
) -> None:
    import torch

    chosen = torch.stack([states[layer][:, -1] for layer in settings.hidden_layers], dim=1)
    for watch, state in zip(watches, chosen.to("cpu", torch.float16).numpy(), strict=True):
        if watch.finish_reason is None:
            watch.hidden.append(state)


def cache_argument(model: Any) -> str:
    """Return what forward() calls its cache: transformers renamed it in 5.x."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def distribution(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probabilities (B, V), entropy in nats (B,)) of logits (B, V)."""
    import torch

    logprobs = logits.float().log_softmax(-1)
    # entr(0) is 0: a token that a model rules out must not turn the entropy into NaN
    return logprobs, torch.special.entr(logprobs.exp()).sum(-1)


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (argmax, entropy in nats, log-probability of the argmax), each (B,), of (B, V)."""
    logprobs, entropy = distribution(logits)
    logprob, token = logprobs.max(-1)
    return token, entropy, logprob
