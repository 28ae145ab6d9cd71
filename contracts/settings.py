"""Settings as frozen dataclasses, changed by TOML tables and ``key.path=value`` assignments.

Every key is checked; an unknown one is an error that offers the nearest. Ranges are the business of
each dataclass, which checks itself when it is built.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from contracts.errors import InvalidInput, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")


def require(settings: object, *rules: tuple[str, bool, str]) -> None:
    """Raise InvalidInput for the first of ``rules`` that does not hold: (name of the field of
    ``settings``, whether it holds, what the value must be)."""
    for name, holds, rule in rules:
        if not holds:
            raise InvalidInput(f"{name} is {getattr(settings, name)!r}: it must be {rule}")


def require_at_least(settings: object, **bounds: int) -> None:
    """Raise InvalidInput for the first field of ``settings`` that lies below its bound."""
    require(
        settings,
        *(
            (name, getattr(settings, name) >= bound, f"at least {bound}")
            for name, bound in bounds.items()
        ),
    )


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Read a TOML file; raises InvalidInput naming the ``kind`` of file and its path."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{kind} {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{kind} {path} is not TOML: {error}") from None


def assigned(current: _T, assignments: Sequence[str], option: str = "--set") -> _T:
    """Apply ``key.path=value`` assignments, each value written as in TOML."""
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        try:
            table = tomllib.loads(f"{key} = {value}") if equals else {}
        except tomllib.TOMLDecodeError:
            table = {}
        if not table:
            raise InvalidInput(f"{option} {assignment}: write key=value, the value as in TOML")
        current = updated(current, table, f"{option} {assignment}")
    return current


def updated(current: _T, changes: Mapping[str, Any], where: str) -> _T:
    """Return the dataclass ``current`` with ``changes``, nested tables into nested dataclasses.

    A value must have the type of what it replaces (a whole number may stand for a float). Where
    there is none yet, the field's annotation says what may be.
    """
    known = [field.name for field in fields(current)]
    values: dict[str, Any] = {}
    for key, value in changes.items():
        if key not in known:
            raise unknown_name(f"setting in {where}", key, known)
        old = getattr(current, key)
        if old is None:
            old = _blank(type(current), key, value)
        values[key] = _converted(old, value, f"{where}: {key}")
    return replace(current, **values)


def _blank(owner: type, key: str, value: object) -> object:
    """Return what an unset field could hold: a dataclass with its defaults, or a plain value."""
    kinds = [kind for kind in get_args(get_type_hints(owner)[key]) if kind is not type(None)]
    for kind in kinds:
        if type(value) is kind:
            return value
    return kinds[0]() if kinds else None


def _converted(old: object, value: Any, where: str) -> object:
    if is_dataclass(old) and not isinstance(old, type):
        if not isinstance(value, dict):
            raise InvalidInput(f"{where} is {value!r}; it must be a table of settings")
        return updated(old, value, where)
    if isinstance(old, tuple) and isinstance(value, list):
        wanted = type(old[0]) if old else None
        wrong = [item for item in value if wanted is not None and type(item) is not wanted]
        if wrong:
            raise InvalidInput(f"{where} holds {wrong[0]!r}; its items must be like {old[0]!r}")
        return tuple(value)
    if type(old) is float and type(value) is int:
        return float(value)
    if type(value) is not type(old):
        raise InvalidInput(f"{where} is {value!r}; it must be a {type(old).__name__}, like {old!r}")
    return value
