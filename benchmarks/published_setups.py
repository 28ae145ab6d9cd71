"""What benchmarks/published_sweeps.py runs: published figures, stated settings, open choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from contracts.policy import IntArray
from serving_sim.config import EngineConfig
from serving_sim.profile import AffineProfile
from traces.workload import Workload

# vLLM #44594, description of 2026-06-05: preemptions, output tokens/s, medians of TTFT and E2E in s
WATERMARKS: Mapping[float, tuple[int, int, float | None, float | None]] = {
    0.00: (1065, 11_582, 6.56, 51.6),
    0.02: (400, 12_134, 11.80, 48.4),
    0.05: (187, 12_167, 11.20, 47.9),
    0.10: (168, 11_835, 8.96, 48.6),
    0.15: (168, 11_635, None, None),  # our reference stops here
}
NUM_CLIENTS = 128
# Qwen2.5-7B, one GB200. 299,584 tokens of KV; >= 160 GB of memory: 16,384 batched tokens
CLOSED_LOOP = EngineConfig(
    num_blocks=299_584 // 16, max_num_seqs=256, max_num_batched_tokens=16_384,
    max_model_len=8192, enable_prefix_caching=False,
)  # fmt: skip
# A roofline: 7.62e9 weights of 2 bytes, 28 layers x 4 KV heads x 128 x (key, value) x 2 bytes a
# token, 8 TB/s and 2.5 PFLOP/s a GPU (NVIDIA's data sheet, dense BF16). What a step costs beyond
# that is fitted to ONE published number, the tokens/s without watermark.
ROOFLINE = AffineProfile("roofline", 2 * 7.62e9 / 8e12, 2 * 7.62e9 / 2.5e15, 57_344 / 8e12)

# vLLM RFC #54644: KV blocks -> tax of LIFO, and the change in wasted tokens by least-computed
POOLS: Mapping[int, tuple[float, float | None]] = {
    2800: (0.0, None),
    1600: (0.322, -0.59),
    800: (0.579, -0.40),
    400: (0.788, -0.43),
}
NUM_OFFLINE = 300
ORDER = ("least-computed", "lifo", "random", "most-computed")
"""Published order of the tax, least first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """What the RFC leaves open about its offline run: mean lengths and their spread (uniform over
    half to one and a half of the mean, or lognormal with sigma 1), and engine settings."""

    prompt_tokens: int
    output_tokens: int
    lengths: Literal["uniform", "lognormal"]
    max_num_seqs: int
    max_num_batched_tokens: int
    reserve_full_isl: bool
    enable_prefix_caching: bool = False
    async_scheduling: bool = False

    def config(self, num_blocks: int) -> EngineConfig:
        """Return the engine with ``num_blocks``."""
        names = ("max_num_seqs", "max_num_batched_tokens", "reserve_full_isl",
                 "enable_prefix_caching", "async_scheduling")  # fmt: skip
        return EngineConfig(num_blocks=num_blocks, **{name: getattr(self, name) for name in names})

    def workload(self, seed: int, count: int = NUM_OFFLINE) -> Workload:
        """Return ``count`` requests that are all there at the start."""
        rng = np.random.default_rng(seed)
        drawn = [self._draw(rng, mean, count) for mean in (self.prompt_tokens, self.output_tokens)]
        return requests(*drawn)

    def _draw(self, rng: np.random.Generator, mean: int, count: int) -> IntArray:
        if self.lengths == "uniform":
            return uniform(rng, mean, 0.5, count)
        # 3,000 tokens still fit the smallest pool; the mean is exp(mu + 1/2)
        drawn = mean * np.exp(rng.standard_normal(count) - 0.5)
        tokens: IntArray = np.clip(drawn, 4, 3000).astype(np.int64)
        return tokens


BEFOREHAND = Offline(
    prompt_tokens=280, output_tokens=280, lengths="uniform",
    max_num_seqs=120, max_num_batched_tokens=8192, reserve_full_isl=True,
)  # fmt: skip
"""Chosen before any result was seen; the reasons are in docs/published_sweeps.md."""
AFTERWARDS = Offline(
    prompt_tokens=140, output_tokens=420, lengths="lognormal",
    max_num_seqs=64, max_num_batched_tokens=512, reserve_full_isl=False,
)  # fmt: skip
"""Chosen after a search over settings for the published taxes."""
READINGS: Mapping[str, Offline] = {
    "beforehand": BEFOREHAND,
    "afterwards": AFTERWARDS,
    "full-prompt gate on": replace(AFTERWARDS, reserve_full_isl=True),
    "2,048 tokens a step": replace(AFTERWARDS, max_num_batched_tokens=2048),
    "uniform lengths": replace(AFTERWARDS, lengths="uniform"),
    "prompts 280, outputs 280": replace(AFTERWARDS, prompt_tokens=280, output_tokens=280),
    "prompts 60, outputs 500": replace(AFTERWARDS, prompt_tokens=60, output_tokens=500),
    "128 seats": replace(AFTERWARDS, max_num_seqs=128),
    "prefix caching on": replace(AFTERWARDS, enable_prefix_caching=True),
    "async scheduling on": replace(AFTERWARDS, async_scheduling=True),
}
"""The two above; the rest differ from ``afterwards`` in one thing."""
VARIANTS: Mapping[str, tuple[EngineConfig, int]] = {
    "as published": (CLOSED_LOOP, NUM_CLIENTS),
    "all 450 at once": (CLOSED_LOOP, 450),
    "full-prompt gate off": (replace(CLOSED_LOOP, reserve_full_isl=False), NUM_CLIENTS),
    "2,048 tokens a step": (replace(CLOSED_LOOP, max_num_batched_tokens=2048), NUM_CLIENTS),
    "prefix caching on": (replace(CLOSED_LOOP, enable_prefix_caching=True), NUM_CLIENTS),
    "async scheduling on": (replace(CLOSED_LOOP, async_scheduling=True), NUM_CLIENTS),
}
"""Readings of the watermark sweep: settings and clients."""


def uniform(rng: np.random.Generator, mean: int, spread: float, count: int) -> IntArray:
    """Return whole numbers within ``spread`` of ``mean`` (vLLM's random-range-ratio)."""
    low, high = round(mean * (1 - spread)), round(mean * (1 + spread))
    return rng.integers(low, high + 1, count)


def requests(prompt_tokens: IntArray, output_tokens: IntArray) -> Workload:
    """Return requests that arrive at 0 s and write exactly their cap (EOS ignored)."""
    count = len(prompt_tokens)
    return Workload(
        name="published sweep",
        request_ids=tuple(f"r{i:03d}" for i in range(count)),
        arrival_s=np.zeros(count),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=output_tokens,
        priority=np.zeros(count, np.int64),
        deadline_s=np.full(count, np.nan),
        cohort=np.ones(count, np.int64),
        capped=np.zeros(count, bool),
    )


def served_prompts(seed: int) -> Workload:
    """Return the 450 prompts of #44594: about 1,000 tokens in and 5,000 out, each +-20 %."""
    rng = np.random.default_rng(seed)
    return requests(uniform(rng, 1000, 0.2, 450), uniform(rng, 5000, 0.2, 450))
