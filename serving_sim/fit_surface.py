"""Measured steps to a :class:`~serving_sim.surface.SurfaceProfile`, with its error where it was
not fitted."""

from __future__ import annotations

from dataclasses import dataclass


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
