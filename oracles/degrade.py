"""The degradation ladder: a signal made worse along one axis at a time, to see what it costs.

``Degraded(signal, how, seed)`` is a signal again, so degradations (:mod:`oracles.degradations`)
compose, and its name says what was done: ``clairvoyant | noise(0.5) | stale(64)``. Answers stay
within [1, max_tokens - age]; degraded signals answer with means only. What a degradation achieved
(tau, log-MAE, concordance) is measured, not assumed: :func:`eval.degradation.degradation_ladder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from contracts.policy import FloatArray, IntArray
from contracts.signals import RemainingSignal, SignalRequest, WrappedSignal
from oracles.degradations import AXES, Degradation, Shrink, Swap, caps_of, label, numbers_of

__all__ = ["AXES", "Degradation", "Degraded", "degrade", "label", "parse_degradations"]

_Requests = Sequence[SignalRequest]


class Degraded(WrappedSignal):
    """``base`` degraded by ``how``; ``seed`` keys the noise."""

    def __init__(self, base: RemainingSignal, how: Degradation, seed: int = 0) -> None:
        super().__init__(base)
        self.how, self.seed = how, seed

    @property
    def name(self) -> str:
        """The base's name, a bar, and what was done."""
        return f"{self.base.name} | {label(self.how)}"

    def remaining(self, requests: _Requests, ages: IntArray) -> FloatArray:
        """Degraded expected remaining tokens; see RemainingSignal."""
        answers = self.how.apply(self.base, requests, ages, self.seed)
        return np.clip(answers, 1.0, np.maximum(1, caps_of(requests) - ages))


def parse_degradations(text: str) -> tuple[str, tuple[Degradation, ...]]:
    """Split ``"clairvoyant | noise(0.5) | stale(64)"`` into base and degradations.

    Raises UnknownName for an axis that does not exist, InvalidInput for numbers that do not fit.
    """
    base, *rest = (part.strip() for part in text.split("|"))
    return base, tuple(_parse_one(part) for part in rest)


def _parse_one(text: str) -> Degradation:
    axis, paren, inside = text.partition("(")
    axis = axis.strip()
    if axis not in AXES:
        raise unknown_name("degradation", axis, AXES)
    wanted = numbers_of(AXES[axis])
    words = [word.strip() for word in inside.removesuffix(")").split(",")] if paren else []
    shape = f"{axis}({', '.join(f.name for f in wanted)})" if wanted else axis
    if (paren and not inside.endswith(")")) or len(words) > len(wanted):
        raise InvalidInput(f"degradation {text!r} is not of the form {shape}")
    try:
        # annotations are texts here: "int" or "float"
        numbers = [
            int(word) if str(f.type) == "int" else float(word)
            for f, word in zip(wanted, words, strict=False)
        ]
        return AXES[axis](*numbers)
    except (TypeError, ValueError):
        raise InvalidInput(f"degradation {text!r} is not of the form {shape}") from None


def with_reference(
    how: Degradation, base: RemainingSignal, requests: _Requests, ages: IntArray
) -> Degradation:
    """Give ``swap`` the population of ``base``'s answers at those ages, and ``shrink`` that at age
    0; others stay as they are."""
    if not isinstance(how, Swap | Shrink):
        return how
    ages = ages if isinstance(how, Swap) else np.zeros_like(ages)
    return replace(how, reference=tuple(np.sort(base.remaining(requests, ages)).tolist()))


def degrade(
    base: RemainingSignal,
    steps: Sequence[Degradation],
    requests: _Requests,
    ages: IntArray,
    seed: int = 0,
) -> RemainingSignal:
    """Wrap ``base`` in ``steps``, first one innermost; ``requests`` at ``ages`` are the population
    that ``swap`` takes its ranks in, and ``shrink`` what is usual."""
    for how in steps:
        base = Degraded(base, with_reference(how, base, requests, ages), seed)
    return base
