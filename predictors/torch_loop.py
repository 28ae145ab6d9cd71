"""The one training loop the torch families share.

Training runs through HF Accelerate (one CPU, one GPU or many; bfloat16 on request) with early
stopping on held-out prompts. The order of rows is keyed by (seed, epoch) and the state after each
epoch lies in one safetensors file, so an interrupted fit resumes to the same weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from contracts.errors import InvalidInput, missing_dependency
from contracts.files import atomic_path
from contracts.policy import IntArray
from contracts.randomness import keyed_generator
from contracts.settings import require

if TYPE_CHECKING:
    import torch

STATE_FILE = "training-state.safetensors"
Batch: TypeAlias = "Mapping[str, torch.Tensor]"


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How a network is trained. ``held_out_share`` of the prompts stop the training early, after
    ``patience_epochs`` without a better loss; ``state_dir`` (empty: none) keeps what a resumed fit
    needs; ``mixed_precision`` is no or bf16; ``tracker`` (empty: none) hears the held-out
    loss after each epoch: tensorboard, wandb, mlflow or what else accelerate knows by name."""

    num_epochs: int = 60
    patience_epochs: int = 8
    batch_rows: int = 256
    learning_rate: float = 3e-3
    weight_decay: float = 1e-3
    held_out_share: float = 0.15
    mixed_precision: str = "no"
    state_dir: str = ""
    tracker: str = ""

    def __post_init__(self) -> None:
        require(
            self,
            ("num_epochs", self.num_epochs >= 1, "at least 1"),
            ("patience_epochs", self.patience_epochs >= 1, "at least 1"),
            ("batch_rows", self.batch_rows >= 1, "at least 1"),
            ("learning_rate", 0.0 < self.learning_rate <= 1.0, "above 0 and at most 1"),
            ("weight_decay", self.weight_decay >= 0.0, "at least 0"),
            ("held_out_share", 0.0 < self.held_out_share < 1.0, "between 0 and 1"),
            ("mixed_precision", self.mixed_precision in ("no", "bf16"), "no or bf16"),
        )


@dataclass(slots=True, eq=False)
class _Progress:
    """Where a training stands: epochs done, and the best weights so far."""

    epoch: int = 0
    best_epoch: int = 0
    best_loss: float = float("inf")
    best: dict[str, np.ndarray] = field(default_factory=dict)


def train_network(
    build: Callable[[], torch.nn.Module],
    row_losses: Callable[[torch.nn.Module, Batch], torch.Tensor],
    rows: Mapping[str, np.ndarray],
    held_out: np.ndarray,
    settings: LoopSettings,
    *,
    seed: int,
    num_threads: int = 1,
) -> dict[str, np.ndarray]:
    """Return the weights (float32, by name) with the lowest held-out loss.

    ``rows`` are arrays with one first axis, among them ``weight`` (n,); ``row_losses`` gives a
    loss for each row of a batch of them. Same weights for the same input on one machine, whether
    interrupted or not. Raises InvalidInput when a side is empty, the loss is not finite, or
    ``state_dir`` holds another training; MissingDependency.
    """
    try:
        import accelerate  # noqa: F401
        import torch
    except ImportError as error:
        raise missing_dependency(str(error.name), "train", "training a network") from None
    if held_out.all() or not held_out.any():
        raise InvalidInput("training and held-out rows must both exist: use more prompts or runs")
    accelerator = _accelerator(settings)
    with _threads(num_threads), torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build()
        adam = torch.optim.AdamW(
            network.parameters(), settings.learning_rate, weight_decay=settings.weight_decay
        )
        state = _State(settings, network, adam, _fingerprint(rows, held_out, settings, seed))
        progress = state.read()
        network, adam = accelerator.prepare(network, adam)
        data = {name: torch.as_tensor(array).to(accelerator.device) for name, array in rows.items()}
        for epoch in _epochs(progress, settings):
            order = np.flatnonzero(~held_out)
            order = order[keyed_generator(seed, "row-order", epoch).permutation(len(order))]
            torch.manual_seed(seed + epoch)
            _one_epoch(accelerator, network, adam, data, order, row_losses, settings)
            loss = _mean_loss(network, data, np.flatnonzero(held_out), row_losses, settings)
            accelerator.log({"held_out_loss": loss}, step=epoch + 1)
            progress.epoch = epoch + 1
            if loss < progress.best_loss:
                progress.best_loss, progress.best_epoch = loss, epoch + 1
                progress.best = weights_of(accelerator.unwrap_model(network))
            if accelerator.is_main_process:
                state.write(accelerator.unwrap_model(network), progress)
    accelerator.end_training()
    if not progress.best:
        raise InvalidInput(
            "the held-out loss was never finite: lower learning_rate, or look for wild features"
        )
    return progress.best


def _accelerator(settings: LoopSettings) -> Any:
    """Return the Accelerator, its tracker started; raises InvalidInput for an unknown tracker."""
    import torch
    from accelerate import Accelerator

    cpu = not torch.cuda.is_available()
    if not settings.tracker:
        return Accelerator(cpu=cpu)
    place = settings.state_dir or "."
    try:
        accelerator = Accelerator(cpu=cpu, log_with=settings.tracker, project_dir=place)
    except ValueError as error:
        raise InvalidInput(f"tracker {settings.tracker!r}: {error}") from None
    if not accelerator.log_with:
        raise InvalidInput(
            f"tracker {settings.tracker!r} is not installed: install its package, or leave it out"
        )
    config = asdict(settings)
    accelerator.init_trackers("preemptbench", config=config)
    return accelerator


def weights_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return a module's weights as float32 arrays."""
    return {
        name: value.detach().float().cpu().numpy().copy()
        for name, value in module.state_dict().items()
    }


def _epochs(progress: _Progress, settings: LoopSettings) -> Iterator[int]:
    """Count epochs on from ``progress`` until patience or their number ends; shown on stderr."""
    from tqdm import tqdm

    with tqdm(total=settings.num_epochs, initial=progress.epoch, unit="epoch", disable=None) as bar:
        while progress.epoch < settings.num_epochs:
            if progress.epoch - progress.best_epoch >= settings.patience_epochs:
                break
            yield progress.epoch
            bar.update()
            bar.set_postfix(held_out_loss=f"{progress.best_loss:.4f}")


def _one_epoch(
    accelerator: Any,
    network: torch.nn.Module,
    adam: torch.optim.Optimizer,
    data: Batch,
    order: IntArray,
    row_losses: Callable[[torch.nn.Module, Batch], torch.Tensor],
    settings: LoopSettings,
) -> None:
    import torch
    from torch.utils.data import DataLoader

    # accelerate hands each process its share of the batches
    loader = accelerator.prepare(DataLoader(torch.as_tensor(order), settings.batch_rows))
    network.train()
    for chosen in loader:
        batch = {name: values[chosen] for name, values in data.items()}
        # not accelerator's own autocast: its precision is one for the whole process
        with torch.autocast(
            accelerator.device.type, torch.bfloat16, enabled=settings.mixed_precision == "bf16"
        ):
            losses = row_losses(network, batch)
        weight = batch["weight"]
        adam.zero_grad()
        accelerator.backward((weight * losses).sum() / weight.sum())
        accelerator.clip_grad_norm_(network.parameters(), 1.0)
        adam.step()


def _mean_loss(
    network: torch.nn.Module,
    data: Batch,
    chosen: IntArray,
    row_losses: Callable[[torch.nn.Module, Batch], torch.Tensor],
    settings: LoopSettings,
) -> float:
    import torch

    network.eval()
    total = weights = 0.0
    with torch.no_grad():
        for start in range(0, len(chosen), settings.batch_rows):
            part = torch.as_tensor(chosen[start : start + settings.batch_rows])
            batch = {name: values[part.to(values.device)] for name, values in data.items()}
            weight = batch["weight"].double()
            total += float((weight * row_losses(network, batch).double()).sum())
            weights += float(weight.sum())
    return total / weights


class _State:
    """What lies in ``state_dir`` between epochs: weights, Adam's moments, and where it stands."""

    def __init__(
        self,
        settings: LoopSettings,
        network: torch.nn.Module,
        adam: torch.optim.Optimizer,
        fingerprint: str,
    ) -> None:
        self.path = Path(settings.state_dir) / STATE_FILE if settings.state_dir else None
        self.network, self.adam, self.fingerprint = network, adam, fingerprint

    def write(self, network: torch.nn.Module, progress: _Progress) -> None:
        if self.path is None:
            return
        from safetensors.numpy import save

        arrays = {f"net.{name}": value for name, value in weights_of(network).items()}
        arrays |= {f"best.{name}": value for name, value in progress.best.items()}
        for index, moments in self.adam.state_dict()["state"].items():
            for name, value in moments.items():
                arrays[f"adam.{index}.{name}"] = value.detach().cpu().numpy()
        where = {"epoch": progress.epoch, "best_epoch": progress.best_epoch}
        notes = {name: str(value) for name, value in where.items()}
        notes |= {"best_loss": repr(progress.best_loss), "fingerprint": self.fingerprint}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.path) as scratch:
            scratch.write_bytes(save(arrays, notes))

    def read(self) -> _Progress:
        """Put network and optimizer back where they stood; a fresh progress if nothing is there."""
        if self.path is None or not self.path.exists():
            return _Progress()
        import torch
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="np") as file:
                notes = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InvalidInput(f"{self.path} cannot be read ({error}): delete it") from None
        if notes.get("fingerprint") != self.fingerprint:
            raise InvalidInput(
                f"{self.path} belongs to a training with other rows, settings or seed: name "
                "another state_dir, or delete it"
            )
        self.network.load_state_dict(
            {name: torch.as_tensor(value) for name, value in _under(arrays, "net.").items()}
        )
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in _under(arrays, "adam.").items():
            index, what = name.split(".", 1)
            moments.setdefault(int(index), {})[what] = torch.as_tensor(value)
        groups = self.adam.state_dict()["param_groups"]
        self.adam.load_state_dict({"state": moments, "param_groups": groups})
        best = _under(arrays, "best.")
        return _Progress(
            int(notes["epoch"]), int(notes["best_epoch"]), float(notes["best_loss"]), best
        )


def _under(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name[len(prefix) :]: a for name, a in arrays.items() if name.startswith(prefix)}


def _fingerprint(
    rows: Mapping[str, np.ndarray], held_out: np.ndarray, settings: LoopSettings, seed: int
) -> str:
    """Return a digest of all that decides the result but the number of epochs."""
    knobs = replace(settings, num_epochs=1, state_dir="", tracker="")
    digest = hashlib.sha256(repr((knobs, seed)).encode())
    for name in sorted(rows):
        digest.update(name.encode() + np.ascontiguousarray(rows[name]).tobytes())
    digest.update(held_out.tobytes())
    return digest.hexdigest()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
