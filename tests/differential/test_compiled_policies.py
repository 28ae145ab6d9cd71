"""Compiled policies against the same functions called in Python: equal scores, bit for bit.

A compiled policy may raise where Python does not (the decision is then asked again in Python); it
may never answer otherwise than Python does.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.conformance import check_policy
from contracts.errors import ConformanceError
from contracts.policy import Policy, RunningView, from_rows
from contracts.randomness import keyed_uniform
from eval.named_policies import find_policy
from serving_sim.config import EngineConfig
from serving_sim.engine import simulate
from serving_sim.jump import simulate_fast
from serving_sim.kernels import exact, scalar
from serving_sim.kernels.draws import draw_uniform, key_prefix
from serving_sim.policies import get_policy, list_policies
from tests.differential.test_jump_engine import PROFILES, make_workload

NUM_POLICIES = int(os.environ.get("PREEMPTBENCH_COMPILED", "40"))
CONFIG = EngineConfig(num_blocks=12)
_INTS = [
    name
    for name, kind in zip(RunningView._fields, scalar.VIEW.types, strict=True)
    if str(kind) == "int64"
]
_FLOATS = [name for name in RunningView._fields if name not in _INTS]


def random_view(rng: np.random.Generator) -> RunningView:
    """Return a view with zeros, ties, NaN and the largest numbers that are allowed."""
    largest = 2**scalar.FIELD_BITS - 1
    ints = {n: int(rng.choice([0, 1, 2, 7, int(rng.integers(0, 900)), largest])) for n in _INTS}
    ints["priority"] = int(rng.choice([-largest, -3, 0, 1]))
    special = [0.0, 1.0, 0.5, -2.5, math.nan, math.inf, 1e-9, 1e300, float(rng.uniform(0, 99))]
    floats = {name: float(rng.choice(special)) for name in _FLOATS}
    return RunningView(**ints, **floats)


def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(inner, inner)
    test = st.tuples(inner, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), inner)
    return st.one_of(
        st.tuples(inner, st.sampled_from("+ - * / // % + - *".split()), inner).map(
            lambda p: f"({p[0]} {p[1]} {p[2]})"
        ),
        two.map(lambda p: f"min({p[0]}, {p[1]})"),
        two.map(lambda p: f"max({p[0]}, {p[1]})"),
        two.map(lambda p: f"({p[0]} and {p[1]})"),
        two.map(lambda p: f"({p[0]} or not {p[1]})"),
        st.tuples(test, inner, inner).map(lambda p: f"({p[1]} if {' '.join(p[0])} else {p[2]})"),
        st.tuples(test, inner, inner).map(lambda p: f"np.where({' '.join(p[0])}, {p[1]}, {p[2]})"),
        st.tuples(st.sampled_from(["maximum", "minimum"]), inner, inner).map(
            lambda p: f"np.{p[0]}({p[1]}, {p[2]})"
        ),
        st.tuples(
            st.sampled_from("abs float bool -".split() + [f"math.{n}" for n in ONE_ARGUMENT]), inner
        ).map(lambda p: f"{p[0]}({p[1]})"),
    )


ONE_ARGUMENT = sorted(
    name for name, member in vars(exact._MATH).items() if hasattr(member, "py_func")
)
LEAVES = [f"view.{name}" for name in RunningView._fields] + ["0", "1", "16", "-3", "0.5", "2.0"]
SOURCES = st.recursive(st.sampled_from(LEAVES), grow, max_leaves=8)


def function_of(source: str) -> Callable[[RunningView], float]:
    names: dict[str, Any] = {"math": math, "np": np}
    exec(f"def score(view):\n    return {source}\n", names)
    made: Callable[[RunningView], float] = names["score"]
    return made


def assert_same_scores(function: Callable[[RunningView], float], seed: int) -> int:
    """Compare on many views; return how many the compiled form answered, -1 if there is none."""
    compiled = scalar.compile_policy(function)
    if isinstance(compiled, str):
        return -1
    rng, num_answers = np.random.default_rng(seed), 0
    for _ in range(300):
        view = random_view(rng)
        try:
            own = compiled(view)
        except (ArithmeticError, ValueError):
            continue
        with np.errstate(all="ignore"):
            expected = float(function(view))
        num_answers += 1
        assert own == expected or (math.isnan(own) and math.isnan(expected)), view
    return num_answers


@settings(
    max_examples=NUM_POLICIES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(SOURCES, st.integers(0, 1_000_000))
def test_a_compiled_policy_never_answers_otherwise_than_python(source: str, seed: int) -> None:
    assert_same_scores(function_of(source), seed)


WEIGHT = 2.5
LIST = [1.0]


def _helper(x: float, y: float) -> float:
    return WEIGHT * x - y


def _with_helper(view: RunningView) -> float:
    return _helper(view.remaining, view.draw) + _helper(view.draw, 1.0)


def _with_branches(view: RunningView) -> float:
    if view.num_preemptions > 1 and not view.priority:
        return -1
    share = view.generated_tokens / max(1, view.max_tokens)
    if math.isnan(view.remaining):
        share += 1
    blocks = 3 if share > 0.5 else view.kv_blocks // 2
    return share + blocks % 3


def _with_logarithm(view: RunningView) -> float:
    return math.log1p(view.remaining) * math.exp(-view.draw) + math.sqrt(view.computed_tokens)


def _by_position(view: RunningView) -> float:
    return view[7] * 16 - view[4] + float(view.draw)


@pytest.mark.parametrize("function", [_with_helper, _with_branches, _with_logarithm, _by_position])
def test_what_policies_are_made_of_is_compiled(function: Callable[[RunningView], float]) -> None:
    assert assert_same_scores(function, 1) > 100


@pytest.mark.parametrize("name", [n for n in list_policies() if "(" not in n] + ["young(0.3)"])
def test_every_built_in_is_compiled_and_keeps_the_rules(name: str) -> None:
    row = get_policy(name).row
    assert row is not None
    assert assert_same_scores(row, 2) == 300


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda view: view.draw * 2, True),
        (lambda view: view.kv_blocks, False),
        (lambda view: view[18], True),
        (_with_helper, True),
        (_with_branches, False),
        (get_policy("young(0.3)").row, True),
        (lambda view: _with_helper(view) + 1, True),
    ],
)
def test_a_draw_is_hashed_only_for_who_may_read_it(function: Any, reads: bool) -> None:
    assert scalar.may_read(function, "draw") == reads


def _unset(view: RunningView) -> float:
    if view.draw > 2:
        score = 1.0
    return score


def _looping(view: RunningView) -> float:
    left = view.draw
    while left > 1.0:
        left -= 1.0
    return left


def _defaulted(view: RunningView, weight: float = 2.0) -> float:
    return weight * view.draw


def _recursive(view: RunningView) -> float:
    return view.draw if view.draw < 2 else _recursive(view)


def _trying(view: RunningView) -> float:
    try:
        return 1 / view.priority
    except ZeroDivisionError:
        return 0.0


def _maybe_none(view: RunningView) -> float | None:
    return None if view.draw > 2 else 1.0


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda view: view.kv_blocks * view.prompt_tokens * view.max_tokens, r"may pass 2\^53"),
        (lambda view: view.priority * 2**32 + view.request_id, r"may pass 2\^53"),
        (lambda view: view.generated_tokens**2, "operator pow"),
        (lambda view: view.kv_blocks << 3, "operator lshift"),
        (lambda view: (view.draw > 0.5) + (view.draw > 0.7), "add on truth values"),
        (lambda view: int(view.draw * 10), "it uses int"),
        (lambda view: LIST[0] * view.draw, "it uses LIST, a list"),
        (lambda view: np.log(view.draw), "numba cannot compile it"),
        (lambda view: {"a": 1.0}["a"], "more than numbers"),
        (_looping, "it has a loop"),
        (_unset, "may be unset"),
        (_defaulted, "default arguments"),
        (_recursive, "calls itself"),
        (_trying, "a try"),
        (_maybe_none, "value of type|numba cannot compile it"),
        (dict, "not a plain function"),
    ],
)
def test_what_numba_would_read_otherwise_is_left_to_python(function: Any, reason: str) -> None:
    why = scalar.compile_policy(function)
    assert isinstance(why, str)
    assert re.search(reason, why), why


def test_a_function_is_compiled_once_and_again_when_a_name_it_reads_changes() -> None:
    names: dict[str, Any] = {"WEIGHT": 2.0}
    exec("def score(view):\n    return WEIGHT * view.kv_blocks\n", names)
    view = random_view(np.random.default_rng(0))._replace(kv_blocks=7)
    first = scalar.compile_policy(names["score"])
    assert first is scalar.compile_policy(names["score"])
    names["WEIGHT"] = -3.0
    assert (first(view), scalar.compile_policy(names["score"])(view)) == (14.0, -21.0)
    names["WEIGHT"] = [1.0]
    assert "it uses WEIGHT, a list" in scalar.compile_policy(names["score"])


@pytest.mark.parametrize("name", ONE_ARGUMENT)
def test_a_stand_in_answers_and_raises_as_math_does(name: str) -> None:
    rng = np.random.default_rng(3)
    values = [*rng.normal(0, 300, 3000).tolist(), *rng.uniform(0, 2, 3000).tolist(), 0.0, -1.0,
              math.inf, -math.inf, math.nan, 1e-320, 1e308, 710.0]  # fmt: skip
    stand_in, original = getattr(exact._MATH, name), getattr(math, name)
    for value in values:
        try:
            expected = original(value)
        except (ValueError, OverflowError) as error:
            with pytest.raises(type(error)):
                stand_in(value)
        else:
            own = stand_in(value)
            assert own == expected or (math.isnan(own) and math.isnan(expected)), value


@given(st.integers(), st.text(max_size=200), st.integers(0, 10**12))
def test_a_draw_is_hashed_as_in_python(seed: int, request_id: str, number: int) -> None:
    own_id = np.frombuffer(request_id.encode(errors="replace"), np.uint8)
    text = own_id.tobytes().decode()
    expected = keyed_uniform(seed, "policy-draw", text, number)
    assert draw_uniform(key_prefix(seed, "policy-draw"), own_id, number) == expected


def test_an_error_is_the_same_compiled_or_called(tmp_path: Path) -> None:
    """The compiled form raises in the middle of a run; Python raises it again, in its own words."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(view):\n    if view.num_preemptions > 0:\n        return 1.0 / (0 * view.draw)\n"
        "    return view.draw\nscore.reads_signal = score.reads_deadline = False\n"
    )
    policy = find_policy(f"{path}:score")
    assert policy.row is not None and not isinstance(scalar.compile_policy(policy.row), str)
    workload = make_workload(5, 30, 40, 0.01, False)
    words = set()
    for engine in (simulate, simulate_fast):
        with pytest.raises(ConformanceError, match="raised ZeroDivisionError near line 3") as error:
            engine(workload, CONFIG, PROFILES[0], policy)
        words.add(str(error.value))
    assert len(words) == 1


def test_numbers_too_large_to_be_exact_are_left_to_python(caplog: pytest.LogCaptureFixture) -> None:
    workload = make_workload(5, 30, 40, 0.01, False)
    workload.priority[3] = 2**40
    policy = from_rows("products", lambda view: view.priority * view.kv_blocks)
    with caplog.at_level(logging.INFO, logger="serving_sim.jump"):
        result = simulate_fast(workload, CONFIG, PROFILES[0], policy)
    assert "'products' is asked in Python: a length, a priority or a count" in caplog.text
    assert result == simulate(workload, CONFIG, PROFILES[0], policy)


def test_conformance_compares_the_two_forms() -> None:
    check_policy(Policy("right", lambda views: views.draw, row=lambda view: view.draw))
    with pytest.raises(ConformanceError, match="one rule in two forms"):
        check_policy(Policy("wrong", lambda views: views.draw, row=lambda view: 2 * view.draw))
