"""Steps of a real vLLM engine with random weights, timed around ``engine.step``.

Decodes are requests whose prompts were computed by steps before, so a point of long contexts costs
their prefill. How many tokens a step takes is set on the engine's scheduler, which lives in this
process. Written against vLLM 0.20 to 0.33 and tested with a stand-in; never run with vLLM.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from contracts.errors import InvalidInput, missing_dependency
from serving_sim.calibration.bench import build, look_up
from serving_sim.calibration.bench_config import BenchConfig
from serving_sim.calibration.capacity import ModelFacts
from serving_sim.calibration.clocks import ClockLog, open_clock_log
from serving_sim.calibration.shapes import config_sha256
from serving_sim.calibration.steps import StepDoesNotFit, StepShape
from serving_sim.calibration.timing import Run, Timing, measure

_TIMER = "time.perf_counter around engine.step"
Wait = Callable[[], object]


@dataclass(frozen=True, slots=True)
class EngineTimer:
    """Wall time of ``step`` from one idle device to the next; a run is what comes before each step
    and is not timed. ``wait`` returns when the device is done."""

    step: Run
    wait: Wait
    name: str = _TIMER

    def time(self, run: Run, count: int) -> list[float]:
        """Return the seconds of each of ``count`` steps, in order."""
        seconds = []
        for _ in range(count):
            run()
            self.wait()
            start_s = time.perf_counter()
            self.step()
            self.wait()
            seconds.append(time.perf_counter() - start_s)
        return seconds


@dataclass(slots=True)
class VllmBench:
    """A vLLM engine (``LLM(...).llm_engine``) and its scheduler; see :func:`open_vllm_bench`.

    ``sampling`` are the parameters of every request: greedy, and never ended by a token.
    """

    config: BenchConfig
    facts: ModelFacts
    sha256: str
    hardware: str
    engine: Any
    scheduler: Any
    sampling: Any
    block_tokens: int
    room_tokens: int
    wait: Wait
    clocks: ClockLog | None = None
    notes: list[str] = field(default_factory=list)
    takes_uneven: bool = True
    _live: list[str] = field(default_factory=list)
    _added: int = 0

    @property
    def kernel(self) -> str:
        """Attention kernel and way of launching."""
        kernel = {"flash": "FLASH_ATTN"}.get(self.config.attention, "attention of its choice")
        launch = "its CUDA graphs" if self.config.graph_max_tokens else "eager"
        return f"vLLM engine steps, {kernel}, {launch}"

    @property
    def identity(self) -> dict[str, str]:
        """What two benches must share for their times to belong together, by name."""
        return {
            "backend": "vllm",
            "model": self.config.model,
            "config_sha256": self.sha256,
            "dtype": self.facts.dtype,
            "hardware": self.hardware,
            "kernel": self.kernel,
            "timer": _TIMER,
            **{name: str(value) for name, value in asdict(self.config.rules).items()},
            **{name: importlib.metadata.version(name) for name in _installed("torch", "vllm")},
        }

    @property
    def clock_state(self) -> str:
        """How the GPU's clocks stood so far, in words."""
        return str(self.clocks) if self.clocks else "not recorded (nvidia-ml-py not installed)"

    def time(self, shape: StepShape) -> Timing:
        """Return the time of a step; raises StepDoesNotFit.

        The last of the timed steps is the one whose decodes have the contexts of ``shape``: each
        step before has a token less of each.
        """
        rules = replace(self.config.rules, max_timed=self.config.rules.min_timed)
        blocks = sum(
            -(-n // self.block_tokens) for n in (shape.prefill_tokens_kept, *shape.decode_contexts)
        )
        if blocks * self.block_tokens > self.room_tokens:
            raise StepDoesNotFit(
                f"{shape} needs {blocks} blocks of {self.block_tokens} tokens; there is room for "
                f"{self.room_tokens} tokens"
            )
        budget: int = self.scheduler.max_num_scheduled_tokens
        try:
            self._start_decodes(shape, rules.warm_ups + rules.min_timed, budget)
            timer = EngineTimer(lambda: self._step(shape.num_requests), self._waited)
            return measure(lambda: self._put_prefill(shape, budget), timer, rules)
        except ValueError as error:  # vLLM's word for a prompt that is too long
            raise StepDoesNotFit(f"{shape}: vLLM refuses it: {error}") from None
        finally:
            self.scheduler.max_num_scheduled_tokens = budget
            self.engine.abort_request(self._live)
            self._live.clear()

    def _start_decodes(self, shape: StepShape, num_steps: int, budget: int) -> None:
        """Compute prompts so long that the contexts are those of ``shape`` ``num_steps`` later. A
        request decodes while those after it still prefill: its prompt is shorter by that much."""
        total = shape.decode_kv_tokens
        computed = 0
        waiting = set()
        for context in shape.decode_contexts:
            computed += context
            lead = -(-total // budget) - -(-computed // budget)
            waiting.add(self._add(max(1, context - num_steps - lead)))
        # decodes take of the budget too: twice the steps it should take are more than enough
        for _ in range(2 * -(-total // max(1, budget - shape.num_decodes)) + 1):
            if not waiting:
                return
            waiting -= {output.request_id for output in self.engine.step()}
        if waiting:
            raise InvalidInput(
                f"{shape}: {len(waiting)} of {shape.num_decodes} requests did not start decoding "
                "in vLLM; lower --max-batch or --max-context"
            )

    def _put_prefill(self, shape: StepShape, budget: int) -> None:
        """Make a request with its prefix computed and its chunk next, in place of the last one."""
        if not shape.prefill_chunk_tokens:
            return
        if len(self._live) > shape.num_decodes:
            self.engine.abort_request([self._live.pop()])
        self._add(shape.prefill_tokens_kept)
        left = shape.prefill_prefix_tokens
        while left:
            part = min(left, max(1, budget - shape.num_decodes))
            self.scheduler.max_num_scheduled_tokens = part + shape.num_decodes
            self.engine.step()
            left -= part
        self.scheduler.max_num_scheduled_tokens = budget

    def _add(self, prompt_tokens: int) -> str:
        self._added += 1
        request_id = f"step-{self._added}"
        # every prompt its own: equal ones would share what is cached of them
        ids = [(self._added * 7919 + at) % self.facts.vocab_size for at in range(prompt_tokens)]
        self.engine.add_request(request_id, {"prompt_token_ids": ids}, self.sampling)
        self._live.append(request_id)
        return request_id

    def _step(self, num_requests: int) -> None:
        outputs = self.engine.step()
        if len(outputs) != num_requests:
            raise InvalidInput(
                f"a vLLM step gave {len(outputs)} tokens where {num_requests} requests were ready: "
                "the engine made up the step otherwise; lower --max-batch or --max-context"
            )

    def _waited(self) -> None:
        self.wait()
        if self.clocks:
            self.clocks.sample()


def open_vllm_bench(config: BenchConfig, shapes: Sequence[StepShape]) -> VllmBench:
    """Return a bench over a vLLM engine; raises what bench.look_up raises, MissingDependency
    without vLLM, InvalidInput for settings it does not take."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler must be in this process
    try:
        from vllm import LLM, SamplingParams
    except ImportError:
        raise missing_dependency("vllm", "vllm", "calibrate --backend vllm") from None
    import torch

    _check(config)
    subject = look_up(config, shapes)
    if subject.device != "cuda:0":
        raise InvalidInput(
            f"device {subject.device!r}: --backend vllm times the first CUDA device; choose it "
            "with CUDA_VISIBLE_DEVICES"
        )
    architecture = type(build(subject.model_config, config, "meta")).__name__
    subject.model_config.architectures = [architecture]
    longest = max(max(s.prefill_tokens_kept, s.decode_context_tokens) for s in shapes)
    with tempfile.TemporaryDirectory() as folder:
        subject.model_config.save_pretrained(folder)
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=config.dtype,
            max_model_len=min(longest + 1, subject.facts.max_context_tokens),
            max_num_seqs=max(s.num_requests for s in shapes),
            max_num_batched_tokens=max(s.tokens for s in shapes),
            gpu_memory_utilization=config.memory_share,
            enable_prefix_caching=False,
            async_scheduling=False,
            enforce_eager=not config.graph_max_tokens,
            **(
                {"attention_config": {"backend": "FLASH_ATTN"}}
                if config.attention == "flash"
                else {}
            ),
        ).llm_engine
    cache = engine.vllm_config.cache_config
    return VllmBench(
        config=config,
        facts=subject.facts,
        sha256=config_sha256(subject.model_config),
        hardware=str(torch.cuda.get_device_name(0)),
        engine=engine,
        scheduler=engine.engine_core.engine_core.scheduler,
        sampling=SamplingParams(
            temperature=0.0, max_tokens=longest, ignore_eos=True, detokenize=False
        ),
        block_tokens=cache.block_size,
        room_tokens=cache.num_gpu_blocks * cache.block_size,
        wait=torch.cuda.synchronize,
        clocks=open_clock_log(str(torch.cuda.get_device_properties(0).uuid)),
    )


def _check(config: BenchConfig) -> None:
    for name, is_given in (
        ("--attention math", config.attention == "math"),
        ("--fuse", config.fuse),
        ("--flush-l2", config.flush_l2),
    ):
        if is_given:
            raise InvalidInput(
                f"{name} is not for --backend vllm, which decides that: leave it out"
            )


def _installed(*names: str) -> list[str]:
    found = {distribution.name for distribution in importlib.metadata.distributions()}
    return [name for name in names if name in found]
