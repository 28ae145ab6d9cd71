"""The wheel: built, installed in an environment of its own, and run from another folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(command: list[str | Path], cwd: Path, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    _run([sys.executable, "-m", "build", "--wheel", "--outdir", out, ROOT], cwd=out)
    return next(out.glob("*.whl"))


def test_wheel_holds_the_packages_and_their_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {
        "contracts", "traces", "predictors", "oracles", "training", "serving_sim", "eval",
        "integrations", "preemptbench",
    }  # fmt: skip
    assert {f"{top}/py.typed" for top in tops} <= set(names)
    assert "traces/data/smollm2-everyday.parquet" in names
    assert "traces/data/smollm2-everyday-512.parquet" in names
    assert any(name.startswith("training/recipes/") for name in names)
    assert any(name.startswith("serving_sim/profiles/") for name in names)


def test_wheel_installs_alone_and_runs_the_demo_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """Base install only: the demo needs neither torch nor scikit-learn."""
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet"]
    _run([*pip, "--constraint", ROOT / "constraints.txt", wheel], cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [home / "bin" / "preemptbench", "demo", "--seeds", "2", "--json"]
    facts = json.loads(_run(command, cwd=elsewhere))
    assert (elsewhere / facts["report"]).stat().st_size > 100_000
    assert len({row["pressure"] for row in facts["rows"]}) == 3
    installed = _run([home / "bin" / "python", "-m", "pip", "list"], cwd=elsewhere)
    assert "torch" not in installed
