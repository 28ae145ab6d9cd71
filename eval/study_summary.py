"""What a study may say: every comparison with LIFO in its cell, and each rule over the grid.

Families of tests: in a cell all policies x signals are one max-T family, over a part of the grid
they are another. The margin was set on pilot seeds. Verdict words are those of eval.verdicts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from eval.cells import Cell, same_cohort
from eval.clusters import compact_letters, model_confidence_set, pairwise_p
from eval.intervals import Interval, across_grid, bootstrap_t_interval, within_grid
from eval.multiplicity import max_t
from eval.signal_sources import NO_SIGNAL
from eval.study import SourceResult, StudyResult
from eval.study_config import BASELINE
from eval.verdicts import Verdict, judge

Rule = tuple[str, str]  # policy, signal
PARTS = ("low breach", "beyond")
YOUNG_BIASED = ("lifo", "least-computed", "sglang-retract")
"""Rules that evict who was admitted last or holds least; ``young(depth)`` is graded apart."""
NOT_YOUNG_BIASED = ("fifo", "most-computed", "largest-kv", "random")


def label(rule: Rule) -> str:
    """Return a rule's name in tables: the policy, and the signal if it reads one."""
    policy, signal = rule
    return policy if signal == NO_SIGNAL else f"{policy} / {signal}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One rule against LIFO in one cell of the grid; rates are shares of 1, differences pp."""

    source: str
    pressure: str
    in_regime: bool
    rule: Rule
    breach: float
    lifo_breach: float
    floor: float
    difference: Interval
    verdict: Verdict
    correlation: float
    preemptions_per_1000: float
    recompute_tax: float


@dataclass(frozen=True, slots=True)
class GridRow:
    """One rule over all comparable cells of a part of the grid.

    ``within`` holds for these cells and new seeds, ``across`` for new (family, benchmark) pairs.
    Wins, ties and losses count cells by the sign of the mean difference. ``letters`` are shared by
    rules that do not differ; ``confidence_set_p`` is the p of belonging to the best.
    """

    part: str
    rule: Rule
    num_cells: int
    breach: float
    within: Interval
    across: Interval | None
    verdict: Verdict
    wins: int
    ties: int
    losses: int
    letters: str
    confidence_set_p: float


@dataclass(frozen=True, slots=True, eq=False)
class CellTable:
    """Breach of one cell of the grid: ``breach`` (seeds, rules) in percentage points."""

    source: str
    pressure: str
    in_regime: bool
    rules: tuple[Rule, ...]
    breach: FloatArray
    comparable: tuple[bool, ...]


def cell_tables(study: StudyResult) -> list[CellTable]:
    """Return breach by seed and rule, a table for each source and pressure.

    A rule is comparable when it accepted the requests that LIFO did in every seed and the breach of
    both is known in every seed: what is undetermined has bounds and no rank. Raises InvalidInput
    when a cell is missing.
    """
    return [table for source in study.sources for table in _tables_of(source, study)]


def _tables_of(source: SourceResult, study: StudyResult) -> list[CellTable]:
    regime = source.pilot.in_regime(study.config.boundary)
    groups = _by_pressure_and_rule(source.cells)
    tables = []
    for pressure, in_regime in zip(source.matrix.pressures, regime, strict=True):
        by_rule = groups[pressure.name]
        if (BASELINE, NO_SIGNAL) not in by_rule:
            raise InvalidInput(f"{source.source.name} at {pressure.name}: {BASELINE} is missing")
        lifo = by_rule[BASELINE, NO_SIGNAL]
        is_known = not any(math.isnan(c.score.breach) for c in lifo)
        for rule, cells in by_rule.items():
            if [cell.seed for cell in cells] != list(study.seeds):
                raise InvalidInput(
                    f"{source.source.name} at {pressure.name}, {label(rule)}: seeds "
                    f"{[cell.seed for cell in cells]} are there, not all of {study.seeds}"
                )
        tables.append(
            CellTable(
                source=source.source.name,
                pressure=pressure.name,
                in_regime=in_regime,
                rules=tuple(by_rule),
                breach=np.array(
                    [[100 * c.score.breach for c in cells] for cells in by_rule.values()]
                ).T,
                comparable=tuple(
                    is_known
                    and same_cohort(cells, lifo)
                    and not any(math.isnan(c.score.breach) for c in cells)
                    for cells in by_rule.values()
                ),
            )
        )
    return tables


def _by_pressure_and_rule(cells: Sequence[Cell]) -> Mapping[str, dict[Rule, list[Cell]]]:
    groups: dict[str, dict[Rule, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell in sorted(cells, key=lambda cell: cell.seed):
        groups[cell.pressure][cell.policy, cell.signal].append(cell)
    return groups


def compare_cells(study: StudyResult) -> list[Comparison]:
    """Return every comparable rule against LIFO in its cell."""
    out = []
    for source in study.sources:
        groups = _by_pressure_and_rule(source.cells)
        for table in _tables_of(source, study):
            out += _compare(table, groups[table.pressure], study)
    return out


def _compare(
    table: CellTable, cells: Mapping[Rule, Sequence[Cell]], study: StudyResult
) -> list[Comparison]:
    at = table.rules.index((BASELINE, NO_SIGNAL))
    others = [i for i, ok in enumerate(table.comparable) if ok and i != at]
    if not others:
        return []
    differences = table.breach[:, others] - table.breach[:, [at]]
    p_values = max_t(differences)
    out = []
    for column, (i, p) in enumerate(zip(others, p_values.tolist(), strict=True)):
        own = cells[table.rules[i]]
        out.append(
            Comparison(
                source=table.source,
                pressure=table.pressure,
                in_regime=table.in_regime,
                rule=table.rules[i],
                breach=float(table.breach[:, i].mean()) / 100,
                lifo_breach=float(table.breach[:, at].mean()) / 100,
                floor=float(np.mean([c.score.floor for c in own])),
                difference=bootstrap_t_interval(differences[:, column]),
                verdict=judge(
                    differences[:, column],
                    p,
                    study.margin_pp,
                    num_tests=len(others),
                    alpha=study.config.alpha,
                ),
                correlation=_correlation(table.breach[:, i], table.breach[:, at]),
                preemptions_per_1000=float(np.mean([c.preemptions_per_1000 for c in own])),
                recompute_tax=float(np.mean([c.recompute_tax for c in own])),
            )
        )
    return out


def _correlation(a: FloatArray, b: FloatArray) -> float:
    if a.std() == 0.0 or b.std() == 0.0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def grid_rows(study: StudyResult, part: str) -> list[GridRow]:
    """Return a row for each rule over the cells of ``part`` in which every rule is comparable;
    none when there is no such cell (an empty regime is a finding, and the report says so)."""
    tables = [t for t in cell_tables(study) if t.in_regime == (part == PARTS[0])]
    tables = [table for table in tables if all(table.comparable)]
    if not tables:
        return []
    rules = tables[0].rules
    at = rules.index((BASELINE, NO_SIGNAL))
    losses = np.mean([table.breach for table in tables], axis=0)
    differences = losses - losses[:, [at]]
    others = [i for i in range(len(rules)) if i != at]
    p_values = dict(zip(others, max_t(differences[:, others]).tolist(), strict=True))
    names = [label(rule) for rule in rules]
    letters = compact_letters(names, pairwise_p(losses), losses.mean(axis=0).tolist())
    best = model_confidence_set(names, losses)
    rows = []
    for i, rule in enumerate(rules):
        by_cell = {
            f"{t.source}, {t.pressure}": (t.breach[:, i] - t.breach[:, at]).tolist() for t in tables
        }
        means = np.array([np.mean(values) for values in by_cell.values()])
        clusters = {f"{t.source}, {t.pressure}": t.source for t in tables}
        many = len(set(clusters.values())) > 1
        rows.append(
            GridRow(
                part=part,
                rule=rule,
                num_cells=len(tables),
                breach=float(losses[:, i].mean()) / 100,
                within=within_grid(by_cell),
                across=across_grid(by_cell, clusters) if many else None,
                verdict=judge(
                    differences[:, i],
                    p_values.get(i, 1.0),
                    study.margin_pp,
                    num_tests=max(1, len(others)),
                    alpha=study.config.alpha,
                ),
                wins=int((means < 0).sum()),
                ties=int((means == 0).sum()),
                losses=int((means > 0).sum()),
                letters=letters[label(rule)],
                confidence_set_p=best[label(rule)],
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class Contrast:
    """A planned comparison of two groups of rules over a part of the grid (percentage points)."""

    part: str
    first: tuple[Rule, ...]
    second: tuple[Rule, ...]
    within: Interval
    p_value: float


def contrast(
    study: StudyResult, part: str, first: Sequence[Rule], second: Sequence[Rule]
) -> Contrast | None:
    """Return mean breach of ``first`` less that of ``second`` over the cells of ``part`` in which
    all of them are comparable; None when there is no such cell or a group is empty. One planned
    test, so its p is not adjusted."""
    tables = [t for t in cell_tables(study) if t.in_regime == (part == PARTS[0])]
    wanted = {*first, *second}
    tables = [
        table
        for table in tables
        if all(ok for rule, ok in zip(table.rules, table.comparable, strict=True) if rule in wanted)
    ]
    if not tables or not first or not second:
        return None

    def mean_of(table: CellTable, rules: Sequence[Rule]) -> FloatArray:
        return np.asarray(table.breach[:, [table.rules.index(r) for r in rules]].mean(axis=1))

    by_cell = {
        f"{t.source}, {t.pressure}": (mean_of(t, first) - mean_of(t, second)).tolist()
        for t in tables
    }
    seeds = np.mean([list(values) for values in by_cell.values()], axis=0)
    return Contrast(
        part, tuple(first), tuple(second), within_grid(by_cell), float(max_t(seeds[:, None])[0])
    )


def planned_contrast(study: StudyResult, part: str) -> Contrast | None:
    """Return the contrast fixed beforehand: young-biased rules against the others that read no
    signal, as far as the study has them."""
    have = study.config.policies
    first, second = (
        [(name, NO_SIGNAL) for name in names if name in have]
        for names in (YOUNG_BIASED, NOT_YOUNG_BIASED)
    )
    return contrast(study, part, first, second)


def dose_response(study: StudyResult, part: str) -> list[tuple[float, Interval]]:
    """Return the difference to LIFO for each ``young(depth)`` over the cells of ``part``."""
    rows = []
    for row in grid_rows(study, part):
        name, paren, depth = row.rule[0].partition("(")
        if name == "young" and paren:
            rows.append((float(depth.removesuffix(")")), row.within))
    return sorted(rows, key=lambda pair: pair[0])
