"""Every example runs from a shell, on a small run log, and says something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.synthetic_runs import synthetic_runs
from traces.runlog import write_runs

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
MAX_LINES = 45


def _python(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )


@pytest.fixture(scope="module")
def run_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "runs.parquet"
    write_runs(synthetic_runs(num_prompts=40, repeats=3, seed=7), path)
    return path


def test_there_are_examples_and_they_are_short() -> None:
    assert [path.name[:2] for path in EXAMPLES] == ["01", "02", "03", "04", "05"]
    for path in (*EXAMPLES, ROOT / "examples" / "my_policy.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES, path.name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_says_something(path: Path, run_log: Path, tmp_path: Path) -> None:
    done = _python(path, run_log, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert f"python examples/{path.name} [RUNS.parquet]" in path.read_text(encoding="utf-8")
    assert not list(tmp_path.iterdir())  # an example leaves nothing behind


def test_a_policy_in_ten_lines_runs_from_the_command_line(run_log: Path, tmp_path: Path) -> None:
    policy = f"{ROOT / 'examples' / 'my_policy.py'}:my_policy"
    done = _python(
        "-m", "preemptbench", "simulate", "--policy", policy, "--runs", run_log,
        "--seeds", "2", "--tagged", "20", "--blocks", "161", "--jobs", "1", "--out", tmp_path,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith(policy)]
    assert row.removeprefix(policy).startswith(" / oracle")
    assert any(line.startswith("lifo ") for line in done.stdout.splitlines())
