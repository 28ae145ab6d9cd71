"""Conformal calibration of a predictor's quantiles, by age: what a checkpoint stores of it.

Split-conformal prediction on the survival curve (Chernozhukov et al., PNAS 2021): a run whose
remaining length R was seen scores V = P(remaining < R) and W = P(remaining <= R). Asking the
predictor at the level that a share ``level`` of the V stayed below makes an upper bound that holds
with that share, whatever the predictor got wrong; W does the same for lower bounds, and the larger
of 2V - 1 and 1 - 2W for central intervals. Levels are learned in groups of age (Mondrian), because
a predictor errs differently early and late.

A run that was not seen to end has a censored score: the shares are product-limit estimates. The
unit is the prompt: repeats of one prompt and rows of one run do not add up to more evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from contracts.errors import CheckpointError, InvalidInput
from contracts.policy import FloatArray, IntArray
from predictors.card import JsonObject, JsonValue

METHOD = "split-conformal on survival, by age"
LEVELS = np.unique(
    np.round([0.01, 0.025, *np.arange(0.05, 0.951, 0.05), 0.975, 0.99], 3)
)  # (23,) 0.5 and above are upper bounds, below are lower bounds
_MAX_GROUPS, _MAX_LEVELS = 100, 200
# a score is a probability read off a curve: the bound must lie on its safe side despite rounding
_SAFE = 1e-7


@dataclass(frozen=True, slots=True, eq=False)
class ConformalRows:
    """Scores of runs that the predictor did not see; one row for each (run, age) asked.

    ``upper`` (n,) is V, ``lower`` (n,) is W, both in [0, 1]; where ``observed`` (n,) is False the
    run was cut or still runs, and its scores are at least these. ``prompt`` (n,) numbers the
    prompts. ``weight`` (n,) must not depend on lengths: equal shares of each run's life, say, would
    count short runs more at every age, and no bound would hold among the requests that run.
    """

    age: IntArray
    upper: FloatArray
    lower: FloatArray
    observed: np.ndarray
    prompt: IntArray
    weight: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationTable:
    """Which level to ask for, so that a bound holds as often as it says.

    Group j holds ages from ``age_edges[j - 1]`` (0 for the first) to below ``age_edges[j]``.
    ``asked`` (g, m) is the level to ask of the predictor for each of ``levels`` (m,); 1 stands for
    the cap and 0 for a single token. ``interval`` (g, m) is the central probability to ask for an
    interval of that coverage; 1 stands for all there is. ``num_prompts`` (g,) is the effective
    number of prompts behind a group, ``raw_cover90`` (g,) how often the predictor's own 0.9
    quantile held there.
    """

    age_edges: IntArray
    levels: FloatArray
    asked: FloatArray
    interval: FloatArray
    num_prompts: FloatArray
    raw_cover90: FloatArray

    def group(self, ages: IntArray) -> IntArray:
        """Return the group (n,) of each age."""
        return np.searchsorted(self.age_edges, ages, side="right")

    def asked_at(self, level: float) -> FloatArray:
        """Return the level (g,) to ask for; between stored levels, on a straight line."""
        return self._between(self.asked, level)

    def interval_at(self, coverage: float) -> FloatArray:
        """Return the central probability (g,) to ask for."""
        return self._between(self.interval, coverage)

    def _between(self, rows: FloatArray, level: float) -> FloatArray:
        knots = np.concatenate([[0.0], self.levels, [1.0]])
        return np.array([np.interp(level, knots, _padded(row)) for row in rows])

    def share_at(self, group: int, share: FloatArray) -> FloatArray:
        """Return the calibrated probability of what the predictor gives probability ``share``."""
        knots = np.concatenate([[0.0], self.levels, [1.0]])
        return np.asarray(np.interp(share, _padded(self.asked[group]), knots))

    def to_json(self) -> JsonObject:
        """Return the table as it stands in ``config.json``."""
        return {
            "method": METHOD,
            "age_edges": [int(edge) for edge in self.age_edges],
            "levels": [float(level) for level in self.levels],
            "asked": [[float(level) for level in row] for row in self.asked],
            "interval": [[float(level) for level in row] for row in self.interval],
            "num_prompts": [float(number) for number in self.num_prompts],
            "raw_cover90": [float(share) for share in self.raw_cover90],
        }


def joined_rows(parts: Sequence[ConformalRows]) -> ConformalRows:
    """Return the rows of all ``parts``; their prompts must be numbered apart."""
    names = [field.name for field in fields(ConformalRows)]
    return ConformalRows(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    )


def fit_table(rows: ConformalRows, num_groups: int = 10) -> CalibrationTable:
    """Return the table of at most ``num_groups`` groups, equally heavy (deciles of age by default).

    A level that so few prompts cannot support becomes the cap (upper bound) or one token (lower).
    """
    edges, members = age_groups(rows.age, rows.weight, num_groups)
    sizes = [effective_prompts(rows.prompt[part], rows.weight[part]) for part in members]
    groups = list(zip(members, sizes, strict=True))
    return CalibrationTable(
        age_edges=edges,
        levels=LEVELS,
        asked=np.array([_asked(rows, part, size) for part, size in groups]),
        interval=np.array([_interval(rows, part, size) for part, size in groups]),
        num_prompts=np.array(sizes),
        raw_cover90=np.array([_share_below(rows, part, 0.9) for part in members]),
    )


def table_from_json(value: JsonValue) -> CalibrationTable | None:
    """Return the checked table of ``config.json``, None for none; raises CheckpointError."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("method") != METHOD:
        raise CheckpointError(
            f"calibration is {str(value)[:60]!r}: this release reads the method {METHOD!r}"
        )
    edges = _numbers(value, "age_edges", (-1,))
    levels = _numbers(value, "levels", (-1,))
    num_groups = len(edges) + 1
    if num_groups > _MAX_GROUPS or not 1 <= len(levels) <= _MAX_LEVELS:
        raise CheckpointError(
            f"calibration has {num_groups} groups and {len(levels)} levels: the bounds are "
            f"{_MAX_GROUPS} and {_MAX_LEVELS}"
        )
    asked, interval = (
        _numbers(value, key, (num_groups, len(levels))) for key in ("asked", "interval")
    )
    table = CalibrationTable(
        age_edges=edges.astype(np.int64),
        levels=levels,
        asked=asked,
        interval=interval,
        num_prompts=_numbers(value, "num_prompts", (num_groups,)),
        raw_cover90=_numbers(value, "raw_cover90", (num_groups,)),
    )
    rising = (np.diff(edges) > 0).all() and (np.diff(levels) > 0).all()
    both = np.concatenate([asked, interval])
    inside = levels[0] > 0.0 and levels[-1] < 1.0 and both.min() >= 0.0 and both.max() <= 1.0
    if not rising or not inside or (np.diff(both, axis=1) < 0.0).any():
        raise CheckpointError(
            "calibration: age_edges and levels must rise, levels lie inside (0, 1), asked levels "
            "in [0, 1] without falling"
        )
    return table


def product_limit(
    scores: FloatArray, observed: np.ndarray, weights: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the observed scores, rising, and the weighted Kaplan-Meier share at or below each."""
    order = np.lexsort((~observed, scores))  # at a tie, events come before censorings
    scores, seen, weights = scores[order], observed[order], weights[order]
    values, first = np.unique(scores, return_index=True)
    at_risk = np.cumsum(weights[::-1])[::-1][first]
    events = np.add.reduceat(np.where(seen, weights, 0.0), first)
    share = np.asarray(1.0 - np.cumprod(np.clip(1.0 - events / at_risk, 0.0, 1.0)))
    ended = events > 0.0
    return values[ended], share[ended]


def _asked(rows: ConformalRows, part: IntArray, num_prompts: float) -> FloatArray:
    observed, weights = rows.observed[part], rows.weight[part]
    upper = product_limit(rows.upper[part], observed, weights)
    lower = product_limit(rows.lower[part], observed, weights)
    spare = 1.0 / num_prompts  # the place of the next prompt among those seen
    out = np.empty(len(LEVELS))
    for index, level in enumerate(LEVELS.tolist()):
        if level >= 0.5:
            out[index] = min(1.0, _reach(*upper, level * (1.0 + spare)) + _SAFE)
        else:
            wanted = level * (1.0 + spare) - spare
            out[index] = max(0.0, _reach(*lower, wanted) - _SAFE) if wanted > 0.0 else 0.0
    return np.maximum.accumulate(out)


def _interval(rows: ConformalRows, part: IntArray, num_prompts: float) -> FloatArray:
    # a cut run may end later, which raises V and W: only 2V - 1 bounds its score from below
    seen, above = rows.observed[part], 2.0 * rows.upper[part] - 1.0
    score = np.where(seen, np.maximum(above, 1.0 - 2.0 * rows.lower[part]), above)
    values, share = product_limit(score, seen, rows.weight[part])
    wanted = LEVELS * (1.0 + 1.0 / num_prompts)
    return np.array(
        [min(1.0, max(0.0, _reach(values, share, level)) + 2 * _SAFE) for level in wanted.tolist()]
    )


def _reach(values: FloatArray, share: FloatArray, wanted: float) -> float:
    """Return the smallest score whose share reaches ``wanted``; 1 when none does."""
    slot = int(np.searchsorted(share, wanted - 1e-12))
    return float(values[slot]) if slot < len(values) else 1.0


def _share_below(rows: ConformalRows, part: IntArray, level: float) -> float:
    values, share = product_limit(rows.upper[part], rows.observed[part], rows.weight[part])
    slot = int(np.searchsorted(values, level)) - 1
    return float(share[slot]) if slot >= 0 else 0.0


def age_groups(
    ages: IntArray, weights: FloatArray, num_groups: int
) -> tuple[IntArray, list[IntArray]]:
    """Return the inner edges of at most ``num_groups`` groups of age, equally heavy, and the rows
    of each; fewer where ages are tied. Raises InvalidInput when there is no row."""
    if not len(ages):
        raise InvalidInput("there is no row to calibrate on: give runs of held-out prompts")
    edges = _age_edges(ages, weights, num_groups)
    group = np.searchsorted(edges, ages, side="right")
    return edges, [np.flatnonzero(group == index) for index in range(len(edges) + 1)]


def _age_edges(ages: IntArray, weights: FloatArray, num_groups: int) -> IntArray:
    order = np.argsort(ages, kind="stable")
    total = np.cumsum(weights[order])
    wanted = total[-1] * np.arange(1, num_groups) / num_groups
    edges = np.unique(ages[order][np.searchsorted(total, wanted)])
    return np.asarray(edges[edges > ages.min()], dtype=np.int64)


def effective_prompts(prompt: IntArray, weights: FloatArray) -> float:
    """Return Kish's effective number of equally heavy prompts."""
    _, member = np.unique(prompt, return_inverse=True)
    each = np.bincount(member, weights)
    return float(each.sum() ** 2 / (each**2).sum())


def _padded(asked: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], asked, [1.0]])


def _numbers(table: Mapping[str, JsonValue], key: str, shape: tuple[int, ...]) -> FloatArray:
    """Return ``table[key]`` as finite float64 of ``shape`` (-1: any length)."""
    value = table.get(key)
    rows = value if isinstance(value, list) and len(shape) == 2 else [value]
    flat = [number for row in rows for number in (row if isinstance(row, list) else [None])]
    if any(type(number) not in (int, float) for number in flat):
        raise CheckpointError(f"calibration field {key!r} must hold numbers only")
    out = np.array(flat, dtype=np.float64)
    even = len({len(row) for row in rows if isinstance(row, list)}) <= 1
    if not even or (shape != (-1,) and out.size != np.prod(shape)) or not np.isfinite(out).all():
        raise CheckpointError(f"calibration field {key!r} must be finite numbers, shape {shape}")
    return out if len(shape) == 1 else out.reshape(shape)
