"""What is asked of a bench, and what one is told: the settings of ``preemptbench calibrate``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from contracts.errors import InvalidInput, unknown_name
from serving_sim.calibration.attention import BACKENDS as KERNELS
from serving_sim.calibration.capacity import ModelFacts
from serving_sim.calibration.steps import StepShape
from serving_sim.calibration.timing import Timing, TimingRules

BACKENDS = ("torch", "paged", "vllm")
_DTYPES = ("float32", "bfloat16", "float16")


class StepBench(Protocol):
    """Anything that can time steps: a model on a device, or an engine."""

    @property
    def room_tokens(self) -> int:
        """Tokens of KV there is room for."""
        ...

    def time(self, shape: StepShape) -> Timing:
        """Return the time of a step; raises StepDoesNotFit."""
        ...


class Bench(StepBench, Protocol):
    """A bench that says what it times: ``identity`` holds what two benches must share for their
    times to belong together; ``takes_uneven`` whether it times decodes of unlike contexts."""

    facts: ModelFacts
    notes: list[str]
    takes_uneven: bool

    @property
    def hardware(self) -> str: ...

    @property
    def kernel(self) -> str: ...

    @property
    def identity(self) -> dict[str, str]: ...

    @property
    def clock_state(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What is timed, and how.

    ``backend`` takes the steps: torch (the model over contiguous caches), paged (transformers'
    continuous batching), vllm (a vLLM engine). The words below are the first one's; paged.py and
    vllm_bench.py say what differs.
    ``attention`` names the kernel of scaled_dot_product_attention: flash, math, or auto (flash for
    16-bit types on a GPU, torch's choice elsewhere). Steps of up to ``graph_max_tokens`` tokens
    replay a captured CUDA graph, larger ones are launched eagerly, as vLLM does by default; 0 takes
    every step eagerly. ``fuse`` compiles norms and feed-forward parts (torch.compile).
    ``memory_share`` of the free memory may be used. ``flush_l2`` empties the
    cache before each run: only for models whose weights would stay in it.
    """

    model: str
    backend: str = "torch"
    dtype: str = "bfloat16"
    device: str = "auto"
    attention: str = "auto"
    graph_max_tokens: int = 512
    fuse: bool = False
    memory_share: float = 0.9
    flush_l2: bool = False
    rules: TimingRules = field(default_factory=TimingRules)

    def __post_init__(self) -> None:
        for name, known in (
            ("backend", BACKENDS), ("dtype", _DTYPES), ("attention", KERNELS)
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)
        if self.graph_max_tokens < 0:
            raise InvalidInput(f"graph_max_tokens {self.graph_max_tokens}: give 0 or more")
