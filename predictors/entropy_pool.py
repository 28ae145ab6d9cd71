"""``entropy-pool``: the prompt's states in a language model, weighted by how unsure it was there.

The idea of EGTP (arXiv 2602.11812): tokens at which the next-token law is wide say most about how
long the answer will be. Its authors classify into 20 bins with soft labels; here the head is the
censored log-t law of the other families, so that only the pooling differs from ``prompt-encoder``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from contracts.errors import InvalidInput
from predictors.base import TrainingSet
from predictors.encoders import EncoderSettings
from predictors.prompt_encoder import PromptEncoder, PromptEncoderSettings
from predictors.torch_loop import LoopSettings
from traces.bundled_models import SMOLLM2


class EntropyPool(PromptEncoder):
    """A log-t head over the entropy-weighted mean of the prompt's hidden states."""

    family: ClassVar[str] = "entropy-pool"


@dataclass(frozen=True, slots=True)
class EntropyPoolSettings:
    """How to fit ``entropy-pool``: the language model and its layer, ages a run, layer widths and
    the training."""

    encoder: EncoderSettings = field(
        default_factory=lambda: EncoderSettings(model=SMOLLM2, pooling="entropy")
    )
    num_landmarks: int = 12
    degrees: float = 3.5
    hidden: tuple[int, ...] = (32,)
    loop: LoopSettings = field(
        default_factory=lambda: LoopSettings(num_epochs=40, patience_epochs=5, weight_decay=0.03)
    )

    def __post_init__(self) -> None:
        if self.encoder.pooling != "entropy":
            raise InvalidInput(
                f"entropy-pool with pooling {self.encoder.pooling!r}: that is prompt-encoder; set "
                'pooling = "entropy"'
            )
        self._as_prompt_encoder()

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> PromptEncoder:
        """Fit on ``training``; see :meth:`PromptEncoderSettings.fit`."""
        return self._as_prompt_encoder().fit_as(EntropyPool, training, seed, num_threads)

    def _as_prompt_encoder(self) -> PromptEncoderSettings:
        return PromptEncoderSettings(
            self.encoder, "log-t", False, self.num_landmarks, self.degrees, self.hidden, self.loop
        )
