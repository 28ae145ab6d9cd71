"""A study that stops when its result is clear: looks at fixed numbers of seeds.

Looking after every seed and stopping at the first small p inflates the error; here the looks are
fixed beforehand, each has its share of the level (:func:`eval.intervals.look_alphas`), and the
verdicts of the look at which one stops are at that look's level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from eval.study import StudyResult, run_study
from eval.study_config import BASELINE, Source, StudyConfig
from eval.study_summary import PARTS, Rule, grid_rows


def run_until_clear(
    config: StudyConfig,
    sources: Sequence[Source],
    out_dir: Path,
    *,
    on_note: Callable[[str], None],
    **how: Any,
) -> StudyResult:
    """Run a study look by look, and stop at the first look that leaves no rule undecided; without
    ``config.looks`` it is :func:`eval.study.run_study`, whose other arguments are ``how``.

    Finished seeds are the same files with or without looks. A seed that failed is missing from the
    look, which keeps its level. ``on_note`` also hears what each look but the last left open.
    """
    looks = config.looks or (config.num_seeds,)
    for number, num_seeds in enumerate(looks, 1):
        at_look = replace(config, num_seeds=num_seeds)
        study = run_study(at_look, sources, out_dir, on_note=on_note, **how)
        left = undecided(study) if number < len(looks) else []
        if number < len(looks) and not left:
            break
        if left:
            on_note(
                f"look {number} of {len(looks)}, {num_seeds} seeds: {len(left)} rules undecided "
                f"at level {at_look.alpha:.3f}; {looks[number]} seeds next"
            )
    return study


def undecided(study: StudyResult) -> list[tuple[str, Rule]]:
    """Return (part, rule) of what is inconclusive over a part of the grid.

    Raises InvalidInput when no cell of the grid can be judged: more seeds would not help.
    """
    rows = [row for part in PARTS for row in grid_rows(study, part)]
    if not rows:
        raise InvalidInput(
            "no cell has every rule comparable with LIFO, so no look can decide anything: read the "
            "cells one by one, or drop the rule that accepts other requests"
        )
    return [
        (row.part, row.rule)
        for row in rows
        if row.rule[0] != BASELINE and row.verdict.word == "inconclusive"
    ]


def look_text(config: StudyConfig) -> str:
    """Say at which look the study stands; empty for one without looks."""
    if not config.looks:
        return ""
    at, count = config.looks.index(config.num_seeds) + 1, len(config.looks)
    stopped = "every rule has a verdict" if at < count else "the last look"
    return (
        f"look {at} of {count} (planned at {', '.join(map(str, config.looks))} seeds; verdicts at "
        f"level {config.alpha:.3f}, intervals 95 % of one look): {stopped}"
    )
