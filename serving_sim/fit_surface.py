"""Measured steps to a :class:`~serving_sim.surface.SurfaceProfile`, with its error where it was
not fitted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.randomness import keyed_generator
from serving_sim.grid_fit import Axes, fill_holes, grid_of, monotone, thin, written
from serving_sim.surface import TABLES, FitError, ProfileHeader, SurfaceProfile, Table

SURFACES = ("decode", "prefill", "mixed")  # kinds of steps: decodes only, prefill only, both
HELD_OUT_SHARE = 0.2
TAIL_SHARE = 1 / 8  # of a curve, at its end, that is one line
KNOT_TOLERANCE = 0.005  # a knot that changes a step by less is dropped
_CHUNK, _PREFIX, _DECODES, _CONTEXT = range(4)
_COLUMNS: Mapping[str, tuple[int, ...]] = {
    "prefill": (_CHUNK, _PREFIX),
    "decode": (_DECODES, _CONTEXT),
    "mixed": (_CHUNK, _PREFIX, _DECODES, _CONTEXT),
}


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """The whole-step seconds of one kind of step: one prefill chunk on a prefix that is computed
    already (both 0 for none), beside decodes of one length each (this step's token included).

    ``seconds`` is the median of ``num_timed`` timings, ``spread_s`` their interquartile range.
    """

    prefill_chunk_tokens: int
    prefill_prefix_tokens: int
    num_decodes: int
    decode_context_tokens: int
    seconds: float
    spread_s: float = 0.0
    num_timed: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Points:
    """Measurements as columns: ``at`` of shape (points, 4), ``seconds``, the kind of each."""

    at: FloatArray
    seconds: FloatArray
    kind: np.ndarray

    def of(self, kind: str, mask: np.ndarray) -> tuple[FloatArray, FloatArray]:
        """Return coordinates on the kind's own axes and seconds of its points in ``mask``."""
        chosen = mask & (self.kind == kind)
        return self.at[chosen][:, _COLUMNS[kind]], self.seconds[chosen]


def fit_surface(
    measurements: Sequence[StepMeasurement],
    header: ProfileHeader,
    *,
    tokens: Table | None = None,
    head: Table | None = None,
    knots: Mapping[str, Sequence[float]] | None = None,
    skew_share: float = 0.0,
    graph_batch_sizes: tuple[int, ...] = (),
    kv_capacity_tokens: float = math.inf,
    seed: int = 0,
) -> SurfaceProfile:
    """Return the profile of measured whole-step seconds, with its held-out errors by surface.

    One inner point in five (keyed by ``seed``) is held out: no table ever sees it, and ``errors``
    are of those points. ``knots`` limits axes, by name (TABLES), to the values given; points off
    them are held out too. ``tokens`` and ``head`` are curves timed by themselves; without them the
    curve comes from the shortest contexts. Steps with more KV than ``kv_capacity_tokens``, which no
    engine can run, shape the tables but are not scored. Raises InvalidInput for what is no time,
    for a kind with no points (only steps with both may be missing), for an unknown knot axis.
    """
    points = _points(measurements)
    held_out = _held_out(points, knots or {}, seed)
    if tokens is None or head is None:
        tokens, head = _curves(points, ~held_out, graph_batch_sizes)
    profile = SurfaceProfile(
        header,
        {"tokens": tokens, "head": head, "prefill": _NOTHING_2D, "decode": _NOTHING_2D},
        graph_batch_sizes=graph_batch_sizes,
        skew_share=skew_share,
    )
    rest = _Points(points.at, points.seconds - predict(profile, points.at), points.kind)
    for kind in ("prefill", "decode", "mixed"):
        if kind == "mixed" and not (points.kind == kind).any():
            continue
        table = _table(kind, rest, ~held_out, profile)
        profile = replace(profile, tables={**profile.tables, kind: table})
    chunk, prefix, decodes, context = points.at.T
    can_run = chunk + prefix + decodes * context <= kv_capacity_tokens
    return replace(profile, errors=_errors(profile, points, held_out & can_run))


_NOTHING_2D = Table(((1.0,), (0.0,)), np.zeros((1, 1)))


def predict(profile: SurfaceProfile, at: FloatArray) -> FloatArray:
    """Return the seconds of steps of shape (steps, 4): chunk, prefix, decodes, context of each."""
    chunk, prefix, decodes, context = np.asarray(at, dtype=np.int64).T
    prefills = (chunk > 0).astype(np.int64)
    work = np.column_stack([
        chunk, prefills * (chunk + prefix), decodes, decodes * context, prefills + decodes, context,
    ])  # fmt: skip
    return profile.steps_s(np.ascontiguousarray(work))


def fit_curve(
    x: Sequence[float], seconds: Sequence[float], seed: int = 0
) -> tuple[Table, FitError]:
    """Return the monotone curve through four points in five and its error on the others.

    The first and the last point are always fitted; few points (< 10) all are, and none is scored.
    Of many points, the last eighth becomes one line: its slope is what goes on beyond the end, so
    it must not hang on two neighbours.
    """
    axis, values = np.array(x, dtype=np.float64), np.array(seconds, dtype=np.float64)
    held_out: Any = keyed_generator(seed, "curve-held-out").random(len(axis)) < HELD_OUT_SHARE
    held_out[[0, -1]] = False
    held_out &= len(axis) >= 10
    tail = (axis > (1.0 - TAIL_SHARE) * axis[-1]) & (len(axis) >= 10)
    tail[-1] = False
    fitted = ~held_out & ~tail
    axes: Axes = (tuple(axis[fitted].tolist()),)
    grid = monotone(values[fitted])
    grid, axes = thin(grid, axes, grid, KNOT_TOLERANCE)
    table = Table(axes, written(grid))
    found = np.interp(axis[held_out], axes[0], table.seconds)
    return table, fit_error(found, values[held_out])


def _points(measurements: Sequence[StepMeasurement]) -> _Points:
    rows = []
    for m in measurements:
        at = (m.prefill_chunk_tokens, m.prefill_prefix_tokens, m.num_decodes)
        context = m.decode_context_tokens
        whole = all(type(n) is int and n >= 0 for n in (*at, context))
        if not whole or not (m.prefill_chunk_tokens or m.num_decodes) or not 0 < m.seconds < 1e6:
            raise InvalidInput(f"{m} is no measured step: give whole counts and seconds above 0")
        rows.append((*at, context, m.seconds))
    columns = np.array(rows, dtype=np.float64).reshape(-1, 5)
    has_chunk, has_decodes = columns[:, _CHUNK] > 0, columns[:, _DECODES] > 0
    kind = np.where(has_chunk & has_decodes, "mixed", np.where(has_chunk, "prefill", "decode"))
    for name in ("decode", "prefill"):
        if not (kind == name).any():
            raise InvalidInput(f"no step of kind {name!r} was measured: time some, then fit")
    return _Points(columns[:, :4], columns[:, 4], kind)


def _held_out(points: _Points, knots: Mapping[str, Sequence[float]], seed: int) -> np.ndarray:
    """Return the points that no table may see: off the knots, or inner ones by a keyed draw."""
    unknown = set(knots) - {axis for axes in TABLES.values() for axis in axes}
    if unknown:
        raise InvalidInput(f"knots of {sorted(unknown)}: axes are {TABLES['mixed']}")
    drawn = keyed_generator(seed, "fit-held-out").random(len(points.seconds)) < HELD_OUT_SHARE
    off, outer = np.zeros(len(drawn), dtype=bool), np.zeros(len(drawn), dtype=bool)
    for kind, columns in _COLUMNS.items():
        own = points.kind == kind
        for name, column in zip(TABLES[kind], columns, strict=True):
            x = points.at[:, column]
            if name in knots:
                off |= own & ~np.isin(x, np.array(knots[name], dtype=np.float64))
            x_own = x[own & ~off]
            if x_own.size:
                outer |= own & ((x == x_own.min()) | (x == x_own.max()))
    return off | (drawn & ~outer)


def _curves(
    points: _Points, fitted: np.ndarray, graph_batch_sizes: tuple[int, ...]
) -> tuple[Table, Table]:
    """Return tokens and head from the steps with the shortest context at each batch or chunk.

    Where decodes and prefill differ at equal tokens, tokens takes the cheaper; what decodes cost
    more is their heads' (they have one each), what prefill costs more stays for its own plane.
    """
    decode_x, decode_s = _shortest(*points.of("decode", fitted))
    chunk_x, chunk_s = _shortest(*points.of("prefill", fitted))
    if graph_batch_sizes:
        own = np.isin(decode_x, graph_batch_sizes) | (decode_x > graph_batch_sizes[-1])
        decode_x, decode_s = (decode_x[own], decode_s[own]) if own.any() else (decode_x, decode_s)
    beyond = chunk_x > decode_x[-1]
    at_end = float(np.interp(decode_x[-1], chunk_x, chunk_s))
    overhead_s = max(0.0, at_end - decode_s[-1]) if chunk_x[0] <= decode_x[-1] else 0.0
    both = decode_x >= chunk_x[0]
    cheaper = np.where(both, np.minimum(decode_s, np.interp(decode_x, chunk_x, chunk_s)), decode_s)
    axis = np.concatenate([decode_x, chunk_x[beyond]])
    beyond_s = np.maximum(cheaper[-1], chunk_s[beyond] - overhead_s)
    tokens_s = monotone(np.concatenate([cheaper, beyond_s]))
    if len(axis) < 2:
        raise InvalidInput(
            "one batch size and one chunk size were measured: give two sizes at least, so that "
            "seconds have a slope over tokens"
        )
    excess_s = monotone(np.maximum(0.0, decode_s - tokens_s[: len(decode_x)]))
    return (
        Table((tuple(axis.tolist()),), written(tokens_s)),
        Table((tuple(decode_x.tolist()),), written(excess_s)),
    )


def _shortest(at: FloatArray, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return (size, seconds at its least context), by rising size."""
    best: dict[float, tuple[float, float]] = {}
    for (size, context), value in zip(at.tolist(), seconds.tolist(), strict=True):
        best[size] = min(best.get(size, (math.inf, math.inf)), (context, value))
    sizes = sorted(best)
    return np.array(sizes), np.array([best[size][1] for size in sizes])


def _table(kind: str, rest: _Points, fitted: np.ndarray, profile: SurfaceProfile) -> Table:
    """Return the table of what a kind of step takes beyond tokens and head."""
    at, seconds = rest.of(kind, fitted)
    axes: Axes = tuple(tuple(np.unique(column).tolist()) for column in at.T)
    grid = fill_holes(grid_of(at, seconds, axes), axes)
    if np.isnan(grid).any():
        raise InvalidInput(f"steps of kind {kind!r}: some lines of the grid hold no measurement")
    grid = monotone(np.maximum(0.0, grid))
    whole_s = grid + _dense(kind, axes, profile)
    grid, axes = thin(grid, axes, whole_s, KNOT_TOLERANCE)
    return Table(axes, written(grid))


def _dense(kind: str, axes: Axes, profile: SurfaceProfile) -> FloatArray:
    """Return what the profile so far says for every grid point of a kind: tokens and head."""
    bare = replace(profile, tables={**_bare(profile), "prefill": _NOTHING_2D})
    points = np.array(np.meshgrid(*axes, indexing="ij")).reshape(len(axes), -1).T
    at = np.zeros((len(points), 4))
    at[:, _COLUMNS[kind]] = points
    return predict(bare, at).reshape([len(axis) for axis in axes])


def _bare(profile: SurfaceProfile) -> dict[str, Table]:
    return {
        name: table if name in ("tokens", "head") else _NOTHING_2D
        for name, table in profile.tables.items()
        if name != "mixed"
    }


def _errors(profile: SurfaceProfile, points: _Points, held_out: np.ndarray) -> dict[str, FitError]:
    found = predict(profile, points.at)
    errors = {}
    for kind in SURFACES:
        scored = held_out & (points.kind == kind)
        if scored.any():
            errors[kind] = fit_error(found[scored], points.seconds[scored])
    return errors


def fit_error(found: FloatArray, measured: FloatArray) -> FitError:
    """Return the quantiles of |found / measured - 1|."""
    if not measured.size:
        return FitError(0, 0.0, 0.0, 0.0)
    error = np.abs(found / measured - 1.0)
    median, p90, p99 = (float(f"{q:.3g}") for q in np.quantile(error, (0.5, 0.9, 0.99)))
    return FitError(int(measured.size), median, p90, p99)
