"""The tables of a study's report: those over the grid, here, and those of its cells.

See eval.tables for how they are shown and kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.study_cell_tables import (
    DIFFERENCE,
    breach_table,
    interval_ends,
    overview_table,
    pilot_table,
)
from eval.study_numbers import RULE_OF_SIGNALS, StudyNumbers, ladder
from eval.study_quality import NUM_SEEDS
from eval.study_rescoring import LIFO
from eval.study_service import cost_table, service_tables
from eval.study_summary import PARTS, Rule, label
from eval.tables import Column, Table, Value

_SHOWN_DEADLINES_S = (600.0, 900.0, 1200.0, 1500.0, 1800.0)


def all_tables(numbers: StudyNumbers) -> list[Table]:
    """Return every table of the report, in its order."""
    return [
        grid_table(numbers),
        overview_table(numbers),
        breach_table(numbers),
        pilot_table(numbers),
        cluster_table(numbers),
        contrast_table(numbers),
        dose_table(numbers),
        ladder_table(numbers),
        quality_table(numbers),
        rescoring_table(numbers),
        curve_table(numbers),
        reversal_table(numbers),
        *service_tables(numbers),
        cost_table(numbers),
    ]


def grid_table(numbers: StudyNumbers) -> Table:
    """Return each rule over each part of the grid, with letters and confidence set."""
    rows: list[tuple[Value, ...]] = []
    for part in PARTS:
        for row in sorted(numbers.grid[part], key=lambda row: row.breach):
            is_lifo = row.rule == LIFO
            rows.append(
                (
                    part,
                    label(row.rule),
                    row.num_cells,
                    row.breach,
                    *interval_ends(None if is_lifo else row.within),
                    *interval_ends(None if is_lifo else row.across)[1:],
                    None if is_lifo else row.verdict.p_value,
                    "baseline" if is_lifo else str(row.verdict),
                    *((None,) * 3 if is_lifo else (row.wins, row.ties, row.losses)),
                    row.letters,
                    row.confidence_set_p >= 0.05,
                )
            )
    columns = (
        Column("part", "part"), Column("rule", "policy / signal"),
        Column("num_cells", "cells", "count"), Column("breach", "breach", "share"), *DIFFERENCE,
        Column("across_low_pp", "across low", "pp"), Column("across_high_pp", "high", "pp"),
        Column("p", "p (max-T)", "p"), Column("verdict", "verdict"),
        Column("wins", "wins", "count"), Column("ties", "ties", "count"),
        Column("losses", "losses", "count"), Column("letters", "letters"),
        Column("in_confidence_set", "in set"),
    )  # fmt: skip
    caption = (
        "Each rule over all cells of a part, least breach first. The first interval holds for "
        "these cells and new seeds, the second for new sources. Rules that share a letter do not "
        "differ at 5 %; 'in set': not ruled out as the best."
    )
    return Table("grid", caption, columns, tuple(rows))


def cluster_table(numbers: StudyNumbers) -> Table:
    """Return which rules belong together in each part."""
    rows: list[tuple[Value, ...]] = [
        (part, label(row.rule), row.breach, row.letters, row.confidence_set_p)
        for part in PARTS
        for row in sorted(numbers.grid[part], key=lambda row: row.breach)
    ]
    columns = (
        Column("part", "part"), Column("rule", "policy / signal"),
        Column("breach", "breach", "share"), Column("letters", "letters"),
        Column("best_p", "p of being the best", "p"),
    )  # fmt: skip
    caption = (
        "Clusters, least breach first: rules that share a letter do not differ at 5 % (all pairs "
        "are one family). The best is, with 95 % confidence, among the rules whose p is at least "
        ".05."
    )
    return Table("clusters", caption, columns, tuple(rows))


def contrast_table(numbers: StudyNumbers) -> Table:
    """Return the planned contrast of both parts."""
    rows: list[tuple[Value, ...]] = [
        (part, _names(c.first), _names(c.second), *interval_ends(c.within), c.p_value)
        for part, c in numbers.contrasts.items()
        if c is not None
    ]
    columns = (
        Column("part", "part"), Column("young_biased", "young-biased"),
        Column("others", "less the others"),
        Column("difference_pp", "difference, pp", "pp"), *DIFFERENCE[1:], Column("p", "p", "p"),
    )  # fmt: skip
    caption = (
        "The planned contrast: mean breach of rules that evict the youngest, less that of the "
        "other rules without a signal. One test a part, so p is not adjusted."
    )
    return Table("contrast", caption, columns, tuple(rows))


def dose_table(numbers: StudyNumbers) -> Table:
    """Return the difference to LIFO for each depth of ``young``."""
    rows: list[tuple[Value, ...]] = [
        (part, depth, *interval_ends(interval))
        for part, doses in numbers.doses.items()
        for depth, interval in doses
    ]
    columns = (Column("part", "part"), Column("depth", "depth", "number"), *DIFFERENCE)
    caption = (
        "young(depth) evicts the request at that depth of the running ones: 0 is the youngest, as "
        "LIFO does, 1 the oldest."
    )
    return Table("dose", caption, columns, tuple(rows))


def ladder_table(numbers: StudyNumbers) -> Table:
    """Return the signals under one rule."""
    rows: list[tuple[Value, ...]] = [
        (part, row.rule[1], row.breach, *interval_ends(row.within), str(row.verdict))
        for part in PARTS
        for row in ladder(numbers.grid[part])
    ]
    columns = (
        Column("part", "part"), Column("signal", "signal"), Column("breach", "breach", "share"),
        *DIFFERENCE, Column("verdict", "verdict"),
    )  # fmt: skip
    caption = (
        f"One rule, {RULE_OF_SIGNALS}, fed by each signal; without any it cannot choose, and LIFO "
        "is what an engine does. 'clairvoyant' reads the executing run's own length: a bound, not "
        "a choice."
    )
    return Table("signals", caption, columns, tuple(rows))


def quality_table(numbers: StudyNumbers) -> Table:
    """Return how good each signal was on the running sets of each source, and what it did."""
    rows: list[tuple[Value, ...]] = [
        (
            row.part,
            row.source,
            *(getattr(row.quality, name) for name in _QUALITY),
            row.difference_pp,
            row.num_cells,
        )
        for row in numbers.qualities
    ]
    columns = (
        Column("part", "part"), Column("source", "source"), Column("signal", "signal"),
        Column("concordance", "concordance", "number"),
        Column("kendall_tau", "Kendall tau", "number"), Column("log_mae", "log-MAE", "number"),
        Column("num_sets", "sets", "count"), DIFFERENCE[0], Column("num_cells", "cells", "count"),
    )  # fmt: skip
    caption = (
        f"Signals on the running sets in which LIFO chose a victim ({NUM_SEEDS} seeds, all "
        "pressures of the source), and the difference in breach of the one rule that reads them, "
        "mean over the source's cells of the part. Concordance: pairs in the right order, .5 is "
        "chance."
    )
    return Table("quality", caption, columns, tuple(rows))


_QUALITY = ("signal", "concordance", "kendall_tau", "log_mae", "num_sets")


def rescoring_table(numbers: StudyNumbers) -> Table:
    """Return the curves at a few deadlines, as one row for each rule and deadline."""
    return _curves(numbers, "rescoring", _SHOWN_DEADLINES_S)


def curve_table(numbers: StudyNumbers) -> Table:
    """Return the curves at every deadline."""
    return _curves(numbers, "curves", numbers.curves.deadlines_s.tolist())


def _curves(numbers: StudyNumbers, name: str, wanted_s: Sequence[float]) -> Table:
    deadlines_s = numbers.curves.deadlines_s
    rows: list[tuple[Value, ...]] = []
    for part in PARTS:
        for curve in numbers.part_curves[part]:
            for at in np.flatnonzero(np.isin(deadlines_s, wanted_s)).tolist():
                d = curve.difference
                band = (float(d.mean[at]), float(d.low[at]), float(d.high[at])) if d else ()
                rows.append(
                    (
                        part,
                        label(curve.rule),
                        float(deadlines_s[at]),
                        float(curve.breach[at]),
                        float(curve.floor[at]),
                        *(band or (None,) * 3),
                    )
                )
    columns = (
        Column("part", "part"), Column("rule", "policy / signal"),
        Column("deadline_s", "deadline, s", "seconds"), Column("breach", "breach", "share"),
        Column("floor", "floor", "share"), *DIFFERENCE,
    )  # fmt: skip
    caption = (
        "Breach at other deadlines, from the same stored runs (legal because no rule read a "
        "deadline). Bands hold for all deadlines of a rule at once."
    )
    return Table(name, caption, columns, tuple(rows))


def reversal_table(numbers: StudyNumbers) -> Table:
    """Return every reversal, over the parts and in single cells."""
    over_parts = [curve for part in PARTS for curve in numbers.part_curves[part]]
    rows: list[tuple[Value, ...]] = [
        (curve.where, label(curve.rule), r.negative_at_s, r.positive_at_s)
        for curve in (*over_parts, *numbers.reversing_cells)
        for r in curve.reversals
    ]
    columns = (
        Column("where", "where"), Column("rule", "policy / signal"),
        Column("better_at_s", "below LIFO at, s", "seconds"),
        Column("worse_at_s", "above LIFO at, s", "seconds"),
    )  # fmt: skip
    caption = (
        "Reversals: the band lies below 0 at one deadline and above 0 at another. In single cells "
        "each band holds at 95 % for itself, so a few of many are chance."
    )
    return Table("reversals", caption, columns, tuple(rows))


def _names(rules: Sequence[Rule]) -> str:
    return ", ".join(map(label, rules))
