"""Hidden states beside a run log: one small safetensors file a run, float16, never in the table.

``hidden/ab/RUN_ID.safetensors`` holds ``states`` of shape (records, layers, hidden size). Row j is
the state that wrote token (j + 1) * stride: it has read every token before that one and no later
one, so a probe on row j may be asked at age (j + 1) * stride. Layer 0 is the embedding, the last
one comes after the final norm. Files are whole or absent, and written before the run that
names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from contracts.errors import InvalidInput
from contracts.files import atomic_path
from oracles.backend import DecodeSettings, HalfArray
from oracles.models import LoadedModel
from oracles.shards import disk_refused

_HALF_BYTES = 2


def hidden_bytes_at_most(lm: LoadedModel, num_runs: int, settings: DecodeSettings) -> int:
    """Return the bytes of hidden states if every run reached its cap."""
    records = settings.max_new_tokens // settings.progress_stride
    return num_runs * records * len(settings.hidden_layers) * lm.hidden_size * _HALF_BYTES


def save_hidden(
    folder: Path, run_id: str, states: HalfArray, layers: Sequence[int], stride: int
) -> str:
    """Write one run's states and return its ``hidden_ref``, a path relative to ``folder``.

    Raises CollectionStopped when the disk takes no more.
    """
    from safetensors.numpy import save

    ref = f"hidden/{run_id[:2]}/{run_id}.safetensors"
    about = {"layers": ",".join(map(str, layers)), "stride": str(stride), "run_id": run_id}
    try:
        with atomic_path(folder / ref) as scratch:
            scratch.write_bytes(save({"states": states}, metadata=about))
    except OSError as error:
        raise disk_refused(folder / ref, error) from error
    return ref


def read_hidden(folder: Path, hidden_ref: str) -> HalfArray:
    """Return the states (records, layers, hidden size) that a run of ``folder`` names."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = (folder / hidden_ref).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        raise InvalidInput(
            f"hidden_ref {hidden_ref!r} names no file inside {folder}: keep the folder 'hidden' "
            "beside the run log"
        )
    try:
        states: HalfArray = load_file(path)["states"]
    except (SafetensorError, KeyError) as error:
        raise InvalidInput(f"{path} holds no hidden states: {error}; collect it again") from None
    return states
