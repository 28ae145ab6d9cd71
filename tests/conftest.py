"""Shared settings: hypothesis is deterministic, and nothing here reaches a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("default")
# small models and small fits: a second thread costs more in waiting than it brings
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


def public_data_dir() -> Path:
    """Return the folder of public data sets: $PREEMPTBENCH_DATA, else ../shared/data."""
    default = Path(__file__).parents[2] / "shared" / "data"
    return Path(os.environ.get("PREEMPTBENCH_DATA", default))


@pytest.fixture
def public_data() -> Path:
    """The public data sets, or a skip that says where they were looked for."""
    folder = public_data_dir()
    if not folder.is_dir():
        pytest.skip(f"public data not found in {folder}: set PREEMPTBENCH_DATA to run this test")
    return folder
