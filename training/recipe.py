"""Recipes: what to fit and how, as TOML; every key is checked, an unknown one is an error.

A checkpoint notes the seed and the settings of its fit, so that the same can be fitted again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from contracts.errors import InvalidInput
from contracts.settings import read_toml, require_at_least, updated
from predictors.base import Predictor, TrainingSet
from predictors.calibrated import Calibrated
from predictors.card import JsonObject
from predictors.registry import FamilySettings, find_family

_NOT_NOTED = ("state_dir", "tracker")  # where a fit kept its state, whom it told: not what it is


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
        require_at_least(self, num_threads=1)


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


def fit_noted(
    settings: FamilySettings, training: TrainingSet, *, seed: int = 0, num_threads: int = 1
) -> Predictor:
    """Fit ``settings`` on ``training``, and note them in the predictor for its checkpoint."""
    predictor = settings.fit(training, seed=seed, num_threads=num_threads)
    noted = json.loads(json.dumps(asdict(cast(Any, settings))))
    predictor.fitted_with = {"seed": seed, "settings": _noted(noted)}
    return predictor


def recipe_of(predictor: Predictor) -> Recipe:
    """Return the recipe that fits ``predictor`` again, given its training runs.

    Raises InvalidInput when the predictor does not say what it was fitted with, UnknownName when it
    names a setting that this release does not have.
    """
    base = predictor.base if isinstance(predictor, Calibrated) else predictor
    noted = base.fitted_with
    if noted is None:
        raise InvalidInput(
            f"the {base.family} checkpoint does not say which settings it was fitted with: train "
            "it again with 'preemptbench train'"
        )
    kept = {key: value for key, value in _noted(noted).items() if key in ("seed", "settings")}
    return updated(
        default_recipe(base.family), kept, f"fitted_with of the {base.family} checkpoint"
    )


def _noted(table: JsonObject) -> JsonObject:
    return {
        key: _noted(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if key not in _NOT_NOTED
    }
