"""One way to write a figure: whole or not at all, the same bytes for the same figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from contracts.errors import InvalidInput
from contracts.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METADATA = {".svg": {"Date": None}, ".png": {"Software": None}}


def save_figure(figure: Figure, path: Path) -> Path:
    """Write ``figure`` to ``path`` (.svg or .png), in a folder that is made if need be.

    Raises InvalidInput for another suffix.
    """
    import matplotlib as mpl

    if path.suffix not in _METADATA:
        raise InvalidInput(f"figure {path}: the name must end in .svg or .png")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "preemptbench"}
    with atomic_path(path) as scratch, mpl.rc_context(settings):
        figure.savefig(scratch, format=path.suffix[1:], dpi=110, metadata=_METADATA[path.suffix])
    return path
