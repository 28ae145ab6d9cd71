"""Conformalised quantile regression on remaining tokens: the other way to a central interval.

A predictor's own low and high quantiles are widened by one number of tokens for each group of age
(Romano, Patterson and Candes 2019, two-sided score E = max(low - R, R - high)); the number may be
negative. The level of its quantiles stays; predictors.conformal moves the level instead, and so
widens more where the predictor itself is unsure. It is here for comparison; checkpoints carry the
table of predictors.conformal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.policy import FloatArray, IntArray
from contracts.signals import DistributionalSignal, SignalRequest
from predictors.base import check_level, room
from predictors.conformal import age_groups, effective_prompts, product_limit


@dataclass(frozen=True, slots=True, eq=False)
class CqrRows:
    """One row for each (run, age) of runs that the predictor did not see: its own ``low`` and
    ``high`` quantiles (n,) in tokens, and what was ``left`` (n,), a lower bound where not
    ``observed``. ``prompt`` numbers the prompts; ``weight`` as in ConformalRows."""

    age: IntArray
    low: FloatArray
    high: FloatArray
    left: FloatArray
    observed: np.ndarray
    prompt: IntArray
    weight: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class CqrTable:
    """Tokens (g,) to add on both sides of the interval of ``coverage``, by group of age; infinity
    where the prompts are too few. Group j holds ages from ``edges[j - 1]`` to below ``edges[j]``.
    """

    coverage: float
    edges: IntArray
    widening_tokens: FloatArray


def fit_cqr(rows: CqrRows, coverage: float, num_groups: int = 10) -> CqrTable:
    """Return the table of at most ``num_groups`` groups, equally heavy; raises InvalidInput."""
    check_level(coverage)
    edges, members = age_groups(rows.age, rows.weight, num_groups)
    above = rows.left - rows.high
    # a cut run may end later: how far it lies above the interval is then a lower bound
    score = np.where(rows.observed, np.maximum(rows.low - rows.left, above), above)
    widening = []
    for part in members:
        weight = rows.weight[part]
        spare = 1.0 / effective_prompts(rows.prompt[part], weight)
        values, share = product_limit(score[part], rows.observed[part], weight)
        slot = int(np.searchsorted(share, coverage * (1.0 + spare) - 1e-12))
        widening.append(float(values[slot]) if slot < len(values) else np.inf)
    return CqrTable(coverage, edges, np.array(widening))


def cqr_interval(
    signal: DistributionalSignal,
    table: CqrTable,
    requests: Sequence[SignalRequest],
    ages: IntArray,
) -> tuple[FloatArray, FloatArray]:
    """Return bounds (n,), (n,) of the remaining tokens, within 1 and the cap; an interval that
    narrows past itself is its middle."""
    tail = (1.0 - table.coverage) / 2.0
    bound = room(requests, ages).astype(np.float64)
    low = signal.quantile(requests, ages, tail)
    high = signal.quantile(requests, ages, 1.0 - tail)
    tokens = table.widening_tokens[np.searchsorted(table.edges, ages, side="right")]
    tokens = np.maximum(tokens, (low - high) / 2.0)
    return np.clip(low - tokens, 1.0, bound), np.clip(high + tokens, 1.0, bound)
