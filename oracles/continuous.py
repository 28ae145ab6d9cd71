"""Greedy decoding with transformers' continuous batching: paged KV, rows join as others leave.

Progress signals are taken where the library would process logits: from the very numbers a token
is drawn from. Hidden states it keeps nowhere: asked for them, a run is read back in one forward
pass over the finished text, in chunks, while the loop is paused. That pass reads what decoding
read, but with prefill kernels: in low precision its numbers differ from decoding's by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from contracts.errors import CollectionStopped, InvalidInput
from contracts.policy import FloatArray
from oracles.backend import DecodeSettings, EngineFacts, Generation, HalfArray, Outcomes
from oracles.generate import cache_argument, distribution, greedy
from oracles.models import LoadedModel, check_layers, prompt_ids, too_long
from oracles.watch import RowWatch

_CHUNK_TOKENS = 256  # logits of a chunk: 256 x vocabulary x 4 bytes, 150 MB at 150k words
_POLL_S = 0.5


def why_not_continuous(lm: LoadedModel) -> str | None:
    """Say why this model cannot decode with continuous batching here; None when it can."""
    try:
        from transformers.generation.continuous_batching import ContinuousBatchingManager
    except ImportError:
        return "the installed transformers has no continuous batching"
    if "pause" not in vars(ContinuousBatchingManager):
        return "the installed transformers cannot pause its continuous batching: take 5.24 or newer"
    if lm.kernel != "sdpa" and not lm.kernel.startswith("flash_attention"):
        return f"continuous batching needs SDPA or flash attention, the model has {lm.kernel!r}"
    return None


class ContinuousBatches:
    """The backend that keeps up to ``size`` requests in transformers' continuous batch.

    ``blocks`` bounds the KV cache (blocks of 256 tokens); None lets transformers fill the device.
    """

    flows = True

    def __init__(self, lm: LoadedModel, blocks: int | None = None) -> None:
        if (reason := why_not_continuous(lm)) is not None:
            raise InvalidInput(f"{reason}: take --engine static")
        self.facts: EngineFacts = lm.facts("transformers-continuous", f"paged|{lm.kernel}")
        self._lm, self._blocks = lm, blocks

    def check(self, settings: DecodeSettings) -> None:
        """Raise InvalidInput for early stops, and for a hidden layer the model does not have."""
        if settings.stop_loops:
            raise InvalidInput("continuous batching cannot stop loops early: take --engine static")
        check_layers(settings.hidden_layers, self._lm.num_layers)

    def refuses(self, prompt: str, max_new_tokens: int) -> str | None:
        """Say why ``prompt`` does not fit the context; None when it does."""
        return too_long(self._lm, len(prompt_ids(self._lm, prompt)), max_new_tokens)

    def run(self, prompts: Sequence[str], size: int, settings: DecodeSettings) -> Outcomes:
        """Yield runs in the order they end; never more than ``size`` are in flight."""
        rows = [prompt_ids(self._lm, prompt) for prompt in prompts]
        manager = self._manager(size, settings)
        tap = None
        if settings.progress_stride and not settings.hidden_layers:
            tap = manager.logit_processor = logits_tap(size, self._lm.model.device)
        manager.start()
        try:
            in_flight: dict[str, int] = {}
            admitted = 0
            while admitted < len(rows) or in_flight:
                while admitted < len(rows) and len(in_flight) < size:
                    in_flight[str(admitted)] = len(in_flight) + 1
                    manager.add_request(rows[admitted], str(admitted), settings.max_new_tokens)
                    admitted += 1
                result = _next_result(manager, self._lm.name)
                index, concurrency = int(result.request_id), in_flight.pop(result.request_id)
                with manager.pause():
                    seen = self._seen(tap, rows[index], result, settings)
                yield index, self._generation(rows[index], result, settings, concurrency, seen)
        finally:
            manager.stop(block=True, timeout=60, hard_stop=True)
            manager.destroy()

    def _manager(self, size: int, settings: DecodeSettings) -> Any:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        # not the model's own settings: those may sample, or punish repetition
        how = GenerationConfig(
            do_sample=False,
            max_new_tokens=settings.max_new_tokens,
            eos_token_id=sorted(self._lm.eos_ids),
            pad_token_id=self._lm.tokenizer.pad_token_id,
        )
        bounds: dict[str, Any] = {"max_requests_per_batch": size, "auto_switch_to_flash": False}
        if settings.progress_stride:
            bounds["use_async_batching"] = False  # a batch is read before the next one is prepared
        if self._blocks is not None:
            bounds |= {"num_blocks": self._blocks, "max_batch_tokens": 512}
        return self._lm.model.init_continuous_batching(
            generation_config=how, continuous_batching_config=ContinuousBatchingConfig(**bounds)
        )

    def _seen(
        self, tap: Any | None, prompt: list[int], result: Any, settings: DecodeSettings
    ) -> ReadBack:
        """Return what each token of a finished run was drawn from. The loop is paused."""
        tokens = [int(token) for token in result.generated_tokens]
        if tap is not None:
            entropy, logprob = tap.take(result.request_id)
            if len(entropy) == len(tokens):  # else the library decoded a token that it then dropped
                return ReadBack(entropy, logprob, _no_states(self._lm, settings))
        return read_back(self._lm, prompt, tokens, settings)

    def _generation(
        self,
        prompt: list[int],
        result: Any,
        settings: DecodeSettings,
        concurrency: int,
        seen: ReadBack,
    ) -> Generation:
        watch = RowWatch(self._lm, settings, prompt)
        wall_s = result.lifespan[1] - result.lifespan[0]
        for token, entropy, logprob in zip(
            result.generated_tokens, seen.entropy, seen.logprob, strict=True
        ):
            watch.take(int(token), float(entropy), float(logprob), wall_s)
        watch.hidden = list(seen.hidden)
        return watch.generation(concurrency)


def logits_tap(size: int, device: Any) -> Any:
    """Return transformers' list of logits processors with one that changes nothing and remembers,
    for each request, entropy (nats) and log-probability of its greedy tokens.

    ``size`` bounds the requests in a batch. ``take(request_id)`` hands over (entropy, logprob),
    each (tokens,); it wants the loop paused. The numbers are written to one buffer on the device,
    so that a captured CUDA graph writes them too, and read when the next batch is prepared, which
    without asynchronous batching is after this one.
    """
    import torch
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingLogitsProcessorList,
    )
    from transformers.generation.logits_process import LogitsProcessorList

    class LogitsTap(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(LogitsProcessorList())
            self.do_processing = True
            self._buffer = torch.zeros((2, size), device=device)
            self._rows: list[str] = []
            self._seen: dict[str, list[list[float]]] = {}

        def prepare_tensor_args(self, requests_in_batch: Any, arg_storage: Any) -> Any:
            self._read()
            self._rows = [r.state.request_id for r in requests_in_batch if r.has_new_token]
            return arg_storage

        def __call__(self, input_ids: Any, scores: Any, logits_processor_args: Any) -> Any:
            del input_ids, logits_processor_args
            _, entropy, logprob = greedy(scores[:size])
            self._buffer[0, : len(entropy)].copy_(entropy)
            self._buffer[1, : len(entropy)].copy_(logprob)
            return scores

        def take(self, request_id: str) -> tuple[FloatArray, FloatArray]:
            self._read()
            seen = np.array(self._seen.pop(request_id, []), dtype=np.float64).reshape(-1, 2)
            return seen[:, 0], seen[:, 1]

        def _read(self) -> None:
            pairs = self._buffer[:, : len(self._rows)].T.tolist()
            for request_id, pair in zip(self._rows, pairs, strict=True):
                self._seen.setdefault(request_id, []).append(pair)
            self._rows = []

    return LogitsTap()


def _next_result(manager: Any, model: str) -> Any:
    """Wait for the next finished request; raises CollectionStopped when the loop died."""
    while True:
        result = manager.get_result(timeout=_POLL_S)
        if result is not None and result.is_finished() and result.error is None:
            return result
        failed = result is not None and result.error is not None
        if failed or not manager.is_running():
            said = result.error if failed else manager.background_thread_status.fatal_error
            raise CollectionStopped(
                f"continuous batching of {model} stopped ({said}): take smaller --batch-sizes or "
                "--engine static; finished runs are safe, the same command goes on"
            )


class ReadBack(NamedTuple):
    """What decoding saw, per output token: entropy (n,) in nats, log-probability (n,) of the token;
    hidden states at the stride, (n // stride, layers, hidden size)."""

    entropy: FloatArray
    logprob: FloatArray
    hidden: HalfArray


def read_back(
    lm: LoadedModel, prompt: list[int], tokens: list[int], settings: DecodeSettings
) -> ReadBack:
    """Read ``prompt`` and ``tokens`` once more and return what each token was drawn from."""
    import torch
    from transformers import DynamicCache

    layers, stride = settings.hidden_layers, settings.progress_stride
    if not stride:
        nothing = np.zeros(len(tokens))
        return ReadBack(nothing, nothing, _no_states(lm, settings))
    ids = torch.tensor([prompt + tokens[:-1]], device=lm.model.device)
    first = len(prompt) - 1  # the position that wrote the first output token
    cache = DynamicCache(config=lm.model.config)
    reuse = {cache_argument(lm.model): cache, "use_cache": True}
    entropies, logprobs, states = [], [], [_no_states(lm, settings)]
    with torch.inference_mode():
        for start in range(0, ids.shape[1], _CHUNK_TOKENS):
            chunk = ids[:, start : start + _CHUNK_TOKENS]
            out = lm.model(input_ids=chunk, output_hidden_states=bool(layers), **reuse)
            skip = max(first - start, 0)
            logprob, entropy = distribution(out.logits[0, skip:])
            drawn = tokens[start + skip - first :][: len(logprob)]
            entropies.append(entropy.cpu().numpy())
            logprobs.append(logprob.cpu().numpy()[range(len(drawn)), drawn])
            # position first + n - 1 wrote token n; every stride-th n is kept
            kept = [
                at for at in range(chunk.shape[1])
                if (n := start + at - first + 1) > 0 and n % stride == 0
            ]  # fmt: skip
            if layers and kept:
                part = torch.stack([out.hidden_states[layer][0, kept] for layer in layers], dim=1)
                states.append(part.to("cpu", torch.float16).numpy())
    return ReadBack(np.concatenate(entropies), np.concatenate(logprobs), np.concatenate(states))


def _no_states(lm: LoadedModel, settings: DecodeSettings) -> HalfArray:
    return np.zeros((0, len(settings.hidden_layers), lm.hidden_size), np.float16)
