"""How much memory a model and its KV cache take, before any of it is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contracts.errors import InvalidInput
from serving_sim.calibration.steps import StepShape

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of one model in one dtype. ``matmul_weights`` are the weights a token is multiplied
    with (all but the embedding table); for a mixture of experts, of all experts."""

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
    matmul_weights: int
    bytes_per_value: int
    is_mixture: bool

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of every KV head of every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value

    def work_bytes(self, shape: StepShape) -> int:
        """Return an upper guess of what a step needs beside weights and KV: three copies of a
        layer's widest activations, and logits in the model's dtype and in float32."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        width = 4 * self.hidden_size + 3 * self.intermediate_size + heads
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
    """Return the sizes of ``model`` (it may lie on torch's meta device)."""
    import torch

    text = config.get_text_config(decoder=True)
    heads = int(text.num_attention_heads)
    head_dim = getattr(text, "head_dim", None) or int(text.hidden_size) // heads
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    weights = sum(p.numel() for p in model.parameters())
    bytes_per_value = getattr(torch, dtype).itemsize
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return ModelFacts(
        architecture=type(model).__name__,
        dtype=dtype,
        num_layers=int(text.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        hidden_size=int(text.hidden_size),
        intermediate_size=int(getattr(text, "intermediate_size", 4 * text.hidden_size)),
        vocab_size=int(text.vocab_size),
        max_context_tokens=int(text.max_position_embeddings),
        weight_bytes=weights * bytes_per_value,
        matmul_weights=weights - (0 if is_tied else embedding.numel()),
        bytes_per_value=bytes_per_value,
        is_mixture=any("num_" in key and "experts" in key for key in text.to_dict()),
    )
