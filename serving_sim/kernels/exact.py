"""What a compiled policy gets for ``math`` and ``numpy``: functions that answer and raise alike.

Compiled ``math.exp`` returns inf where Python's raises OverflowError, and numpy's own exp differs
from the C library's in last bits. So a policy is compiled against :data:`STAND_INS`: they hold what
was made equal, bit for bit, and nothing else; any other name leaves the policy to Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numba
import numpy as np

_compiled = numba.njit(error_model="python", nogil=True)


def _never_overflowing(function: Callable[[float], float]) -> Any:
    @_compiled
    def call(x: float) -> float:
        y = function(x)
        if math.isinf(y) and not math.isinf(x):
            raise OverflowError("math range error")
        return y

    return call


def _above(bound: float, function: Callable[[float], float]) -> Any:
    @_compiled
    def call(x: float) -> float:
        if x <= bound:
            raise ValueError("math domain error")
        return function(x)

    return call


@_compiled
def _sqrt(x: float) -> float:
    if x < 0.0:
        raise ValueError("math domain error")
    return math.sqrt(x)


def _plain(function: Callable[[float], Any]) -> Any:
    @_compiled
    def call(x: float) -> Any:
        return function(x)

    return call


@_compiled
def _where(condition: Any, yes: float, no: float) -> float:
    return np.float64(yes) if condition else np.float64(no)


@_compiled
def _maximum(a: float, b: float) -> float:
    return np.float64(a) if a >= b or math.isnan(a) else np.float64(b)


@_compiled
def _minimum(a: float, b: float) -> float:
    return np.float64(a) if a <= b or math.isnan(a) else np.float64(b)


@_compiled
def _ceil(x: float) -> Any:
    return np.ceil(np.float64(x))


@_compiled
def _floor(x: float) -> Any:
    return np.floor(np.float64(x))


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


_TESTS = {
    "isnan": _plain(math.isnan),
    "isinf": _plain(math.isinf),
    "isfinite": _plain(math.isfinite),
}
_MATH = _module(
    "math",
    exp=_never_overflowing(math.exp),
    expm1=_never_overflowing(math.expm1),
    log=_above(0.0, math.log),
    log2=_above(0.0, math.log2),
    log10=_above(0.0, math.log10),
    log1p=_above(-1.0, math.log1p),
    sqrt=_sqrt,
    tanh=_plain(math.tanh),
    fabs=_plain(math.fabs),
    **_TESTS,
    **{name: getattr(math, name) for name in ("pi", "e", "tau", "inf", "nan")},
)
_NUMPY = _module(
    "numpy",
    where=_where,
    maximum=_maximum,
    minimum=_minimum,
    ceil=_ceil,
    floor=_floor,
    **_TESTS,
    **{name: getattr(np, name) for name in ("pi", "e", "inf", "nan")},
)

STAND_INS: dict[int, Any] = {
    id(math): _MATH,
    id(np): _NUMPY,
    **{
        id(getattr(module, name)): member
        for module, stand_in in ((math, _MATH), (np, _NUMPY))
        for name, member in vars(stand_in).items()
        if callable(member)
    },
}
"""By the id of the module, or of the function imported from it: what is compiled in its place."""
