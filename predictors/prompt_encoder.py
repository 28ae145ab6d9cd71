"""``prompt-encoder``: a pretrained text encoder reads the prompt, a small head does the rest.

The idea of SSJF (arXiv 2404.08509, a fine-tuned BERT that regresses length) and of LTR (2408.15792,
an OPT-125M trained with ListMLE to order lengths). Here the head is a censored log-t law of what is
left, given the vector and the age. With ``loss = "listmle"`` a score learned from orders alone
stands in for the vector, so that the head cannot see more of the prompt than an order tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Self

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest
from predictors.base import TrainingSet, held_out_runs
from predictors.card import JsonObject, JsonValue
from predictors.checkpoint import Checkpoint, Provenance, need, need_array, need_list
from predictors.encoders import (
    Encoder,
    EncoderSettings,
    checked_encoder,
    encoder_from,
    load_encoder,
)
from predictors.features import AGE_FEATURES, feature_columns, feature_matrix
from predictors.gbm_hazard import horizon_edges, landmarks
from predictors.listmle import fit_scores
from predictors.log_t import LogT, check_head, fit_log_t, need_endings
from predictors.neural import Scaler, perceptron, perceptron_from
from predictors.torch_loop import LoopSettings
from predictors.tuning import fit_encoder

LOSSES = ("log-t", "listmle")
NUMBERS = (*AGE_FEATURES, "prompt_tokens")
_NUM_EDGES = 48


class PromptEncoder(LogT):
    """A log-t head over NUMBERS and the prompt's vector, or its score where ``ranker`` has layers.

    ``tuned`` holds the encoder's weights where they were trained too; else ``digest`` says which
    weights the head was trained on.
    """

    family: ClassVar[str] = "prompt-encoder"

    def __init__(
        self,
        provenance: Provenance,
        edges: IntArray,
        head: tuple[Scaler, Mapping[str, np.ndarray], float],
        how: EncoderSettings,
        digest: str,
        ranker: Mapping[str, np.ndarray],
        tuned: Mapping[str, np.ndarray],
    ) -> None:
        super().__init__(provenance, edges, NUMBERS, *head)
        self.how, self.digest = how, digest
        self.ranker, self.tuned = dict(ranker), dict(tuned)
        self._encoder: Encoder | None = None

    @property
    def encoder(self) -> Encoder:
        """The encoder, loaded when first asked; raises InvalidInput when its weights differ from
        those the head was trained on."""
        if self._encoder is None:
            if self.tuned:
                self._encoder = load_encoder(self.how).tuned(self.tuned)
            else:
                self._encoder = checked_encoder(self.how, self.digest)
        return self._encoder

    def inputs(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return the numbers and the vector, or its score."""
        return head_inputs(requests, ages, self.scaler, self.encoder, self.ranker)

    def settings(self) -> JsonObject:
        """See Predictor."""
        own: JsonObject = {
            "encoder": asdict(self.how),
            "encoder_sha256": self.digest,
            "ranker_hidden": [len(self.ranker[f"{i}.bias"]) for i in range(len(self.ranker) // 2)],
            "tuned": list[JsonValue](sorted(self.tuned)),
        }
        return super().settings() | own

    def tensors(self) -> dict[str, np.ndarray]:
        """See Predictor."""
        own = super().tensors()
        own |= {f"ranker.{name}": value for name, value in self.ranker.items()}
        return own | {f"encoder.{name}": value for name, value in self.tuned.items()}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """See Predictor."""
        settings, tensors = checkpoint.settings, checkpoint.tensors
        how = encoder_from(settings.get("encoder"))
        if tuple(need_list(settings, "features", str)) != NUMBERS:
            raise InvalidInput(f"{cls.family} reads the numbers {', '.join(NUMBERS)}")
        sizes = need_list(settings, "ranker_hidden", int)
        width = _width(tensors, "ranker." if sizes else "net.", 0 if sizes else 2 * len(NUMBERS))
        ranker = perceptron_from(tensors, (width, *sizes), "ranker.") if sizes else {}
        inner = 2 * len(NUMBERS) + (1 if sizes else width)
        layers = perceptron_from(tensors, (inner, *need_list(settings, "hidden", int), 2))
        names = need_list(settings, "tuned", str)
        if missing := [name for name in names if f"encoder.{name}" not in tensors]:
            raise InvalidInput(f"the tuned encoder lacks {missing[0]!r}: the checkpoint is damaged")
        head = (
            Scaler.from_tensors(tensors, len(NUMBERS)),
            layers,
            need(settings, "degrees_of_freedom", float),
        )
        return cls(
            checkpoint.provenance,
            need_array(tensors, "edges", np.int64),
            head,
            how,
            need(settings, "encoder_sha256", str),
            ranker,
            {name: tensors[f"encoder.{name}"] for name in names},
        )


@dataclass(frozen=True, slots=True)
class PromptEncoderSettings:
    """How to fit ``prompt-encoder``: the encoder, ``loss`` (log-t or listmle), whether the encoder
    itself is trained (``fine_tune``; a GPU's work for all but tiny ones), ages a run, layer
    widths and the training."""

    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    loss: str = "log-t"
    fine_tune: bool = False
    num_landmarks: int = 12
    degrees: float = 3.5
    hidden: tuple[int, ...] = (32,)
    loop: LoopSettings = field(
        default_factory=lambda: LoopSettings(num_epochs=40, patience_epochs=5, weight_decay=0.03)
    )

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise unknown_name("loss", self.loss, LOSSES)
        check_head(self.num_landmarks, self.degrees, self.hidden)

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> PromptEncoder:
        """Fit on ``training``; deterministic in (training, settings, seed) on one machine.

        Raises InvalidInput when no run has a prompt text.
        """
        return self.fit_as(PromptEncoder, training, seed, num_threads)

    def fit_as(
        self, kind: type[PromptEncoder], training: TrainingSet, seed: int, num_threads: int
    ) -> PromptEncoder:
        """Fit a predictor of class ``kind``."""
        if not any(request.prompt for request in training.requests):
            raise InvalidInput(
                f"no training run has a prompt text, which {kind.family} reads: keep prompts when "
                "collecting, or use gbm-hazard"
            )
        need_endings(training)
        encoder, tuned = load_encoder(self.encoder), {}
        stopping = held_out_runs(training, self.loop.held_out_share, seed)
        how = (self.hidden, self.loop)
        if self.fine_tune:
            tuned = fit_encoder(encoder, training, stopping, self.loss, how, seed, num_threads)
            encoder = encoder.tuned(tuned)
        vectors = encoder.vectors([request.prompt or "" for request in training.requests])
        ranker = {}
        if self.loss == "listmle":
            ranker = fit_scores(training, vectors, stopping, how, seed, num_threads)
        run, ages = landmarks(training, self.num_landmarks, seed)
        requests = [training.requests[i] for i in run.tolist()]
        known = feature_matrix(requests, ages)[:, feature_columns(NUMBERS)]
        scaler = Scaler.of(known[~stopping[run]])
        layers = fit_log_t(
            training,
            (run, ages),
            head_inputs(requests, ages, scaler, encoder, ranker),
            (self.hidden, self.degrees, self.loop),
            stopping[run],
            seed=seed,
            num_threads=num_threads,
        )
        return kind(
            training.provenance,
            horizon_edges(1, training.cap_tokens, _NUM_EDGES),
            (scaler, layers, self.degrees),
            self.encoder,
            encoder.digest(),
            ranker,
            tuned,
        )


def head_inputs(
    requests: Sequence[SignalRequest],
    ages: IntArray,
    scaler: Scaler,
    encoder: Encoder,
    ranker: Mapping[str, np.ndarray],
) -> FloatArray:
    """Return NUMBERS, scaled, then the prompts' vectors, or their scores."""
    numbers = scaler(feature_matrix(requests, ages)[:, feature_columns(NUMBERS)])
    texts, place = np.unique([request.prompt or "" for request in requests], return_inverse=True)
    read = encoder.vectors(texts.tolist())
    if ranker:
        read = perceptron(ranker, read)
    return np.hstack([numbers, read[place]])


def _width(tensors: Mapping[str, np.ndarray], prefix: str, numbers: int) -> int:
    """Return how wide a vector the first layer under ``prefix`` reads beside ``numbers``."""
    return int(need_array(tensors, f"{prefix}0.weight", np.float32, 2).shape[1]) - numbers
