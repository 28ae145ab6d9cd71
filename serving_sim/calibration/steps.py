"""The kinds of step that are timed: one prefill chunk on a prefix, beside decodes of one length, of
which one may be longer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from contracts.errors import InvalidInput

if TYPE_CHECKING:
    from serving_sim.fit_surface import StepMeasurement


class StepDoesNotFit(InvalidInput):
    """A step for which the device has no room; such a point is left out and said to be."""


class StepShape(NamedTuple):
    """One step, in tokens: a prefill chunk on a prefix computed before (0, 0 for none), beside
    ``num_decodes`` requests of ``decode_context_tokens`` each, this step's own included; in an
    uneven batch one of them has ``longest_context_tokens`` instead (0 in an even one)."""

    prefill_chunk_tokens: int = 0
    prefill_prefix_tokens: int = 0
    num_decodes: int = 0
    decode_context_tokens: int = 0
    longest_context_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed in the step."""
        return self.prefill_chunk_tokens + self.num_decodes

    @property
    def num_requests(self) -> int:
        """Requests that take part, each of which samples one token."""
        return self.num_decodes + (self.prefill_chunk_tokens > 0)

    @property
    def prefill_tokens_kept(self) -> int:
        """KV of the prefilling request once the step is done."""
        return self.prefill_prefix_tokens + self.prefill_chunk_tokens

    @property
    def decode_contexts(self) -> list[int]:
        """Context of each decode, the longest last."""
        contexts = [self.decode_context_tokens] * self.num_decodes
        return [*contexts[:-1], self.longest_context_tokens] if self.is_uneven else contexts

    @property
    def decode_kv_tokens(self) -> int:
        """KV of the decodes once the step is done."""
        even = self.num_decodes * self.decode_context_tokens
        spread = self.longest_context_tokens - self.decode_context_tokens
        return even + spread if self.is_uneven else even

    @property
    def kv_tokens(self) -> int:
        """KV of every request once the step is done."""
        return self.prefill_tokens_kept + self.decode_kv_tokens

    @property
    def is_uneven(self) -> bool:
        """Whether one decode is longer than the others."""
        return self.longest_context_tokens > 0

    @property
    def surface(self) -> str:
        """``decode``, ``prefill``, ``mixed``, or ``uneven`` (decodes only, one longer)."""
        if not self.prefill_chunk_tokens:
            return "uneven" if self.is_uneven else "decode"
        return "mixed" if self.num_decodes else "prefill"

    def __str__(self) -> str:
        parts = []
        if self.prefill_chunk_tokens:
            parts.append(f"prefill {self.prefill_chunk_tokens} on {self.prefill_prefix_tokens}")
        if self.num_decodes:
            longest = f" to {self.longest_context_tokens}" if self.is_uneven else ""
            parts.append(f"decode {self.num_decodes} x {self.decode_context_tokens}{longest}")
        return " + ".join(parts)


def shape_of(row: StepMeasurement) -> StepShape:
    """Return the step that ``row`` is a measurement of."""
    return StepShape(
        row.prefill_chunk_tokens,
        row.prefill_prefix_tokens,
        row.num_decodes,
        row.decode_context_tokens,
    )
