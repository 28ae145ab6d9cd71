"""Policies by name: a built-in, or a function in a file that the user named on the command line."""

from __future__ import annotations

import contextlib
import sys
import traceback
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from contracts.errors import ConformanceError, InvalidInput, PreemptBenchError
from contracts.policy import FloatArray, Policy, RunningViews
from serving_sim.policies import get_policy, load_policy


def find_policy(name: str) -> Policy:
    """Return a built-in policy, or the user's own for ``path/to/file.py:function``.

    What the user's file prints goes to stderr; what it raises becomes one ConformanceError.
    """
    file = policy_file(name)
    if file is None:
        if name.endswith(".py"):
            raise InvalidInput(f"policy {name!r} names a file: write it as {name}:function")
        return get_policy(name)
    return _load(name, file.stat().st_mtime_ns if file.is_file() else 0)


def policy_file(name: str) -> Path | None:
    """Return the file of a policy of the user's own, None for a built-in one."""
    file, colon, _ = name.rpartition(":")
    return Path(file) if colon and file.endswith(".py") else None


@lru_cache
def _load(name: str, mtime_ns: int) -> Policy:  # noqa: ARG001 - a changed file is another key
    with contextlib.redirect_stdout(sys.stderr):
        policy = load_policy(name)

    def score(views: RunningViews) -> FloatArray:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return policy.score(views)
        except PreemptBenchError:
            raise
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1].lineno
            raise ConformanceError(
                f"policy {name!r} raised {type(error).__name__} near line {line}: {error}; it must "
                "return one float for every running request"
            ) from error

    return replace(policy, score=score)
