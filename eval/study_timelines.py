"""Two timelines in a study's report: LIFO and the rule furthest from it, in one cell and seed."""

from __future__ import annotations

from collections.abc import Callable

from contracts.errors import PreemptBenchError
from eval.matrix_config import Pressure
from eval.one_cell import OneCell, run_one_cell
from eval.report import figure, paragraph
from eval.study_numbers import StudyNumbers
from eval.study_rescoring import LIFO
from eval.study_summary import Comparison, label
from eval.timeline_figure import write_timeline_figure
from serving_sim.timeline import StepSeries

OnStep = Callable[[str, int, int], None]


def contrasting_timelines(numbers: StudyNumbers, on_step: OnStep) -> str:
    """Return the two drawings as HTML, or why there are none; ``on_step`` hears of each that is
    drawn now, and not read from timelines/."""
    chosen = _furthest(numbers)
    if chosen is None:
        return paragraph("No rule was compared with LIFO, so there is no contrast to show.")
    parts = []
    for policy, signal in (LIFO, chosen.rule):
        try:
            svg, title = _timeline(numbers, chosen, policy, signal, on_step)
        except PreemptBenchError as error:
            return paragraph(f"Not drawn: {error}.")
        parts.append(figure(svg, f"{title}: KV in use, requests running and waiting, evictions."))
    d = chosen.difference
    lead = (
        f"{chosen.source} at KV pressure {chosen.pressure}, where {label(chosen.rule)} is furthest "
        f"from LIFO ({d.mean:+.1f} pp over all seeds); one seed of it under both rules."
    )
    return paragraph(lead) + "".join(parts)


def _furthest(numbers: StudyNumbers) -> Comparison | None:
    """Return the comparison furthest from 0, in the low-breach regime if there is one."""
    inside = [c for c in numbers.comparisons if c.in_regime] or numbers.comparisons
    return max(inside, key=lambda c: abs(c.difference.mean), default=None)


def _timeline(
    numbers: StudyNumbers, where: Comparison, policy: str, signal: str, on_step: OnStep
) -> tuple[str, str]:
    """Return the drawing and its title; it is kept in timelines/, and drawn when not there."""
    source = next(s for s in numbers.stored.study.sources if s.source.name == where.source)
    at = next(i for i, p in enumerate(source.matrix.pressures) if p.name == where.pressure)
    pressure: Pressure = source.matrix.pressures[at]
    cell = OneCell(policy, signal, pressure, 0)
    named = f"{source.out_dir.name}-{pressure.name}-{policy}-{signal}"
    safe = "".join(c if c.isalnum() or c in "-._" else "-" for c in named)
    path = numbers.stored.out_dir / "timelines" / f"{safe}.svg"
    if not path.exists():
        on_step("timeline", 0, 1)
        series = StepSeries(pressure.num_blocks - 1)
        _, result = run_one_cell(source.matrix, cell, series.step)
        series.finish(result)
        write_timeline_figure(series, path, cell.title)
        on_step("timeline", 1, 1)
    text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :], cell.title
