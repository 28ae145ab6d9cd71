"""Rescoring of a whole study from its stored records: breach of every rule at every deadline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from eval.lives import read_records
from eval.rescoring import (
    DEADLINES_S,
    BreachCurve,
    DifferenceCurve,
    Reversal,
    difference_curve,
    rescore_lives,
    rescore_own,
    reversals,
)
from eval.signal_sources import NO_SIGNAL
from eval.stored import StoredStudy
from eval.study_config import BASELINE
from eval.study_summary import PARTS, Rule, cell_tables

LIFO: Rule = (BASELINE, NO_SIGNAL)
CellKey = tuple[str, str]  # source, pressure


@dataclass(frozen=True, slots=True)
class Refusal:
    """Engine runs of a rule whose records may not be rescored, and why."""

    source: str
    pressure: str
    rule: Rule
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class StudyCurves:
    """One curve a seed for each rule in each cell of the grid, the cells that cannot be compared
    with LIFO's (other requests were accepted), and what may not be rescored."""

    deadlines_s: FloatArray
    by_cell: Mapping[CellKey, Mapping[Rule, Sequence[BreachCurve]]]
    in_regime: Mapping[CellKey, bool]
    not_comparable: frozenset[tuple[CellKey, Rule]]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RuleCurve:
    """One rule over some cells: mean breach and floor at each deadline (shares of 1), the
    difference to LIFO with its band (None for LIFO), and the reversals that the band shows."""

    where: str
    rule: Rule
    num_cells: int
    breach: FloatArray
    floor: FloatArray
    difference: DifferenceCurve | None
    reversals: tuple[Reversal, ...]


def legal_deadlines(stored: StoredStudy) -> tuple[float, ...]:
    """Return the usual deadlines up to which every request was watched."""
    usual = tuple(d for d in DEADLINES_S if d <= _watched_s(stored))
    return usual or (stored.study.config.deadline_s,)


def _watched_s(stored: StoredStudy) -> float:
    return max(stored.study.config.observe_s, _longest_own_s(stored))


def _longest_own_s(stored: StoredStudy) -> float:
    config = stored.study.config
    return max((c.deadline_s for c in config.deadline_classes), default=config.deadline_s)


def rescore_study(
    stored: StoredStudy,
    deadlines_s: Sequence[float],
    on_file: Callable[[int, int], None] = lambda *_: None,
    *,
    of_own: bool = False,
) -> StudyCurves:
    """Score every stored engine run at every deadline; ``on_file`` hears files done and to do.

    With ``of_own`` the deadlines are multiples of each request's own, as classes gave them.

    Where rescoring a rule is not legal in some seed, the rule has no curve in that cell but a
    refusal. Raises InvalidInput for a deadline beyond the time that requests were watched (which
    rules could answer would depend on how they did), and when nothing may be rescored.
    """
    deadlines = np.asarray(deadlines_s, dtype=np.float64)
    watched_s = _watched_s(stored) / (_longest_own_s(stored) if of_own else 1.0)
    unit = "times its own" if of_own else "s"
    if deadlines.size and deadlines.max() > watched_s:
        raise InvalidInput(
            f"a deadline of {deadlines.max():g} {unit} was asked for, but this study watched "
            f"requests for {watched_s:g} {unit}: ask for deadlines up to that, or run it with a "
            "longer observe_s"
        )
    score = rescore_own if of_own else rescore_lives
    files = [(s, path) for s in stored.study.sources for path in stored.records_of(s)]
    curves: dict[CellKey, dict[Rule, list[BreachCurve]]] = defaultdict(lambda: defaultdict(list))
    refused: dict[tuple[CellKey, Rule], str] = {}
    on_file(0, len(files))
    for done, (source, path) in enumerate(files, 1):
        for run, lives in read_records(path):
            cell, rule = (source.source.name, run.pressure), (run.policy, run.signal)
            if (cell, rule) in refused:
                continue
            try:
                curves[cell][rule].append(score(lives, deadlines))
            except InvalidInput as error:
                refused[cell, rule] = str(error)
                curves[cell].pop(rule, None)
        on_file(done, len(files))
    if not any(curves.values()):
        raise InvalidInput(f"nothing may be rescored: {next(iter(refused.values()))}")
    tables = cell_tables(stored.study)
    return StudyCurves(
        deadlines_s=deadlines,
        by_cell=curves,
        in_regime={(t.source, t.pressure): t.in_regime for t in tables},
        not_comparable=frozenset(
            ((t.source, t.pressure), rule)
            for t in tables
            for rule, is_fine in zip(t.rules, t.comparable, strict=True)
            if not is_fine
        ),
        refusals=tuple(Refusal(*cell, rule, why) for (cell, rule), why in refused.items()),
    )


def part_curves(curves: StudyCurves, part: str) -> list[RuleCurve]:
    """Return a curve for each rule over all cells of ``part`` in which it and LIFO have one."""
    cells = [cell for cell, low in curves.in_regime.items() if low == (part == PARTS[0])]
    return _rule_curves(curves, part, cells)


def cell_curves(curves: StudyCurves) -> list[RuleCurve]:
    """Return the curve of each rule in each cell of the grid."""
    return [
        curve
        for cell in curves.in_regime
        for curve in _rule_curves(curves, f"{cell[0]}, {cell[1]}", [cell])
    ]


def _rule_curves(curves: StudyCurves, where: str, cells: Sequence[CellKey]) -> list[RuleCurve]:
    rules = dict.fromkeys(rule for cell in cells for rule in curves.by_cell[cell])
    out = []
    for rule in rules:
        usable = [
            cell
            for cell in cells
            if {rule, LIFO} <= curves.by_cell[cell].keys()
            and (cell, rule) not in curves.not_comparable
        ]
        if not usable:
            continue
        own = _mean_by_seed([curves.by_cell[cell][rule] for cell in usable])
        base = _mean_by_seed([curves.by_cell[cell][LIFO] for cell in usable])
        difference = None if rule == LIFO else difference_curve(own, base)
        out.append(
            RuleCurve(
                where=where,
                rule=rule,
                num_cells=len(usable),
                breach=np.mean([curve.breach for curve in own], axis=0),
                floor=np.mean([curve.floor for curve in own], axis=0),
                difference=difference,
                reversals=() if difference is None else tuple(reversals(difference)),
            )
        )
    return out


def _mean_by_seed(cells: Sequence[Sequence[BreachCurve]]) -> list[BreachCurve]:
    """Return, for each seed, the mean curve over ``cells`` (each a curve a seed)."""
    return [
        BreachCurve(
            seeds[0].deadlines_s,
            np.mean([curve.breach for curve in seeds], axis=0),
            np.mean([curve.floor for curve in seeds], axis=0),
        )
        for seeds in zip(*cells, strict=True)
    ]
