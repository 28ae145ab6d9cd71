"""The real vLLM scheduler on a CPU, fed requests that share prefixes or stop before their cap.

Runs in an environment that has vLLM (0.15 to 0.33), not in ours, and imports nothing from here:

    python benchmarks/vllm_prefix_driver.py workloads.jsonl LOG_FOLDER [--driver vllm_driver.py]

Each line of ``workloads.jsonl`` is a driver workload (serving_sim/decisions.py says what it holds)
and becomes ``LOG_FOLDER/NNNN.jsonl``. With ``--driver``, workloads that need neither prefix groups
nor stops are run by that other driver, whose clock and log this one shares.

There is no model: a step takes fixed + per-token + per-context-token seconds of a virtual clock,
and each request that computed all its known tokens gets the next one. Token ids are chosen so that
two requests have equal blocks where their groups say so, and nowhere else.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import sys
from collections import deque
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

DEFAULTS: dict[str, Any] = {
    "num_blocks": 10_000, "block_size": 16, "max_num_seqs": 128, "max_num_batched_tokens": 2048,
    "max_model_len": 16_384, "policy": "fcfs", "enable_prefix_caching": False,
    "enable_chunked_prefill": True, "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False, "async_scheduling": False,
    "reserve_full_isl": True, "watermark": 0.0,
    "t_fixed": 0.008, "t_token": 1.0e-4, "t_ctx": 2.0e-8,
}  # fmt: skip
STOP_TOKEN = 1
OWN_TOKENS, GROUP_TOKENS = 1_000, 1_000_000_000
DUE_SLACK_S = 1e-12


class Bag(SimpleNamespace):
    """A configuration of which the scheduler reads only what was put in; the rest is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def accepted(call: Any, **values: Any) -> Any:
    """Call ``call`` with those of ``values`` that it has parameters for."""
    names = inspect.signature(call).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values()):
        return call(**values)
    return call(**{name: value for name, value in values.items() if name in names})


def no(*_: Any, **__: Any) -> bool:
    """Say no to whatever is asked."""
    return False


def build_scheduler(engine: dict[str, Any]) -> Any:
    """Return vLLM's scheduler for one full-attention group, built without a model."""
    import torch
    from vllm.config import CacheConfig, SchedulerConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    named = dict(engine, scheduler_reserve_full_isl=engine["reserve_full_isl"])
    cache = accepted(CacheConfig, cache_dtype="auto", **named)
    cache.num_gpu_blocks = engine["num_blocks"]
    depth = 2 if engine["async_scheduling"] else 1
    config = Bag(
        scheduler_config=accepted(SchedulerConfig, is_encoder_decoder=False, **named),
        cache_config=cache,
        model_config=Bag(
            max_model_len=engine["max_model_len"], runner_type="generate", skip_tokenizer_init=True,
            is_encoder_decoder=False, uses_mrope=False, is_diffusion=False,
            is_multimodal_model=False, supports_multimodal_inputs=False,
            return_sampling_mask=False, enable_return_routed_experts=False,
        ),
        parallel_config=Bag(
            data_parallel_index=0, data_parallel_rank=0, data_parallel_size=1,
            tensor_parallel_size=1, pipeline_parallel_size=1,
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
        observability_config=Bag(
            kv_cache_metrics=False, enable_mfu_metrics=False,
            per_request_spec_decode_metrics="none", enable_logging_iteration_details=False,
        ),
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=SimpleNamespace(enabled=False),
        structured_outputs_config=Bag(),
        max_concurrent_batches=depth,
        max_in_flight_tokens=depth * engine["max_num_batched_tokens"],
        num_speculative_tokens=0, num_lookahead_tokens=0, num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0, use_v2_model_runner=False, is_mm_encoder_only=False,
    )  # fmt: skip
    group = accepted(
        FullAttentionSpec, block_size=engine["block_size"], num_kv_heads=1, head_size=1,
        dtype=torch.float32,
    )  # fmt: skip
    kv_cache = KVCacheConfig(
        num_blocks=engine["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], group)],
    )
    return accepted(
        config.scheduler_config.get_scheduler_cls(),
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=Bag(should_advance=no, accept_tokens=lambda *_: True),
        block_size=engine["block_size"],
        log_stats=False,
    )


def build_request(row: dict[str, Any], index: int, engine: dict[str, Any]) -> Any:
    """Return vLLM's request: the group's tokens first, then tokens that nobody else has."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    shared = row.get("shared", 0)
    prompt = [GROUP_TOKENS + row.get("prefix_group", 0)] * shared
    prompt += [OWN_TOKENS + index] * (row["prompt"] - shared)
    cap = row.get("max_tokens", row["output"])
    return accepted(
        Request,
        request_id=row["id"],
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            max_tokens=cap,
            ignore_eos=True,
            stop_token_ids=[STOP_TOKEN],
            logprobs=row.get("logprobs"),
        ),
        pooling_params=None,
        eos_token_id=None,
        arrival_time=row.get("arrival", 0.0),
        priority=row.get("priority", 0),
        block_hasher=block_hasher(engine["block_size"])
        if engine["enable_prefix_caching"]
        else None,
    )


@lru_cache
def block_hasher(block_size: int) -> Any:
    """Return vLLM's hasher of full blocks; every call of ``init_none_hash`` draws another seed."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    start_hashes()
    return get_request_block_hasher(block_size, sha256)


@lru_cache
def start_hashes() -> None:
    """Set the hash that every chain of blocks starts from, once."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)


class Run:
    """One workload: the scheduler, the virtual clock, and the steps that are under way."""

    def __init__(self, workload: dict[str, Any], log: TextIO) -> None:
        self.engine = {**DEFAULTS, **workload.get("engine", {})}
        self.rows = sorted(workload["requests"], key=lambda row: row.get("arrival", 0.0))
        self.index = {row["id"]: index for index, row in enumerate(self.rows)}
        self.scheduler = build_scheduler(self.engine)
        self.log = log
        self.clock_s = 0.0
        self.num_steps = self.num_added = self.num_finished = 0
        self.in_flight: deque[tuple[Any, Any, float]] = deque()
        self.victims: list[str] = []
        self._watch_preemptions()

    def _watch_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.victims.append(request.request_id)
            return preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = watched

    def play(self, max_steps: int) -> None:
        """Step until every request has ended, or ``max_steps`` were planned."""
        depth = 2 if self.engine["async_scheduling"] else 1
        while self.num_finished < len(self.rows) and self.num_steps < max_steps:
            self._add_due()
            if not self.scheduler.requests and not self.in_flight:
                self.clock_s = self.rows[self.num_added].get("arrival", 0.0)
                continue
            if self.scheduler.requests and self._plan() and len(self.in_flight) < depth:
                continue
            self._finish_oldest()

    def _add_due(self) -> None:
        due_s = self.clock_s + DUE_SLACK_S
        while self.num_added < len(self.rows):
            row = self.rows[self.num_added]
            if row.get("arrival", 0.0) > due_s:
                break
            self.scheduler.add_request(build_request(row, self.num_added, self.engine))
            self.num_added += 1

    def _plan(self) -> bool:
        """Plan and log a step; say whether it computes anything."""
        from vllm.v1.outputs import ModelRunnerOutput

        self.victims.clear()
        planned = self.scheduler.schedule()
        self.num_steps += 1
        tokens = planned.num_scheduled_tokens
        requests = [self.scheduler.requests[name] for name in tokens]
        output = accepted(
            ModelRunnerOutput,
            req_ids=list(tokens),
            req_id_to_index={name: place for place, name in enumerate(tokens)},
            sampled_token_ids=[self.sample(request) for request in requests],
            logprobs=self.logprobs(requests),
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        engine = self.engine
        context = sum(request.num_computed_tokens for request in requests)
        step_s = (
            engine["t_fixed"] + engine["t_token"] * sum(tokens.values()) + engine["t_ctx"] * context
        )
        self.in_flight.append((planned, output, step_s if tokens else 0.0))
        self._write(planned)
        return bool(tokens)

    def sample(self, request: Any) -> list[int]:
        """Return the token that follows all computed ones, if none of those is missing."""
        number = self.number_sampled(request)
        if number is None:
            return []
        index = self.index[request.request_id]
        return [STOP_TOKEN if number >= self.rows[index]["output"] else self.word(index, number)]

    def number_sampled(self, request: Any) -> int | None:
        """Return which output token, from 1, a planned step samples; None for none."""
        computed: int = request.num_computed_tokens
        if computed < request.num_tokens + max(0, request.num_output_placeholders - 1):
            return None
        return computed - int(self.rows[self.index[request.request_id]]["prompt"]) + 1

    def word(self, index: int, _number: int) -> int:
        """Return output token ``_number`` of a request: one that nobody else has."""
        return OWN_TOKENS + index

    def logprobs(self, _requests: list[Any]) -> Any:
        """Return what the step's tokens were drawn from, as vLLM lists it: nothing."""
        return None

    def _write(self, planned: Any) -> None:
        scheduler = self.scheduler
        line = {
            "step": self.num_steps,
            "t": round(self.clock_s, 9),
            "sched": planned.num_scheduled_tokens,
            "preempted": list(self.victims),
            "finished_before": sorted(planned.finished_req_ids),
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "n_running": len(scheduler.running),
            "n_waiting": len(scheduler.waiting),
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }
        self.log.write(json.dumps(line) + "\n")

    def _finish_oldest(self) -> None:
        planned, output, step_s = self.in_flight.popleft()
        self.clock_s += step_s
        for answers in self.scheduler.update_from_output(planned, output).values():
            self.num_finished += sum(answer.finish_reason is not None for answer in answers.outputs)


def is_plain(workload: dict[str, Any]) -> bool:
    """Say whether any driver can run it: no shared prefixes, no stops, no newer settings."""
    rows = workload["requests"]
    special = {"prefix_group", "shared", "max_tokens"}
    adaptive = workload["engine"].get("long_prefill_token_threshold_adaptive", False)
    return not adaptive and not any(special & set(row) for row in rows)


def load_driver(path: Path) -> ModuleType:
    """Import another driver from its file."""
    spec = importlib.util.spec_from_file_location("other_driver", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run every workload of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workloads", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--driver", type=Path)
    parser.add_argument("--max-steps", type=int, default=1_000_000_000)
    options = parser.parse_args()
    import vllm

    version = vllm.__version__
    other = load_driver(options.driver) if options.driver else None
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = options.workloads.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        workload = json.loads(line)
        with (options.folder / f"{number:04d}.jsonl").open("w", encoding="utf-8") as log:
            log.write(json.dumps({"vllm_version": version} | workload) + "\n")
            if other is not None and is_plain(workload):
                engine = other.EngineCfg(**workload["engine"], stub_config=True)
                other.run(
                    [other.Req(**row) for row in workload["requests"]],
                    engine,
                    log,
                    options.max_steps,
                )
            else:
                Run(workload, log).play(options.max_steps)


if __name__ == "__main__":
    main()
