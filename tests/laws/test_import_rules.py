"""What may be imported, and what may not be loaded: the rules a linter cannot see."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "contracts", "traces", "predictors", "oracles", "training", "serving_sim", "eval",
    "integrations", "preemptbench",
)  # fmt: skip
HEAVY = ("torch", "transformers", "datasets", "accelerate")


@pytest.mark.parametrize("package", PACKAGES)
def test_package_resolves_into_this_checkout(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / package
    assert (ROOT / package / "py.typed").exists()


def test_nobody_binds_the_name_eval() -> None:
    """``import eval`` would shadow the builtin for the rest of the file."""
    for path in ROOT.glob("*/**/*.py"):
        if ".venv" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    assert bound != "eval", f"{path}:{node.lineno} binds the name eval"


def _modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(out.stdout.split())


def test_front_door_and_matrix_load_no_deep_learning() -> None:
    loaded = _modules_after("import preemptbench.cli, eval.matrix, serving_sim.engine")
    assert not loaded & set(HEAVY)
    assert "lightgbm" not in loaded


def test_policies_load_neither_numba_nor_the_engine() -> None:
    loaded = _modules_after("import serving_sim.policies")
    assert "numba" not in loaded
    assert "serving_sim.engine" not in loaded
