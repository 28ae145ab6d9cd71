"""Files whole or absent, and what a killed writer leaves."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from contracts.files import atomic_path, atomic_write_text, remove_leftovers

KILLED = """
import os, signal, sys
from pathlib import Path
from contracts.files import atomic_path
with atomic_path(Path(sys.argv[1])) as scratch:
    scratch.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_while_writing(path: Path) -> Path:
    """Return the scratch file of a writer that was killed."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -9
    (scratch,) = path.parent.glob(".*.tmp")
    return scratch


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "cells.parquet"
    atomic_write_text(path, "whole")
    scratch = killed_while_writing(path)
    began_s = scratch.stat().st_mtime
    assert remove_leftovers([tmp_path], began_s) == []  # not older than the start
    assert remove_leftovers([tmp_path, tmp_path / "none"], began_s + 1.0) == [scratch]
    assert [p.name for p in tmp_path.iterdir()] == ["cells.parquet"]
    assert path.read_text() == "whole"


def test_a_living_writer_keeps_its_scratch_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with atomic_path(path) as scratch:
        scratch.write_text("slow")
        assert remove_leftovers([tmp_path], time.time() + 9.0) == []
    assert path.read_text() == "slow" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "name", ["mine.tmp", ".x.tmp", ".a.json.ABCDEFGH.tmp", ".a.json.abcdefgh.tmp.old", "a.json"]
)
def test_files_of_others_stay(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    assert remove_leftovers([tmp_path], time.time() + 9.0) == []
    assert (tmp_path / name).exists()


def test_a_link_or_folder_of_such_a_name_stays(tmp_path: Path) -> None:
    (tmp_path / "far").write_text("mine")
    (tmp_path / ".a.json.abcdefgh.tmp").symlink_to(tmp_path / "far")
    (tmp_path / ".b.json.abcdefgh.tmp").mkdir()
    assert remove_leftovers([tmp_path], time.time() + 9.0) == []
    assert len(list(tmp_path.iterdir())) == 3
