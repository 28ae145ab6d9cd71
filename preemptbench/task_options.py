"""How tasks are run: workers, backend, limits, and a second try. Shared by study and sweep."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TextIO

import click

from contracts.errors import missing_dependency
from preemptbench.options import jobs_option


def task_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --jobs, --backend, --address, --task-timeout, --task-memory-gb, --retry-failed and
    --status to a click command's function."""
    options = (
        jobs_option,
        click.option(
            "--backend", type=click.Choice(["loky", "threading", "dask", "ray"]), default="loky",
            show_default=True, help="joblib's backend; dask and ray need the extra 'cluster', and "
            "reach a cluster by --address.",
        ),
        click.option("--address", help="Address of a running Dask scheduler or Ray cluster."),
        click.option(
            "--task-timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS", help="A seed that takes longer is recorded as failed.",
        ),
        click.option(
            "--task-memory-gb", "memory_gb", type=click.FloatRange(min=0, min_open=True),
            metavar="GB", help="A seed whose process holds more is recorded as failed.",
        ),
        click.option("--retry-failed", is_flag=True, help="Run failed seeds again."),
        click.option("--status", is_flag=True, help="Say what is done, failed and missing; stop."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def backend_context(backend: str, address: str | None) -> Any:
    """Return a context in which joblib uses ``backend``."""
    import joblib

    if backend in ("loky", "threading"):
        if address is not None:
            raise click.UsageError(f"--address does not go with --backend {backend}.")
        return joblib.parallel_config(backend=backend)
    try:
        if backend == "dask":
            client = import_module("distributed").Client(address)
            return joblib.parallel_config(backend="dask", client=client)
        import_module("ray").init(address=address, ignore_reinit_error=True)
        import_module("ray.util.joblib").register_ray()
        return joblib.parallel_config(backend="ray")
    except ImportError as error:
        raise missing_dependency(error.name or backend, "cluster", f"--backend {backend}") from None


def memory_bytes(memory_gb: float | None) -> int | None:
    """Return gigabytes (1e9) as bytes."""
    return None if memory_gb is None else max(1, round(memory_gb * 1e9))


def say(note: str) -> None:
    """Show a note on stderr, above a progress bar if there is one."""
    from tqdm import tqdm

    tqdm.write(f"warning: {note}", file=sys.stderr)


def say_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show what the library warns of as one line (``warnings.showwarning``): where in our code it
    stood is no help to a user."""
    del category, filename, lineno, file, line
    say(str(message))
