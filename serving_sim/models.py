"""Model architectures: what a config.json says, and the bytes that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.errors import InvalidInput, unknown_name


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder of attention and gated feed-forward layers; ``num_experts`` is 0 for a dense one,
    and ``intermediate`` is an expert's width where there are experts. Weights and KV have 16 bit.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    num_experts: int = 0
    experts_per_token: int = 0
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def qkv_width(self) -> int:
        """Outputs of the query, key and value projections together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Embedding, layers, final norm and, unless tied, head."""
        attention = self.hidden * (self.qkv_width + self.heads * self.head_dim)
        attention += self.qkv_width * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        feed_forward = 3 * self.hidden * self.intermediate * max(1, self.num_experts)
        router = self.hidden * self.num_experts
        layer = attention + feed_forward + router + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_head else 2)
        return self.layers * layer + embeddings + self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return 2 * self.num_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


# from the config.json of each model
MODELS: Mapping[str, Architecture] = {
    "Llama-3.1-8B": Architecture(32, 4096, 32, 8, 128, 14336, 128256),
    "Llama-2-70B": Architecture(80, 8192, 64, 8, 128, 28672, 32000),
    "Qwen3-8B": Architecture(36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True),
    "Qwen3-32B": Architecture(64, 5120, 64, 8, 128, 25600, 151936, qk_norm=True),
    "Qwen3-30B-A3B": Architecture(48, 2048, 32, 4, 128, 768, 151936, 128, 8, qk_norm=True),
    "DeepSeek-R1-Distill-Qwen-7B": Architecture(
        28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True
    ),
}  # fmt: skip
_ALIASES = {"Qwen3-30B-A3B-Instruct-2507": "Qwen3-30B-A3B"}

_KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
          "Qwen3MoeForCausalLM")  # fmt: skip


def model_key(model: str) -> str:
    """Return a model's short name: no owner, no variant that shares all shapes."""
    name = model.rpartition("/")[2]
    return _ALIASES.get(name, name)


def architecture(model: str) -> Architecture:
    """Return a known model's architecture by name or path (owner/name); raises UnknownName."""
    if model_key(model) not in MODELS:
        raise unknown_name("model", model, MODELS)
    return MODELS[model_key(model)]


def architecture_from_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a parsed config.json; raises InvalidInput for one that this
    formula does not cover (hybrid, multi-head latent or sliding-window attention, a vision tower).
    """
    kinds = config.get("architectures")
    kind = kinds[0] if isinstance(kinds, list) and kinds else None
    if kind not in _KNOWN:
        raise InvalidInput(
            f"architecture {kind!r} is not covered: config.json must name one of "
            f"{', '.join(_KNOWN)}"
        )
    is_moe = kind == "Qwen3MoeForCausalLM"
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    return Architecture(
        layers=_count(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", heads),
        head_dim=_count(config, "head_dim", hidden // heads),
        intermediate=_count(config, "moe_intermediate_size" if is_moe else "intermediate_size"),
        vocabulary=_count(config, "vocab_size"),
        num_experts=_count(config, "num_experts") if is_moe else 0,
        experts_per_token=_count(config, "num_experts_per_tok") if is_moe else 0,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "Qwen2ForCausalLM" or bool(config.get("attention_bias", False)),
        qk_norm=kind.startswith("Qwen3"),
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 1 << 31:
        raise InvalidInput(f"config.json: {key} is {value!r}; it must be a whole number above 0")
    return value
