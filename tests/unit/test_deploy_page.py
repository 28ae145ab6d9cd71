"""The five commands of the deploy page, on a small part of the bundled run log."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from preemptbench.cli import cli
from serving_sim.policies import get_policy
from tests.unit.test_log_replay import workload, write_live
from traces.bundled import bundled_runs
from traces.runlog import read_runs, write_runs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"


def commands() -> list[list[str]]:
    """Return the commands of the page's first block, without comments."""
    block = PAGE.read_text(encoding="utf-8").split("```bash\n")[1].split("```")[0]
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line.split("  #")[0]) for line in lines]


def test_the_five_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them run as they stand (vLLM's is not ours); a matrix of simulations takes seconds,
    so of the third the options are read and the checkpoint's fitness for the runs is left out."""
    monkeypatch.chdir(tmp_path)
    runs = list(read_runs(bundled_runs()))
    write_runs(runs[:240], Path("runs.parquet"))
    write_live(tmp_path, workload(), get_policy("lifo")).rename("lifo.jsonl")
    split, train, simulate, serve, what_if = commands()
    for command in (split, train, what_if):
        assert command[0] == "preemptbench"
        done = CliRunner().invoke(cli, command[1:])
        assert done.exit_code == 0, (command, done.output, done.exception)
    assert {"lifo", "least-computed", "longest-remaining"} <= set(done.stdout.split())
    verb = cli.commands[simulate[1]]
    parsed = verb.make_context(simulate[1], simulate[2:], parent=click.Context(cli))
    assert parsed.params["signals"] == ("ckpt",)
    assert serve[2:4] == ["vllm", "serve"]
    done = CliRunner().invoke(cli, ["validate", "lifo.jsonl"])
    assert done.exit_code == 0, done.output
    assert "named alike" in done.stdout
