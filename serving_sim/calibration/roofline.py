"""The least time a step can take: every byte at the memory's bandwidth, every operation at the
tensor cores' peak, whichever is longer. Drawn beside measurements; never part of a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from contracts.errors import InvalidInput
from serving_sim.calibration.capacity import ModelFacts
from serving_sim.calibration.steps import StepShape


@dataclass(frozen=True, slots=True)
class GpuPeaks:
    """Memory bandwidth and dense 16-bit tensor throughput (no sparsity)."""

    bytes_per_s: float
    flops_per_s: float

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "flops_per_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InvalidInput(f"GPU peaks: {name} is {getattr(self, name)}; give a rate > 0")


# NVIDIA's data sheets, dense rates; by what torch.cuda.get_device_name() begins with. The longest
# name that fits counts.
GPUS: Mapping[str, GpuPeaks] = {
    "NVIDIA A100-SXM4-40GB": GpuPeaks(1.555e12, 312e12),
    "NVIDIA A100-SXM4-80GB": GpuPeaks(2.039e12, 312e12),
    "NVIDIA A100 80GB PCIe": GpuPeaks(1.935e12, 312e12),
    "NVIDIA H100 80GB HBM3": GpuPeaks(3.35e12, 989e12),
    "NVIDIA H100 PCIe": GpuPeaks(2.0e12, 756e12),
    "NVIDIA H100 NVL": GpuPeaks(3.9e12, 835e12),
    "NVIDIA H200": GpuPeaks(4.8e12, 989e12),
    "NVIDIA B200": GpuPeaks(8.0e12, 2250e12),
    "NVIDIA L4": GpuPeaks(0.300e12, 121e12),
    "NVIDIA L40S": GpuPeaks(0.864e12, 362e12),
    "NVIDIA GeForce RTX 4090": GpuPeaks(1.008e12, 165e12),
}


def gpu_peaks(hardware: str) -> GpuPeaks | None:
    """Return the peaks of the GPU with this name; None for one that the table lacks."""
    fits = [name for name in GPUS if hardware == name or hardware.startswith(f"{name} ")]
    return GPUS[max(fits, key=len)] if fits else None


def roofline_s(shape: StepShape, facts: ModelFacts, peaks: GpuPeaks) -> float:
    """Return the roofline seconds of a step of a dense model.

    Bytes: the weights once, the KV once read (and the new tokens' written). Operations: two a
    weight and token, and four a head, head dimension, layer and pair of a query and a key; the head
    runs on one token a request only.
    """
    chunk, prefix, decodes, context = shape
    head_weights = facts.vocab_size * facts.hidden_size
    pairs = chunk * prefix + chunk * (chunk + 1) // 2 + decodes * context
    flops = (
        2 * (facts.matmul_weights - head_weights) * shape.tokens
        + 2 * head_weights * shape.num_requests
        + 4 * facts.num_layers * facts.num_heads * facts.head_dim * pairs
    )
    kv_bytes = (shape.kv_tokens + shape.tokens) * facts.kv_bytes_per_token
    read_bytes = facts.matmul_weights * facts.bytes_per_value + kv_bytes
    return max(read_bytes / peaks.bytes_per_s, flops / peaks.flops_per_s)
