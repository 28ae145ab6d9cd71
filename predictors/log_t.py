"""``log-t``: remaining life is log-Student-t, its place and width learned from what is known.

A perceptron maps age, prompt and progress to the location and scale of log(remaining); the tail
is that of Student's t with fixed degrees of freedom, 3.5 as in TIE (arXiv 2604.00499), which fits
it to prompts only. The loss is the censored likelihood: a run that ended gives its density, a cut
run the chance to last longer. So nothing is dropped and no cap is taken for a length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest
from predictors.base import HorizonPredictor, TrainingSet, held_out_runs
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, Provenance, need, need_array, need_list
from predictors.features import FEATURE_NAMES, feature_columns, feature_matrix
from predictors.gbm_hazard import horizon_edges, landmarks
from predictors.neural import Scaler, new_perceptron, perceptron, perceptron_from
from predictors.torch_loop import Batch, LoopSettings, train_network

if TYPE_CHECKING:
    import torch

MIN_SCALE = 0.05  # of log(remaining): no answer is surer than 5 %
_NUM_EDGES = 48
CENSORING_RULE = "a cut run contributes log P(remaining > what it lasted); no length is made up"


class LogT(HorizonPredictor):
    """``layers`` map the scaled ``features`` to (location, raw scale) of log(remaining)."""

    family: ClassVar[str] = "log-t"

    def __init__(
        self,
        provenance: Provenance,
        edges: IntArray,
        features: Sequence[str],
        scaler: Scaler,
        layers: Mapping[str, np.ndarray],
        degrees: float,
    ) -> None:
        super().__init__(provenance, edges)
        if not degrees > 0.0:
            raise InvalidInput(f"degrees of freedom are {degrees}: they must be above 0")
        self.features, self._columns = tuple(features), feature_columns(features)
        self.scaler, self.layers, self.degrees = scaler, dict(layers), degrees

    def inputs(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return what the perceptron reads (n, w)."""
        return self.scaler(feature_matrix(requests, ages)[:, self._columns])

    def located(
        self, requests: Sequence[SignalRequest], ages: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return location and scale (n,) of log(remaining)."""
        heads = perceptron(self.layers, self.inputs(requests, ages))
        return heads[:, 0], MIN_SCALE + np.logaddexp(0.0, heads[:, 1])

    def residual_survival(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return P(remaining > edge) of the log-t law."""
        from scipy.special import stdtr

        location, scale = self.located(requests, ages)
        z = (np.log(self.edges) - location[:, None]) / scale[:, None]
        return np.asarray(stdtr(self.degrees, -z))

    def settings(self) -> JsonObject:
        """See Predictor."""
        return {
            "censoring_rule": CENSORING_RULE,
            "features": list(self.features),
            "degrees_of_freedom": self.degrees,
            "hidden": [len(self.layers[f"{i}.bias"]) for i in range(len(self.layers) // 2 - 1)],
        }

    def tensors(self) -> dict[str, np.ndarray]:
        """See Predictor."""
        layers = {f"net.{name}": value for name, value in self.layers.items()}
        return {"edges": self.edges, **self.scaler.to_tensors(), **layers}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """See Predictor."""
        settings, tensors = checkpoint.settings, checkpoint.tensors
        features = need_list(settings, "features", str)
        hidden = need_list(settings, "hidden", int)
        return cls(
            checkpoint.provenance,
            need_array(tensors, "edges", np.int64),
            features,
            Scaler.from_tensors(tensors, len(features)),
            perceptron_from(tensors, (2 * len(features), *hidden, 2)),
            need(settings, "degrees_of_freedom", float),
        )


def check_head(num_landmarks: int, degrees: float, hidden: Sequence[int]) -> None:
    """Raise InvalidInput unless a log-t head can be fitted so; families that share it ask here."""
    if num_landmarks < 0 or not degrees > 0.0 or min(hidden, default=1) < 1:
        raise InvalidInput(
            f"num_landmarks {num_landmarks}, degrees {degrees} and hidden {tuple(hidden)} must be "
            "at least 0, above 0 and at least 1 each"
        )


@dataclass(frozen=True, slots=True)
class LogTSettings:
    """How to fit ``log-t``: ages a run, layer widths of the perceptron, and its training."""

    num_landmarks: int = 12
    degrees: float = 3.5
    hidden: tuple[int, ...] = (32, 32)
    features: tuple[str, ...] = FEATURE_NAMES
    loop: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        feature_columns(self.features)
        if not self.features:
            raise InvalidInput("log-t features are empty: name at least one, such as log_age")
        check_head(self.num_landmarks, self.degrees, self.hidden)

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> LogT:
        """Fit on ``training``; deterministic in (training, settings, seed) on one machine."""
        need_endings(training)
        run, ages = landmarks(training, self.num_landmarks, seed)
        known = feature_matrix([training.requests[i] for i in run.tolist()], ages)
        known = known[:, feature_columns(self.features)]
        need_some_values(known, self.features)
        stopping = held_out_runs(training, self.loop.held_out_share, seed)[run]
        scaler = Scaler.of(known[~stopping])
        layers = fit_log_t(
            training,
            (run, ages),
            scaler(known),
            (self.hidden, self.degrees, self.loop),
            stopping,
            seed=seed,
            num_threads=num_threads,
        )
        edges = horizon_edges(1, training.cap_tokens, _NUM_EDGES)
        return LogT(training.provenance, edges, self.features, scaler, layers, self.degrees)


def fit_log_t(
    training: TrainingSet,
    at: tuple[IntArray, IntArray],
    inputs: FloatArray,
    how: tuple[tuple[int, ...], float, LoopSettings],
    stopping: np.ndarray,
    *,
    seed: int,
    num_threads: int,
) -> dict[str, np.ndarray]:
    """Return the layers that map ``inputs`` (n, w), what was known ``at`` (run, age), to the
    log-t law of what was left; ``how`` is (layer widths, degrees of freedom, loop)."""
    run, ages = at
    hidden, degrees, loop = how
    observed = training.event_observed[run]
    left = (training.output_tokens[run] - ages).astype(np.float64)
    return train_network(
        lambda: _network((inputs.shape[1], *hidden, 2), np.log(left)),
        log_t_losses(degrees),
        {
            "inputs": inputs.astype(np.float32),
            # whole tokens: an ending is somewhere in the last one, a cut run outlived it
            "log_left": np.log(left - 0.5 * observed),
            "observed": observed,
            "weight": training.repeat_weights()[run].astype(np.float32),
        },
        stopping,
        loop,
        seed=seed,
        num_threads=num_threads,
    )


def need_endings(training: TrainingSet) -> None:
    """Raise InvalidInput when no run was seen to end: a length law cannot be learned from cuts."""
    if not training.event_observed.any():
        raise InvalidInput(
            f"none of {len(training.requests)} training runs was seen to end below its cap: "
            "lengths need endings; collect with a higher cap"
        )


def need_some_values(known: FloatArray, features: Sequence[str]) -> None:
    """Raise InvalidInput when every one of ``features`` is absent in every row."""
    if known.size and not np.isfinite(known).any():
        raise InvalidInput(
            f"no training run has any of the features {', '.join(features)}: collect with "
            "--progress, keep the prompts, or name other features in the recipe"
        )


def _network(sizes: Sequence[int], log_left: FloatArray) -> torch.nn.Module:
    """Return a perceptron that starts at the marginal location and scale of the rows."""
    import torch

    module = new_perceptron(sizes)
    with torch.no_grad():
        spread = max(float(log_left.std()), 2.0 * MIN_SCALE) - MIN_SCALE
        start = [float(log_left.mean()), float(np.log(np.expm1(spread)))]
        list(module.parameters())[-1].copy_(torch.tensor(start))
    return module


def log_t_losses(degrees: float) -> Any:
    """Return the loss of a batch: -log density of an ending, -log survival of a cut run."""
    import torch
    from scipy.special import gammaln, stdtr

    constant = float(
        gammaln((degrees + 1) / 2) - gammaln(degrees / 2) - 0.5 * np.log(degrees * np.pi)
    )

    def log_density(z: torch.Tensor) -> torch.Tensor:
        return constant - 0.5 * (degrees + 1) * torch.log1p(z * z / degrees)

    class LogSurvival(torch.autograd.Function):  # type: ignore[misc]
        """log P(t > z): torch has no Student distribution function, scipy has."""

        @staticmethod
        def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
            alive = torch.as_tensor(stdtr(degrees, -z.detach().cpu().numpy()), device=z.device)
            value = torch.log(alive)
            ctx.save_for_backward(z, value)
            return value

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            z, value = ctx.saved_tensors
            return -grads[0] * torch.exp(log_density(z) - value)

    def losses(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
        heads = network(batch["inputs"]).double()
        scale = MIN_SCALE + torch.nn.functional.softplus(heads[:, 1])
        z = (batch["log_left"] - heads[:, 0]) / scale
        ended = -log_density(z) + torch.log(scale)
        # log(0) cannot happen: the t tail is a power, and |z| is far below its underflow
        return torch.where(batch["observed"], ended, -LogSurvival.apply(z))

    return losses
