"""Recipes: what to fit and how, as TOML; every key is checked, an unknown one is an error."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from contracts.errors import InvalidInput, unknown_name
from predictors.registry import FamilySettings, find_family

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Recipe:
    """``family`` with its ``settings``; ``test_share`` of the prompts are held out for scores
    (0 trains on all and scores nothing)."""

    family: str
    settings: FamilySettings
    seed: int = 0
    num_threads: int = 1
    test_share: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 <= self.test_share < 1.0:
            raise InvalidInput(f"test_share is {self.test_share}: it must be in [0, 1)")
        if self.num_threads < 1:
            raise InvalidInput(f"num_threads is {self.num_threads}: it must be at least 1")


def default_recipe(family: str) -> Recipe:
    """Return the recipe of a family with its default settings; raises UnknownName."""
    return Recipe(family, find_family(family).settings())


def read_recipe(path: Path) -> Recipe:
    """Read a TOML recipe; raises InvalidInput or UnknownName naming the file and the key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"recipe {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"recipe {path} is not TOML: {error}") from None
    family = table.pop("family", None)
    if not isinstance(family, str):
        raise InvalidInput(f'recipe {path}: family is {family!r}; name one, family = "gbm-hazard"')
    return updated(default_recipe(family), table, f"recipe {path}")


def with_overrides(recipe: Recipe, assignments: Sequence[str]) -> Recipe:
    """Apply ``key.path=value`` assignments, each value written as in TOML."""
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        try:
            table = tomllib.loads(f"{key} = {value}") if equals else {}
        except tomllib.TOMLDecodeError:
            table = {}
        if not table:
            raise InvalidInput(f"--set {assignment}: write key=value, the value as in TOML")
        recipe = updated(recipe, table, f"--set {assignment}")
    return recipe


def updated(current: _T, changes: Mapping[str, Any], where: str) -> _T:
    """Return the dataclass ``current`` with ``changes``, nested tables into nested dataclasses.

    A value must have the type of what it replaces (a whole number may stand for a float).
    """
    known = [field.name for field in fields(current)]
    values: dict[str, Any] = {}
    for key, value in changes.items():
        if key not in known:
            raise unknown_name(f"setting in {where}", key, known)
        values[key] = _converted(getattr(current, key), value, f"{where}: {key}")
    return replace(current, **values)


def _converted(old: object, value: Any, where: str) -> object:
    if is_dataclass(old) and not isinstance(old, type) and isinstance(value, dict):
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
