"""The report of a study: one HTML page, the same in Markdown, and every table as CSV and Parquet.

Everything comes from what is stored; only the two timelines run an engine, once, and are kept.
"""

from __future__ import annotations

import html
import math
from pathlib import Path

from contracts.files import atomic_write_text
from eval.report import Section, contents, figure, paragraph, write_report
from eval.stored import StoredStudy, load_study, store_study
from eval.study import StudyResult
from eval.study_cell_tables import breach_table, overview_table, pilot_table
from eval.study_figures import (
    by_pressure,
    deadline_curves,
    dose_lines,
    grid_forest,
    highlights,
    ladder_points,
    payers_bars,
    pilot_lines,
    quality_points,
)
from eval.study_manifest import bullets, facts, manifest, not_covered
from eval.study_numbers import (
    StudyNumbers,
    ladder,
    overload_sentence,
    study_numbers,
    three_sentences,
)
from eval.study_quality import rank_correlation
from eval.study_service import class_table, cost_table, latency_table, payers_table
from eval.study_summary import PARTS, label
from eval.study_tables import (
    all_tables,
    cluster_table,
    contrast_table,
    dose_table,
    grid_table,
    ladder_table,
    quality_table,
    rescoring_table,
    reversal_table,
)
from eval.study_timelines import OnStep, contrasting_timelines
from eval.surrogates import surrogate_notes
from eval.tables import Table, html_table, markdown_table, write_tables

TITLE = "What signal does preemption need?"
PAGE, MARKDOWN = "report.html", "report.md"


def write_study_report(
    study: StudyResult, out_dir: Path, command: str, on_step: OnStep = lambda *_: None
) -> Path:
    """Store ``study`` in ``out_dir`` (study.json) and write its report; return the page's path.

    ``command`` is the command line that made it, shown as it is.
    """
    store_study(study, out_dir, command)
    return render_study(load_study(out_dir), on_step)


def render_study(stored: StoredStudy, on_step: OnStep = lambda *_: None) -> Path:
    """Write report.html, report.md and tables/ beside a stored study; return the page's path.

    ``on_step`` hears a stage, how much of it is done, and how much it is.
    """
    numbers = study_numbers(stored, on_step)
    tables = all_tables(numbers)
    write_tables(tables, stored.out_dir / "tables")
    sections = [
        _differences(numbers),
        _breach(numbers),
        _regime(numbers),
        _doses(numbers),
        _signals(numbers),
        _quality(numbers),
        _rescoring(numbers),
        _payers(numbers),
        _latency(numbers),
        _cost(numbers),
        Section("Timelines of one contrasting cell", contrasting_timelines(numbers, on_step)),
        Section("What is not covered", bullets(not_covered(numbers))),
        manifest(numbers),
    ]
    links = Section("Contents", contents(sections))
    page = stored.out_dir / PAGE
    lead = "\n".join(three_sentences(numbers))
    write_report(page, _title(numbers), lead, [links, *sections])
    atomic_write_text(stored.out_dir / MARKDOWN, _markdown(numbers, tables))
    return page


def _title(numbers: StudyNumbers) -> str:
    return f"{TITLE} Study “{numbers.stored.study.config.name}”"


def _differences(numbers: StudyNumbers) -> Section:
    parts = []
    if any(numbers.grid.values()):
        caption = (
            "Each rule's mean paired difference in breach to LIFO. Left of the line is less breach "
            "than LIFO. Thick: 95 % for these cells and new seeds; thin: for new sources. Filled "
            "points: the thick interval excludes 0. Grey: rules that read no signal; a colour for "
            "each signal."
        )
        parts.append(figure(grid_forest(numbers.grid), caption))
    return Section("Paired differences", "".join([*parts, html_table(grid_table(numbers))]))


def _breach(numbers: StudyNumbers) -> Section:
    table = breach_table(numbers)
    parts = [paragraph(overload_sentence(numbers)), html_table(overview_table(numbers))]
    for source in dict.fromkeys(row[0] for row in table.rows):
        rows = tuple(row[1:] for row in table.rows if row[0] == source)
        own = Table(table.name, table.caption, table.columns[1:], rows)
        parts.append(
            f"<details><summary>{html.escape(str(source))}: every rule</summary>"
            f"{html_table(own)}</details>"
        )
    return Section("Breach by source and pressure", "".join(parts))


def _regime(numbers: StudyNumbers) -> Section:
    study = numbers.stored.study
    rows = numbers.grid[PARTS[0]] or numbers.grid[PARTS[1]]
    parts = []
    if rows and numbers.comparisons:
        caption = (
            "How the difference to LIFO moves with load. Lines: mean over sources; dots: each "
            "source. Up to six rules: those that read a signal, then least and most breach without."
        )
        parts.append(figure(by_pressure(numbers.comparisons, highlights(rows)), caption))
    caption = (
        "LIFO on pilot seeds, which no result uses. Cells below the dashed boundary form the "
        "low-breach regime."
    )
    parts.append(figure(pilot_lines(study.sources, study.config.boundary), caption))
    parts.append(html_table(pilot_table(numbers)))
    empty = [part for part in PARTS if not numbers.grid[part]]
    parts += [paragraph(f"{part}: no cell of this grid, so nothing to group.") for part in empty]
    parts += [html_table(cluster_table(numbers)), html_table(contrast_table(numbers))]
    return Section("Regime and clusters", "".join(parts))


def _doses(numbers: StudyNumbers) -> Section:
    if not any(numbers.doses.values()):
        text = "No young(depth) rule ran in a comparable cell, so there is no response to show."
        return Section("Dose-response over the victim's age", paragraph(text))
    caption = (
        "The older the victim, the further right. Where evicting the youngest protects deadlines, "
        "the line rises from left to right."
    )
    body = figure(dose_lines(numbers.doses), caption) + html_table(dose_table(numbers))
    return Section("Dose-response over the victim's age", body)


def _signals(numbers: StudyNumbers) -> Section:
    title = "What a better signal buys"
    rungs = {part: ladder(numbers.grid[part]) for part in PARTS}
    if not any(rungs.values()):
        return Section(title, paragraph("No rule that reads a signal ran in a comparable cell."))
    caption = (
        "One rule, longest-remaining, under each signal: below 0 it breaches less than LIFO, which "
        "needs no signal. The step from age-km to clairvoyant is all that knowing lengths can add."
    )
    notes = surrogate_notes(numbers.stored.study.config.signals)
    body = figure(ladder_points(rungs), caption) + "".join(map(paragraph, notes))
    return Section(title, body + html_table(ladder_table(numbers)))


def _quality(numbers: StudyNumbers) -> Section:
    parts = []
    if numbers.qualities:
        caption = (
            "One point for each signal and source: how good the signal was when somebody had to "
            "go, and what the rule that reads it did to breach. If quality were all that "
            "preemption needs, points would fall from left to right under concordance, and rise "
            "under log-MAE."
        )
        parts.append(figure(quality_points(numbers.qualities), caption))
        parts += [paragraph(text) for text in _rank_sentences(numbers)]
        parts.append(html_table(quality_table(numbers)))
    else:
        parts.append(paragraph("No rule that reads a signal ran in a comparable cell."))
    parts += [paragraph(f"Not measured: {text}.") for text in numbers.not_measured]
    return Section("Signal quality against breach", "".join(parts))


def _rank_sentences(numbers: StudyNumbers) -> list[str]:
    out = []
    for part in PARTS:
        rows = [row for row in numbers.qualities if row.part == part]
        rank = rank_correlation(rows)
        if not math.isnan(rank):
            out.append(
                f"{part}: Spearman's rank correlation of concordance and difference over "
                f"{len(rows)} points is {rank:+.2f} (descriptive: points of a source share seeds)."
            )
    return out


def _rescoring(numbers: StudyNumbers) -> Section:
    parts = []
    rows = numbers.grid[PARTS[0]] or numbers.grid[PARTS[1]]
    if rows:
        caption = (
            "Difference to LIFO at every deadline with bands that hold for all deadlines at once; "
            "below, LIFO's own breach and the floor. A rule reverses where its whole band changes "
            "sides."
        )
        deadlines_s = numbers.curves.deadlines_s
        drawn = deadline_curves(numbers.part_curves, highlights(rows), deadlines_s)
        parts.append(figure(drawn, caption))
    if numbers.stored.study.config.deadline_classes:
        text = (
            "This study has deadline classes. Here all requests are given one deadline instead; "
            "'preemptbench rescore OUT --multiples 0.5:2:0.25' moves everybody's own."
        )
        parts.append(paragraph(text))
    reversed_ = reversal_table(numbers)
    parts.append(html_table(rescoring_table(numbers)))
    parts.append(
        html_table(reversed_) if reversed_.rows else paragraph("No rule reverses anywhere.")
    )
    for rule in dict.fromkeys(refusal.rule for refusal in numbers.curves.refusals):
        mine = [refusal for refusal in numbers.curves.refusals if refusal.rule == rule]
        text = f"Not rescored: {label(rule)} in {len(mine)} cells: {mine[0].reason}."
        parts.append(paragraph(text))
    return Section("Other deadlines", "".join(parts))


def _payers(numbers: StudyNumbers) -> Section:
    table = payers_table(numbers)
    caption = (
        "Filled: breach. Hollow: the score over completed requests only; the bar between is what "
        "survivorship hides. Cross: breach of the tenth that takes longest alone. Tick: the floor."
    )
    parts = [figure(payers_bars(table), caption), html_table(table)]
    if numbers.stored.study.config.deadline_classes:
        parts.append(html_table(class_table(numbers)))
    return Section("Floors, survivors and the longest tenth", "".join(parts))


def _latency(numbers: StudyNumbers) -> Section:
    return Section("Latency and goodput", html_table(latency_table(numbers)))


def _cost(numbers: StudyNumbers) -> Section:
    return Section("Recompute tax and preemptions", html_table(cost_table(numbers)))


def _markdown(numbers: StudyNumbers, tables: list[Table]) -> str:
    """Return verdict, short tables and manifest; the long tables are named, not repeated."""
    parts = [f"# {_title(numbers)}", *three_sentences(numbers)]
    for table in tables:
        if table.name in ("breach", "curves", "service"):
            parts.append(f"The table of {len(table.rows)} rows is in tables/{table.name}.csv.")
        elif table.rows:
            parts.append(f"## {table.name.capitalize()}\n\n{markdown_table(table)}")
    parts.append("## What is not covered\n\n" + "\n".join(f"- {t}" for t in not_covered(numbers)))
    lines = "\n".join(f"- {name}: {value}" for name, value in facts(numbers).items())
    parts.append(f"## Command and manifest\n\n    {numbers.stored.command}\n\n{lines}")
    return "\n\n".join(parts) + "\n"
