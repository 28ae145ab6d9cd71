"""The device that is timed: which, and how much of its memory is free."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from contracts.errors import InvalidInput, unknown_name

_MEMINFO = Path("/proc/meminfo")


def resolve_device(device: str) -> str:
    """Return ``device`` as torch names it; ``auto`` is a GPU where there is one.

    Raises InvalidInput for a device that is not there.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cuda", "cpu") or (index and not index.isdecimal()):
        raise unknown_name("device", device, ("auto", "cuda", "cuda:0", "cpu"))
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            f"device {device!r}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA "
            "devices; install a CUDA build of torch and check nvidia-smi, or use --device cpu"
        )
    return f"cuda:{int(index or 0)}" if kind == "cuda" else kind


def free_bytes(device: str, share: float) -> int:
    """Return ``share`` of the bytes that are free on ``device`` now."""
    if not 0.0 < share <= 1.0:
        raise InvalidInput(f"memory share {share}: give a share in (0, 1]")
    if device.startswith("cuda"):
        import torch

        free = int(torch.cuda.mem_get_info(device)[0])
        return math.floor(share * free)
    return math.floor(share * _available_bytes())


def _available_bytes() -> int:
    """Return what Linux could give without swapping; elsewhere, what is unused."""
    if _MEMINFO.exists():
        found = re.search(r"^MemAvailable: +(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
        if found:
            return 1024 * int(found[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
