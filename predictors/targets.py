"""Two questions beside the served remaining length: will the cap be reached, and what if there
were none.

A predictor answers the *served* length, which ends at ``max_tokens``. How likely a run is cut there
is part of the same distribution (:func:`reach_cap`). The *natural* length, which the model would
reach uncapped, was observed up to the cap of the training log only; :class:`Natural` answers so far
and says where it ends.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np

from contracts.policy import FloatArray, IntArray
from contracts.signals import DistributionalSignal, SignalRequest
from predictors.base import Predictor, room


def reach_cap(
    signal: DistributionalSignal, requests: Sequence[SignalRequest], ages: IntArray
) -> FloatArray:
    """Return the chance (n,) that a run still writes when it comes to ``max_tokens``: that its
    served remaining length is all that is left to it. A run that stops by itself with the very last
    token counts too, as it does in a log of lengths."""
    last = (room(requests, ages) - 1).astype(np.float64)
    return np.asarray(signal.survival(requests, ages, last))


class Natural:
    """A predictor asked for natural lengths, up to the cap of its training log.

    A request's own ``max_tokens`` plays no part. ``remaining`` is the mean restricted to the
    training cap, so a lower bound where that cap is often reached; a ``quantile`` beyond it is
    infinite, and ``survival`` there is the last value known, an upper bound.
    """

    clairvoyant = False

    def __init__(self, base: Predictor) -> None:
        self.base = base
        self.cap_tokens = base.provenance.cap_tokens

    @property
    def name(self) -> str:
        """The predictor's, marked."""
        return f"{self.base.name} (natural, up to {self.cap_tokens} tokens)"

    @property
    def source_run_ids(self) -> Container[str]:
        """The runs it was trained on."""
        return self.base.source_run_ids

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return the restricted mean (n,) of natural tokens to come; see RemainingSignal."""
        return self.base.remaining(self._uncapped(requests), ages)

    def quantile(
        self, requests: Sequence[SignalRequest], ages: IntArray, level: float
    ) -> FloatArray:
        """Return the quantile (n,), infinite from the training cap on."""
        asked = self._uncapped(requests)
        found = self.base.quantile(asked, ages, level)
        return np.where(found < room(asked, ages), found, np.inf)

    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        """Return P(remaining > horizon) (n,), an upper bound from the training cap on."""
        asked = self._uncapped(requests)
        known = np.minimum(horizon, room(asked, ages) - 1.0)
        return self.base.survival(asked, ages, known)

    def _uncapped(self, requests: Sequence[SignalRequest]) -> list[SignalRequest]:
        kept: dict[int, SignalRequest] = {}  # a request stands in many rows: replaced once
        for request in requests:
            if id(request) not in kept:
                kept[id(request)] = replace(request, max_tokens=self.cap_tokens)
        return [kept[id(request)] for request in requests]
