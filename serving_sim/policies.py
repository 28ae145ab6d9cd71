"""Victim policies: each a score over the running set; the highest goes, ties to the youngest.

To add one: write a function of RunningViews, :func:`register` it, done. A user's own function of
one RunningView is read from the command line with :func:`load_policy`.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from contracts.policy import ArrayPolicy, FloatArray, Policy, RunningViews, from_rows

_MAJOR = float(2**32)  # weight of the first of two keys; both stay exact in a float64
_POLICIES: dict[str, Policy] = {}
_FAMILIES: dict[str, Callable[[float], Policy]] = {}


def register(policy: Policy) -> Policy:
    """Make ``policy`` known by its name; a name that is taken raises InvalidInput."""
    if policy.name in _POLICIES or policy.name in _FAMILIES:
        raise InvalidInput(f"policy {policy.name!r} exists already: choose another name")
    _POLICIES[policy.name] = policy
    return policy


def get_policy(name: str) -> Policy:
    """Return a policy by name; a family takes its number in brackets, as in ``young(0.25)``."""
    family, bracket, argument = name.partition("(")
    if bracket and family in _FAMILIES:
        try:
            return _FAMILIES[family](float(argument.removesuffix(")")))
        except ValueError:
            raise InvalidInput(
                f"policy {name!r}: {argument.removesuffix(')')!r} is not a number; write for "
                f"example {family}(0.25)"
            ) from None
    if name not in _POLICIES:
        raise unknown_name("policy", name, list_policies())
    return _POLICIES[name]


def list_policies() -> tuple[str, ...]:
    """Return the names of all policies; a family is shown with the name of its number."""
    return tuple(sorted([*_POLICIES, *(f"{family}(depth)" for family in _FAMILIES)]))


def load_policy(spec: str) -> Policy:
    """Return the policy of ``FILE.py:FUNCTION``, a function of one RunningView to a float.

    The file is a program that the user named and trusts; it is run. The function is taken to read
    the signal and the deadline unless it carries ``reads_signal = False`` or
    ``reads_deadline = False`` as attributes.
    """
    file, colon, function_name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise InvalidInput(f"policy {spec!r}: write it as path/to/file.py:function")
    path = Path(file)
    if not path.is_file():
        raise InvalidInput(f"policy {spec!r}: the file {path} does not exist")
    try:
        names = runpy.run_path(str(path))
    except SyntaxError as error:
        raise InvalidInput(
            f"policy {spec!r}: {path} line {error.lineno} is not Python: {error.msg}"
        ) from None
    except Exception as error:
        raise InvalidInput(
            f"policy {spec!r}: running {path} failed with {type(error).__name__}: {error}"
        ) from error
    function = names.get(function_name)
    if not callable(function):
        own = [name for name, value in names.items() if callable(value) and name[0] != "_"]
        raise unknown_name(f"function of {path}", function_name, own or ["(it defines none)"])
    return from_rows(
        function_name,
        function,
        reads_signal=bool(getattr(function, "reads_signal", True)),
        reads_deadline=bool(getattr(function, "reads_deadline", True)),
    )


def _policy(name: str, *, reads_signal: bool = False) -> Callable[[ArrayPolicy], ArrayPolicy]:
    def add(score: ArrayPolicy) -> ArrayPolicy:
        register(Policy(name, score, reads_signal=reads_signal))
        return score

    return add


@_policy("lifo")
def lifo(views: RunningViews) -> FloatArray:
    """The last admitted: vLLM's FCFS rule, and the baseline of every comparison."""
    return views.admission_seq.astype(np.float64)


@_policy("fifo")
def fifo(views: RunningViews) -> FloatArray:
    """The first admitted."""
    return -views.admission_seq.astype(np.float64)


@_policy("random")
def random(views: RunningViews) -> FloatArray:
    """Anyone; a request keeps its draw until it is preempted."""
    return views.draw


@_policy("largest-kv")
def largest_kv(views: RunningViews) -> FloatArray:
    """The one that frees most blocks."""
    return views.kv_blocks.astype(np.float64)


@_policy("least-computed")
def least_computed(views: RunningViews) -> FloatArray:
    """The one with the least sunk work (vLLM RFC #54644, LCF)."""
    return -views.computed_tokens.astype(np.float64)


@_policy("most-computed")
def most_computed(views: RunningViews) -> FloatArray:
    """The one with the most sunk work: what not to do."""
    return views.computed_tokens.astype(np.float64)


@_policy("sglang-retract")
def sglang_retract(views: RunningViews) -> FloatArray:
    """Fewest tokens generated, the longest prompt among equals (SGLang's retraction order)."""
    return views.prompt_tokens - _MAJOR * views.generated_tokens


@_policy("priority")
def priority(views: RunningViews) -> FloatArray:
    """The largest priority value, the later arrival among equals (vLLM's PRIORITY rule)."""
    return views.request_id + _MAJOR * views.priority


@_policy("longest-remaining", reads_signal=True)
def longest_remaining(views: RunningViews) -> FloatArray:
    """The one with most tokens still to come."""
    return views.remaining


@_policy("shortest-remaining", reads_signal=True)
def shortest_remaining(views: RunningViews) -> FloatArray:
    """The one with fewest tokens still to come."""
    return -views.remaining


def young(depth: float) -> Policy:
    """Return the policy "anyone of the youngest ``depth`` share" (at least one), 0 < depth <= 1.

    Depth near 0 is ``lifo``, depth 1 is ``random``.
    """
    if not 0.0 < depth <= 1.0:
        raise InvalidInput(f"young({depth:g}): the depth is a share of the running set in (0, 1]")

    def score(views: RunningViews) -> FloatArray:
        is_young = views.rank_from_youngest < np.maximum(1.0, np.ceil(depth * views.num_running))
        return np.where(is_young, views.draw, -1.0)

    return Policy(f"young({depth:g})", score)


_FAMILIES["young"] = young
