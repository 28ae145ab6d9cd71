"""The least a step can take: its arithmetic at peak speed, or its bytes at peak bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serving_sim.models import Architecture
from serving_sim.profile import StepWork


@dataclass(frozen=True, slots=True)
class Peak:
    """What the maker states for one GPU: dense bfloat16 operations and bytes of memory a second."""

    flops_per_s: float
    bytes_per_s: float


PEAKS: Mapping[str, Peak] = {  # from the makers' data sheets; by the name that profiles begin with
    "rtx4090": Peak(165.2e12, 1.008e12),
    "rtxpro6000": Peak(503.8e12, 1.597e12),
    "h100": Peak(989e12, 3.35e12),
    "h200": Peak(989e12, 4.8e12),
    "l40s": Peak(362e12, 0.864e12),
}


def roofline_s(shape: Architecture, peak: Peak, gpus: int, work: StepWork) -> float:
    """Return the seconds that a step takes at least: no launches, no communication, all overlapped.

    Weights are read once (of experts, those that uniform routing hits), KV once, and every query
    meets half of its own chunk and all before it.
    """
    prefill, prefill_context, decodes, decode_context, requests, _ = work
    tokens = prefill + decodes
    expert = 3 * shape.hidden * shape.intermediate
    head = shape.vocabulary * shape.hidden
    one_layer = shape.hidden * (shape.qkv_width + shape.heads * shape.head_dim)
    if shape.num_experts:
        share = 1.0 - shape.experts_per_token / shape.num_experts
        hit = shape.num_experts * (1.0 - share**tokens)
        active = shape.experts_per_token
    else:
        hit = active = 1
    pairs = float(decode_context)
    if prefill:
        chunk = prefill / max(1, requests - decodes)
        pairs += prefill * (prefill_context / max(1, requests - decodes) - chunk / 2)
    operations = 2.0 * tokens * shape.layers * (one_layer + active * expert)
    operations += 2.0 * requests * head
    operations += 4.0 * pairs * shape.layers * shape.heads * shape.head_dim
    moved = 2.0 * (shape.layers * (one_layer + hit * expert) + head)
    moved += shape.kv_bytes_per_token * float(prefill_context + decode_context)
    return max(operations / peak.flops_per_s, moved / peak.bytes_per_s) / gpus
