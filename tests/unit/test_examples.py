"""Every example runs from a shell, on a small run log; what the docs show is what there is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from contracts.conformance import check_policy
from contracts.policy import from_rows
from preemptbench.cli import cli
from serving_sim.profile import load_profile
from tests.synthetic_runs import synthetic_runs
from traces.runlog import write_runs
from training.rows import training_set

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
MAX_LINES = 45
DOCS = sorted((ROOT / "docs").glob("*.md"))


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


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def test_every_command_in_the_docs_is_one() -> None:
    """Verbs and options exist and take such values; nothing is run."""
    text = "".join(block for path in DOCS for block in _blocks(path, "bash"))
    lines = text.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith("preemptbench ")]
    assert len(commands) >= 10
    for line in commands:
        command: click.Command = cli
        name, *words = shlex.split(line, comments=True)
        while isinstance(command, click.Group):
            name, *words = words
            command = command.commands[name]
        command.make_context(name, words)


def test_the_laws_in_the_docs_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
    tests = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(?:[\w/]+\.py::)?(test_\w+)`", text))
    assert len(named) >= 40
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []
    files = set(re.findall(r"`([\w/]+\.py)", text))
    assert [name for name in sorted(files) if not (ROOT / "tests" / name).is_file()] == []


def test_the_predictor_in_the_docs_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, check = _blocks(ROOT / "docs" / "add-a-predictor.md", "python")
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    exec(compile(source, "add-a-predictor.md", "exec"), vars(page))
    runs = synthetic_runs(num_prompts=40, repeats=3, seed=7)
    predictor = page.ConstantHazardSettings().fit(training_set(runs[:60]))
    test_runs = [run for run in runs[60:] if run.output_tokens >= 24]
    exec(check, {"predictor": predictor, "test_runs": test_runs})
    predictor.save_pretrained(tmp_path)
    assert page.ConstantHazard.from_pretrained(tmp_path).hazard == predictor.hazard


def test_the_policies_in_the_docs_are_some() -> None:
    by_row, by_array = _blocks(ROOT / "docs" / "add-a-policy.md", "python")
    names: dict[str, Any] = {}
    exec(by_row, names)
    check_policy(from_rows("mine", names["my_policy"], reads_signal=True))
    exec(by_array, {})  # checks itself


def test_the_profile_in_the_docs_is_one(tmp_path: Path) -> None:
    (text,) = [b for b in _blocks(ROOT / "docs" / "formats.md", "json") if "fixed_s" in b]
    (tmp_path / "profile.json").write_text(text, encoding="utf-8")
    assert load_profile(tmp_path / "profile.json").name == "mine"
