"""The tables of a study's report that have a row for each cell of the grid."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from eval.cells import Cell
from eval.intervals import Interval
from eval.study_numbers import StudyNumbers, breach_by_half
from eval.study_rescoring import LIFO
from eval.study_summary import Comparison, Rule, label
from eval.tables import Column, Table, Value

DIFFERENCE = (
    Column("difference_pp", "vs LIFO, pp", "pp"),
    Column("low_pp", "95 % low", "pp"),
    Column("high_pp", "high", "pp"),
)
"""The columns of a paired difference to LIFO; :func:`interval_ends` fills them."""


def overview_table(numbers: StudyNumbers) -> Table:
    """Return one row for each cell of the grid: LIFO, its floor, and the least and most breach."""
    by_cell: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for comparison in numbers.comparisons:
        by_cell[comparison.source, comparison.pressure].append(comparison)
    lifo = _means(numbers, lambda cell: (cell.policy, cell.signal) == LIFO)
    halves = breach_by_half(numbers)
    rows: list[tuple[Value, ...]] = []
    for (source, pressure, _), scores in lifo.items():
        found = by_cell[source, pressure]
        least = min(found, key=lambda c: c.breach, default=None)
        most = max(found, key=lambda c: c.breach, default=None)
        gap = 100 * (scores["breach"] - scores["completed_only"])
        rows.append(
            (source, pressure, scores["breach"], *halves[source, pressure])
            + (scores["completed_only"], gap, scores["floor"])
            + ((label(least.rule), least.breach) if least else (None, None))
            + ((label(most.rule), most.breach) if most else (None, None))
            + tuple(sum(c.verdict.word == w for c in found) for w in _WORDS)
        )
    columns = (
        Column("source", "source"), Column("pressure", "KV pressure"),
        Column("lifo_breach", "LIFO breach", "share"),
        Column("earlier_half", "earlier half", "share"),
        Column("later_half", "later half", "share"),
        Column("completed_only", "completed only", "share"),
        Column("gap_pp", "hidden, pp", "pp"), Column("floor", "floor", "share"),
        Column("least_rule", "least breach"), Column("least_breach", "its breach", "share"),
        Column("most_rule", "most breach"), Column("most_breach", "its breach", "share"),
        *(Column(word, word, "count") for word in _WORDS),
    )  # fmt: skip
    caption = (
        "Each cell of the grid at the study's deadline. Halves: LIFO on the earlier and the later "
        "arrivals that are scored. 'Completed only' is LIFO's score if "
        "requests that never ended were left out, 'hidden' how much that flatters. The last four "
        "columns count rules by their verdict against LIFO in this cell."
    )
    return Table("overview", caption, columns, tuple(rows))


_WORDS = ("better", "worse", "equivalent", "inconclusive")


def breach_table(numbers: StudyNumbers) -> Table:
    """Return every rule in every cell of the grid."""
    found = {(c.source, c.pressure, c.rule): c for c in numbers.comparisons}
    rows: list[tuple[Value, ...]] = []
    for key, s in _means(numbers, lambda _: True).items():
        source, pressure, rule = key
        c = found.get(key)
        word = "baseline" if rule == LIFO else "not comparable"
        if math.isnan(s["breach"]):
            word = "undetermined: no rank, bounds only"
        rows.append(
            (
                source,
                pressure,
                label(rule),
                s["breach"],
                s["breach_low"],
                s["breach_high"],
                s["floor"],
                100 * (s["breach"] - s["floor"]),
                s["completed_only"],
                100 * (s["breach"] - s["completed_only"]),
                *interval_ends(c.difference if c else None),
                c.verdict.p_value if c else None,
                str(c.verdict) if c else word,
                c.correlation if c else None,
                *(s[name] for name in _COUNTS),
            )
        )
    columns = (
        Column("source", "source"), Column("pressure", "pressure"),
        Column("rule", "policy / signal"), Column("breach", "breach", "share"),
        Column("breach_low", "at least", "share"), Column("breach_high", "at most", "share"),
        Column("floor", "floor", "share"), Column("excess_pp", "excess, pp", "pp"),
        Column("completed_only", "completed only", "share"),
        Column("gap_pp", "hidden, pp", "pp"), *DIFFERENCE, Column("p", "p (max-T)", "p"),
        Column("verdict", "verdict"), Column("correlation", "corr. with LIFO", "number"),
        *(Column(f"mean_{name}", name, "number") for name in _COUNTS),
    )  # fmt: skip
    caption = (
        "Breach with its bounds (apart where a request was withdrawn, or not watched for long "
        "enough: then there is no verdict), its floor (requests that would be late alone), the "
        "excess over it, and the score over completed requests only. Outcome counts are means over "
        "seeds and add up to the accepted ones; accepted and rejected add up to the offered ones."
    )
    return Table("breach", caption, columns, tuple(rows))


_COUNTS = (
    "met", "late", "failed", "unfinished", "withdrawn", "undetermined", "accepted", "rejected",
)  # fmt: skip


def _means(
    numbers: StudyNumbers, wanted: Callable[[Cell], bool]
) -> dict[tuple[str, str, Rule], dict[str, float]]:
    """Return seed means of scores, by source, pressure and rule, in the study's order."""
    names = ("breach", "breach_low", "breach_high", "floor", "completed_only", *_COUNTS)
    out: dict[tuple[str, str, Rule], list[Cell]] = defaultdict(list)
    for source in numbers.stored.study.sources:
        for cell in filter(wanted, source.cells):
            out[source.source.name, cell.pressure, (cell.policy, cell.signal)].append(cell)
    return {
        key: {n: float(np.mean([getattr(c.score, n) for c in cells])) for n in names}
        for key, cells in out.items()
    }


def pilot_table(numbers: StudyNumbers) -> Table:
    """Return what the pilot seeds settled for each cell of the grid."""
    study = numbers.stored.study
    rows: list[tuple[Value, ...]] = [
        (s.source.name, s.source.kind, p.name, p.num_blocks, ratio, breach, floor, inside)
        for s in study.sources
        for p, ratio, breach, floor, inside in zip(
            s.matrix.pressures,
            s.pilot.kv_ratio,
            s.pilot.lifo_breach,
            s.pilot.floor,
            s.pilot.in_regime(study.config.boundary),
            strict=True,
        )
    ]
    columns = (
        Column("source", "source"), Column("kind", "lengths"), Column("pressure", "pressure"),
        Column("num_blocks", "KV blocks", "count"), Column("kv_ratio", "offered KV load", "number"),
        Column("pilot_lifo_breach", "LIFO on pilots", "share"),
        Column("pilot_floor", "floor", "share"), Column("in_regime", "in the regime"),
    )  # fmt: skip
    caption = (
        f"Settled on {study.config.num_pilots} pilot seeds that no result uses: a cell belongs to "
        f"the low-breach regime when LIFO breaches less than {study.config.boundary:.0%} there. "
        "Pressure 1 is where it crosses that line."
    )
    return Table("pilots", caption, columns, tuple(rows))


def interval_ends(interval: Interval | None) -> tuple[Value, Value, Value]:
    """Return the values of the columns DIFFERENCE: mean, low and high in percentage points."""
    if interval is None or math.isnan(interval.mean):
        return None, None, None
    return interval.mean, interval.low, interval.high
