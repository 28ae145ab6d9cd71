"""A step-time profile from operator times measured on a GPU: tables that are looked up, not fitted.

A step of a dense transformer is embedding + layers x (2 norms, qkv, rotary, attention, o, gate-up,
activation, down) + final norm + head + sampler. The tables (LLMServingSim's layout, microseconds)
give each of them: dense layers by tokens, head and sampler by sequences, attention of one layer by
(prefill chunk, prefill KV, decodes, KV of a decode). Between measured points all is linear.
"""

from __future__ import annotations

import csv
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from contracts.policy import FloatArray
from serving_sim.models import architecture
from serving_sim.profile import StepWork


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the tables do not say about a model: layers, and bytes of weights and of a token's KV
    (all layers, 16-bit)."""

    num_layers: int
    weight_bytes: int
    kv_bytes_per_token: int


_LLAMA = architecture("Llama-3.1-8B")
MODEL_SHAPES: Mapping[str, ModelShape] = {
    "Llama-3.1-8B": ModelShape(_LLAMA.layers, _LLAMA.weight_bytes, _LLAMA.kv_bytes_per_token)
}

PER_LAYER = {
    "layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1,
    "gate_up_proj": 1, "act_fn": 1, "down_proj": 1,
}  # fmt: skip
ONCE = {"embedding": 1, "final_layernorm": 1}
HEAD = {"lm_head": 1, "sampler": 1}
ATTENTION_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Seconds over one quantity: linear between the points and on from the last two; below the
    first point, the first point's."""

    x: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, x: float) -> float:
        """Return the seconds at ``x``."""
        return sum(share * self.seconds[i] for i, share in _sides(self.x, x))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTable:
    """Seconds of one layer's attention. ``seconds`` is a full grid over the four ``axes``: prefill
    chunk and the KV before it (tokens), decodes (requests) and the KV of each decode (tokens)."""

    axes: tuple[tuple[float, ...], ...]
    seconds: FloatArray

    def at(self, chunk: float, prefix: float, decodes: float, context: float) -> float:
        """Return the seconds at a point, linear along each axis."""
        point = (chunk, prefix, decodes, context)
        sides = [_sides(axis, x) for axis, x in zip(self.axes, point, strict=True)]
        return sum(
            math.prod(share for _, share in corner)
            * float(self.seconds[tuple(i for i, _ in corner)])
            for corner in product(*sides)
        )


def _sides(axis: Sequence[float], x: float) -> list[tuple[int, float]]:
    """Return the points of ``axis`` that count at ``x``, with their weights (which sum to 1)."""
    low = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
    share = max(0.0, (x - axis[low]) / (axis[low + 1] - axis[low]))
    return [(low, 1.0)] if share == 0.0 else [(low, 1.0 - share), (low + 1, share)]


@dataclass(frozen=True, slots=True, eq=False)
class OperatorProfile:
    """The cost of a step as the sum of its operators; ``per_layer`` and ``attention`` are one
    layer's, ``once`` is embedding and final norm, ``head`` is head and sampler by sequences.

    Decodes count with their mean KV, and ``skew_share`` of the way from there to all of them being
    as long as the longest (measured on uneven batches; 0 where that was not done). Several prefill
    chunks count as one that has as many pairs of a query and a key; StepWork gives their sum, so
    they are taken to be equally long. Equal only
    to itself, and therefore hashable.
    """

    name: str
    num_layers: int
    per_layer: Curve
    once: Curve
    head: Curve
    attention: AttentionTable
    skew_share: float = 0.0

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds of one more token, averaged over the measured range of the dense layers."""
        points = (self.per_layer.x[0], self.per_layer.x[-1])
        low, high = (self.num_layers * self.per_layer.at(x) + self.once.at(x) for x in points)
        return (high - low) / (points[1] - points[0])

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        return _seconds(self, work)


@lru_cache(maxsize=65_536)
def _seconds(profile: OperatorProfile, work: StepWork) -> float:
    tokens = work.prefill_tokens + work.num_decodes
    chunk, prefix = _one_chunk(work)
    decodes = work.num_decodes
    context = work.decode_context_tokens / decodes if decodes else 0.0
    attention_s = profile.attention.at(chunk, prefix, decodes, context)
    if profile.skew_share and work.max_decode_context_tokens > context:
        longest = work.max_decode_context_tokens
        uneven_s = profile.attention.at(chunk, prefix, decodes, longest) - attention_s
        attention_s += profile.skew_share * uneven_s
    layers_s = profile.num_layers * (profile.per_layer.at(tokens) + attention_s)
    return layers_s + profile.once.at(tokens) + profile.head.at(work.num_requests)


def _one_chunk(work: StepWork) -> tuple[float, float]:
    """Return (chunk, KV before it) of one prefill with as many query-key pairs as all of them.

    A chunk of c tokens on k has c (k + c / 2) pairs. The one chunk keeps the tokens if it can;
    many short prompts have fewer pairs than one long prompt on nothing, which is then shortened.
    """
    count = work.num_requests - work.num_decodes
    if not count:
        return 0.0, 0.0
    tokens = work.prefill_tokens
    mean_prefix = (work.prefill_context_tokens - tokens) / count
    pairs = tokens * (mean_prefix + tokens / count / 2)
    prefix = pairs / tokens - tokens / 2
    return (tokens, prefix) if prefix >= 0.0 else (math.sqrt(2.0 * pairs), 0.0)


def load_operator_profile(folder: Path, model: str) -> OperatorProfile:
    """Read the tables of ``folder``: dense.csv, per_sequence.csv, attention.csv; and meta.yaml of
    the folder above, if there is one, for the share that uneven batches were measured to add.

    Raises UnknownName for a model without a shape here, InvalidInput for a damaged table.
    """
    if model not in MODEL_SHAPES:
        raise unknown_name("model", model, MODEL_SHAPES)
    dense = read_rows(folder / "dense.csv", ("tokens",), "layer")
    heads = read_rows(folder / "per_sequence.csv", ("sequences",), "layer")
    return OperatorProfile(
        name=f"operators of {model} in {folder}",
        num_layers=MODEL_SHAPES[model].num_layers,
        per_layer=sum_of_layers(dense, PER_LAYER, folder / "dense.csv"),
        once=sum_of_layers(dense, ONCE, folder / "dense.csv"),
        head=sum_of_layers(heads, HEAD, folder / "per_sequence.csv"),
        attention=_attention(folder / "attention.csv"),
        skew_share=measured_skew_share(folder),
    )


def measured_skew_share(folder: Path) -> float:
    """Return alpha_default of this tensor-parallel degree in the block skew_fit of meta.yaml; 0
    where the profiler says that it measured none (enabled: false) or there is no such file."""
    path = folder.absolute().parent / "meta.yaml"
    if not path.is_file():
        return 0.0
    degree = folder.absolute().name.removeprefix("tp")
    text = path.read_text(encoding="utf-8", errors="replace")
    block = re.search(r"^skew_fit:\n((?: .*\n?)*)", text, re.MULTILINE)
    if block is None or not re.search(r"^  enabled: true$", block[1], re.MULTILINE):
        return 0.0
    found = re.search(
        rf"^    {re.escape(degree)}:\n(?:      .*\n)*?      alpha_default: ([0-9.]+)$",
        block[1],
        re.MULTILINE,
    )
    if found is None or not 0.0 <= float(found[1]) <= 1.0:
        raise InvalidInput(
            f"{path}: skew_fit is enabled, but names no alpha_default in [0, 1] for tp {degree}"
        )
    return float(found[1])


TableRow = tuple[str, tuple[float, ...], float]  # layer, point, seconds


def read_rows(path: Path, axes: tuple[str, ...], label: str = "") -> list[TableRow]:
    """Return the rows of a table; ``label`` is the column that names the layer, if there is one."""
    if not path.is_file():
        raise InvalidInput(f"{path} does not exist: --perf names a folder with operator tables")
    rows = []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for row in csv.DictReader(file):
            try:
                point = tuple(float(row[axis]) for axis in axes)
                seconds = float(row["time_us"]) * 1e-6
            except (KeyError, TypeError, ValueError):
                point, seconds = (), math.nan
            if not (0.0 <= seconds < math.inf and all(0.0 <= x < math.inf for x in point)):
                columns = ", ".join((*axes, "time_us"))
                raise InvalidInput(
                    f"{path}: row {dict(row)} is no measurement; {columns} must be numbers >= 0"
                )
            rows.append((row.get(label) or "", point, seconds))
    return rows


def sum_of_layers(rows: list[TableRow], counts: Mapping[str, int], path: Path) -> Curve:
    """Return the curve of ``counts`` of each layer together."""
    curves = []
    for layer, count in counts.items():
        points = sorted((point[0], seconds) for name, point, seconds in rows if name == layer)
        if len(points) < 2 or len({x for x, _ in points}) < len(points):
            raise InvalidInput(f"{path}: layer {layer!r} needs at least two points, each once")
        curves.append((count, Curve(*map(tuple, zip(*points, strict=True)))))
    xs = sorted({x for _, curve in curves for x in curve.x})
    return Curve(tuple(xs), tuple(sum(n * curve.at(x) for n, curve in curves) for x in xs))


def _attention(path: Path) -> AttentionTable:
    """Return the table as a full grid over its axes.

    Not measured, and filled in: a step without attention (0 s), prefill KV without a prefill and
    decode KV without decodes (no matter), and the largest decode batch beside a prefill (on along
    the two before it), and holes between measured points, such as where grids of different steps
    were measured: linear along decode KV, else prefill KV, else chunk.
    """
    cells = {point: seconds for _, point, seconds in read_rows(path, ATTENTION_AXES)}
    axes = [np.array(sorted({0.0, *(point[i] for point in cells)})) for i in range(4)]
    if min(map(len, axes)) < 4:
        raise InvalidInput(f"{path}: each of {', '.join(ATTENTION_AXES)} needs 3 values above 0")
    axes[3] = axes[3][1:]
    grid = np.empty([len(axis) for axis in axes])
    for at in np.ndindex(grid.shape):
        chunk, prefix, decodes, context = (float(axis[i]) for axis, i in zip(axes, at, strict=True))
        point = (chunk, prefix if chunk else 0.0, decodes, context if decodes else 0.0)
        grid[at] = cells.get(point, np.nan if chunk or decodes else 0.0)
    near, far, last = (grid[:, :, i] for i in (-3, -2, -1))
    ratio = (axes[2][-1] - axes[2][-2]) / (axes[2][-2] - axes[2][-3])
    last[:] = np.where(np.isnan(last), far + ratio * (far - near), last)
    for axis in (3, 1, 0):
        grid = np.apply_along_axis(_bridge, axis, grid, axes[axis])
    if np.isnan(grid).any():
        at = tuple(np.argwhere(np.isnan(grid))[0])
        hole = {name: float(axes[i][at[i]]) for i, name in enumerate(ATTENTION_AXES)}
        raise InvalidInput(f"{path}: the grid has a hole at {hole}; measure it, or drop the value")
    return AttentionTable(tuple(tuple(axis.tolist()) for axis in axes), grid)


def _bridge(seconds: FloatArray, axis: FloatArray) -> FloatArray:
    """Return ``seconds`` with the NaNs between two numbers filled in linearly."""
    known = ~np.isnan(seconds)
    if known.sum() < 2:
        return seconds
    return np.where(
        known, seconds, np.interp(axis, axis[known], seconds[known], left=np.nan, right=np.nan)
    )
