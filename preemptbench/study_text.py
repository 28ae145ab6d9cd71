"""What ``preemptbench study`` prints: verdicts first, then the tables they rest on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eval.study import StudyResult
from eval.study_config import deadline_text
from eval.study_looks import look_text
from eval.study_summary import (
    PARTS,
    Comparison,
    GridRow,
    compare_cells,
    dose_response,
    grid_rows,
    label,
    planned_contrast,
)


def study_object(study: StudyResult) -> dict[str, Any]:
    """Return everything that is printed, and each cell's comparison, for ``--json``."""
    return {
        "study": study.config.name,
        "seeds": study.config.num_seeds,
        "looks": list(study.config.looks),
        "alpha": study.config.alpha,
        "failures": [asdict(failure) for failure in study.failures],
        "deadline_s": study.config.deadline_s,
        "deadline_classes": [asdict(one) for one in study.config.deadline_classes],
        "margin_pp": study.margin_pp,
        "profile": study.config.profile,
        "sources": [
            {
                "name": source.source.name,
                "kind": source.source.kind,
                "pressures": [asdict(pressure) for pressure in source.matrix.pressures],
                **asdict(source.pilot),
            }
            for source in study.sources
        ],
        "cells": [_object(row) for row in compare_cells(study)],
        "grid": [_object(row) for part in PARTS for row in grid_rows(study, part)],
    }


def _object(row: Comparison | GridRow) -> dict[str, Any]:
    policy, signal = row.rule
    return asdict(row) | {"policy": policy, "signal": signal, "words": str(row.verdict)}


def study_text(study: StudyResult) -> str:
    """Return the printed summary."""
    config = study.config
    kinds = Counter(source.source.kind for source in study.sources)
    head = (
        f"{config.name} study: {len(study.sources)} sources "
        f"({', '.join(f'{n} {kind}' for kind, n in kinds.items())}), {len(config.pressures)} "
        f"pressures, {config.num_seeds} seeds, deadline {deadline_text(config)}, "
        f"step times {config.profile}, margin ±{study.margin_pp:g} pp"
    )
    said = [text for text in (look_text(config), study.missing_text()) if text]
    parts = [head, *said, *(_part(study, part) for part in PARTS)]
    return "\n\n".join(parts)


def _part(study: StudyResult, part: str) -> str:
    rows = grid_rows(study, part)
    if not rows:
        return f"{part}: no cell on pilot seeds; nothing can be said there"
    bound = "below" if part == PARTS[0] else "at or above"
    lines = [
        f"{part}: {rows[0].num_cells} cells in which LIFO breaches {bound} "
        f"{study.config.boundary:.0%} on pilot seeds",
        _table(rows),
    ]
    planned = contrast_text(study, part)
    if planned:
        lines.append(planned)
    doses = dose_response(study, part)
    if doses:
        shown = ", ".join(f"{depth:g}: {i.mean:+.1f} pp" for depth, i in doses)
        lines.append(f"young(depth) minus LIFO: {shown}")
    return "\n".join(lines)


def contrast_text(study: StudyResult, part: str) -> str:
    """Return the sentence on young-biased rules against the others; empty without them."""
    found = planned_contrast(study, part)
    if found is None:
        return ""
    i = found.within
    return (
        f"young-biased ({', '.join(map(label, found.first))}) minus the others "
        f"({', '.join(map(label, found.second))}): {i.mean:+.1f} pp [{i.low:+.1f}, {i.high:+.1f}], "
        f"p = {found.p_value:.2g}"
    )


def _table(rows: Sequence[GridRow]) -> str:
    width = max(len(label(row.rule)) for row in rows) + 2
    head = (
        f"{'policy / signal':<{width}}{'breach':>8}{'vs LIFO, pp [95 %]':>24}"
        f"{'across sources':>20}{'p':>9}{'w/t/l':>11}{'letters':>9}  verdict"
    )
    lines = [head, "-" * (len(head) + 18)]
    for row in sorted(rows, key=lambda row: row.breach):
        i = row.within
        is_lifo = row.rule[0] == "lifo"
        wide = f"[{row.across.low:+.1f}, {row.across.high:+.1f}]" if row.across else "-"
        counts = f"{row.wins}/{row.ties}/{row.losses}"
        lines.append(
            f"{label(row.rule):<{width}}{row.breach:>8.1%}"
            + (f"{'baseline':>24}{'':>20}{'':>9}{'':>11}" if is_lifo else
               f"{f'{i.mean:+.1f} [{i.low:+.1f}, {i.high:+.1f}]':>24}{wide:>20}"
               f"{row.verdict.p_value:>9.2g}{counts:>11}")
            + f"{row.letters:>9}  {'' if is_lifo else row.verdict}"
        )  # fmt: skip
    return "\n".join(lines)
