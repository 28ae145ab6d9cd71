"""``text-progress``: the prompt and what was written last, as hashed words, to a log-t law.

The idea of ELIS (arXiv 2505.09142), which reads prompt plus text so far with a sentence encoder
and predicts again every 50 tokens. Here words and pairs of words are hashed into two bags, one of
the prompt and one of the last ``recent_chars`` characters written, beside the age; the loss is the
censored one of ``log-t``, where ELIS drops long runs as outliers. With ``encoder`` a pretrained one
reads both texts instead of the bags, again every ``encode_every`` tokens, as ELIS does.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Self

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest
from predictors.base import TrainingSet, held_out_runs
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, Provenance, need, need_array, need_list
from predictors.encoders import EncoderSettings, checked_encoder, encoder_from, load_encoder
from predictors.features import AGE_FEATURES, feature_columns, feature_matrix
from predictors.gbm_hazard import horizon_edges, landmarks
from predictors.log_t import LogT, check_head, fit_log_t, need_endings
from predictors.neural import Scaler, perceptron_from
from predictors.torch_loop import LoopSettings

_WORD = re.compile(r"\w+|[^\w\s]|\n\s*")
_MAX_BUCKETS, _MAX_CHARS = 1 << 16, 1 << 20
_PROMPT_CHARS = 20_000  # the prompt's beginning: more says nothing new in a bag of words
_NUM_EDGES = 48
NUMBERS = (*AGE_FEATURES, "prompt_tokens")
READERS = ("words", "encoder")


class TextProgress(LogT):
    """A log-t head over NUMBERS, the prompt and the recent text, both as ``reader`` reads them."""

    family: ClassVar[str] = "text-progress"

    def __init__(
        self,
        provenance: Provenance,
        edges: IntArray,
        scaler: Scaler,
        layers: Mapping[str, np.ndarray],
        degrees: float,
        reader: TextReader,
    ) -> None:
        super().__init__(provenance, edges, NUMBERS, scaler, layers, degrees)
        self.reader = reader

    def inputs(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return the numbers and both texts (n, 2 * len(NUMBERS) + 2 * width of a text)."""
        return text_inputs(requests, ages, self.scaler, self.reader)

    def settings(self) -> JsonObject:
        """See Predictor."""
        return super().settings() | self.reader.settings()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """See Predictor."""
        settings, tensors = checkpoint.settings, checkpoint.tensors
        if tuple(need_list(settings, "features", str)) != NUMBERS:
            raise InvalidInput(f"text-progress reads the numbers {', '.join(NUMBERS)}")
        reader = TextReader.from_settings(settings)
        width = 2 * reader.buckets
        if reader.encoder is not None:
            first = need_array(tensors, "net.0.weight", np.float32, 2)
            width = first.shape[1] - 2 * len(NUMBERS)
        sizes = (2 * len(NUMBERS) + width, *need_list(settings, "hidden", int), 2)
        return cls(
            checkpoint.provenance,
            need_array(tensors, "edges", np.int64),
            Scaler.from_tensors(tensors, len(NUMBERS)),
            perceptron_from(tensors, sizes),
            need(settings, "degrees_of_freedom", float),
            reader,
        )


@dataclass(frozen=True, slots=True)
class TextReader:
    """How a text becomes numbers: a bag of words ``buckets`` wide or, with ``encoder`` and the
    ``digest`` of its weights, a vector; of what was written, the last ``recent_chars`` characters
    at the last multiple of ``encode_every`` tokens."""

    buckets: int = 512
    recent_chars: int = 800
    encode_every: int = 1
    encoder: EncoderSettings | None = None
    digest: str = ""

    def __post_init__(self) -> None:
        _check_bags(self.buckets, self.recent_chars)
        if self.encode_every < 1:
            raise InvalidInput(f"encode_every is {self.encode_every}: it must be at least 1 token")

    def read(self, texts: Sequence[str]) -> FloatArray:
        """Return (n, w)."""
        if self.encoder is None:
            return np.array([bag_of_words(text, self.buckets) for text in texts])
        return checked_encoder(self.encoder, self.digest).vectors(texts)

    def settings(self) -> JsonObject:
        """Return what a checkpoint's settings keep."""
        own: JsonObject = {"buckets": self.buckets, "recent_chars": self.recent_chars}
        if self.encoder is not None:
            own |= {"encoder": asdict(self.encoder), "encoder_sha256": self.digest}
            own |= {"encode_every": self.encode_every}
        return own

    @classmethod
    def from_settings(cls, settings: JsonObject) -> TextReader:
        """Return the reader that a checkpoint wrote; raises InvalidInput."""
        bags = need(settings, "buckets", int), need(settings, "recent_chars", int)
        if "encoder" not in settings:
            return cls(*bags)
        digest = need(settings, "encoder_sha256", str)
        every = need(settings, "encode_every", int)
        return cls(*bags, every, encoder_from(settings["encoder"]), digest)


@dataclass(frozen=True, slots=True)
class TextProgressSettings:
    """How to fit ``text-progress``: ages a run, width of each bag of words, how many characters
    count as recent, the tail, layer widths and the training. ``reader`` is ``words`` (hashed) or
    ``encoder``, which reads again every ``encode_every`` tokens."""

    num_landmarks: int = 12
    buckets: int = 512
    recent_chars: int = 800
    degrees: float = 3.5
    hidden: tuple[int, ...] = (32,)
    loop: LoopSettings = field(
        default_factory=lambda: LoopSettings(num_epochs=30, patience_epochs=4, weight_decay=0.03)
    )
    reader: str = "words"
    encode_every: int = 50
    encoder: EncoderSettings = field(default_factory=lambda: EncoderSettings(keep_end=True))

    def __post_init__(self) -> None:
        if self.reader not in READERS:
            raise unknown_name("reader", self.reader, READERS)
        TextReader(self.buckets, self.recent_chars, self.encode_every)
        check_head(self.num_landmarks, self.degrees, self.hidden)

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
        reader = TextReader(self.buckets, self.recent_chars)
        if self.reader == "encoder":
            digest = load_encoder(self.encoder).digest()
            reader = replace(
                reader, encode_every=self.encode_every, encoder=self.encoder, digest=digest
            )
        run, ages = landmarks(training, self.num_landmarks, seed)
        stopping = held_out_runs(training, self.loop.held_out_share, seed)[run]
        requests = [training.requests[i] for i in run.tolist()]
        scaler = Scaler.of(feature_matrix(requests, ages)[~stopping][:, feature_columns(NUMBERS)])
        layers = fit_log_t(
            training,
            (run, ages),
            text_inputs(requests, ages, scaler, reader),
            (self.hidden, self.degrees, self.loop),
            stopping,
            seed=seed,
            num_threads=num_threads,
        )
        edges = horizon_edges(1, training.cap_tokens, _NUM_EDGES)
        return TextProgress(training.provenance, edges, scaler, layers, self.degrees, reader)


def text_inputs(
    requests: Sequence[SignalRequest], ages: IntArray, scaler: Scaler, reader: TextReader
) -> FloatArray:
    """Return NUMBERS, scaled, then the prompt and what was written last, as the reader reads."""
    numbers = scaler(feature_matrix(requests, ages)[:, feature_columns(NUMBERS)])
    prompts = [(request.prompt or "")[:_PROMPT_CHARS] for request in requests]
    asked = ages // reader.encode_every * reader.encode_every
    recent = [
        "" if request.text is None else request.text.seen(age)[-reader.recent_chars :]
        for request, age in zip(requests, asked.tolist(), strict=True)
    ]
    parts = [numbers]
    for texts in (prompts, recent):
        distinct, place = np.unique(np.array(texts, dtype=object), return_inverse=True)
        parts.append(reader.read(distinct.tolist())[place])
    return np.hstack(parts)


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
