"""Matrices on measured tables: they run, say when models differ, and can be strict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput
from preemptbench.cli import cli
from serving_sim.profile import save_profile
from serving_sim.surface import Table
from tests.surfaces import HEADER, small_profile

SMALL = [
    "simulate", "--policy", "lifo", "--blocks", "300", "--seeds", "2", "--tagged", "10",
    "--jobs", "1", "--json",
]  # fmt: skip


def test_a_matrix_runs_on_tables_and_says_whose_they_are(tmp_path: Path) -> None:
    arguments = [*SMALL, "--out", str(tmp_path), "--profile", "h100-llama-3.1-8b-tp1", "--strict"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"]
    assert "lengths are of" in done.stderr
    assert "step times of meta-llama/Llama-3.1-8B" in done.stderr


def test_a_strict_matrix_stops_where_nothing_was_measured(tmp_path: Path) -> None:
    """The decode table ends at 20 tokens of context, before any request of the log does."""
    tables = small_profile().tables
    decode = tables["decode"]
    short = Table((decode.axes[0], (1.0, 10.0, 20.0)), decode.seconds)
    profile = small_profile(
        header=replace(HEADER, name="strict matrix"), tables={**tables, "decode": short}
    )
    save_profile(profile, tmp_path / "small.json")
    arguments = [*SMALL, "--out", str(tmp_path / "out"), "--profile", str(tmp_path / "small.json")]
    strict = CliRunner().invoke(cli, [*arguments, "--strict"])
    assert isinstance(strict.exception, InvalidInput)
    assert "measured up to" in str(strict.exception)
    with pytest.warns(UserWarning, match="seconds go on linearly"):
        assert CliRunner().invoke(cli, arguments).exit_code == 0
