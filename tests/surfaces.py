"""A small surface profile, made by a known law, and steps to time with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from serving_sim.fit_surface import StepMeasurement
from serving_sim.surface import ProfileHeader, SurfaceProfile, Table

HEADER = ProfileHeader(
    name="small", hardware="a test", model="owner/Model-1", source="made up", licence="none"
)


def small_profile(**changes: object) -> SurfaceProfile:
    """Return a profile whose every table bends, with a mixed table that is not the sum."""
    chunk, prefix = (4.0, 64.0, 512.0), (0.0, 100.0, 1000.0)
    decodes, context = (1.0, 8.0, 32.0), (1.0, 128.0, 2048.0)
    prefill = np.multiply.outer(np.array([1e-5, 2e-4, 5e-3]), np.array([1.0, 1.5, 4.0]))
    decode = np.multiply.outer(np.array([1e-5, 9e-5, 3e-4]), np.array([1.0, 2.0, 20.0]))
    tables = {
        "tokens": Table(((1.0, 16.0, 17.0, 256.0),), np.array([5e-3, 5.1e-3, 6e-3, 2e-2])),
        "head": Table(((1.0, 32.0),), np.array([1e-4, 3e-4])),
        "prefill": Table((chunk, prefix), prefill),
        "decode": Table((decodes, context), decode),
        "mixed": Table((chunk, prefix, decodes, context), 1.25 * np.add.outer(prefill, decode)),
    }
    arguments: dict[str, object] = {"header": HEADER, "tables": tables}
    return SurfaceProfile(**(arguments | changes))  # type: ignore[arg-type]


def law(chunk: int, prefix: int, decodes: int, context: int) -> float:
    """Return the seconds of a step on a made-up card; smooth, monotone, not piecewise linear."""
    tokens = chunk + decodes
    dense = 0.004 + 2e-5 * tokens + 0.002 * (1.0 - np.exp(-tokens / 200.0))
    prefill = 2e-9 * chunk * (prefix + chunk / 2)
    return float(dense + 5e-6 * decodes + prefill + 1e-8 * decodes * context)


def measured(seconds: Callable[[int, int, int, int], float] = law) -> list[StepMeasurement]:
    """Return a grid of steps of every kind, timed by ``seconds``."""
    chunks, prefixes = (16, 64, 128, 256, 512, 1024), (0, 256, 512, 1024, 2048)
    batches, contexts = (1, 2, 4, 8, 16, 32, 64, 128), (16, 256, 512, 1024, 2048, 4096)
    at = [(c, p, 0, 0) for c in chunks for p in prefixes]
    at += [(0, 0, n, k) for n in batches for k in contexts]
    at += [
        (c, p, n, k)
        for c in chunks[::2] for p in prefixes[::2] for n in batches[::2] for k in contexts[1::2]
    ]  # fmt: skip
    return [StepMeasurement(*point, seconds(*point)) for point in at]
