"""Attention of one engine step, and the KV cache it reads and writes.

A serving engine flattens the tokens of a step into one row and attends request by request. This
does the same inside any transformers model that lets its attention be replaced: the model sees one
row of tokens, dense layers run over all of them, and each attention layer splits the row into the
prefill chunk and the decodes, writes their keys and values into the cache, and attends.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from contracts.errors import InvalidInput
from serving_sim.calibration.steps import StepShape

if TYPE_CHECKING:
    import torch

Cached = tuple[Any, ...]  # keys and values of one layer
NAME = "preemptbench_step"
BACKENDS = ("auto", "flash", "math")


class KvArena:
    """Keys and values of ``tokens`` tokens in every layer, random: times do not depend on them, so
    a context of any length costs memory and no prefill. Each tensor is (tokens, KV heads, head)."""

    def __init__(
        self,
        num_layers: int,
        tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        import torch

        self.tokens, self.num_kv_heads, self.head_dim = tokens, num_kv_heads, head_dim
        shape = (tokens, num_kv_heads, head_dim)
        self.layers = [
            tuple(torch.empty(shape, dtype=dtype, device=device).normal_() for _ in range(2))
            for _ in range(num_layers)
        ]

    def view(self, shape: StepShape) -> StepKv:
        """Return the cache of one step: views into the arena, nothing is copied."""
        kept = shape.prefill_tokens_kept
        rows = (shape.num_decodes, shape.decode_context_tokens, self.num_kv_heads, self.head_dim)
        return StepKv(
            shape,
            [tuple(tensor[:kept][None] for tensor in layer) for layer in self.layers],
            [
                tuple(tensor[kept : shape.kv_tokens].view(rows) for tensor in layer)
                for layer in self.layers
            ],
        )


@dataclass(slots=True)
class StepKv:
    """Keys and values that one step works on, by layer, each (requests, tokens, KV heads, head)."""

    shape: StepShape
    prefill: list[Cached]
    decodes: list[Cached]
    num_calls: int = 0


def register() -> None:
    """Make :func:`attend` known to transformers as :data:`NAME`; without a mask function of that
    name transformers builds no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,  # noqa: ARG001  (transformers passes it; there is none)
    scaling: float | None = None,
    *,
    step_kv: StepKv,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return (output, None); query is (1, heads, tokens, head), output (1, tokens, heads, head).

    Keys and values are written where an engine would write them: behind the prefix, and last in the
    context of each decode.
    """
    import torch

    if sliding_window is not None:
        raise InvalidInput(
            f"a layer attends to a sliding window of {sliding_window} tokens: calibrate covers "
            "models whose every layer attends to the whole context"
        )
    step_kv.num_calls += 1
    chunk, layer = step_kv.shape.prefill_chunk_tokens, module.layer_idx
    outputs = []
    if chunk:
        q, k, v = (tensor[:, :, :chunk] for tensor in (query, key, value))
        outputs.append(_attend_chunk(q, k, v, step_kv.prefill[layer], scaling))
    if step_kv.shape.num_decodes:
        q, k, v = (tensor[:, :, chunk:] for tensor in (query, key, value))
        outputs.append(_attend_decodes(q, k, v, step_kv.decodes[layer], scaling))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).contiguous(), None


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cached: Cached, scale: float | None
) -> torch.Tensor:
    """Return (1, chunk, heads, head): each query meets the prefix and the chunk up to itself."""
    import torch.nn.functional as functional
    from torch.nn.attention.bias import causal_lower_right

    chunk, kept = query.shape[2], cached[0].shape[1]
    for tensor, new in zip(cached, (key, value), strict=True):
        tensor[:, kept - chunk :] = new.transpose(1, 2)
    keys, values = (tensor.transpose(1, 2) for tensor in cached)
    mask = causal_lower_right(chunk, kept)
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    ).transpose(1, 2)


def _attend_decodes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cached: Cached, scale: float | None
) -> torch.Tensor:
    """Return (1, decodes, heads, head): each token meets its own request's context."""
    import torch.nn.functional as functional

    for tensor, new in zip(cached, (key, value), strict=True):
        tensor[:, -1] = new[0].transpose(0, 1)
    keys, values = (tensor.transpose(1, 2) for tensor in cached)
    decodes, kv_heads, _, head = keys.shape
    # the query heads that share a KV head become rows of one query: every kernel can do that
    rows = query[0].transpose(0, 1).reshape(decodes, kv_heads, -1, head)
    out = functional.scaled_dot_product_attention(rows, keys, values, scale=scale)
    return out.reshape(1, decodes, -1, head)


@contextlib.contextmanager
def only_backend(backend: str) -> Any:
    """Let scaled_dot_product_attention use this kernel and no other (``auto``: torch's choice)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    if backend == "auto":
        yield
        return
    with sdpa_kernel(kinds[backend]):
        yield
