"""Operator times of LLMServingSim's profiler (CUDA, one layer, vLLM) to a SurfaceProfile.

A step is embedding + layers x (norms, qkv, rotary, attention, o, feed-forward) + final norm + head
+ sampler, as in serving_sim/operator_profile.py, which reads the same tables without a fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from contracts.errors import InvalidInput
from serving_sim.fit_surface import StepMeasurement, fit_curve, fit_surface
from serving_sim.models import Architecture, architecture
from serving_sim.operator_profile import (
    ATTENTION_AXES,
    HEAD,
    ONCE,
    PER_LAYER,
    Curve,
    measured_skew_share,
    read_rows,
    sum_of_layers,
)
from serving_sim.surface import ProfileHeader, SurfaceProfile

_FEED_FORWARD = ("gate_up_proj", "act_fn", "down_proj")


def import_llmservingsim(
    folder: Path,
    model: str,
    header: ProfileHeader,
    *,
    all_reduce_s: Callable[[float], float] | None = None,
    kv_capacity_tokens: float = math.inf,
) -> SurfaceProfile:
    """Return the profile of the tables in ``folder`` (.../bf16/tp<N>): dense.csv, per_sequence.csv,
    attention.csv, and moe.csv for a model with experts.

    ``all_reduce_s`` gives the seconds to add up a message of so many bytes between the GPUs; the
    tables do not hold it, so it must be given for more than one. Raises InvalidInput for damaged
    tables, UnknownName for a model whose architecture isn't in serving_sim/models.py.
    """
    shape = architecture(model)
    if header.tensor_parallel > 1 and all_reduce_s is None:
        raise InvalidInput(f"{folder}: the tables hold no all-reduce; give all_reduce_s")
    dense = _Dense(folder, shape)
    heads = sum_of_layers(
        read_rows(folder / "per_sequence.csv", ("sequences",), "layer"), HEAD, folder
    )
    tokens_s = [dense(x) + _communication(shape, x, all_reduce_s) for x in dense.axis]
    tokens, tokens_error = fit_curve(dense.axis, tokens_s)
    head, head_error = fit_curve(heads.x, heads.seconds)
    raw = Curve(dense.axis, tuple(tokens_s))
    profile = fit_surface(
        _steps(folder, shape, raw, heads),
        header,
        tokens=tokens,
        head=head,
        knots=_doubling_knots(),
        skew_share=measured_skew_share(folder),
        kv_capacity_tokens=kv_capacity_tokens,
    )
    errors = {"tokens": tokens_error, "head": head_error, **profile.errors}
    return replace(profile, errors=errors)


class _Dense:
    """Seconds of everything but attention, head and communication, over tokens."""

    def __init__(self, folder: Path, shape: Architecture) -> None:
        counts = {**PER_LAYER, **({"qk_norm": 1} if shape.qk_norm else {})}
        if shape.num_experts:
            counts = {name: n for name, n in counts.items() if name not in _FEED_FORWARD}
        path = folder / "dense.csv"
        rows = read_rows(path, ("tokens",), "layer")
        self._layer, self._once = (sum_of_layers(rows, c, path) for c in (counts, ONCE))
        self._experts = _experts(folder / "moe.csv", shape) if shape.num_experts else None
        self._layers = shape.layers
        self.axis = self._layer.x

    def __call__(self, tokens: float) -> float:
        layer_s = self._layer.at(tokens)
        if self._experts is not None:
            layer_s += self._experts.at(tokens)
        return self._layers * layer_s + self._once.at(tokens)


def _experts(path: Path, shape: Architecture) -> Curve:
    """Return the expert layers' seconds over tokens, for as many experts as uniform routing hits:
    n (1 - (1 - k / n)^tokens) of n, k for each token."""
    rows = read_rows(path, ("tokens", "activated_experts"))
    tokens = sorted({point[0] for _, point, _ in rows})
    n, k = shape.num_experts, shape.experts_per_token
    seconds = []
    for x in tokens:
        hit = sorted((point[1], s) for _, point, s in rows if point[0] == x)
        experts, times = zip(*hit, strict=True)
        seconds.append(float(np.interp(n * (1.0 - (1.0 - k / n) ** x), experts, times)))
    return Curve(tuple(tokens), tuple(seconds))


def _communication(
    shape: Architecture, tokens: float, all_reduce_s: Callable[[float], float] | None
) -> float:
    """Return the seconds of the two sums a layer (after attention and after feed-forward)."""
    if all_reduce_s is None:
        return 0.0
    return 2 * shape.layers * all_reduce_s(tokens * shape.hidden * 2)


def _steps(folder: Path, shape: Architecture, tokens: Curve, heads: Curve) -> list[StepMeasurement]:
    """Return every row of the attention table as a whole step."""
    steps = []
    for _, point, attention_s in read_rows(folder / "attention.csv", ATTENTION_AXES):
        chunk, prefix, decodes, context = map(int, point)
        dense_s = tokens.at(chunk + decodes) + heads.at(decodes + (chunk > 0))
        seconds = dense_s + shape.layers * attention_s
        steps.append(StepMeasurement(chunk, prefix, decodes, context, seconds))
    return steps


def _doubling_knots() -> dict[str, list[float]]:
    """Return the powers of two, which every grid of that profiler has; what lies between tests."""
    powers = [0.0, *(2.0**i for i in range(22))]
    return dict.fromkeys(("chunk_tokens", "prefix_tokens", "context_tokens"), powers)
