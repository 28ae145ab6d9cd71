"""Recipes: what to fit and how, as TOML; every key is checked, an unknown one is an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from contracts.errors import InvalidInput
from contracts.settings import read_toml, updated
from predictors.registry import FamilySettings, find_family


@dataclass(frozen=True, slots=True)
class Recipe:
    """``family`` with its ``settings``; ``test_share`` of the prompts are held out for scores
    (0 trains on all and scores nothing); bounds are calibrated across ``calibration_folds`` folds
    of the training prompts (0 leaves them as they are)."""

    family: str
    settings: FamilySettings
    seed: int = 0
    num_threads: int = 1
    test_share: float = 0.25
    calibration_folds: int = 5

    def __post_init__(self) -> None:
        if not 0.0 <= self.test_share < 1.0:
            raise InvalidInput(f"test_share is {self.test_share}: it must be in [0, 1)")
        if self.calibration_folds < 0 or self.calibration_folds == 1:
            raise InvalidInput(
                f"calibration_folds is {self.calibration_folds}: it must be 0 (none) or at least 2"
            )
        if self.num_threads < 1:
            raise InvalidInput(f"num_threads is {self.num_threads}: it must be at least 1")


def default_recipe(family: str) -> Recipe:
    """Return the recipe of a family with its default settings; raises UnknownName."""
    return Recipe(family, find_family(family).settings())


def read_recipe(path: Path) -> Recipe:
    """Read a TOML recipe; raises InvalidInput or UnknownName naming the file and the key."""
    table = read_toml(path, "recipe")
    family = table.pop("family", None)
    if not isinstance(family, str):
        raise InvalidInput(f'recipe {path}: family is {family!r}; name one, family = "gbm-hazard"')
    return updated(default_recipe(family), table, f"recipe {path}")
