"""How much memory a model and its KV cache take, before any of it is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contracts.errors import InvalidInput
from serving_sim.calibration.steps import StepShape
from serving_sim.models import Architecture

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of one model in one dtype. ``num_experts`` is 0 for a dense model; where there are
    experts, ``intermediate_size`` is the width of one."""

    architecture: str
    dtype: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_context_tokens: int
    weight_bytes: int
    bytes_per_value: int
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of every KV head of every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value

    @property
    def sizes(self) -> Architecture:
        """The sizes alone, as the roofline takes them."""
        return Architecture(
            layers=self.num_layers,
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate_size,
            vocabulary=self.vocab_size,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
        )

    def work_bytes(self, shape: StepShape) -> int:
        """Return an upper guess of what a step needs beside weights and KV: three copies of a
        layer's widest activations, and logits in the model's dtype and in float32."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        width = 4 * self.hidden_size + heads
        width += 3 * self.intermediate_size * max(1, self.experts_per_token)
        logits = shape.num_requests * self.vocab_size * (self.bytes_per_value + 4)
        return 3 * shape.tokens * width * self.bytes_per_value + logits


def arena_tokens(facts: ModelFacts, shapes: Sequence[StepShape], free_bytes: int) -> int:
    """Return the tokens of KV to allocate: what the largest of ``shapes`` needs, or what fits
    beside the weights and the working memory of the widest step.

    Raises InvalidInput when not even the smallest of ``shapes`` fits.
    """
    reserve = max(facts.work_bytes(shape) for shape in shapes) + GIB // 2
    smallest = min(shape.kv_tokens for shape in shapes)
    fits = (free_bytes - facts.weight_bytes - reserve) // facts.kv_bytes_per_token
    if fits < smallest:
        weights, kv = _gib(facts.weight_bytes), _gib(smallest * facts.kv_bytes_per_token)
        raise InvalidInput(
            f"{facts.architecture} in {facts.dtype} does not fit: weights {weights} + KV of the "
            f"smallest step {kv} + working memory {_gib(reserve)} exceed the {_gib(free_bytes)} "
            "that may be used: take a smaller model or dtype, a smaller --max-chunk or "
            "--max-batch, or a larger GPU"
        )
    return int(min(fits, max(shape.kv_tokens for shape in shapes)))


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"


def model_facts(config: Any, model: Any, dtype: str) -> ModelFacts:
    """Return the sizes of ``model`` (it may lie on torch's meta device).

    Raises KeyError for a config that lacks a size every decoder has.
    """
    import torch

    text = config.get_text_config(decoder=True).to_dict()
    heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
    experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
    width = text.get("moe_intermediate_size") if experts else None
    bytes_per_value = getattr(torch, dtype).itemsize
    return ModelFacts(
        architecture=type(model).__name__,
        dtype=dtype,
        num_layers=int(text["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        hidden_size=hidden,
        intermediate_size=int(width or text.get("intermediate_size") or 4 * hidden),
        vocab_size=int(text["vocab_size"]),
        max_context_tokens=int(text["max_position_embeddings"]),
        weight_bytes=sum(p.numel() for p in model.parameters()) * bytes_per_value,
        bytes_per_value=bytes_per_value,
        num_experts=experts,
        experts_per_token=int(text.get("num_experts_per_tok") or 0) if experts else 0,
    )
