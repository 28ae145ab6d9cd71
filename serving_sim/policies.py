"""Victim policies: each a score over the running set; the highest goes, ties to the youngest.

To add one: write a function that scores a RunningView and, as it stands, RunningViews too (so it
has neither branches nor ``min``), :func:`register` it, done. The first form is compiled into the
jump engine, the second called by the step engine. A user's own function of one RunningView is read
from the command line with :func:`load_policy`.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput, unknown_name
from contracts.policy import Policy, from_rows

_MAJOR = float(2**32)  # weight of the first of two keys; both stay exact in a float64
EitherView = Any  # a RunningView, or RunningViews
EitherScore = Any  # a float, or one for each request
EitherPolicy = Callable[[EitherView], EitherScore]
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


def _policy(name: str, *, reads_signal: bool = False) -> Callable[[EitherPolicy], EitherPolicy]:
    def add(score: EitherPolicy) -> EitherPolicy:
        register(Policy(name, score, reads_signal=reads_signal, row=score))
        return score

    return add


@_policy("lifo")
def lifo(view: EitherView) -> EitherScore:
    """The last admitted: vLLM's FCFS rule, and the baseline of every comparison."""
    return 1.0 * view.admission_seq


@_policy("fifo")
def fifo(view: EitherView) -> EitherScore:
    """The first admitted."""
    return -1.0 * view.admission_seq


@_policy("random")
def random(view: EitherView) -> EitherScore:
    """Anyone; a request keeps its draw until it is preempted."""
    return view.draw


@_policy("largest-kv")
def largest_kv(view: EitherView) -> EitherScore:
    """The one that frees most blocks."""
    return 1.0 * view.kv_blocks


@_policy("least-computed")
def least_computed(view: EitherView) -> EitherScore:
    """The one with the least sunk work (vLLM RFC #54644, LCF)."""
    return -1.0 * view.computed_tokens


@_policy("most-computed")
def most_computed(view: EitherView) -> EitherScore:
    """The one with the most sunk work: what not to do."""
    return 1.0 * view.computed_tokens


@_policy("sglang-retract")
def sglang_retract(view: EitherView) -> EitherScore:
    """Fewest tokens generated, the longest prompt among equals (SGLang's retraction order)."""
    return view.prompt_tokens - _MAJOR * view.generated_tokens


@_policy("priority")
def priority(view: EitherView) -> EitherScore:
    """The largest priority value, the later arrival among equals (vLLM's PRIORITY rule)."""
    return view.request_id + _MAJOR * view.priority


@_policy("longest-remaining", reads_signal=True)
def longest_remaining(view: EitherView) -> EitherScore:
    """The one with most tokens still to come."""
    return view.remaining


@_policy("shortest-remaining", reads_signal=True)
def shortest_remaining(view: EitherView) -> EitherScore:
    """The one with fewest tokens still to come."""
    return -view.remaining


def young(depth: float) -> Policy:
    """Return the policy "anyone of the youngest ``depth`` share" (at least one), 0 < depth <= 1.

    Depth near 0 is ``lifo``, depth 1 is ``random``.
    """
    if not 0.0 < depth <= 1.0:
        raise InvalidInput(f"young({depth:g}): the depth is a share of the running set in (0, 1]")

    def score(view: EitherView) -> EitherScore:
        rank = view.rank_from_youngest
        is_old = (rank > 0) & (rank >= depth * view.num_running)
        return view.draw - 2.0 * is_old  # no draw reaches 1, so any young one beats all old ones

    return Policy(f"young({depth:g})", score, row=score)


_FAMILIES["young"] = young
