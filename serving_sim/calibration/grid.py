"""Which steps are timed: a coarse grid first, then lines where the fit is worst."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from contracts.errors import InvalidInput
from serving_sim.calibration.steps import StepShape

AxisName = Literal["chunks", "prefixes", "batches", "contexts"]
_TILE = 64  # rows of the smallest matrix tile in common use; the others are its multiples
AXES: tuple[AxisName, ...] = ("batches", "contexts", "chunks", "prefixes")


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that are crossed: ``batches`` x ``contexts`` (decode steps), ``chunks`` x
    ``prefixes`` (prefill steps), all in tokens but the first; no prefill beyond
    ``max_context_tokens``."""

    chunks: tuple[int, ...]
    prefixes: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    max_context_tokens: int

    def shapes(self) -> list[StepShape]:
        """Return every step of the grid, cheap ones first; mixed steps beside them."""
        decodes = [StepShape(0, 0, n, k) for n in self.batches for k in self.contexts]
        prefills = [self._prefill(c, p) for c in self.chunks for p in self.prefixes]
        return [*decodes, *(s for s in prefills if s), *self._mixed()]

    def _prefill(self, chunk: int, prefix: int) -> StepShape | None:
        fits = chunk + prefix <= self.max_context_tokens
        return StepShape(chunk, prefix, 0, 0) if fits else None

    def _mixed(self) -> Iterator[StepShape]:
        """Yield prefills that fill a step beside decodes, for the middle and the end of each axis:
        they show whether the two surfaces add up."""
        for tokens in _middle_and_last(self.chunks):
            for batch in _middle_and_last(self.batches):
                if batch < tokens:
                    context = self.contexts[len(self.contexts) // 2]
                    yield StepShape(tokens - batch, 0, batch, context)

    def uneven(self) -> list[StepShape]:
        """Return decode batches in which one request is longer than the others: pairs of the
        shortest, middle and longest context, for the middle and the end of the batch sizes."""
        contexts = tuple(dict.fromkeys((self.contexts[0], *_middle_and_last(self.contexts))))
        return [
            StepShape(0, 0, batch, short, long)
            for batch in _middle_and_last(self.batches) if batch > 1
            for short, long in itertools.combinations(contexts, 2)
        ]  # fmt: skip

    def line(self, axis: AxisName, value: int) -> list[StepShape]:
        """Return the steps that ``value`` adds when it joins ``axis``."""
        if axis == "batches":
            return [StepShape(0, 0, value, k) for k in self.contexts]
        if axis == "contexts":
            return [StepShape(0, 0, n, value) for n in self.batches]
        pairs = (
            [(value, p) for p in self.prefixes]
            if axis == "chunks"
            else [(c, value) for c in self.chunks]
        )
        return [shape for c, p in pairs if (shape := self._prefill(c, p))]

    def gaps(self, axis: AxisName) -> list[tuple[int, ...]]:
        """Return what may be worth joining ``axis``, each with the value to ask about first last.

        Between any two neighbours more than a quarter apart that is their geometric mean (half,
        above 0). GPUs compute in tiles, and a step is dearest just past a full one: where the mean
        is a full tile, it comes with the value after it, and so does each full tile on the axis.
        """
        found: list[tuple[int, ...]] = []
        tiled = axis in ("chunks", "batches")
        for low, high in itertools.pairwise(getattr(self, axis)):
            if high <= 1.25 * low:
                continue
            if tiled and low and low % _TILE == 0:
                found.append((low + 1,))
            middle = round(math.sqrt(low * high)) if low else high // 2
            if low < middle < high:
                is_full = tiled and middle % _TILE == 0
                found.append((middle, middle + 1) if is_full else (middle,))
        return found

    def joined(self, axis: AxisName, values: tuple[int, ...]) -> Grid:
        """Return the grid with ``values`` on ``axis`` too."""
        merged: dict[str, Any] = {axis: tuple(sorted({*getattr(self, axis), *values}))}
        return replace(self, **merged)


def coarse_grid(max_batch: int, max_context_tokens: int, max_chunk_tokens: int) -> Grid:
    """Return the grid a calibration begins with: factors of four up to the bounds."""
    bounds = {
        "max batch": (max_batch, 4),
        "max context": (max_context_tokens, 64),
        "max chunk": (max_chunk_tokens, 32),
    }
    for name, (value, least) in bounds.items():
        if value < least:
            raise InvalidInput(f"{name} {value}: give at least {least}")
    if max_chunk_tokens >= max_context_tokens:
        raise InvalidInput(
            f"max chunk {max_chunk_tokens} and max context {max_context_tokens}: a chunk must be "
            "smaller than the context, or no prefix fits before it"
        )
    largest_prefix = max_context_tokens - max_chunk_tokens
    return Grid(
        chunks=_powers(16, max_chunk_tokens),
        prefixes=(0, *_powers(min(512, largest_prefix), largest_prefix)),
        batches=_powers(1, max_batch),
        contexts=_powers(32, max_context_tokens),
        max_context_tokens=max_context_tokens,
    )


def _powers(first: int, last: int) -> tuple[int, ...]:
    """Return first, 4 first, 16 first … and ``last``; a value close below ``last`` gives way."""
    values = [first]
    while values[-1] * 4 < last:
        values.append(values[-1] * 4)
    if len(values) > 1 and values[-1] * 2 > last:
        values.pop()
    return tuple(dict.fromkeys((*values, last)))


def _middle_and_last(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((values[len(values) // 2], values[-1])))
