"""Every number of a study's report, computed once, and the sentences that they allow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.intervals import Interval
from eval.stored import StoredStudy
from eval.study_quality import QualityRow, measure_qualities, quality_rows
from eval.study_rescoring import (
    LIFO,
    RuleCurve,
    StudyCurves,
    cell_curves,
    legal_deadlines,
    part_curves,
    rescore_study,
)
from eval.study_summary import (
    PARTS,
    Comparison,
    Contrast,
    GridRow,
    compare_cells,
    dose_response,
    grid_rows,
    label,
    planned_contrast,
)

RULE_OF_SIGNALS = "longest-remaining"  # the one rule under which signals are compared
_GROWTH = 0.05  # of the cohort's half; well above what seeds scatter


@dataclass(frozen=True, slots=True, eq=False)
class StudyNumbers:
    """All that the report says, computed once. Mappings by part of the grid (study_summary.PARTS)
    hold empty lists, or None, for a part without cells."""

    stored: StoredStudy
    comparisons: list[Comparison]
    grid: Mapping[str, list[GridRow]]
    contrasts: Mapping[str, Contrast | None]
    doses: Mapping[str, list[tuple[float, Interval]]]
    curves: StudyCurves
    part_curves: Mapping[str, list[RuleCurve]]
    reversing_cells: list[RuleCurve]
    qualities: list[QualityRow]
    not_measured: tuple[str, ...]


def study_numbers(
    stored: StoredStudy, on_step: Callable[[str, int, int], None] = lambda *_: None
) -> StudyNumbers:
    """Compute everything; ``on_step`` hears a stage, how much of it is done, and how much it is."""
    study = stored.study
    curves = rescore_study(
        stored, legal_deadlines(stored), lambda done, total: on_step("records", done, total)
    )
    found = measure_qualities(stored, lambda done, total: on_step("signals", done, total))
    on_step("statistics", 0, 1)
    comparisons = compare_cells(study)
    numbers = StudyNumbers(
        stored=stored,
        comparisons=comparisons,
        grid={part: grid_rows(study, part) for part in PARTS},
        contrasts={part: planned_contrast(study, part) for part in PARTS},
        doses={part: dose_response(study, part) for part in PARTS},
        curves=curves,
        part_curves={part: part_curves(curves, part) for part in PARTS},
        reversing_cells=[curve for curve in cell_curves(curves) if curve.reversals],
        qualities=quality_rows(found, comparisons, RULE_OF_SIGNALS),
        not_measured=found.missing,
    )
    on_step("statistics", 1, 1)
    return numbers


def ladder(rows: Sequence[GridRow]) -> list[GridRow]:
    """Return the rows of the one rule under which signals are compared, as the study lists them."""
    return [row for row in rows if row.rule[0] == RULE_OF_SIGNALS]


def breach_by_half(numbers: StudyNumbers) -> dict[tuple[str, str], tuple[float, float]]:
    """Return LIFO's mean breach among the earlier and the later half of the cohort, by source and
    pressure."""
    out: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for source in numbers.stored.study.sources:
        for cell in source.cells:
            if (cell.policy, cell.signal) == LIFO:
                out[source.source.name, cell.pressure].append(cell.breach_by_half)
    means = {key: np.mean(values, axis=0).tolist() for key, values in out.items()}
    return {key: (first, second) for key, (first, second) in means.items()}


def overload_sentence(numbers: StudyNumbers) -> str:
    """Return what the halves say: where the later half breaches much more, the queue grows."""
    halves = breach_by_half(numbers)
    growing = [key for key, (first, second) in halves.items() if second - first > _GROWTH]
    if not growing:
        return (
            "In no cell does LIFO breach much more in the later half of the scored arrivals than "
            "in the earlier one: the queue does not grow while one watches."
        )
    return (
        f"In {_plural(len(growing), 'cell')} of {len(halves)} the later half of the scored "
        f"arrivals breaches over {100 * _GROWTH:.0f} pp more under LIFO than the earlier one: the "
        "queue grows for as long as one watches, so breach there depends on the length of the run. "
        "Read such a cell as a burst of overload, not as a steady load."
    )


def three_sentences(numbers: StudyNumbers) -> list[str]:
    """Return the verdict: the regime, the signals, and beyond the regime."""
    low, beyond = (_part_sentence(numbers, part) for part in PARTS)
    return [low, _signal_sentence(numbers), beyond]


def _part_sentence(numbers: StudyNumbers, part: str) -> str:
    is_low = part == PARTS[0]
    bound = f"{'below' if is_low else 'at least'} {numbers.stored.study.config.boundary:.0%}"
    rows = numbers.grid[part]
    if not rows:
        return f"No cell of this grid has LIFO {bound} on pilot seeds: nothing is said about such."
    others = [row for row in rows if row.rule != LIFO]
    lifo = next(row for row in rows if row.rule == LIFO)
    where = (
        f"In {_plural(lifo.num_cells, 'cell')} "
        f"{'of the low-breach regime' if is_low else 'beyond the regime'} (LIFO {bound} on pilot "
        f"seeds) LIFO breaches {lifo.breach:.1%} on the judged seeds"
    )
    if not others:
        return f"{where}; it is the only rule of this study."
    words = Counter(row.verdict.word for row in others)
    counts = (
        f"{words['better']} better, {words['worse']} worse, {words['equivalent']} equivalent "
        f"within {numbers.stored.study.margin_pp:g} pp and {words['inconclusive']} inconclusive"
    )
    best = min(others, key=lambda row: row.breach)
    contrast = numbers.contrasts[part]
    young = (
        f"; young-biased rules less the others without a signal: {_pp(contrast.within)}"
        if contrast is not None
        else ""
    )
    return (
        f"{where}; of {_plural(len(others), 'other rule')} {counts}; the least breach has "
        f"{label(best.rule)} ({_pp(best.within)}, {best.verdict}){young}."
    )


def _signal_sentence(numbers: StudyNumbers) -> str:
    parts = []
    for part in PARTS:
        rungs = ladder(numbers.grid[part])
        if rungs:
            said = ", ".join(f"{r.rule[1]} {_pp(r.within)} ({r.verdict})" for r in rungs)
            parts.append(f"{'in the regime' if part == PARTS[0] else 'beyond it'} {said}")
    if not parts:
        return f"{RULE_OF_SIGNALS} is not in this study, so nothing is said about signals."
    return f"With a signal, {RULE_OF_SIGNALS} is, against LIFO, {'; '.join(parts)}."


def _pp(interval: Interval) -> str:
    return f"{interval.mean:+.1f} pp [{interval.low:+.1f}, {interval.high:+.1f}]"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
