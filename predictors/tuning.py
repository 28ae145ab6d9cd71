"""Training an encoder's own weights, with the small head that reads it, on whole prompts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from contracts.policy import IntArray
from predictors.base import TrainingSet
from predictors.encoders import Encoder
from predictors.listmle import listmle_losses
from predictors.log_t import log_t_losses
from predictors.neural import new_perceptron
from predictors.torch_loop import Batch, LoopSettings, train_network

if TYPE_CHECKING:
    import torch

_DEGREES = 3.5


def fit_encoder(
    encoder: Encoder,
    training: TrainingSet,
    stopping: np.ndarray,
    loss: str,
    how: tuple[tuple[int, ...], LoopSettings],
    seed: int,
    num_threads: int,
) -> dict[str, np.ndarray]:
    """Return the encoder's weights (float32, by name) after training it on total lengths, under
    the ``log-t`` or the ``listmle`` loss; the head that helped is thrown away."""
    import torch

    hidden, loop = how
    ids, mask = _token_rows(encoder, [request.prompt or "" for request in training.requests])

    class Tuned(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = copy.deepcopy(encoder.model)
            self.head = new_perceptron((encoder.width, *hidden, 2))
            self.reader = Encoder(encoder.how, encoder.tokenizer, self.body)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.head(self.reader.pooled(rows[:, 0], rows[:, 1]))

    log_t = log_t_losses(_DEGREES)

    def losses(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if loss == "listmle":
            return listmle_losses(network(batch["inputs"])[:, 0].double(), batch["length"])
        terms: torch.Tensor = log_t(network, batch)
        return terms

    weights = train_network(
        Tuned,
        losses,
        {
            "inputs": np.stack([ids, mask], axis=1),
            "length": training.output_tokens,
            "log_left": np.log(training.output_tokens - 0.5 * training.event_observed),
            "observed": training.event_observed,
            "weight": training.repeat_weights().astype(np.float32),
        },
        stopping,
        loop,
        seed=seed,
        num_threads=num_threads,
    )
    start = len("body.")
    return {name[start:]: value for name, value in weights.items() if name.startswith("body.")}


def _token_rows(encoder: Encoder, texts: list[str]) -> tuple[IntArray, IntArray]:
    """Return token ids and mask (n, t), padded on the right; an empty text reads one token."""
    rows = [encoder.ids(text) or [0] for text in texts]
    longest = max(map(len, rows))
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, found in enumerate(rows):
        ids[row, : len(found)], mask[row, : len(found)] = found, 1
    return ids, mask
