"""Seven reasoning model families that two public collections of repeated runs share.

The collections name the same model differently; this is the one table that maps them. All their
runs were *sampled*: an oracle built from them is one of sampled runs, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping

COLLECTIONS: Mapping[str, str] = {
    "LRMTokenEconomy": "cpldcpu/LRMTokenEconomy @ d5cc353, Apache-2.0",
    "MisguidedAttention": "cpldcpu/MisguidedAttention @ bbae011, CC0-1.0",
}
"""Collection: repository, commit and licence."""

FAMILIES: Mapping[str, tuple[str, str]] = {
    "DeepSeek-R1-0528": ("deepseek-r1-0528", "deepseek-r1-0528"),
    "Qwen3-235B-A22B": ("qwen3-235b-a22b-think", "qwen3-235b-a22b-think"),
    "GLM-Z1-32B": ("glm-z1-32b", "glm-z1-32b"),
    "Nemotron-Super-49B": ("llama-3.3-nemotron-super-49b-v1", "ll3.3-nemotron-49b-v1-thk"),
    "DeepHermes-3-24B": ("DeepHermes-3-Mistral-24B-Pre", "DeepHermes-3-Mistral-24B-Pre"),
    "Gemini-2.5-Flash": ("gemini-2.5-flash-high", "gemini-2.5-flash-high"),
    "Grok-3-mini": ("grok-3-mini-think", "grok-3-mini-think"),
}
"""Family: its name in each of COLLECTIONS, in that order."""

CAP_TOKENS = 30_000
"""The largest cap that these families record; several record none, or one that runs exceed."""
