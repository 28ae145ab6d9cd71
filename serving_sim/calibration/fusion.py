"""Small operations of a layer compiled into few kernels, as serving engines have them."""

from __future__ import annotations

from typing import Any

_KINDS = ("RMSNorm", "LayerNorm", "MLP")


def fuse(model: Any, backend: str = "inductor") -> int:
    """Have torch.compile fuse norms and dense feed-forward parts of ``model``; return how many.

    Attention stays as it is: it has its kernel, and its cache is no tensor. Layers share one
    compilation of each kind, for any number of tokens; it happens in the first warm-ups.
    """
    parts = [m for m in model.modules() if type(m).__name__.endswith(_KINDS)]
    for part in parts:
        part.compile(dynamic=True, backend=backend)
    return len(parts)
