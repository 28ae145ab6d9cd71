"""The rungs of oracle-K, from a request's own runs down to the cap, and the climb down them.

- ``prompt``: the runs of this very request that were longer than the age;
- ``near-duplicate``: those of prompts that differ in case, spacing or punctuation only;
- ``log-t``: the heavy tail beyond the prompt's own runs (:mod:`oracles.tails`);
- ``family``, ``model``: the runs of its family, of its model, that were longer than the age;
- ``cap``: nothing was ever observed that far, the answer is the bound itself.

A row settles on the first rung with a run that outlived its age. Lengths never cross models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import unknown_name
from contracts.log_t import log_t_mean_residual
from contracts.policy import FloatArray, IntArray
from contracts.survival_many import SurvivalCurves, kaplan_meier_by
from oracles.run_table import BoolArray, HashArray, RunTable
from oracles.tails import LogTails, fit_tails

LEVELS = ("prompt", "near-duplicate", "log-t", "family", "model", "cap")
CAP_LEVEL = len(LEVELS) - 1
FOREVER = (1 << 31) - 1  # the serving cap of who asks for natural lengths
_KEY_OF = {"prompt": 0, "near-duplicate": 1, "family": 2, "model": 3}  # place in RequestKeys


@dataclass(frozen=True, slots=True, eq=False)
class Rung:
    """One level of curves: ``keys`` (g,) are rising hashes, ``curve_of`` (g,) their curves."""

    keys: HashArray
    curve_of: IntArray
    curves: SurvivalCurves

    def find(self, hashes: HashArray) -> IntArray:
        """Return the curve (n,) of each hash, -1 where there is none."""
        at = np.minimum(np.searchsorted(self.keys, hashes), len(self.keys) - 1)
        return np.where(self.keys[at] == hashes, self.curve_of[at], -1)


@dataclass(frozen=True, slots=True, eq=False)
class Climb:
    """Where each row (n,) settled: its level, curve or tail (``slot``), the runs behind it and how
    many outlived the age, the longest observation there (``last``), whether runs beyond it remain
    possible (``open_end``), whether all were cut, and the mean if it was asked for (else NaN)."""

    keys: HashArray
    level: IntArray
    slot: IntArray
    num_runs: IntArray
    effective_k: IntArray
    last: IntArray
    open_end: BoolArray
    all_cut: BoolArray
    mean: FloatArray

    @staticmethod
    def start(keys: HashArray) -> Climb:
        """Return a climb at which nobody has settled."""
        n = len(keys)
        return Climb(
            keys=keys,
            level=np.full(n, CAP_LEVEL),
            slot=np.zeros(n, dtype=np.int64),
            num_runs=np.zeros(n, dtype=np.int64),
            effective_k=np.zeros(n, dtype=np.int64),
            last=np.zeros(n, dtype=np.int64),
            open_end=np.zeros(n, dtype=bool),
            all_cut=np.zeros(n, dtype=bool),
            mean=np.full(n, np.nan),
        )

    def settle(
        self, index: int, rows: IntArray, slot: IntArray, num_runs: IntArray, alive: IntArray
    ) -> None:
        """Put ``rows`` on rung ``index``."""
        self.level[rows], self.slot[rows] = index, slot
        self.num_runs[rows], self.effective_k[rows] = num_runs, alive


class Ladder:
    """The rungs built from a run table; ``levels`` names those in use ("cap" always ends them).

    Raises UnknownName for a level that does not exist.
    """

    def __init__(self, table: RunTable, levels: Sequence[str] = LEVELS) -> None:
        for level in levels:
            if level not in LEVELS:
                raise unknown_name("oracle level", level, LEVELS)
        self.levels = tuple(levels)
        self.rungs: dict[str, Rung] = {}
        for name, place in _KEY_OF.items():
            self.rungs[name] = self._rung(table, name, place)
        self.tails = self._tails(table) if "log-t" in levels else None

    def _rung(self, table: RunTable, name: str, place: int) -> Rung:
        keys, group = np.unique(table.keys[:, place], return_inverse=True)
        group = group.reshape(-1)
        if name == "near-duplicate" and len(keys) == table.num_requests:
            own = self.rungs["prompt"]  # no two requests are near: their own curves serve
            curve_of = np.empty(len(keys), dtype=np.int64)
            curve_of[group] = own.find(table.keys[:, 0])
            return Rung(keys, curve_of, own.curves)
        curves = kaplan_meier_by(
            group[table.request_of], table.output_tokens, table.event_observed, len(keys)
        )
        return Rung(keys, np.arange(len(keys)), curves)

    def _tails(self, table: RunTable) -> LogTails:
        """Return the tails in the order of the prompt rung's curves."""
        order = np.argsort(table.keys[:, 0])
        tails = fit_tails(table)
        return LogTails(tails.location[order], tails.scale[order])

    def climb(self, keys: HashArray, ages: IntArray, caps: IntArray | None) -> Climb:
        """Settle every row of ``keys`` (n, 4) at its age; with ``caps`` ask the mean as well."""
        climb = Climb.start(keys)
        for index, name in enumerate(LEVELS[:-1]):
            rows = np.flatnonzero(climb.level == CAP_LEVEL)
            if name not in self.levels or not rows.size:
                continue
            if name == "log-t":
                self._on_tail(climb, index, rows, ages, caps)
            else:
                self._on_curve(climb, index, rows, ages, caps)
        return climb

    def ask(
        self,
        keys: HashArray,
        ages: IntArray,
        of_curve: Callable[[SurvivalCurves, IntArray, IntArray], FloatArray],
        of_tail: Callable[[FloatArray, FloatArray, IntArray], FloatArray],
    ) -> FloatArray:
        """Ask each row's rung, the one that answers its mean; NaN at the cap."""
        climb = self.climb(keys, ages, None)
        answers = np.full(len(keys), np.nan)
        for index, name in enumerate(LEVELS[:-1]):
            rows = np.flatnonzero(climb.level == index)
            slot = climb.slot[rows]
            if not rows.size:
                continue
            if name == "log-t":
                assert self.tails is not None
                answers[rows] = of_tail(self.tails.location[slot], self.tails.scale[slot], rows)
            else:
                answers[rows] = of_curve(self.rungs[name].curves, slot, rows)
        return answers

    def _on_curve(
        self, climb: Climb, index: int, rows: IntArray, ages: IntArray, caps: IntArray | None
    ) -> None:
        rung = self.rungs[LEVELS[index]]
        curves = rung.curves
        slot = rung.find(climb.keys[rows, _KEY_OF[LEVELS[index]]])
        rows, slot = rows[slot >= 0], slot[slot >= 0]
        outlived = curves.alive(slot, ages[rows])
        rows, slot, outlived = rows[outlived > 0], slot[outlived > 0], outlived[outlived > 0]
        climb.settle(index, rows, slot, curves.num_runs[slot], outlived)
        climb.last[rows] = curves.last_tokens[slot]
        climb.open_end[rows] = curves.last_survival[slot] > 0.0
        climb.all_cut[rows] = curves.num_events[slot] == 0
        if caps is not None:
            # runs that were all cut say "at least this long" and no more
            only_seen = climb.all_cut[rows] | (caps[rows] == FOREVER)
            seen = np.minimum(caps[rows], climb.last[rows])
            upto = np.where(only_seen, seen, caps[rows])
            climb.mean[rows] = curves.mean_residual(slot, ages[rows], upto)

    def _on_tail(
        self, climb: Climb, index: int, rows: IntArray, ages: IntArray, caps: IntArray | None
    ) -> None:
        assert self.tails is not None
        own, model = self.rungs["prompt"], self.rungs["model"]
        slot = own.find(climb.keys[rows, 0])
        can = (slot >= 0) & ~np.isnan(self.tails.scale[slot])
        rows, slot = rows[can], slot[can]
        num_runs = own.curves.num_runs[slot]
        climb.settle(index, rows, slot, num_runs, num_runs)
        # the mean of a log-t without a cap is infinite: natural answers stop at the longest
        # length its model was seen to write, and are lower bounds
        longest = model.curves.last_tokens[model.find(climb.keys[rows, 3])]
        climb.last[rows] = np.maximum(longest, ages[rows] + 1)
        climb.open_end[rows] = True
        if caps is not None:
            upto = np.where(caps[rows] == FOREVER, climb.last[rows], caps[rows])
            climb.mean[rows] = log_t_mean_residual(
                self.tails.location[slot], self.tails.scale[slot], ages[rows], upto
            )
