"""Small networks as plain arrays: standardised inputs and perceptrons, evaluated in numpy.

torch trains them (predictors.torch_loop); a loaded predictor does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from predictors.checkpoint import need_array

if TYPE_CHECKING:
    import torch

_STANDARD_BOUND = 8.0  # standardised inputs beyond it say no more than "far out"


@dataclass(frozen=True, slots=True, eq=False)
class Scaler:
    """Columns to standardised columns: ``mean`` and ``scale`` (f,) of the values that are there."""

    mean: FloatArray
    scale: FloatArray

    @classmethod
    def of(cls, rows: FloatArray) -> Scaler:
        """Return the scaler of ``rows`` (n, f); no values, or a constant, map to 0."""
        known = np.isfinite(rows)
        count = np.maximum(known.sum(axis=0), 1)
        mean = np.where(known, rows, 0.0).sum(axis=0) / count
        spread = np.sqrt((np.where(known, rows - mean, 0.0) ** 2).sum(axis=0) / count)
        return cls(mean, np.where(spread > 1e-12, spread, 1.0))

    def __call__(self, rows: FloatArray) -> FloatArray:
        """Return (n, 2 f): standardised values (0 where absent), then 1 where absent."""
        known = np.isfinite(rows)
        values = (np.where(known, rows, self.mean) - self.mean) / self.scale
        return np.hstack([np.clip(values, -_STANDARD_BOUND, _STANDARD_BOUND), ~known * 1.0])

    def to_tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays by name."""
        return {"scaler_mean": self.mean, "scaler_scale": self.scale}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, np.ndarray], width: int) -> Scaler:
        """Return the checked scaler of ``width`` columns; raises CheckpointError, InvalidInput."""
        mean = need_array(tensors, "scaler_mean", np.float64)
        scale = need_array(tensors, "scaler_scale", np.float64)
        if len(mean) != width or len(scale) != width or not (scale > 0.0).all():
            raise InvalidInput(f"the scaler must hold {width} means and {width} scales above 0")
        return cls(mean, scale)


def perceptron(layers: Mapping[str, np.ndarray], rows: FloatArray) -> FloatArray:
    """Apply linear layers ``{i}.weight`` (out, in), ``{i}.bias`` with tanh between; (n, out).

    Raises InvalidInput for rows of another width than the first layer reads: an encoder other than
    the one it was trained on gives such.
    """
    last, width = len(layers) // 2 - 1, layers["0.weight"].shape[1]
    if rows.shape[1] != width:
        raise InvalidInput(
            f"the network reads {width} numbers a request and got {rows.shape[1]}: use the encoder "
            "and the settings that it was trained with"
        )
    for index in range(last + 1):
        rows = rows @ layers[f"{index}.weight"].T.astype(np.float64) + layers[f"{index}.bias"]
        rows = np.tanh(rows) if index < last else rows
    return rows


def perceptron_from(
    tensors: Mapping[str, np.ndarray], sizes: Sequence[int], prefix: str = "net."
) -> dict[str, np.ndarray]:
    """Return the checked layers of a perceptron with these layer sizes; raises InvalidInput."""
    layers: dict[str, np.ndarray] = {}
    for index, (inner, outer) in enumerate(pairwise(sizes)):
        weight = need_array(tensors, f"{prefix}{index}.weight", np.float32, 2)
        bias = need_array(tensors, f"{prefix}{index}.bias", np.float32)
        if weight.shape != (outer, inner) or bias.shape != (outer,):
            raise InvalidInput(
                f"layer {index} has shapes {weight.shape} and {bias.shape}; it must map {inner} "
                f"to {outer}"
            )
        layers |= {f"{index}.weight": weight, f"{index}.bias": bias}
    return layers


def new_perceptron(sizes: Sequence[int]) -> torch.nn.Module:
    """Return the torch module whose state ``perceptron`` reads; the last layer starts at 0."""
    import torch

    class Perceptron(torch.nn.ModuleList):  # type: ignore[misc]
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            for layer in self[:-1]:
                rows = torch.tanh(layer(rows))
            return self[-1](rows)

    pairs = pairwise(sizes)
    module = Perceptron([torch.nn.Linear(inner, outer) for inner, outer in pairs])
    torch.nn.init.zeros_(module[-1].weight)
    return module
