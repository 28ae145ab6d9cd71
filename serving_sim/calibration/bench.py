"""A model with random weights on a device, and the seconds of its steps.

What is timed is what an engine's forward pass does: the tokens of the step in one row, dense layers
over all of them, attention request by request on cached keys and values, the head on the last token
of each request, and the greedy choice of the next token.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from contracts.errors import InvalidInput, missing_dependency
from serving_sim.calibration import attention
from serving_sim.calibration.bench_config import BenchConfig
from serving_sim.calibration.capacity import ModelFacts, arena_tokens, model_facts
from serving_sim.calibration.clocks import ClockLog, open_clock_log
from serving_sim.calibration.device import free_bytes, resolve_device
from serving_sim.calibration.fusion import fuse
from serving_sim.calibration.graphs import capture
from serving_sim.calibration.shapes import config_sha256, read_config
from serving_sim.calibration.steps import StepDoesNotFit, StepShape
from serving_sim.calibration.timing import (
    CpuTimer,
    CudaTimer,
    Run,
    Timer,
    Timing,
    measure,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

_TRIAL = StepShape(2, 2, 2, 4)


class TorchBench:
    """A transformers model on one device; see :func:`open_torch_bench`."""

    takes_uneven = False  # a rectangle of keys has one length

    def __init__(
        self, config: BenchConfig, device: str, model: Any, facts: ModelFacts, sha256: str
    ) -> None:
        self.facts, self.room_tokens = facts, 0
        self.notes: list[str] = []
        self._config, self._device, self._model, self._sha256 = config, device, model, sha256
        self._kernel = _kernel(config, device)
        self._arena: attention.KvArena | None = None
        self._clocks: ClockLog | None = None
        self._timer: Timer = CpuTimer()
        self._graph_max_tokens = 0
        if device.startswith("cuda"):
            self._set_up_cuda()

    def _set_up_cuda(self) -> None:
        import torch

        torch.cuda.set_device(self._device)  # events, streams and graphs go by the current device
        properties = torch.cuda.get_device_properties(self._device)
        self._clocks = open_clock_log(str(properties.uuid))
        flush = None
        if self._config.flush_l2:
            scratch = torch.empty(
                2 * properties.L2_cache_size, dtype=torch.int8, device=self._device
            )
            flush = scratch.zero_
        sample = self._clocks.sample if self._clocks else lambda: None
        self._timer = CudaTimer(torch.cuda, flush, sample)
        self._graph_max_tokens = self._config.graph_max_tokens

    def allocate(self, tokens: int) -> None:
        """Allocate the KV cache and take one step, to see that the model can be timed at all."""
        import torch

        self.room_tokens, facts = tokens, self.facts
        dtype = getattr(torch, facts.dtype)
        self._arena = attention.KvArena(
            facts.num_layers, tokens, facts.num_kv_heads, facts.head_dim, dtype, self._device
        )
        trial = self._arena.view(_TRIAL)
        try:
            self._runner(trial)()
        except (RuntimeError, TypeError, AttributeError, KeyError, IndexError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InvalidInput(
                f"{facts.architecture} cannot be timed with {self._kernel} attention in "
                f"{facts.dtype}: {said}; try --attention auto, or another dtype or model"
            ) from error
        if trial.num_calls != facts.num_layers:
            raise InvalidInput(
                f"{facts.architecture}: {trial.num_calls} of {facts.num_layers} layers attend over "
                "a KV cache; calibrate covers models in which every layer does"
            )
        self._try_graphs()

    def _try_graphs(self) -> None:
        if not self._graph_max_tokens or self._arena is None:
            return
        try:
            capture(self._runner(self._arena.view(_TRIAL)))
        except RuntimeError as error:
            self._graph_max_tokens = 0
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.notes.append(f"no CUDA graph of this model ({said}): every step is timed eagerly")

    @property
    def hardware(self) -> str:
        """The device's name."""
        import torch

        if self._device.startswith("cuda"):
            return str(torch.cuda.get_device_name(self._device))
        return f"cpu x{torch.get_num_threads()}"

    @property
    def kernel(self) -> str:
        """Attention kernel and way of launching."""
        graphs = self._graph_max_tokens
        launch = f"CUDA graphs up to {graphs} tokens" if graphs else "eager"
        fused = ", norms and MLP compiled" if self._config.fuse else ""
        return f"torch sdpa {self._kernel}, {launch}{fused}"

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the software that was timed, by name."""
        import torch

        found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        return found | ({"cuda": str(torch.version.cuda)} if torch.version.cuda else {})

    @property
    def identity(self) -> dict[str, str]:
        """What two benches must share for their times to belong together, by name."""
        return {
            "backend": self._config.backend,
            "model": self._config.model,
            "config_sha256": self._sha256,
            "dtype": self.facts.dtype,
            "hardware": self.hardware,
            "kernel": self.kernel,
            "timer": self._timer.name,
            "flush_l2": str(self._config.flush_l2),
            **{name: str(value) for name, value in asdict(self._config.rules).items()},
            **self.versions,
        }

    @property
    def clock_state(self) -> str:
        """How the GPU's clocks stood so far, in words."""
        if not self._device.startswith("cuda"):
            return "not recorded on a CPU"
        return str(self._clocks) if self._clocks else "not recorded (nvidia-ml-py not installed)"

    def time(self, shape: StepShape) -> Timing:
        """Return the time of a step; raises StepDoesNotFit."""
        import torch

        try:
            with self._stream():
                return measure(self._step(shape), self._timer, self._config.rules)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise StepDoesNotFit(f"{shape}: the working memory does not fit the GPU") from None

    def _stream(self) -> AbstractContextManager[Any]:
        """Return the context in which the step's own stream is the one that events go to."""
        return contextlib.nullcontext()

    def _step(self, shape: StepShape) -> Run:
        """Return the call that takes a step once, as it is timed; raises StepDoesNotFit."""
        if self._arena is None or shape.kv_tokens > self.room_tokens:
            raise StepDoesNotFit(
                f"{shape} needs KV of {shape.kv_tokens} tokens; there is room for "
                f"{self.room_tokens}"
            )
        run = self._runner(self._arena.view(shape))
        return capture(run) if shape.tokens <= self._graph_max_tokens else run

    def _runner(self, kv: attention.StepKv) -> Run:
        """Return the call that takes the step of ``kv`` once; its inputs stay where they are."""
        import torch

        shape, device = kv.shape, self._device
        chunk, prefix, decodes, context, _ = shape
        tokens = torch.randint(self.facts.vocab_size, (1, shape.tokens), device=device)
        places = [*range(prefix, prefix + chunk), *[context - 1] * decodes]
        positions = torch.tensor([places], device=device)
        last = torch.arange(shape.tokens - shape.num_requests, shape.tokens, device=device)

        def run() -> object:
            with torch.inference_mode(), attention.only_backend(self._kernel):
                return self._model(
                    input_ids=tokens,
                    position_ids=positions,
                    use_cache=False,
                    logits_to_keep=last,
                    step_kv=kv,
                ).logits.argmax(-1)

        return run


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be timed, before any of it is allocated; ``tokens`` of KV are wanted and fit."""

    device: str
    model_config: Any
    facts: ModelFacts
    tokens: int


def look_up(config: BenchConfig, shapes: Sequence[StepShape]) -> Subject:
    """Return what ``config`` names, with room for as many of ``shapes`` as fit.

    Raises InvalidInput for a device that is not there, an unknown architecture, contexts beyond the
    model's, and a model that does not fit.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        raise missing_dependency("torch", "collect", "calibrate") from None
    device = resolve_device(config.device)
    model_config = read_config(config.model)
    meta = build(model_config, config, "meta")
    try:
        facts = model_facts(model_config, meta, config.dtype)
    except KeyError as error:
        raise InvalidInput(
            f"model {config.model!r} ({type(meta).__name__}): its config has no {error}; calibrate "
            "covers decoders of attention and feed-forward layers"
        ) from None
    longest = max(max(s.prefill_tokens_kept, s.decode_context_tokens) for s in shapes)
    if longest > facts.max_context_tokens:
        raise InvalidInput(
            f"a context of {longest} tokens is asked for; {config.model} goes to "
            f"{facts.max_context_tokens}: lower --max-context"
        )
    tokens = arena_tokens(facts, shapes, free_bytes(device, config.memory_share))
    return Subject(device, model_config, facts, tokens)


def open_torch_bench(config: BenchConfig, shapes: Sequence[StepShape]) -> TorchBench:
    """Return a bench over contiguous caches; raises what :func:`look_up` raises."""
    subject = look_up(config, shapes)
    model = build(subject.model_config, config, subject.device)
    sha256 = config_sha256(subject.model_config)
    bench = TorchBench(config, subject.device, model, subject.facts, sha256)
    bench.allocate(subject.tokens)
    return bench


def build(
    model_config: Any, config: BenchConfig, device: str, implementation: str = attention.NAME
) -> Any:
    """Return the model with random weights, made where it will run: nothing is copied."""
    import torch
    import transformers

    attention.register()
    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(
                model_config,
                dtype=getattr(torch, config.dtype),
                attn_implementation=implementation,
            ).eval()
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(
            f"model {config.model!r} ({type(model_config).__name__}) is no causal language model "
            f"that can be built: {said}"
        ) from error
    if config.fuse and device != "meta":
        fuse(model)
    return model


def _kernel(config: BenchConfig, device: str) -> str:
    if config.attention != "auto":
        return config.attention
    half = config.dtype in ("bfloat16", "float16")
    return "flash" if half and device.startswith("cuda") else "auto"
