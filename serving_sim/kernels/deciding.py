"""Who goes, compiled: what a policy may see of the running set, and a compiled policy's choice.

numba's cache looks at a function's own file only. The entry points here call other files, so each
is made by a function that hands it :data:`SOURCES`, a hash of them: what a function closes over is
part of its key in the cache.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import types

from contracts.policy import FloatArray, IntArray, RunningView
from serving_sim.kernels import layout
from serving_sim.kernels.draws import Bytes, draw_uniform
from serving_sim.kernels.leaps import ASKS, NOBODY, NUM_RECENT_STEPS, advance
from serving_sim.kernels.scalar import SCORE

_FILES = [
    Path(__file__).with_name(f"{name}.py") for name in ("draws", "layout", "leaps", "surface")
]
SOURCES = int.from_bytes(blake2b(b"".join(f.read_bytes() for f in _FILES), digest_size=7).digest())

_compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def _recent_tpot_s(engine: Any, recent_steps_s: FloatArray) -> float:
    """Return what PolicyRule does: the mean of the last steps' seconds, summed from the oldest."""
    count = min(engine.num_timed_steps, NUM_RECENT_STEPS)
    total_s = 0.0
    for step in range(engine.num_timed_steps - count, engine.num_timed_steps):
        total_s += recent_steps_s[step % NUM_RECENT_STEPS]
    mean_s: float = total_s / max(1, count)
    return mean_s


@_compiled
def _draw_missing(
    engine: Any, requests: Any, running: IntArray, key: Bytes, ids: Bytes, id_starts: IntArray
) -> None:
    """Give a draw to each running request whose last one was for an earlier life."""
    for at in range(engine.num_running):
        request = running[at]
        own = requests[request]
        if np.isnan(own.draw):
            own_id = ids[id_starts[request] : id_starts[request + 1]]
            own.draw = draw_uniform(key, own_id, own.num_preemptions)


@_compiled
def _read(remaining: float, upper: float, down: int) -> tuple[float, float]:
    """Return what RemainingGrid.read does, from the answers ``down`` tokens before."""
    upper -= down
    return max(1.0, remaining - down), 1.0 if upper < 1.0 else upper


@_compiled
def _view(
    engine: Any, own: Any, request: int, at: int, tpot_s: float, answer: tuple[float, float]
) -> RunningView:
    """Return what a policy may see of ``own``, which runs at ``at``.

    No array is handed over: numba would count a reference to it up and down for every request.
    """
    count = engine.num_running
    remaining, upper = answer
    return RunningView(
        request, own.admission_seq, own.arrival_s, own.deadline_s, own.prompt_tokens,
        own.generated_tokens, own.computed_tokens, own.num_blocks, own.max_tokens,
        own.num_preemptions, own.priority, count - 1 - at, count, engine.clock_s, tpot_s,
        engine.prefill_s_per_token, remaining, upper, own.draw,
    )  # fmt: skip


@_compiled
def _choose(
    score: Any,
    engine: Any,
    requests: Any,
    running: IntArray,
    tpot_s: float,
    grid_offsets: IntArray,
    grid_remaining: FloatArray,
    grid_upper: FloatArray,
) -> int:
    """Return the position with the highest score, as PolicyRule does."""
    best, best_score, has_nan = NOBODY, 0.0, False
    stride = engine.grid_stride
    for at in range(engine.num_running):
        request = running[at]
        own = requests[request]
        answer = (np.nan, np.nan)
        if stride > 0:
            slot = grid_offsets[request] + own.generated_tokens // stride
            answer = _read(grid_remaining[slot], grid_upper[slot], own.generated_tokens % stride)
        value = score(_view(engine, own, request, at, tpot_s, answer))
        if np.isnan(value):
            has_nan = True
        elif best == NOBODY or value >= best_score:  # of equals the youngest
            best, best_score = at, value
    engine.num_fallbacks += has_nan
    return best if best != NOBODY else engine.num_running - 1


@lru_cache
def compiled_loop(sources: int = SOURCES) -> Any:
    """Return the loop that decides by a compiled policy.

    Its signature is written out, so that all policies go through one compiled loop, by address.
    """

    @numba.njit(_LOOP, cache=True, nogil=True, error_model="numpy")
    def run_compiled(
        score: Any,
        engines: Any,
        requests: Any,
        running: IntArray,
        waiting: IntArray,
        recent_steps_s: FloatArray,
        num_asking: IntArray,
        tables: FloatArray,
        grid_offsets: IntArray,
        grid_remaining: FloatArray,
        grid_upper: FloatArray,
        key: Bytes,
        ids: Bytes,
        id_starts: IntArray,
    ) -> int:
        """Run as :func:`serving_sim.kernels.leaps.advance` does, with ``score`` as the policy.

        What ``score`` raises is raised; the decision is then open, as it is after ASKS.
        """
        _ = sources
        engine = engines[0]
        while True:
            status: int = advance(
                engines, requests, running, waiting, recent_steps_s, num_asking, tables
            )
            if status != ASKS:
                return status
            if engine.draws:
                _draw_missing(engine, requests, running, key, ids, id_starts)
            engine.victim_at = _choose(
                score, engine, requests, running, _recent_tpot_s(engine, recent_steps_s),
                grid_offsets, grid_remaining, grid_upper,
            )  # fmt: skip

    return run_compiled


_INTS, _FLOATS, _BYTES = (
    types.int64[::1],
    types.float64[::1],
    types.Array(types.uint8, 1, "C", True),
)
_LOOP = types.int64(
    SCORE,
    *(numba.from_dtype(record)[::1] for record in (layout.ENGINE, layout.REQUEST)),
    _INTS,
    _INTS,
    _FLOATS,
    _INTS,
    _FLOATS,
    *(_INTS, _FLOATS, _FLOATS),
    *(_BYTES, _BYTES, _INTS),
)


def _make_show(sources: int) -> Any:
    @_compiled
    def show(
        engines: Any,
        requests: Any,
        running: IntArray,
        recent_steps_s: FloatArray,
        grid_offsets: IntArray,
        grid_remaining: FloatArray,
        grid_upper: FloatArray,
        key: Bytes,
        ids: Bytes,
        id_starts: IntArray,
        int_views: IntArray,
        float_views: FloatArray,
    ) -> None:
        """Write what a policy may see, one column a running request (INT_VIEWS, FLOAT_VIEWS)."""
        _ = sources
        engine = engines[0]
        _draw_missing(engine, requests, running, key, ids, id_starts)
        tpot_s = _recent_tpot_s(engine, recent_steps_s)
        stride = engine.grid_stride
        for at in range(engine.num_running):
            request = running[at]
            own = requests[request]
            answer = (np.nan, np.nan)
            if stride > 0:
                slot = grid_offsets[request] + own.generated_tokens // stride
                down = own.generated_tokens % stride
                answer = _read(grid_remaining[slot], grid_upper[slot], down)
            view = _view(engine, own, request, at, tpot_s, answer)
            ints = (
                view.request_id, view.admission_seq, view.prompt_tokens, view.generated_tokens,
                view.computed_tokens, view.kv_blocks, view.max_tokens, view.num_preemptions,
                view.priority, view.rank_from_youngest, view.num_running,
            )  # fmt: skip
            for place in range(len(ints)):
                int_views[place, at] = ints[place]
            floats = (
                view.arrival_s, view.deadline_s, view.now_s, view.recent_tpot_s,
                view.prefill_s_per_token, view.remaining, view.remaining_upper, view.draw,
            )  # fmt: skip
            for place in range(len(floats)):
                float_views[place, at] = floats[place]

    return show


show = _make_show(SOURCES)
