"""``preemptbench env``: what a bug report needs to know."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import click

from preemptbench import __version__
from preemptbench.options import json_option

_PACKAGES = (
    "numpy", "scipy", "pyarrow", "numba", "lightgbm", "safetensors", "click", "tqdm",
    "matplotlib", "joblib", "scikit-learn", "torch", "transformers", "accelerate", "datasets",
)  # fmt: skip


@click.command()
@json_option
def env(as_json: bool) -> None:
    """Print versions and hardware for a bug report."""
    facts = describe_environment()
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        click.echo(f"{name:<14} {value}")


def describe_environment() -> dict[str, str]:
    """Return the versions that can change a result, by name."""
    facts = {
        "preemptbench": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
    }
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts
