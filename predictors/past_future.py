"""``past-future``: the window of the last finished lengths, conditioned on the age.

The estimator of Past-Future (Gong et al., ASPLOS 2025, arXiv 2507.10150): lengths of the latest
requests a server finished, of which those longer than the age say what may still come. It reads
neither prompt nor progress. As there, a request still in flight is no part of the window: a run
cut before its cap (aborted, or of unknown ending) is left out. A run that reached its cap stands
above every length that was seen, so the cap is the answer once no other run is left.

It differs from ``age-km`` in the window and in that rule; without early cuts and with one cap for
all runs, a window as long as the log gives the same answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from contracts.errors import InvalidInput
from contracts.settings import require_at_least
from contracts.survival import kaplan_meier
from predictors.age_km import AgeKm
from predictors.base import TrainingSet
from predictors.card import JsonObject

CENSORING_RULE = (
    "a run that reached its cap stands above all finished lengths; a run cut before its cap is "
    "not in the window"
)


class PastFuture(AgeKm):
    """``curves`` maps a model's name to the distribution of its window."""

    family: ClassVar[str] = "past-future"

    def settings(self) -> JsonObject:
        """See Predictor."""
        return super().settings() | {"censoring_rule": CENSORING_RULE}


@dataclass(frozen=True, slots=True)
class PastFutureSettings:
    """``window_runs``: how many runs of a model, the last in the log, the window holds."""

    window_runs: int = 1000

    def __post_init__(self) -> None:
        require_at_least(self, window_runs=1)

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> PastFuture:
        """Fill the windows; ``seed`` and ``num_threads`` change nothing."""
        del seed, num_threads
        caps = np.array([request.max_tokens for request in training.requests], dtype=np.int64)
        finished = training.event_observed | (training.output_tokens >= caps)
        models = np.array([request.model for request in training.requests], dtype=object)
        if not training.event_observed.any():
            raise InvalidInput(
                f"none of {len(models)} training runs was seen to end below its cap: a window of "
                "finished lengths needs some; collect with a higher cap"
            )
        curves = {}
        for model in sorted(set(models.tolist())):
            rows = np.flatnonzero((models == model) & finished)[-self.window_runs :]
            ended = training.event_observed[rows]
            if not rows.size:
                continue  # nothing finished: the model is unknown, and its answer the cap
            top = int(np.maximum(caps[rows], training.output_tokens[rows]).max())
            curves[model] = kaplan_meier(np.where(ended, training.output_tokens[rows], top), ended)
        return PastFuture(training.provenance, curves)
