"""A step-time profile as measured surfaces: piecewise-linear tables with a header that says whose.

seconds = tokens(prefill + decodes) + head(requests) + attention(prefill chunk, decodes)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProfileHeader:
    """Whose seconds a profile holds. ``versions`` go by software name; ``clock_state`` says how the
    GPU's clocks stood; None where nobody knows."""

    name: str
    hardware: str
    model: str
    source: str
    licence: str
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    kernel: str = "not stated"
    versions: Mapping[str, str] = field(default_factory=dict)
    clock_state: str = "not stated"
    num_layers: int | None = None
    kv_bytes_per_token: int | None = None
    weight_bytes: int | None = None
