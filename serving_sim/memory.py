"""KV blocks from a model and a GPU: what is left of the memory beside weights and a reserve.

blocks = floor((memory x utilisation - weights / tp - reserve) / (block size x KV bytes / tp))

vLLM measures the reserve when it starts: the activations of a full batch, which follow from the
model's widths, and the CUDA context, graphs and workspaces, which do not (OVERHEAD_BYTES).
"""

from __future__ import annotations

from contracts.errors import InvalidInput
from serving_sim.models import Architecture

GPU_MEMORY_UTILIZATION = 0.9  # vLLM's default
# what a recorded run leaves over (RTX 4090, Llama-3.1-8B, vLLM 0.19.0): 25,250,627,584 bytes x 0.9
# less weights, 2,588 blocks of 2 MiB and activation_bytes, to 10 MB
OVERHEAD_BYTES = 830_000_000


def activation_bytes(
    model: Architecture, max_num_batched_tokens: int, max_num_seqs: int, tensor_parallel: int = 1
) -> int:
    """Return the activations of the largest step: gate, up and product of the widest feed-forward
    and two hidden states a token (16 bit), and logits a request (16 bit, then 32 bit)."""
    routed = max(1, model.experts_per_token)
    widths = 3 * model.intermediate * routed // tensor_parallel + 2 * model.hidden
    logits_bytes = max_num_seqs * model.vocabulary * (2 + 4)
    return max_num_batched_tokens * widths * 2 + logits_bytes


def usable_blocks(
    model: Architecture,
    memory_bytes: int,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    tensor_parallel: int = 1,
    block_size: int = 16,
    overhead_bytes: int = OVERHEAD_BYTES,
) -> int:
    """Return the KV blocks that fit beside ``model`` on ``tensor_parallel`` GPUs of
    ``memory_bytes`` each; raises InvalidInput if not even one does."""
    if not 0.0 < gpu_memory_utilization <= 1.0:
        raise InvalidInput(f"gpu_memory_utilization is {gpu_memory_utilization}; give (0, 1]")
    if min(tensor_parallel, block_size, memory_bytes, max_num_batched_tokens, max_num_seqs) < 1:
        raise InvalidInput(
            f"tensor_parallel {tensor_parallel}, block_size {block_size}, memory_bytes "
            f"{memory_bytes}, max_num_batched_tokens {max_num_batched_tokens} and max_num_seqs "
            f"{max_num_seqs} must each be at least 1"
        )
    weight_bytes = -(-model.weight_bytes // tensor_parallel)
    reserve_bytes = overhead_bytes + activation_bytes(
        model, max_num_batched_tokens, max_num_seqs, tensor_parallel
    )
    # a GPU holds whole KV heads: more GPUs than heads hold copies
    kv_bytes = model.kv_bytes_per_token // min(tensor_parallel, model.kv_heads)
    free_bytes = memory_bytes * gpu_memory_utilization - weight_bytes - reserve_bytes
    blocks = int(free_bytes // (block_size * kv_bytes))
    if blocks < 1:
        raise InvalidInput(
            f"the model does not fit: weights of {weight_bytes / 1e9:.1f} GB and a reserve of "
            f"{reserve_bytes / 1e9:.1f} GB a GPU leave nothing of {gpu_memory_utilization:.0%} of "
            f"{memory_bytes / 1e9:.1f} GB; use more GPUs (tensor_parallel) or a smaller model"
        )
    return blocks
