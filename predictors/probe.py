"""``probe``: a small network on one hidden state of the served model, filtered over the run.

The idea of TRAIL (arXiv 2410.01035): the state that wrote the last token of a stride says in which
bin the remaining length lies; between refreshes the old answer is carried on by what was written,
and old and new are multiplied (Bayes). Its bins are equal and end at 512 tokens, its last one
mixes long with cut; here bins are log-spaced, one more holds all that lies beyond the cap, and a
cut run contributes the mass beyond what it lasted. ``head = "hazard"`` learns chances to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest
from predictors.base import HorizonPredictor, TrainingSet, held_out_runs
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, Provenance, need, need_array, need_list
from predictors.features import rows_by_request
from predictors.gbm_hazard import horizon_edges
from predictors.log_t import need_endings
from predictors.neural import Scaler, new_perceptron, perceptron, perceptron_from
from predictors.torch_loop import Batch, LoopSettings, train_network

if TYPE_CHECKING:
    import torch

HEADS = ("bins", "hazard")
TRUSTS = (0.0, 0.25, 0.5, 1.0)  # how much of the carried answer counts; 0: no filter
_NUM_NUMBERS = 1  # the age
_LEAST = 1e-12


class Probe(HorizonPredictor):
    """``layers`` map (log age, scaled state) to logits of the bins between ``edges``, and
    of the one beyond; ``prior`` (b + 1,) answers before the first state; ``trust`` is the filter's.
    """

    family: ClassVar[str] = "probe"

    def __init__(
        self,
        provenance: Provenance,
        edges: IntArray,
        reads: tuple[int, int, str],
        scaler: Scaler,
        layers: Mapping[str, np.ndarray],
        prior: FloatArray,
        trust: float,
    ) -> None:
        super().__init__(provenance, edges)
        self.layer, self.stride, self.head = reads
        if self.head not in HEADS:
            raise unknown_name("head", self.head, HEADS)
        if self.stride < 1 or not 0.0 <= trust <= 1.0:
            raise InvalidInput(f"stride {self.stride} and trust {trust}: at least 1, and in [0, 1]")
        if prior.shape != (len(edges) + 1,) or not prior.min() >= 0.0 or not prior.sum() > 0.0:
            raise InvalidInput(f"the prior must hold {len(edges) + 1} masses of at least 0")
        self.scaler, self.layers, self.prior, self.trust = scaler, dict(layers), prior, trust

    def residual_survival(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return P(remaining > edge), each request's states filtered up to its age.

        Raises InvalidInput for states of another layer, stride or width.
        """
        mass = np.empty((len(requests), len(self.edges) + 1))
        for request, rows in rows_by_request(requests):
            closed = ages[rows] // self.stride
            beliefs = self._beliefs(request, int(closed.max(initial=0)))
            known = np.minimum(closed, len(beliefs) - 1)
            gone = ages[rows] - known * self.stride
            mass[rows] = carried(beliefs[known], self.edges, gone)
        return np.clip(1.0 - np.cumsum(mass, axis=1)[:, :-1], 0.0, 1.0)

    def _beliefs(self, request: SignalRequest, count: int) -> FloatArray:
        """Return the filtered masses (k + 1, b + 1) after 0, 1, ... k <= ``count`` states."""
        out = [self.prior / self.prior.sum()]
        if request.hidden is not None and count:
            states = states_of(request, self.layer, self.stride, len(self.scaler.mean))[:count]
            at = (np.arange(len(states)) + 1) * self.stride
            for seen in self.said(states, at):
                out.append(self.joined(out[-1][None], seen[None])[0])
        return np.array(out)

    def said(self, states: np.ndarray, ages: IntArray) -> FloatArray:
        """Return the network's masses (n, b + 1) for ``states`` (n, w) that closed ``ages``."""
        inputs = probe_inputs(self.scaler, states, ages)
        return np.exp(log_masses(perceptron(self.layers, inputs), self.head))

    def joined(self, beliefs: FloatArray, said: FloatArray) -> FloatArray:
        """Return beliefs (n, b + 1) after one more stride each, at whose end the network said
        ``said``: what an engine calls, with one row a request whose state came in."""
        old = carried(beliefs, self.edges, np.full(len(beliefs), self.stride))
        joint = said * np.maximum(old, _LEAST) ** self.trust
        return np.asarray(joint / joint.sum(axis=1, keepdims=True))

    def settings(self) -> JsonObject:
        """See Predictor."""
        return {
            "censoring_rule": "a cut run contributes the mass beyond what it lasted",
            "layer": self.layer,
            "stride": self.stride,
            "head": self.head,
            "trust": self.trust,
            "hidden": [len(self.layers[f"{i}.bias"]) for i in range(len(self.layers) // 2 - 1)],
        }

    def tensors(self) -> dict[str, np.ndarray]:
        """See Predictor."""
        layers = {f"net.{name}": value for name, value in self.layers.items()}
        return {"edges": self.edges, "prior": self.prior, **self.scaler.to_tensors(), **layers}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """See Predictor."""
        settings, tensors = checkpoint.settings, checkpoint.tensors
        edges = need_array(tensors, "edges", np.int64)
        width = len(need_array(tensors, "scaler_mean", np.float64))
        sizes = (_NUM_NUMBERS + width, *need_list(settings, "hidden", int), len(edges) + 1)
        reads = tuple(need(settings, name, int) for name in ("layer", "stride"))
        return cls(
            checkpoint.provenance,
            edges,
            (reads[0], reads[1], need(settings, "head", str)),
            Scaler.from_tensors(tensors, width),
            perceptron_from(tensors, sizes),
            need_array(tensors, "prior", np.float64),
            need(settings, "trust", float),
        )


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """How to fit ``probe``: which collected ``layer``, the head (bins or hazard), how many bins,
    layer widths and the training."""

    layer: int = -1
    head: str = "bins"
    num_bins: int = 20
    first_edge_tokens: int = 3
    hidden: tuple[int, ...] = (128,)
    loop: LoopSettings = field(
        default_factory=lambda: LoopSettings(
            num_epochs=30, patience_epochs=4, learning_rate=1e-3, weight_decay=0.05
        )
    )

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise unknown_name("head", self.head, HEADS)
        if min(self.num_bins, self.first_edge_tokens, *self.hidden) < 1:
            raise InvalidInput(
                f"num_bins {self.num_bins}, first_edge_tokens {self.first_edge_tokens} and hidden "
                f"{self.hidden} must be at least 1 each"
            )

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> Probe:
        """Fit on ``training``; deterministic in (training, settings, seed) on one machine.

        Raises InvalidInput when no run kept hidden states, or runs kept different ones.
        """
        watched = [i for i, r in enumerate(training.requests) if r.hidden is not None]
        if not watched:
            raise InvalidInput(
                "no training run has hidden states, which probe reads: collect with "
                "--hidden-layers, keep the folder 'hidden' beside the log, or use gbm-hazard"
            )
        need_endings(training)
        first = training.requests[watched[0]].hidden
        assert first is not None
        kept = first.load()
        layer = kept.layers[-1] if self.layer == -1 else self.layer
        width = kept.states.shape[2]
        run, states, at = _rows(training, watched, layer, kept.stride, width)
        stopping = held_out_runs(training, self.loop.held_out_share, seed)
        scaler = Scaler.of(states[~stopping[run]].astype(np.float64))
        edges = horizon_edges(self.first_edge_tokens, training.cap_tokens, self.num_bins)
        left = training.output_tokens[run] - at
        layers = train_network(
            lambda: new_perceptron((_NUM_NUMBERS + width, *self.hidden, len(edges) + 1)),
            bin_losses(self.head),
            {
                "inputs": probe_inputs(scaler, states, at).astype(np.float32),
                "target": bin_targets(left, training.event_observed[run], edges),
                "weight": training.repeat_weights()[run].astype(np.float32),
            },
            stopping[run],
            self.loop,
            seed=seed,
            num_threads=num_threads,
        )
        reads = (layer, kept.stride, self.head)
        prior = _prior(training, edges)

        def with_trust(trust: float) -> Probe:
            return Probe(training.provenance, edges, reads, scaler, layers, prior, trust)

        apart = [i for i in watched if stopping[i]] or watched
        return max(map(with_trust, TRUSTS), key=lambda probe: _likelihood(probe, training, apart))


def states_of(request: SignalRequest, layer: int, stride: int, width: int) -> np.ndarray:
    """Return the states (m, width) of one layer; raises InvalidInput for another set-up."""
    assert request.hidden is not None
    kept = request.hidden.load()
    if layer not in kept.layers or kept.stride != stride or kept.states.shape[2] != width:
        raise InvalidInput(
            f"run {request.run_id!r} kept layers {', '.join(map(str, kept.layers))} of width "
            f"{kept.states.shape[2]} every {kept.stride} tokens; the probe reads layer {layer} of "
            f"width {width} every {stride}: collect with the same --hidden-layers and --stride, "
            "from the same model"
        )
    states: np.ndarray = kept.states[:, kept.layers.index(layer)]
    return states


def probe_inputs(scaler: Scaler, states: np.ndarray, ages: IntArray) -> FloatArray:
    """Return (n, 1 + w): a tenth of the log age, and the scaled state."""
    scaled = scaler(states.astype(np.float64))[:, : states.shape[1]]
    return np.column_stack([np.log1p(ages) / 10.0, scaled])


def log_masses(logits: FloatArray, head: str) -> FloatArray:
    """Return log P(remaining in bin) (n, b + 1) of a head's logits; the last bin is beyond all."""
    if head == "bins":
        peak = logits.max(axis=1, keepdims=True)
        return np.asarray(logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True)))
    ends, stays = -np.logaddexp(0.0, -logits), -np.logaddexp(0.0, logits)
    before = np.cumsum(stays, axis=1) - stays
    return np.column_stack([(before + ends)[:, :-1], before[:, -1]])


def bin_losses(head: str) -> Callable[[torch.nn.Module, Batch], torch.Tensor]:
    """Return -log of the mass that ``target`` (n, b + 1), shares of each bin, covers."""

    def losses(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
        import torch

        logits = network(batch["inputs"]).double()
        if head == "bins":
            logs = logits.log_softmax(-1)
        else:
            ends = torch.nn.functional.logsigmoid(logits)
            stays = torch.nn.functional.logsigmoid(-logits)
            before = stays.cumsum(1) - stays
            logs = torch.cat([(before + ends)[:, :-1], before[:, -1:]], dim=1)
        covered = torch.log(torch.clamp(batch["target"], min=1e-30))
        return -torch.logsumexp(logs + covered, dim=1)

    return losses


def bin_targets(left: IntArray, ended: np.ndarray, edges: IntArray) -> FloatArray:
    """Return (n, b + 1): 1 in the bin of an ending; for a cut run the share of each bin that lies
    beyond what it lasted."""
    low = np.concatenate([[0], edges]).astype(np.float64)
    high = np.concatenate([edges, [np.inf]]).astype(np.float64)
    at = left[:, None].astype(np.float64)
    inside = (low < at) & (at <= high)
    width = np.where(np.isinf(high), 1.0, high - low)
    beyond = np.where(np.isinf(high), 1.0, np.clip((high - np.maximum(low, at)) / width, 0.0, 1.0))
    return np.where(ended[:, None], inside * 1.0, beyond)


def carried(mass: FloatArray, edges: IntArray, tokens: IntArray) -> FloatArray:
    """Return masses (n, b + 1) after ``tokens`` (n,) more were written without an end: what was to
    come before is ruled out, the rest moves down. Within a bin the mass is spread evenly; beyond
    the last edge it stays."""
    knots = np.concatenate([[0.0], edges])
    total = np.cumsum(mass, axis=1)[:, :-1]
    cdf = np.concatenate([np.zeros((len(mass), 1)), total], axis=1)
    at = np.minimum(knots[None, :] + tokens[:, None], knots[-1])
    slot = np.clip(np.searchsorted(knots, at, side="right") - 1, 0, len(knots) - 2)
    part = (at - knots[slot]) / (knots[slot + 1] - knots[slot])
    below = np.take_along_axis(cdf, slot, axis=1)
    shifted = below + part * (np.take_along_axis(cdf, slot + 1, axis=1) - below)
    gone = shifted[:, :1]
    alive = np.maximum(1.0 - gone, _LEAST)
    ended = np.clip((shifted - gone) / alive, 0.0, 1.0)
    return np.diff(np.concatenate([ended, np.ones((len(mass), 1))], axis=1), axis=1)


def _rows(
    training: TrainingSet, watched: Sequence[int], layer: int, stride: int, width: int
) -> tuple[IntArray, np.ndarray, IntArray]:
    """Return (run, state, age) of every state of the watched runs that its run outlived."""
    runs, states, ages = [], [], []
    for index in watched:
        kept = states_of(training.requests[index], layer, stride, width)
        at = (np.arange(len(kept)) + 1) * stride
        alive = at < training.output_tokens[index]
        runs.append(np.full(int(alive.sum()), index))
        states.append(kept[alive])
        ages.append(at[alive])
    if not sum(map(len, runs)):
        raise InvalidInput(
            f"no run wrote more than {stride} tokens, the stride of its hidden states: collect "
            "with a smaller --stride"
        )
    return np.concatenate(runs), np.concatenate(states), np.concatenate(ages)


def _prior(training: TrainingSet, edges: IntArray) -> FloatArray:
    """Return the masses (b + 1,) of total lengths, by Kaplan and Meier."""
    from contracts.survival import kaplan_meier

    curve = kaplan_meier(training.output_tokens, training.event_observed)
    return np.maximum(-np.diff(np.concatenate([[1.0], curve(edges), [0.0]])), 0.0)


def _likelihood(probe: Probe, training: TrainingSet, chosen: Sequence[int]) -> float:
    """Return the mean log-likelihood of ``chosen`` runs, at eight ages each."""
    total, count = 0.0, 0
    for index in chosen:
        length, ended = int(training.output_tokens[index]), training.event_observed[index]
        ages = np.unique(np.linspace(0, length - 1, 8).astype(np.int64))
        alive = probe.residual_survival([training.requests[index]] * len(ages), ages)
        mass = -np.diff(np.column_stack([np.ones(len(ages)), alive, np.zeros(len(ages))]), axis=1)
        target = bin_targets(length - ages, np.full(len(ages), ended), probe.edges)
        total += float(np.log(np.maximum((mass * target).sum(axis=1), _LEAST)).sum())
        count += len(ages)
    return total / count
