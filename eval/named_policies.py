"""Policies by name: a built-in, or a function in a file that the user named on the command line."""

from __future__ import annotations

import contextlib
import sys
import traceback
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from contracts.conformance import check_policy
from contracts.errors import ConformanceError, InvalidInput, PolicyRaised, PreemptBenchError
from contracts.policy import FloatArray, Policy, RunningViews
from eval.task_limits import TaskLimits, TaskStopped, run_limited
from serving_sim.policies import get_policy, load_policy

CHECK_LIMITS = TaskLimits(timeout_s=60.0, memory_bytes=4_000_000_000)


def checked_policy(name: str, limits: TaskLimits = CHECK_LIMITS) -> Policy:
    """Return a policy by name; one of the user's own is first held to its contract.

    That happens in a process of its own under ``limits``, since a file that never returns from
    compiled code can be stopped in no other way. Raises ConformanceError.
    """
    if policy_file(name) is None:
        return find_policy(name)
    try:
        run_limited(_check, (name,), limits)
    except TaskStopped as stopped:
        place = stopped.frames.partition("\n")[0].strip()
        raise ConformanceError(
            f"the check of policy {name!r} was stopped: {stopped}"
            f"{f' ({place})' if place else ''}; it scores some thousand small running sets, "
            "which takes a second: look for a loop that does not end"
        ) from None
    return find_policy(name)


def _check(name: str) -> None:
    check_policy(find_policy(name))


def find_policy(name: str) -> Policy:
    """Return a built-in policy, or the user's own for ``path/to/file.py:function``.

    What the user's file prints goes to stderr; what it raises becomes one PolicyRaised.
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
            raise PolicyRaised(
                f"policy {name!r} raised {type(error).__name__} near line {line}: {error}; it must "
                "return one float for every running request"
            ) from error

    return replace(policy, score=score)
