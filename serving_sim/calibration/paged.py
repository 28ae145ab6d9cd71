"""Steps of transformers' continuous batching: a paged KV cache, requests of any lengths in one row.

Requests are put before the library's own scheduler as if they had come that far; it picks them, its
cache gives them pages, and what is timed is its forward pass with the choice of the next tokens.
The pages hold random values, so no context is computed to time a step on it. Left out is the host's
work between steps (scheduling, filling the index tensors), which a busy engine does meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from contracts.errors import InvalidInput, missing_dependency
from serving_sim.calibration import attention
from serving_sim.calibration.bench import TorchBench, build, look_up
from serving_sim.calibration.bench_config import BenchConfig
from serving_sim.calibration.shapes import config_sha256
from serving_sim.calibration.steps import StepDoesNotFit, StepShape
from serving_sim.calibration.timing import Run

_PAGE_TOKENS = 256  # transformers' default
_TRIAL = StepShape(2, 2, 2, 4)
_FLASH = {"flash_attention_3": "flash-attn-3", "flash_attention_2": "flash-attn"}  # their packages


def why_not_paged() -> str | None:
    """Say why the installed transformers cannot be timed so; None when it can."""
    try:
        from transformers import ContinuousBatchingConfig
        from transformers.generation.continuous_batching import model_runner  # noqa: F401
    except ImportError:
        return "the installed transformers has no continuous batching with a model runner"
    if "page_size" not in ContinuousBatchingConfig.__dataclass_fields__:
        return "the continuous batching of the installed transformers has no pages of set size"
    return None


class PagedBench(TorchBench):
    """Continuous batching of a transformers model on one device; see :func:`open_paged_bench`."""

    takes_uneven = True
    _processor: Any = None

    def allocate_pages(self, shapes: Sequence[StepShape]) -> None:
        """Allocate pages for as many of ``shapes`` as fit, and take one step."""
        self._processor = self._new_processor(shapes)
        cache = self._processor.cache
        if list(cache.cache_allocators) != ["full_attention"]:
            raise InvalidInput(
                f"{self.facts.architecture} has layers of {', '.join(cache.cache_allocators)}: "
                "calibrate covers models whose every layer attends to the whole context"
            )
        self.room_tokens = cache.num_blocks * _PAGE_TOKENS
        _fill(cache, self._model.dtype)
        try:
            with self._stream():
                self._step(_TRIAL)()
        except (RuntimeError, TypeError, AttributeError, KeyError, IndexError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InvalidInput(
                f"{self.facts.architecture} cannot be timed with {self.kernel} in "
                f"{self.facts.dtype}: {said}; try --backend torch, or another dtype or model"
            ) from error

    def _new_processor(self, shapes: Sequence[StepShape]) -> Any:
        """Return the library's batching with pages for all of ``shapes``, or with what fits."""
        wanted = max(map(pages, (*shapes, _TRIAL)))
        try:
            return self._processor_with(shapes, wanted)
        except MemoryError:  # raised by its sum, before anything is allocated
            pass
        try:
            return self._processor_with(shapes, None)
        except (MemoryError, ValueError) as error:
            raise InvalidInput(
                f"{self.facts.architecture} in {self.facts.dtype}: its continuous batching does "
                f"not fit ({error}): lower --max-chunk or --max-batch"
            ) from error

    def _processor_with(self, shapes: Sequence[StepShape], num_pages: int | None) -> Any:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        longest = max(max(s.prefill_tokens_kept, *s.decode_contexts, 0) for s in shapes)
        with_table = self._implementation in _FLASH
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=num_pages,
                max_batch_tokens=max(s.tokens for s in (*shapes, _TRIAL)),
                max_requests_per_batch=max(s.num_requests for s in (*shapes, _TRIAL)),
                max_blocks_per_request=longest // _PAGE_TOKENS + 1 if with_table else 0,
                max_memory_percent=self._config.memory_share,
                allow_block_sharing=False,
                use_async_batching=False,
                use_cuda_graph=None if self._graph_max_tokens else False,
                safety_margin=0.0,
                auto_switch_to_flash=False,
            ),
        )
        return manager._create_batch_processor()

    @property
    def _implementation(self) -> str:
        return str(self._model.config._attn_implementation)

    @property
    def kernel(self) -> str:
        """Attention kernel and way of launching."""
        graphs = any(self._processor.cb_config.cuda_graph_booleans)
        launch = "CUDA graphs of padded sizes" if graphs else "eager"
        name = self._implementation
        name = f"{name} {self._kernel}" if name == "sdpa" else name
        fused = ", norms and MLP compiled" if self._config.fuse else ""
        return f"paged {name}, pages of {_PAGE_TOKENS} tokens, {launch}{fused}"

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the software that was timed, by name."""
        found = super().versions
        if self._implementation in _FLASH:
            found["flash-attn"] = importlib.metadata.version(_FLASH[self._implementation])
        return found

    def _stream(self) -> AbstractContextManager[Any]:
        import torch

        stream = self._processor.inputs_and_outputs.compute_stream
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def _step(self, shape: StepShape) -> Run:
        """Return the forward pass of the batch that the library's scheduler makes of ``shape``."""
        import torch

        processor, needed = self._processor, pages(shape)
        if needed > processor.cache.num_blocks:
            raise StepDoesNotFit(
                f"{shape} needs {needed} pages of {_PAGE_TOKENS} tokens; there is room for "
                f"{processor.cache.num_blocks}"
            )
        processor.scheduler.reset()
        processor.cache.free_all_requests()
        states = self._requests(shape)
        processor.scheduler.active_requests = {state.request_id: state for state in states}
        processor.prepare_next_batch()
        put = processor.inputs_and_outputs.num_request_in_batch
        if put != len(states):
            raise StepDoesNotFit(f"{shape}: the scheduler takes {put} of {len(states)} requests")
        runner = processor.model_runner

        def run() -> None:
            with torch.no_grad(), attention.only_backend(self._kernel):
                inputs = runner.inputs_and_outputs.get_model_kwargs(use_padding=runner.pad_inputs)
                runner.compute_batch(self._model, inputs)

        return run

    def _requests(self, shape: StepShape) -> list[Any]:
        """Return the requests of ``shape``, each as far as it is before the step."""
        import torch
        from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

        ids = torch.randint(self.facts.vocab_size, (shape.tokens,)).tolist()
        states = []
        for at, context in enumerate(shape.decode_contexts):
            state = RequestState(f"decode {at}", [], max_new_tokens=None)
            state._status = RequestStatus.DECODING
            state.tokens_to_process = [ids[at]]
            state.position_offset = context - 1
            states.append(state)
        if shape.prefill_chunk_tokens:
            chunk = ids[shape.num_decodes :]
            state = RequestState("prefill", chunk, max_new_tokens=None)
            state._status = RequestStatus.PREFILLING
            state.position_offset = shape.prefill_prefix_tokens
            states.append(state)
        return states


def open_paged_bench(config: BenchConfig, shapes: Sequence[StepShape]) -> PagedBench:
    """Return a bench over transformers' paged cache; raises what bench.look_up raises, InvalidInput
    for a transformers without continuous batching and for a flash kernel that is not there."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise missing_dependency("torch", "collect", "calibrate --backend paged") from None
    if (reason := why_not_paged()) is not None:
        raise InvalidInput(f"{reason}: take transformers 5.24 or newer, or --backend torch")
    subject = look_up(config, shapes)
    implementation = _implementation(config, subject.device)
    model = build(subject.model_config, config, subject.device, implementation)
    sha256 = config_sha256(subject.model_config)
    bench = PagedBench(config, subject.device, model, subject.facts, sha256)
    if implementation != "sdpa" or config.attention != "math":
        bench._kernel = "auto"  # an SDPA with a mask has no flash kernel
    bench.allocate_pages(shapes)
    return bench


def pages(shape: StepShape) -> int:
    """Return the pages that the requests of ``shape`` take: each fills its own."""
    return sum(-(-n // _PAGE_TOKENS) for n in (shape.prefill_tokens_kept, *shape.decode_contexts))


def _fill(cache: Any, dtype: Any) -> None:
    """Fill the pages with random values: a GPU draws less power, and runs faster, on zeros."""
    values = cache.cache_tensor.view(dtype)
    for start in range(0, len(values), 1 << 28):
        values[start : start + (1 << 28)].normal_()


def _implementation(config: BenchConfig, device: str) -> str:
    """Return the attention of transformers that ``config`` asks for."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    half = config.dtype in ("bfloat16", "float16") and device.startswith("cuda")
    if config.attention == "math" or (config.attention == "auto" and not half):
        return "sdpa"
    if is_flash_attn_3_available():
        return "flash_attention_3"
    if is_flash_attn_2_available():
        return "flash_attention_2"
    if config.attention == "auto":
        return "sdpa"
    raise InvalidInput(
        "--attention flash with --backend paged needs the package flash-attn and a GPU it knows: "
        "install it, or take --attention auto (SDPA over gathered pages)"
    )
