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

import numpy as np

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


def _policy(
    name: str, *, reads_signal: bool = False, reads_deadline: bool = False
) -> Callable[[EitherPolicy], EitherPolicy]:
    def add(score: EitherPolicy) -> EitherPolicy:
        register(Policy(name, score, reads_signal, reads_deadline, row=score))
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


@_policy("least-generated")
def least_generated(view: EitherView) -> EitherScore:
    """The one that wrote least: age alone, without the prompt that sunk work counts too."""
    return -1.0 * view.generated_tokens


@_policy("most-generated")
def most_generated(view: EitherView) -> EitherScore:
    """The one that wrote most."""
    return 1.0 * view.generated_tokens


@_policy("remaining-times-sunk", reads_signal=True)
def remaining_times_sunk(view: EitherView) -> EitherScore:
    """The one that would hold most KV for longest."""
    return view.remaining * view.computed_tokens


@_policy("remaining-per-sunk", reads_signal=True)
def remaining_per_sunk(view: EitherView) -> EitherScore:
    """The one with most tokens still to come for each token that must be computed again."""
    return view.remaining / _sunk(view)


@_policy("most-slack", reads_signal=True, reads_deadline=True)
def most_slack(view: EitherView) -> EitherScore:
    """The one that could wait longest and still meet its deadline."""
    return _slack_s(view)


@_policy("slack-per-sunk", reads_signal=True, reads_deadline=True)
def slack_per_sunk(view: EitherView) -> EitherScore:
    """The one with most slack for each token that must be computed again."""
    return _slack_s(view) / _sunk(view)


@_policy("doomed-first", reads_signal=True, reads_deadline=True)
def doomed_first(view: EitherView) -> EitherScore:
    """Who misses its deadline even undisturbed; the last admitted among them, or else of all."""
    return view.admission_seq + _MAJOR * (_slack_s(view) < 0.0)


@_policy("doomed-then-slack", reads_signal=True, reads_deadline=True)
def doomed_then_slack(view: EitherView) -> EitherScore:
    """Who misses its deadline even undisturbed; or else ``slack-per-sunk``."""
    return _slack_s(view) / _sunk(view) + _MAJOR * (_slack_s(view) < 0.0)


@_policy("goodspeed-bid", reads_signal=True, reads_deadline=True)
def goodspeed_bid(view: EitherView) -> EitherScore:
    """The lowest bid, where a bid is remaining tokens / steps to the deadline (GoodSpeed, 7dc55e3;
    that the lowest goes is our reading). A deadline that is over counts as 1 ms ahead."""
    left_s = np.maximum(view.deadline_s - view.now_s, 1e-3)
    return -view.remaining * view.recent_tpot_s / left_s


@_policy("bidkv")
def bidkv(view: EitherView) -> EitherScore:
    """The largest utility of BidKV (intellistream/bidkv 96ab63e, selector.py): sunk work over
    1 + 0.5 x share written + 0.3 x preemptions."""
    worn = 0.5 * _written(view) + 0.3 * view.num_preemptions
    return view.computed_tokens / (1.000001 + worn)


@_policy("reclaimable-unfinished")
def reclaimable_unfinished(view: EitherView) -> EitherScore:
    """Most blocks a token x share of max_tokens unwritten (vLLM PR #56897; all blocks are one's
    own here, so the first factor is near 1 / block size)."""
    total = np.maximum(1.0, view.prompt_tokens + view.generated_tokens)
    return view.kv_blocks / total * (1.0 - _written(view))


@_policy("most-budget-left")
def most_budget_left(view: EitherView) -> EitherScore:
    """The most of max_tokens unwritten, for want of a length (vLLM PR #36980, read as SRPT)."""
    return 1.0 * (view.max_tokens - view.generated_tokens)


@_policy("spare-evicted")
def spare_evicted(view: EitherView) -> EitherScore:
    """The last admitted of those evicted least; beyond three it counts no more (the bound of vLLM
    PR #51574's boost against ping-pong)."""
    return view.admission_seq - _MAJOR * np.minimum(3.0, view.num_preemptions)


def _slack_s(view: EitherView) -> EitherScore:
    """Seconds to spare before the deadline, if the request runs on undisturbed."""
    return view.deadline_s - view.now_s - view.remaining * view.recent_tpot_s


def _written(view: EitherView) -> EitherScore:
    return np.minimum(1.0, view.generated_tokens / np.maximum(1.0, view.max_tokens))


def _sunk(view: EitherView) -> EitherScore:
    return np.maximum(1.0, view.computed_tokens)  # who was just admitted has computed nothing


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
