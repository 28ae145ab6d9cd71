"""``gru-progress``: a recurrent net over the progress records, one hazard head at every record.

A GRU reads the records of a run one by one, from a state made of the prompt's features; from the
state and the age, a linear head gives the log-odds to end in each bin of remaining life. The loss
is that of ``gbm-hazard``: discrete-time hazards, where a cut run contributes the bins it survived.
Inference is numpy: one state of ``hidden`` numbers a request, updated once a record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.runs import ProgressRecord
from contracts.settings import require_at_least
from contracts.signals import NUM_PROGRESS, SignalRequest
from predictors.base import HorizonPredictor, TrainingSet, held_out_runs
from predictors.card import JsonObject
from predictors.checkpoint import Checkpoint, Provenance, need, need_array
from predictors.features import PROMPT_FEATURES, feature_columns, feature_matrix, rows_by_request
from predictors.gbm_hazard import hazard_rows, horizon_edges, landmarks
from predictors.log_t import need_endings
from predictors.neural import Scaler
from predictors.torch_loop import Batch, LoopSettings, train_network

if TYPE_CHECKING:
    import torch

_PROMPT, _AGE = feature_columns(PROMPT_FEATURES), feature_columns(("log_age",))
_INPUTS, _WIDTH = 2 * NUM_PROGRESS, 2 * len(PROMPT_FEATURES)  # scaled values, then what is absent
_MAX_HIDDEN = 1024
CENSORING_RULE = (
    "a cut run contributes the bins it fully survived; a bin reaching beyond the collection cap "
    "contributes for nobody"
)


class GruProgress(HorizonPredictor):
    """``reads`` is (stride of the records, how many are read at most); ``weights`` are those of
    :func:`_shapes`; ``scalers`` standardise records, prompts and ages."""

    family: ClassVar[str] = "gru-progress"

    def __init__(
        self,
        provenance: Provenance,
        edges: IntArray,
        reads: tuple[int, int],
        scalers: Mapping[str, Scaler],
        weights: Mapping[str, np.ndarray],
    ) -> None:
        super().__init__(provenance, edges)
        self.stride, self.max_records = reads
        if min(reads) < 1:
            raise InvalidInput(f"record stride and max_records are {reads}: at least 1 each")
        self.scalers = dict(scalers)
        self.weights = {name: array.astype(np.float64) for name, array in weights.items()}

    def first_state(self, prompts: FloatArray) -> FloatArray:
        """Return the state (n, hidden) before any record, from prompt features (n, f)."""
        w = self.weights
        return np.tanh(self.scalers["prompt"](prompts) @ w["start.weight"].T + w["start.bias"])

    def next_state(self, state: FloatArray, records: FloatArray) -> FloatArray:
        """Return the state (n, hidden) after one more record each (n, 6): O(1) a request."""
        w, size = self.weights, state.shape[1]
        seen = self.scalers["record"](records) @ w["cell.weight_ih"].T + w["cell.bias_ih"]
        kept = state @ w["cell.weight_hh"].T + w["cell.bias_hh"]
        reset, update = np.split(_sigmoid(seen[:, : 2 * size] + kept[:, : 2 * size]), 2, axis=1)
        fresh = np.tanh(seen[:, 2 * size :] + reset * kept[:, 2 * size :])
        return np.asarray((1.0 - update) * fresh + update * state)

    def survival_of(self, state: FloatArray, ages: IntArray) -> FloatArray:
        """Return P(remaining > edge) (n, b) from states and ages."""
        age = self.scalers["age"](np.log1p(ages.astype(np.float64))[:, None])[:, :1]
        log_odds = np.hstack([state, age]) @ self.weights["head.weight"].T
        log_odds += self.weights["head.bias"]
        return np.asarray(np.exp(-np.cumsum(np.logaddexp(0.0, log_odds), axis=1)))

    def residual_survival(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Run each request's records once, all requests side by side; see HorizonPredictor.

        Raises InvalidInput for records of another stride than it was trained on.
        """
        groups = rows_by_request(requests)
        at_start = np.zeros(len(groups), dtype=np.int64)
        prompts = feature_matrix([request for request, _ in groups], at_start)[:, _PROMPT]
        state = self.first_state(prompts)
        closed = np.zeros(len(requests), dtype=np.int64)
        owner = np.empty(len(requests), dtype=np.int64)
        for index, (request, rows) in enumerate(groups):
            owner[rows] = index
            if request.progress is not None:
                _check_stride(request, self.stride)
                most = min(len(request.progress.values), self.max_records)
                closed[rows] = np.minimum(ages[rows] // self.stride, most)
        states = np.empty((len(requests), state.shape[1]))
        deepest = np.zeros(len(groups), dtype=np.int64)
        np.maximum.at(deepest, owner, closed)
        by_depth = np.argsort(closed, kind="stable")
        reached = np.searchsorted(closed[by_depth], np.arange(closed.max(initial=0) + 2))
        for depth in range(len(reached) - 1):
            here = by_depth[reached[depth] : reached[depth + 1]]
            states[here] = state[owner[here]]
            going = np.flatnonzero(deepest > depth)
            if going.size:
                records = [_record(groups[i][0], depth) for i in going.tolist()]
                state[going] = self.next_state(state[going], np.array(records))
        return self.survival_of(states, ages)

    def settings(self) -> JsonObject:
        """See Predictor."""
        hidden = self.weights["cell.weight_hh"].shape[1]
        reads: JsonObject = {"stride": self.stride, "max_records": self.max_records}
        return {"censoring_rule": CENSORING_RULE, "hidden": hidden, **reads}

    def tensors(self) -> dict[str, np.ndarray]:
        """See Predictor."""
        out = {"edges": self.edges}
        out |= {f"net.{name}": array.astype(np.float32) for name, array in self.weights.items()}
        for name, scaler in self.scalers.items():
            out |= {f"{name}.{key}": array for key, array in scaler.to_tensors().items()}
        return out

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """See Predictor."""
        settings, tensors = checkpoint.settings, checkpoint.tensors
        edges = need_array(tensors, "edges", np.int64)
        hidden = need(settings, "hidden", int)
        if not 1 <= hidden <= _MAX_HIDDEN:
            raise InvalidInput(f"hidden is {hidden}: it must be between 1 and {_MAX_HIDDEN}")
        weights = {}
        for name, shape in _shapes(hidden, len(edges)).items():
            array = need_array(tensors, f"net.{name}", np.float32, len(shape))
            if array.shape != shape:
                raise InvalidInput(f"net.{name} has shape {array.shape}; it must have {shape}")
            weights[name] = array
        widths = {"record": NUM_PROGRESS, "prompt": len(PROMPT_FEATURES), "age": 1}
        scalers = {
            name: Scaler.from_tensors(
                {key.removeprefix(f"{name}."): array for key, array in tensors.items()}, width
            )
            for name, width in widths.items()
        }
        reads = need(settings, "stride", int), need(settings, "max_records", int)
        return cls(checkpoint.provenance, edges, reads, scalers, weights)


@dataclass(frozen=True, slots=True)
class GruProgressSettings:
    """How to fit ``gru-progress``: ages a run, bins of remaining life, width of the state and the
    training. A run is read up to its first ``max_records`` records."""

    num_landmarks: int = 12
    num_bins: int = 16
    first_edge_tokens: int = 3
    hidden: int = 24
    max_records: int = 512
    loop: LoopSettings = field(
        default_factory=lambda: LoopSettings(num_epochs=60, patience_epochs=8, batch_rows=32)
    )

    def __post_init__(self) -> None:
        require_at_least(
            self, num_landmarks=0, num_bins=1, first_edge_tokens=1, hidden=1, max_records=1
        )

    def fit(self, training: TrainingSet, *, seed: int = 0, num_threads: int = 1) -> GruProgress:
        """Fit on ``training``; deterministic in (training, settings, seed) on one machine.

        Raises InvalidInput without progress records, or with records of different strides.
        """
        need_endings(training)
        stride = _common_stride(training)
        edges = horizon_edges(self.first_edge_tokens, training.cap_tokens, self.num_bins)
        stopping = held_out_runs(training, self.loop.held_out_share, seed)
        scalers, rows = self._rows(training, stride, edges, stopping, seed)
        weights = train_network(
            lambda: _network(self.hidden, len(edges)),
            _row_losses,
            rows,
            stopping,
            self.loop,
            seed=seed,
            num_threads=num_threads,
        )
        return GruProgress(training.provenance, edges, (stride, self.max_records), scalers, weights)

    def _rows(
        self,
        training: TrainingSet,
        stride: int,
        edges: IntArray,
        stopping: np.ndarray,
        seed: int,
    ) -> tuple[dict[str, Scaler], dict[str, np.ndarray]]:
        """Return the scalers and one row a run: its records, and for each of its landmarks which
        record it stands at, the bins it was at risk in and the bin it ended in."""
        run, ages = landmarks(training, self.num_landmarks, seed)
        owner, bins, ended = hazard_rows(training, run, ages, edges)
        prompts = feature_matrix(training.requests, np.zeros(len(training.requests), np.int64))
        prompts = prompts[:, _PROMPT]
        records = np.full((len(training.requests), self.max_records, NUM_PROGRESS), np.nan)
        for row, request in enumerate(training.requests):
            if request.progress is not None:
                part = request.progress.values[: self.max_records]
                records[row, : len(part)] = part
        records = records[:, : 1 + int(min(self.max_records, ages.max() // stride))]
        log_age = np.log1p(ages.astype(np.float64))[:, None]
        scalers = {
            "record": Scaler.of(records[~stopping].reshape(-1, NUM_PROGRESS)),
            "prompt": Scaler.of(prompts[~stopping]),
            "age": Scaler.of(log_age),
        }
        slot = _slots(run)
        shape = (len(training.requests), self.num_landmarks + 1)
        at, age = np.zeros(shape, np.int64), np.zeros((*shape, 1), np.float32)
        at[run, slot] = np.minimum(ages // stride, records.shape[1])
        age[run, slot] = scalers["age"](log_age)[:, :1]
        at_risk, ends = np.zeros((2, *shape, len(edges)), dtype=np.float32)
        at_risk[run[owner], slot[owner], bins] = 1.0
        ends[run[owner], slot[owner], bins] = ended
        flat = scalers["record"](records.reshape(-1, NUM_PROGRESS))
        return scalers, {
            "records": flat.reshape(*records.shape[:2], _INPUTS).astype(np.float32),
            "prompt": scalers["prompt"](prompts).astype(np.float32),
            "at": at,
            "age": age,
            "at_risk": at_risk,
            "ends": ends,
            "weight": training.repeat_weights().astype(np.float32),
        }


def _network(hidden: int, num_bins: int) -> torch.nn.Module:
    import torch

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.start = torch.nn.Linear(_WIDTH, hidden)
            self.cell = torch.nn.GRUCell(_INPUTS, hidden)
            self.head = torch.nn.Linear(hidden + 1, num_bins)
            torch.nn.init.constant_(self.head.bias, -2.0)  # an early guess: most bins are survived

        def forward(self, batch: Batch) -> torch.Tensor:
            """Return log-odds (n, landmarks, bins) at the record each landmark stands at."""
            state = torch.tanh(self.start(batch["prompt"]))
            states = [state]
            for step in range(int(batch["at"].max())):
                state = self.cell(batch["records"][:, step], state)
                states.append(state)
            path = torch.stack(states, dim=1)
            index = batch["at"].unsqueeze(-1).expand(-1, -1, path.shape[-1])
            return self.head(torch.cat([path.gather(1, index), batch["age"]], dim=-1))

    return Net()


def _row_losses(network: Any, batch: Batch) -> torch.Tensor:
    """Return each run's negative log-likelihood, summed over its landmarks: a run counts by how
    often it was met, as in ``gbm-hazard``, never by 1 / its length."""
    import torch

    log_odds = network(batch)
    each = torch.nn.functional.binary_cross_entropy_with_logits(
        log_odds.float(), batch["ends"], batch["at_risk"], reduction="none"
    )
    return each.sum(dim=(1, 2))


def _shapes(hidden: int, num_bins: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights, as torch's Linear and GRUCell have them."""
    return {
        "start.weight": (hidden, _WIDTH),
        "start.bias": (hidden,),
        "cell.weight_ih": (3 * hidden, _INPUTS),
        "cell.weight_hh": (3 * hidden, hidden),
        "cell.bias_ih": (3 * hidden,),
        "cell.bias_hh": (3 * hidden,),
        "head.weight": (num_bins, hidden + 1),
        "head.bias": (num_bins,),
    }


def _common_stride(training: TrainingSet) -> int:
    tracks = [request.progress for request in training.requests if request.progress is not None]
    strides = {track.stride for track in tracks}
    if len(strides) != 1 or not any(len(track.values) for track in tracks):
        raise InvalidInput(
            f"training runs have progress records of strides {sorted(strides) or '(none)'}; "
            f"gru-progress reads {', '.join(ProgressRecord._fields)} at one stride: collect with "
            "one --progress stride, or use gbm-hazard"
        )
    return int(strides.pop())


def _check_stride(request: SignalRequest, stride: int) -> None:
    if request.progress is not None and request.progress.stride != stride:
        raise InvalidInput(
            f"run {request.run_id!r} has progress every {request.progress.stride} tokens; this "
            f"gru-progress was trained on records of {stride}: collect with that stride"
        )


def _record(request: SignalRequest, index: int) -> FloatArray:
    assert request.progress is not None
    record: FloatArray = request.progress.values[index]
    return record


def _slots(run: IntArray) -> IntArray:
    """Return each landmark's number inside its run; ``run`` rises."""
    first = np.searchsorted(run, run, side="left")
    return np.arange(len(run)) - first


def _sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))
