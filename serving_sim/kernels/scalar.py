"""Compiles a scalar policy, but only when the compiled form is sure to answer as Python does.

The same source can mean two things: int64 wraps where Python's integers grow, a global is frozen
when numba compiles, ``**`` and numpy's functions round differently. Here a policy may use its
view, numbers, comparisons, arithmetic without ``**``, branches without loops, the functions of
:mod:`serving_sim.kernels.exact`, and helpers made of the same; whole numbers must stay below 2^53.
Whatever else it does, it is left to Python, and :func:`compile_policy` says why.
"""

from __future__ import annotations

import dis
import operator
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple, get_type_hints

import numba
import numpy as np
from numba.core import analysis, ir, types

from contracts.policy import RowPolicy, RunningView
from serving_sim.kernels.exact import STAND_INS

FIELD_BITS = 26  # whole numbers of a view must be smaller than 2 to this
_EXACT_BITS = 53  # as float64, and a product of two fields stays below

_HINTS = get_type_hints(RunningView)
VIEW = types.NamedTuple(
    [types.int64 if _HINTS[name] is int else types.float64 for name in RunningView._fields],
    RunningView,
)
SCORE = types.FunctionType(types.float64(VIEW))
_BUILTINS = {f.__name__: f for f in (min, max, abs, float, bool)}
_COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


class _NotExactError(Exception):
    """The policy has to be called in Python; the message says what in it is the reason."""


def compile_policy(score: RowPolicy, *, keep: bool = False) -> Any:
    """Return ``score`` as compiled code of type SCORE, once a process; or, in words, why not.

    ``keep`` writes the code to numba's cache on disk. It is for this project's own policies, which
    a test holds to the rules: what comes from the cache cannot be checked.
    """
    if type(score) is not FunctionType:
        return f"it is a {type(score).__name__}, not a plain function"
    try:
        frozen = _frozen(score, ())
    except _NotExactError as reason:
        return str(reason)
    return _compile(frozen, keep)


def may_read(score: RowPolicy, field: str) -> bool:
    """Say whether a policy that compiles may look at ``field`` of its view; never wrongly False."""
    functions = [score] if isinstance(score, FunctionType) else []
    while functions:
        function = functions.pop()
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        used = [*(value for _, value in _names(function)), *cells]
        functions += [value for value in used if isinstance(value, FunctionType)]
        steps = [step.opname + step.argrepr for step in dis.get_instructions(function)]
        by_position = any("SUBSCR" in step or "UNPACK" in step or "[" in step for step in steps)
        if by_position or field in function.__code__.co_names:
            return True
    return False


class _Frozen(NamedTuple):
    """A function and the values of all names that it reads: what is compiled stays true of it."""

    code: CodeType
    names: tuple[tuple[str, object], ...]  # a value stands as (type, repr) or as a _Frozen
    cells: tuple[object, ...]
    function: _Named


class _Named:
    """Keeps a function out of the comparison of two _Frozen."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Named)

    def __hash__(self) -> int:
        return 0


def _frozen(function: FunctionType, callers: tuple[FunctionType, ...]) -> _Frozen:
    code = function.__code__
    if function.__defaults__ or function.__kwdefaults__:
        raise _NotExactError(f"{code.co_name} has default arguments")
    if code.co_exceptiontable or any(isinstance(const, CodeType) for const in code.co_consts):
        raise _NotExactError(f"{code.co_name} has a try, a with or a function inside")
    if function in callers:
        raise _NotExactError(f"{code.co_name} calls itself")
    callers = (*callers, function)
    names = [(name, _constant(name, value, callers)) for name, value in _names(function)]
    cells = [
        _constant(name, cell.cell_contents, callers)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
    ]
    return _Frozen(code, tuple(names), tuple(cells), _Named(function))


def _names(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the globals that ``function`` reads, with their values."""
    for step in dis.get_instructions(function):
        if step.opname.startswith(("BUILD_", "IMPORT_", "STORE_GLOBAL")):
            raise _NotExactError("it makes more than numbers")  # numba needs 10 s for a dict
        if step.opname.startswith("LOAD_GLOBAL"):
            name = str(step.argval)
            if name in function.__globals__:
                yield name, function.__globals__[name]
            elif name not in _BUILTINS:
                raise _NotExactError(f"it uses {name}")


def _constant(name: str, value: object, callers: tuple[FunctionType, ...]) -> object:
    if type(value) in (int, float, bool, np.float64):
        return type(value), repr(value)
    if id(value) in STAND_INS:
        return id(value)
    if isinstance(value, FunctionType):
        return _frozen(value, callers)
    raise _NotExactError(f"it uses {name}, a {type(value).__name__}")


@lru_cache(maxsize=256)
def _compile(frozen: _Frozen, keep: bool) -> Any:
    """Return the compiled function, or in words why there is none."""
    helpers: list[Any] = []
    try:
        copy = _bound_copy(frozen, helpers)
        compiled = _jit(copy, types.float64(VIEW), keep)
        if not keep:
            for dispatcher in (compiled, *helpers):
                for overload in dispatcher.overloads.values():
                    _Exactness(overload.type_annotation).check()
    except _NotExactError as reason:
        return str(reason)
    except Exception as error:  # whatever numba cannot do, Python does
        return f"numba cannot compile it: {str(error).strip().splitlines()[0]}"
    return compiled


def _jit(function: Callable[..., float], signature: Any, keep: bool) -> Any:
    return numba.njit(signature, cache=keep, nogil=True, error_model="python")(function)


def _bound_copy(frozen: _Frozen, helpers: list[Any]) -> FunctionType:
    """Return the function with stand-ins for its modules, and its helpers compiled."""
    original = frozen.function.function

    def stand_in(value: object, known: object) -> object:
        if isinstance(known, _Frozen):
            helpers.append(_jit(_bound_copy(known, helpers), None, False))
            return helpers[-1]
        return STAND_INS.get(id(value), value)

    values = dict(_names(original))
    names = {name: stand_in(values[name], known) for name, known in frozen.names}
    names["__name__"] = original.__module__
    cells = [
        type(cell)(stand_in(cell.cell_contents, known))
        for cell, known in zip(original.__closure__ or (), frozen.cells, strict=True)
    ]
    copy = FunctionType(frozen.code, names, original.__name__, None, tuple(cells))
    copy.__module__, copy.__qualname__ = original.__module__, original.__qualname__
    return copy


class _Exactness:
    """Checks the typed intermediate code of one compiled function."""

    def __init__(self, typed: Any) -> None:
        self.blocks, self.types = typed.blocks, typed.typemap
        self.values: dict[str, list[Any]] = {}
        for block in self.blocks.values():
            for assign in block.find_insts(ir.Assign):
                self.values.setdefault(assign.target.name, []).append(assign.value)

    def check(self) -> None:
        """Raise _NotExactError unless every value is a number that both worlds have alike."""
        if analysis.compute_cfg_from_blocks(self.blocks).loops():
            raise _NotExactError("it has a loop")
        for name, values in self.values.items():
            kind = types.unliteral(self.types[name])
            if not isinstance(kind, _KINDS) and kind not in _NUMBERS:
                raise _NotExactError(f"it uses a value of type {kind}")
            for value in values:
                self._check_operation(value)
            if kind == types.int64:
                self.bits(name, ())

    def _check_operation(self, value: Any) -> None:
        if not isinstance(value, ir.Expr):
            return
        if value.op == "null":
            raise _NotExactError("a name in it may be unset")
        if value.op not in ("binop", "inplace_binop", "unary"):
            return
        sides = (value.value,) if value.op == "unary" else (value.lhs, value.rhs)
        are_bool = all(types.unliteral(self.types[s.name]) == types.boolean for s in sides)
        sign = value.immutable_fn if value.op == "inplace_binop" else value.fn
        if sign in (operator.pow, operator.lshift, operator.is_, operator.is_not):
            raise _NotExactError(f"it uses the operator {sign.__name__}")
        # numpy's and Python's truth values differ as numbers
        if are_bool and sign not in (*_COMPARISONS, operator.not_, operator.and_, operator.or_):
            raise _NotExactError(f"it uses the operator {sign.__name__} on truth values")

    def bits(self, name: str, users: tuple[str, ...]) -> int:
        """Return how many bits the whole number ``name`` has at most, without its sign."""
        if types.unliteral(self.types[name]) == types.boolean:
            return 1
        if name in users:
            raise _NotExactError("a whole number in it grows")
        bits = max(self._bits(value, (*users, name)) for value in self.values.get(name, [None]))
        if bits > _EXACT_BITS:
            raise _NotExactError(
                f"a whole number in it may pass 2^{_EXACT_BITS} (fields count as 2^{FIELD_BITS}): "
                "write one factor as a float"
            )
        return bits

    def _bits(self, value: Any, users: tuple[str, ...]) -> int:
        def of(*parts: Any) -> int:
            return max(self.bits(part.name, users) for part in parts)

        if isinstance(value, ir.Const | ir.Global | ir.FreeVar):
            return int(value.value).bit_length()
        if isinstance(value, ir.Var):
            return of(value)
        op = value.op if isinstance(value, ir.Expr) else ""
        if op in ("getattr", "static_getitem") and self.types[value.value.name] == VIEW:
            return FIELD_BITS
        if op in ("cast", "unary"):
            return of(value.value)
        if op == "phi":
            return of(*value.incoming_values)
        if op in ("binop", "inplace_binop"):
            sign = value.immutable_fn if op == "inplace_binop" else value.fn
            if sign is operator.mul:
                return of(value.lhs) + of(value.rhs)
            return of(value.lhs, value.rhs) + 1
        if op == "call" and getattr(self.types[value.func.name], "typing_key", None) in _SAME_SIZE:
            return of(*value.args)
        raise _NotExactError("it makes a whole number in a way that is not checked")


_KINDS = (
    types.NamedTuple, types.Module, types.Dispatcher, types.Function, types.NumberClass,
)  # fmt: skip
_NUMBERS = (types.int64, types.float64, types.boolean)
_SAME_SIZE = (min, max, abs)
