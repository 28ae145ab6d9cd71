"""AIConfigurator's kernel times (CUDA, vLLM kernels) composed into a model's SurfaceProfile.

Measured: GEMM by (m, n, k), prefill attention by (prompts, length), decode attention by (batch, KV
length), expert layers by tokens, all-reduce by elements. Linear between the shapes that were timed.
Not measured there, and computed with the constants of that project's system.yaml (bandwidth, its
correction and a latency a kernel): norms, rotary embedding, activation, sampling. A chunk on a
prefix costs the causal triangle of all of it less that of the prefix. Steps with prefill and
decodes were not timed: the two attentions add up.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from serving_sim.fit_surface import StepMeasurement, fit_curve, fit_error, fit_surface
from serving_sim.grid_fit import fill_holes, grid_of, monotone, written
from serving_sim.models import Architecture, architecture
from serving_sim.surface import FitError, ProfileHeader, SurfaceProfile, Table

MAX_TOKENS = 16384  # of a step; what prefill attention was timed for
MAX_BATCH = 512
MAX_CONTEXT = 131072
EXPERT_ROUTING = "power_law_1.01"  # the mildest of the uneven routings that were timed
_S_PER_MS = 1e-3


@dataclass(frozen=True, slots=True)
class Card:
    """Constants of a system.yaml: bytes/s as corrected there, seconds a kernel takes at least."""

    bytes_per_s: float
    kernel_s: float


def import_aiconfigurator(folder: Path, model: str, header: ProfileHeader) -> SurfaceProfile:
    """Return the profile of ``model`` from the tables of one GPU (.../<gpu>/*.parquet).

    Raises InvalidInput for a missing or foreign table, or a shape outside what was timed.
    """
    shape, gpus = architecture(model), header.tensor_parallel
    card = read_card(folder / "system.yaml")
    gemm = _Gemm(_table(folder, "gemm_perf", gemm_dtype="bfloat16"))
    tokens_s = _dense(folder, shape, gpus, gemm, card)
    head_s = gemm.over_m(-(-shape.vocabulary // gpus), shape.hidden)
    head_s = head_s + card.kernel_s + gemm.m * shape.vocabulary * 10 / card.bytes_per_s
    tokens, tokens_error = fit_curve(gemm.m.tolist(), tokens_s.tolist())
    few = gemm.m <= MAX_BATCH
    head, head_error = fit_curve(gemm.m[few].tolist(), head_s[few].tolist())
    whole = _Whole(gemm.m, tokens_s, head_s, shape.layers)
    prompts = _attention(folder, "context_attention_perf", shape, gpus, "isl")
    prompts = prompts[(prompts[:, 0] * prompts[:, 1] <= MAX_TOKENS) & (prompts[:, 1] >= 16)]
    decodes = _attention(folder, "generation_attention_perf", shape, gpus, "step")
    decodes = decodes[(decodes[:, 0] <= MAX_BATCH) & (decodes[:, 1] < MAX_CONTEXT)]
    profile = fit_surface(
        [whole.of_decodes(*row) for row in decodes] + [
            whole.of_prompt(length, s) for count, length, s in prompts if count == 1
        ],
        header,
        tokens=tokens,
        head=head,
    )  # fmt: skip
    plane = _prefill_plane(prompts, shape.layers)
    profile = replace(profile, tables={**profile.tables, "prefill": plane})
    errors = {
        "tokens": tokens_error,
        "head": head_error,
        "decode": profile.errors["decode"],
        "prefill": _prefill_error(profile, prompts, whole),
    }
    return replace(profile, errors=errors)


def read_card(path: Path) -> Card:
    """Read the three constants from a system.yaml."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    values = []
    for key in ("mem_bw", "mem_bw_empirical_scaling_factor", "mem_empirical_constant_latency"):
        found = re.search(rf"^  {key}: ([0-9.e+-]+)", text, re.MULTILINE)
        if found is None:
            raise InvalidInput(f"{path} gives no {key}: name a folder of AIConfigurator's tables")
        values.append(float(found[1]))
    return Card(values[0] * values[1], values[2])


def all_reduce_curve(folder: Path, gpus: int) -> Callable[[float], float]:
    """Return seconds over bytes of one all-reduce of 16-bit values (CUDA graph, vLLM's kernel)."""
    columns = _table(folder, "custom_allreduce_perf", backend="vllm_graph", num_gpus=gpus)
    order = np.argsort(columns["message_size"])
    num_bytes, seconds = 2 * columns["message_size"][order], columns["latency"][order] * _S_PER_MS
    return lambda size: float(_interp(num_bytes, seconds, np.array([size]))[0])


def _table(folder: Path, name: str, **wanted: Any) -> dict[str, FloatArray]:
    """Return the numeric columns of the one table of that name, rows as ``wanted``."""
    paths = sorted(folder.glob(f"{name}.*.parquet"))
    if len(paths) != 1:
        raise InvalidInput(f"{folder} holds {len(paths)} files {name}.*.parquet; one is read")
    present = pq.read_schema(paths[0]).names
    missing = set(wanted) - set(present) - {"window_size"}  # older tables knew no windows
    if missing or "latency" not in present:
        raise InvalidInput(
            f"{paths[0]} lacks columns {sorted(missing) or ['latency']}: is it AIConfigurator's?"
        )
    filters = [(column, "=", value) for column, value in wanted.items() if column in present]
    table = pq.read_table(paths[0], filters=filters)
    if not table.num_rows:
        raise InvalidInput(f"{paths[0]}: nothing was timed with {wanted}")
    columns = {}
    for column in table.column_names:
        if str(table.schema.field(column).type) in ("int64", "double"):
            columns[column] = table[column].to_numpy().astype(np.float64)
    bad = ~np.isfinite(columns["latency"]) | (columns["latency"] <= 0.0)
    if bad.any():
        raise InvalidInput(f"{paths[0]}: {int(bad.sum())} latencies are not finite and above 0 ms")
    return columns


class _Gemm:
    """Seconds of a matrix product (m, k) x (k, n), 16 bit, for every m that was timed."""

    def __init__(self, columns: dict[str, FloatArray]) -> None:
        self._axes = tuple(tuple(np.unique(columns[axis]).tolist()) for axis in "mnk")
        points = np.column_stack([columns[axis] for axis in "mnk"])
        grid = grid_of(points, columns["latency"] * _S_PER_MS, self._axes)
        self._seconds = fill_holes(grid, self._axes)
        m = np.array(self._axes[0])
        self._timed = m <= MAX_TOKENS
        self.m = m[self._timed]

    def over_m(self, n: int, k: int) -> FloatArray:
        """Return the seconds by m: linear in n and k between shapes; in proportion beyond them,
        where a product is all weights or all arithmetic."""
        seconds = self._seconds[self._timed]
        for axis, size in ((2, k), (1, n)):
            points = np.array(self._axes[axis])
            inside = min(float(size), points[-1])
            right = min(max(int(np.searchsorted(points, inside, side="right")), 1), len(points) - 1)
            share = (inside - points[right - 1]) / (points[right] - points[right - 1])
            left, far = seconds.take(right - 1, axis=axis), seconds.take(right, axis=axis)
            seconds = (left + max(0.0, share) * (far - left)) * max(1.0, size / points[-1])
        return seconds


def dense_curve(folder: Path, shape: Architecture) -> tuple[FloatArray, FloatArray]:
    """Return tokens and the seconds of all but attention and head on one GPU, as composed."""
    gemm = _Gemm(_table(folder, "gemm_perf", gemm_dtype="bfloat16"))
    return gemm.m, _dense(folder, shape, 1, gemm, read_card(folder / "system.yaml"))


def interpolated_gemm_errors(folder: Path) -> FloatArray:
    """Return |from neighbours / timed - 1| of products that are left out of the table in turn: for
    each inner n, every k of at least 1,024 and every m; what a shape nobody timed is off by."""
    columns = _table(folder, "gemm_perf", gemm_dtype="bfloat16")
    errors = []
    for n in np.unique(columns["n"])[1:-1]:
        if n < 1024:
            continue
        rest = columns["n"] != n
        gemm = _Gemm({name: column[rest] for name, column in columns.items()})
        for k in np.unique(columns["k"])[:-1]:
            own = (columns["n"] == n) & (columns["k"] == k) & (columns["m"] <= MAX_TOKENS)
            if k < 1024 or not own.any():
                continue
            found = _interp(gemm.m, gemm.over_m(int(n), int(k)), columns["m"][own])
            errors.append(np.abs(found / (columns["latency"][own] * _S_PER_MS) - 1.0))
    return np.concatenate(errors)


def _interp(axis: FloatArray, values: FloatArray, x: FloatArray) -> FloatArray:
    """Return values at ``x``: linear, on from the last two beyond, level before the first."""
    right = np.clip(np.searchsorted(axis, x, side="right"), 1, len(axis) - 1)
    share = np.maximum(0.0, (x - axis[right - 1]) / (axis[right] - axis[right - 1]))
    out: FloatArray = values[right - 1] + share * (values[right] - values[right - 1])
    return out


def _dense(folder: Path, shape: Architecture, gpus: int, gemm: _Gemm, card: Card) -> FloatArray:
    """Return the seconds of all but attention and head, by gemm.m tokens."""
    m, wide = gemm.m, shape.heads * shape.head_dim // gpus
    layer = gemm.over_m(shape.qkv_width // gpus, shape.hidden) + gemm.over_m(shape.hidden, wide)
    if shape.num_experts:
        layer = (
            layer + _experts(folder, shape, gpus, m) + gemm.over_m(shape.num_experts, shape.hidden)
        )
        activation_bytes = 0.0  # inside the expert kernel
    else:
        width = shape.intermediate // gpus
        layer = layer + gemm.over_m(2 * width, shape.hidden) + gemm.over_m(shape.hidden, width)
        activation_bytes = 3 * width * 2
    norm_bytes = 2 * 4 * shape.hidden * 2  # two norms: hidden and residual, read and written
    rotary_bytes = 2 * (shape.heads + shape.kv_heads) * shape.head_dim // gpus * 2
    kernels = 3 + (activation_bytes > 0)
    layer = layer + kernels * card.kernel_s
    layer = layer + m * (norm_bytes + rotary_bytes + activation_bytes) / card.bytes_per_s
    if gpus > 1:
        reduce_s = all_reduce_curve(folder, gpus)
        layer = layer + 2 * np.array([reduce_s(x * shape.hidden * 2) for x in m])
    embedding_s = card.kernel_s + m * 2 * shape.hidden * 2 / card.bytes_per_s
    final_norm_s = card.kernel_s + m * 4 * shape.hidden * 2 / card.bytes_per_s
    return shape.layers * layer + embedding_s + final_norm_s


def _experts(folder: Path, shape: Architecture, gpus: int, m: FloatArray) -> FloatArray:
    columns = _table(
        folder, "moe_perf", moe_dtype="bfloat16", hidden_size=shape.hidden,
        inter_size=shape.intermediate, num_experts=shape.num_experts,
        topk=shape.experts_per_token, moe_tp_size=gpus, moe_ep_size=1,
        distribution=EXPERT_ROUTING,
    )  # fmt: skip
    order = np.argsort(columns["num_tokens"])
    return _interp(columns["num_tokens"][order], columns["latency"][order] * _S_PER_MS, m)


def _attention(folder: Path, name: str, shape: Architecture, gpus: int, length: str) -> FloatArray:
    """Return rows (batch, length, seconds of one layer) of the GPU's share of the heads; a count of
    heads that was not timed is taken linearly between its neighbours."""
    heads, kv_heads = shape.heads // gpus, max(1, shape.kv_heads // gpus)
    columns = _table(
        folder, name, head_dim=shape.head_dim, num_key_value_heads=kv_heads, window_size=0,
        kv_cache_dtype="bfloat16",
    )  # fmt: skip
    timed = np.unique(columns["num_heads"])
    if not timed[0] <= heads <= timed[-1]:
        raise InvalidInput(
            f"{folder}: {name} was timed for {timed[0]:.0f} to {timed[-1]:.0f} heads, not {heads}"
        )
    low, high = timed[timed <= heads][-1], timed[timed >= heads][0]
    share = 0.0 if high == low else (heads - low) / (high - low)
    lows, highs = (
        {
            (b, x): s * _S_PER_MS
            for h, b, x, s in zip(
                columns["num_heads"], columns["batch_size"], columns[length], columns["latency"],
                strict=True,
            )
            if h == wanted
        }
        for wanted in (low, high)
    )  # fmt: skip
    both = sorted(set(lows) & set(highs))
    return np.array([(*at, lows[at] + share * (highs[at] - lows[at])) for at in both])


@dataclass(frozen=True, slots=True)
class _Whole:
    """One layer's attention to a whole step: layers of it, and the curves as they were timed."""

    m: FloatArray
    tokens_s: FloatArray
    head_s: FloatArray
    layers: int

    def dense(self, tokens: float, requests: float) -> float:
        at = np.array([tokens, requests])
        return float(_interp(self.m, self.tokens_s, at)[0] + _interp(self.m, self.head_s, at)[1])

    def of_decodes(self, batch: float, step: float, attention_s: float) -> StepMeasurement:
        seconds = self.dense(batch, batch) + self.layers * attention_s
        return StepMeasurement(0, 0, int(batch), int(step) + 1, seconds)

    def of_prompt(self, length: float, attention_s: float) -> StepMeasurement:
        seconds = self.dense(length, 1) + self.layers * attention_s
        return StepMeasurement(int(length), 0, 0, 0, seconds)


def _prefill_plane(prompts: FloatArray, layers: int) -> Table:
    """Return the plane over chunk and prefix, from single prompts of lengths that double: what a
    prompt of both takes less what one of the prefix takes (above the shortest prompt's, which is
    the kernel's start), and never less than a chunk alone."""
    single = prompts[(prompts[:, 0] == 1) & (np.log2(prompts[:, 1]) % 1 == 0)]
    lengths, seconds = single[:, 1], layers * single[:, 2]
    prefixes = np.concatenate([[0.0], lengths[:-1]])
    alone = np.where(prefixes > 0, _interp(lengths, seconds, prefixes) - seconds[0], 0.0)
    # beyond the longest prompt, time grows with the square of the length
    longest = lengths[-1]

    def triangle(x: FloatArray) -> FloatArray:
        return np.where(
            x <= longest, _interp(lengths, seconds, np.minimum(x, longest)),
            seconds[-1] * (x / longest) ** 2,
        )  # fmt: skip

    grid = np.array(
        [
            np.maximum(s, triangle(c + prefixes) - alone)
            for c, s in zip(lengths, seconds, strict=True)
        ]
    )
    axes = (tuple(lengths.tolist()), tuple(prefixes.tolist()))
    return Table(axes, written(monotone(grid)))


def _prefill_error(profile: SurfaceProfile, prompts: FloatArray, whole: _Whole) -> FitError:
    """Return the error on the prompts that the plane has not seen: other lengths, and several."""
    unseen = prompts[(prompts[:, 0] > 1) | (np.log2(prompts[:, 1]) % 1 != 0)]
    count, length, attention_s = unseen.T
    tokens = (count * length).astype(np.int64)
    zero = np.zeros_like(tokens)
    work = np.column_stack([tokens, tokens, zero, zero, count.astype(np.int64), zero])
    dense = [whole.dense(t, n) for t, n in zip(tokens, count, strict=True)]
    return fit_error(profile.steps_s(work), np.array(dense) + whole.layers * attention_s)
