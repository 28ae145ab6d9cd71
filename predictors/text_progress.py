"""``text-progress``: the prompt and what was written last, as hashed words, to a log-t law.

The idea of ELIS (arXiv 2505.09142), which reads prompt plus text so far with a sentence encoder
and predicts again every 50 tokens. Here words and pairs of words are hashed into two bags, one of
the prompt and one of the last ``recent_chars`` characters written, beside the age; the loss is the
censored one of ``log-t``, where ELIS drops long runs as outliers. Numpy only once loaded.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Self

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest
from predictors.base import TrainingSet, held_out_runs
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, Provenance, need, need_array, need_list
from predictors.features import AGE_FEATURES, feature_columns, feature_matrix, rows_by_request
from predictors.gbm_hazard import horizon_edges, landmarks
from predictors.log_t import LogT, fit_log_t, need_endings
from predictors.neural import Scaler, perceptron_from
from predictors.torch_loop import LoopSettings

_WORD = re.compile(r"\w+|[^\w\s]|\n\s*")
_MAX_BUCKETS, _MAX_CHARS = 1 << 16, 1 << 20
_PROMPT_CHARS = 20_000  # the prompt's beginning: more says nothing new in a bag of words
_NUM_EDGES = 48
NUMBERS = (*AGE_FEATURES, "prompt_tokens")


class TextProgress(LogT):
    """A log-t head over NUMBERS, the prompt's bag and the recent text's, ``buckets`` wide each."""

    family: ClassVar[str] = "text-progress"

    def __init__(
        self,
        provenance: Provenance,
        edges: IntArray,
        scaler: Scaler,
        layers: Mapping[str, np.ndarray],
        degrees: float,
        bags: tuple[int, int],
    ) -> None:
        super().__init__(provenance, edges, NUMBERS, scaler, layers, degrees)
        self.buckets, self.recent_chars = bags
        _check_bags(*bags)

    def inputs(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return the numbers and both bags (n, 2 * len(NUMBERS) + 2 * buckets)."""
        return text_inputs(requests, ages, self.scaler, self.buckets, self.recent_chars)

    def settings(self) -> JsonObject:
        """See Predictor."""
        own: JsonObject = {"buckets": self.buckets, "recent_chars": self.recent_chars}
        return super().settings() | own

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """See Predictor."""
        settings, tensors = checkpoint.settings, checkpoint.tensors
        if need_list(settings, "features", str) != NUMBERS:
            raise InvalidInput(f"text-progress reads the numbers {', '.join(NUMBERS)}")
        bags = need(settings, "buckets", int), need(settings, "recent_chars", int)
        _check_bags(*bags)
        width = 2 * len(NUMBERS) + 2 * bags[0]
        return cls(
            checkpoint.provenance,
            need_array(tensors, "edges", np.int64),
            Scaler.from_tensors(tensors, len(NUMBERS)),
            perceptron_from(tensors, (width, *need_list(settings, "hidden", int), 2)),
            need(settings, "degrees_of_freedom", float),
            bags,
        )


@dataclass(frozen=True, slots=True)
class TextProgressSettings:
    """How to fit ``text-progress``: ages a run, width of each bag of words, how many characters
    count as recent, the tail, layer widths and the training."""

    num_landmarks: int = 12
    buckets: int = 512
    recent_chars: int = 800
    degrees: float = 3.5
    hidden: tuple[int, ...] = (32,)
    loop: LoopSettings = field(
        default_factory=lambda: LoopSettings(num_epochs=30, patience_epochs=4, weight_decay=0.03)
    )

    def __post_init__(self) -> None:
        _check_bags(self.buckets, self.recent_chars)
        if self.num_landmarks < 0 or not self.degrees > 0.0 or min(self.hidden, default=1) < 1:
            raise InvalidInput(
                f"num_landmarks {self.num_landmarks}, degrees {self.degrees} and hidden "
                f"{self.hidden} must be at least 0, above 0 and at least 1 each"
            )

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> TextProgress:
        """Fit on ``training``; deterministic in (training, settings, seed) on one machine.

        Raises InvalidInput when no run has a prompt or a text.
        """
        if all(request.text is None and not request.prompt for request in training.requests):
            raise InvalidInput(
                "no training run has a prompt or a text, which text-progress reads: keep them "
                "when collecting, or use gbm-hazard"
            )
        need_endings(training)
        run, ages = landmarks(training, self.num_landmarks, seed)
        stopping = held_out_runs(training, self.loop.held_out_share, seed)[run]
        requests = [training.requests[i] for i in run.tolist()]
        scaler = Scaler.of(feature_matrix(requests, ages)[~stopping][:, feature_columns(NUMBERS)])
        layers = fit_log_t(
            training,
            (run, ages),
            text_inputs(requests, ages, scaler, self.buckets, self.recent_chars),
            (self.hidden, self.degrees, self.loop),
            stopping,
            seed=seed,
            num_threads=num_threads,
        )
        edges = horizon_edges(1, training.cap_tokens, _NUM_EDGES)
        bags = (self.buckets, self.recent_chars)
        return TextProgress(training.provenance, edges, scaler, layers, self.degrees, bags)


def text_inputs(
    requests: Sequence[SignalRequest],
    ages: IntArray,
    scaler: Scaler,
    buckets: int,
    recent_chars: int,
) -> FloatArray:
    """Return NUMBERS, scaled, then the prompt's bag and that of the last ``recent_chars``."""
    numbers = scaler(feature_matrix(requests, ages)[:, feature_columns(NUMBERS)])
    bags = np.zeros((len(requests), 2 * buckets))
    for request, rows in rows_by_request(requests):
        bags[rows, :buckets] = bag_of_words((request.prompt or "")[:_PROMPT_CHARS], buckets)
        if request.text is None:
            continue
        for row in rows.tolist():
            recent = request.text.seen(int(ages[row]))[-recent_chars:]
            bags[row, buckets:] = bag_of_words(recent, buckets)
    return np.hstack([numbers, bags])


def bag_of_words(text: str, buckets: int) -> FloatArray:
    """Return (buckets,) of length 1: 1 + log(count) of the words and pairs of words of each bucket
    (CRC-32, the same on every machine); zeros for an empty text."""
    words = _WORD.findall(text.lower())
    grams = words + [f"{first} {second}" for first, second in pairwise(words)]
    hashes = [zlib.crc32(gram.encode("utf-8", "surrogatepass")) % buckets for gram in grams]
    counts = np.bincount(np.array(hashes, dtype=np.int64), minlength=buckets)
    bag = np.where(counts > 0, 1.0 + np.log(np.maximum(counts, 1)), 0.0)
    return np.asarray(bag / max(1.0, float(np.linalg.norm(bag))))


def _check_bags(buckets: int, recent_chars: int) -> None:
    if not 1 <= buckets <= _MAX_BUCKETS or not 1 <= recent_chars <= _MAX_CHARS:
        raise InvalidInput(
            f"buckets {buckets} and recent_chars {recent_chars} must be at least 1 and at most "
            f"{_MAX_BUCKETS} and {_MAX_CHARS}"
        )
