"""Seconds of a step from the tables of a SurfaceProfile, compiled: whoever asks gets the same bits.

All tables lie in one flat float64 array, so that a call passes one array: HEADER_FLOATS numbers,
the CUDA-graph batch sizes, then for each table of surface.TABLES its axes and its seconds
(row-major). Header: share of uneven batches, number of graph sizes, then the points of each axis in
the order of the tables; a table that is not there has none.

Along each axis a table is linear between its points, constant below the first and linear beyond the
last, never below the value at the edge.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from contracts.policy import FloatArray, IntArray

SKEW_SHARE, NUM_GRAPH_SIZES, FIRST_AXIS = 0, 1, 2
HEADER_FLOATS = 12  # two numbers, then ten axes: tokens, head, prefill (2), decode (2), mixed (4)

_compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def _bracket(tables: FloatArray, start: int, count: int, x: float) -> Any:
    """Return (point at or before ``x``, share of the way to the next; above 1 beyond the last)."""
    if count < 2 or x <= tables[start]:
        return 0, 0.0
    low, high = 0, count - 1
    while high - low > 1:
        middle = (low + high) // 2
        if tables[start + middle] <= x:
            low = middle
        else:
            high = middle
    left = tables[start + low]
    return low, (x - left) / (tables[start + low + 1] - left)


@_compiled
def _on_curve(tables: FloatArray, start: int, count: int, x: float) -> float:
    low, share = _bracket(tables, start, count, x)
    at = start + count + low
    left = tables[at]
    return float(left if share == 0.0 else left + share * (tables[at + 1] - left))


@_compiled
def _blend(
    tables: FloatArray, at: int, rows: int, columns: int, i: int, u: float, j: int, v: float
) -> float:
    """Return the value of a 2-D table at point (i + u, j + v)."""
    here = at + i * columns + j
    right = here + 1 if columns > 1 else here
    step = columns if rows > 1 else 0
    near = tables[here] + v * (tables[right] - tables[here])
    if u == 0.0:
        return float(near)
    far = tables[here + step] + v * (tables[right + step] - tables[here + step])
    return float(near + u * (far - near))


@_compiled
def _on_plane(tables: FloatArray, start: int, rows: int, columns: int, x: float, y: float) -> float:
    i, u = _bracket(tables, start, rows, x)
    j, v = _bracket(tables, start + rows, columns, y)
    at = start + rows + columns
    value = _blend(tables, at, rows, columns, i, u, j, v)
    if u > 1.0 or v > 1.0:
        edge = _blend(tables, at, rows, columns, i, min(u, 1.0), j, min(v, 1.0))
        value = max(value, edge)
    return float(value)


@_compiled
def _blend4(tables: FloatArray, at: int, sizes: Any, low: Any, share: Any) -> float:
    """Return the value of the 4-D table: planes of the last two axes, blended over the first."""
    rows, columns = sizes[2], sizes[3]
    plane = rows * columns
    value = 0.0
    for a in range(2):
        first = share[0] if a else 1.0 - share[0]
        for b in range(2):
            second = share[1] if b else 1.0 - share[1]
            if first * second != 0.0:
                where = at + ((low[0] + a) * sizes[1] + low[1] + b) * plane
                part = _blend(tables, where, rows, columns, low[2], share[2], low[3], share[3])
                value += first * second * part
    return value


@_compiled
def _on_mixed(
    tables: FloatArray, start: int, chunk: float, prefix: float, decodes: float, context: float
) -> float:
    a, b = int(tables[8]), int(tables[9])
    c, d = int(tables[10]), int(tables[11])
    i, s = _bracket(tables, start, a, chunk)
    j, t = _bracket(tables, start + a, b, prefix)
    k, u = _bracket(tables, start + a + b, c, decodes)
    m, v = _bracket(tables, start + a + b + c, d, context)
    at = start + a + b + c + d
    value = _blend4(tables, at, (a, b, c, d), (i, j, k, m), (s, t, u, v))
    if max(s, t, u, v) > 1.0:
        shares = (min(s, 1.0), min(t, 1.0), min(u, 1.0), min(v, 1.0))
        edge = _blend4(tables, at, (a, b, c, d), (i, j, k, m), shares)
        value = max(value, edge)
    return float(value)


@_compiled
def _attention(
    tables: FloatArray, start: int, chunk: float, prefix: float, decodes: float, context: float
) -> float:
    """Return the attention's seconds; ``start`` is where the prefill table begins."""
    rows, columns = int(tables[4]), int(tables[5])
    decode_at = start + rows + columns + rows * columns
    mixed_at = decode_at + int(tables[6] + tables[7] + tables[6] * tables[7])
    if chunk > 0.0 and decodes > 0.0 and tables[8] > 0.0:
        return float(_on_mixed(tables, mixed_at, chunk, prefix, decodes, context))
    seconds = 0.0
    if chunk > 0.0:
        seconds += _on_plane(tables, start, rows, columns, chunk, prefix)
    if decodes > 0.0:
        seconds += _on_plane(tables, decode_at, int(tables[6]), int(tables[7]), decodes, context)
    return seconds


@_compiled
def one_chunk(prefill: int, prefill_context: int, count: int) -> Any:
    """Return (chunk, KV before it) of one prefill with as many query-key pairs as ``count`` equal
    ones: a chunk of c tokens on k has c (k + c / 2). It keeps the tokens if it can; many short
    prompts have fewer pairs than one long prompt on nothing, which is then shortened."""
    if count <= 0 or prefill <= 0:
        return 0.0, 0.0
    mean_prefix = (prefill_context - prefill) / count
    pairs = prefill * (mean_prefix + prefill / count / 2)
    prefix = pairs / prefill - prefill / 2
    if prefix >= 0.0:
        return float(prefill), prefix
    return math.sqrt(2.0 * pairs), 0.0


@_compiled
def decode_context(tables: FloatArray, decodes: int, context_tokens: int, longest: int) -> float:
    """Return the KV of each decode in the even batch that costs as much as this one."""
    if decodes <= 0:
        return 0.0
    mean: float = context_tokens / decodes
    return mean + tables[SKEW_SHARE] * (longest - mean) if longest > mean else mean


@_compiled
def step_seconds(
    tables: FloatArray,
    prefill: int,
    prefill_context: int,
    decodes: int,
    decode_context_tokens: int,
    num_requests: int,
    longest: int,
) -> float:
    """Return the seconds of a step; the arguments are StepWork's fields, in its order."""
    num_graphs = int(tables[NUM_GRAPH_SIZES])
    num_tokens, num_heads = int(tables[2]), int(tables[3])
    tokens = prefill + decodes
    if prefill == 0:  # a captured graph runs at its own size
        for i in range(HEADER_FLOATS, HEADER_FLOATS + num_graphs):
            if tables[i] >= tokens:
                tokens = int(tables[i])
                break
    at = HEADER_FLOATS + num_graphs
    seconds: float = _on_curve(tables, at, num_tokens, tokens)
    at += 2 * num_tokens
    seconds += _on_curve(tables, at, num_heads, num_requests)
    at += 2 * num_heads
    chunk, prefix = one_chunk(prefill, prefill_context, num_requests - decodes)
    context = decode_context(tables, decodes, decode_context_tokens, longest)
    return seconds + float(_attention(tables, at, chunk, prefix, decodes, context))


@_compiled
def alone_seconds(tables: FloatArray, prompt_tokens: int, output_tokens: int, budget: int) -> float:
    """Return what profile.single_stream_s returns for one request, bit for bit."""
    clock_s = 0.0
    computed, known = 0, prompt_tokens
    while known < prompt_tokens + output_tokens:
        tokens = min(known - computed, budget)
        computed += tokens
        if tokens == 1:
            clock_s += step_seconds(tables, 0, 0, 1, computed, 1, 0)
        else:
            clock_s += step_seconds(tables, tokens, computed, 0, 0, 1, 0)
        if computed == known:
            known += 1
    return clock_s


@_compiled
def many_step_seconds(tables: FloatArray, work: IntArray) -> FloatArray:
    """Return the seconds of steps; ``work`` has shape (steps, 6), StepWork's fields in order."""
    seconds = np.empty(len(work))
    for i in range(len(work)):
        seconds[i] = step_seconds(
            tables, work[i, 0], work[i, 1], work[i, 2], work[i, 3], work[i, 4], work[i, 5]
        )
    return seconds
