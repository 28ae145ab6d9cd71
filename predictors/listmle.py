"""ListMLE (Xia et al. 2008): the likelihood of the order of a list, under Plackett and Luce.

A batch is the list. Its longest run is to come first, then the longest of the rest, and so on; a
cut run counts with its served length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from contracts.policy import FloatArray
from predictors.base import TrainingSet
from predictors.neural import new_perceptron
from predictors.torch_loop import Batch, LoopSettings, train_network

if TYPE_CHECKING:
    import torch


def listmle_losses(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return each member's term (n,): log of the sum of exp(score) over it and all that are no
    longer, minus its own score."""
    import torch

    order = torch.argsort(lengths, descending=False, stable=True)
    reach = torch.logcumsumexp(scores[order], 0)
    out = torch.empty_like(scores)
    out[order] = reach - scores[order]
    return out


def fit_scores(
    training: TrainingSet,
    vectors: FloatArray,
    stopping: np.ndarray,
    how: tuple[tuple[int, ...], LoopSettings],
    seed: int,
    num_threads: int,
) -> dict[str, np.ndarray]:
    """Return the layers that map ``vectors`` (n, w) of the runs' prompts to a score each: higher
    means longer; no unit. ``stopping`` (n,) runs end the training early."""
    hidden, loop = how

    def losses(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return listmle_losses(network(batch["inputs"])[:, 0].double(), batch["length"])

    return train_network(
        lambda: new_perceptron((vectors.shape[1], *hidden, 1)),
        losses,
        {
            "inputs": vectors.astype(np.float32),
            "length": training.output_tokens,
            "weight": training.repeat_weights().astype(np.float32),
        },
        stopping,
        loop,
        seed=seed,
        num_threads=num_threads,
    )
