"""How good each signal of a study was when somebody had to go, beside what it did to breach."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from contracts.errors import PreemptBenchError
from contracts.files import atomic_write_text
from eval.running_sets import SetQuality, judge_signals
from eval.signal_sources import NO_SIGNAL
from eval.stored import StoredStudy
from eval.study import SourceResult
from eval.study_summary import PARTS, Comparison
from oracles.empirical import SAMPLED_LABEL

NUM_SEEDS = 2
"""Seeds whose running sets are judged: a sample, as a signal's quality scatters far less over seeds
than breach does."""


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One signal on one source: its quality on running sets, and the mean difference in breach to
    LIFO (pp) of the rule that reads it, over the source's cells in ``part``."""

    part: str
    source: str
    quality: SetQuality
    difference_pp: float
    num_cells: int


@dataclass(frozen=True, slots=True)
class Qualities:
    """What was measured, and why sources are missing, if any are."""

    by_source: dict[str, list[SetQuality]]
    missing: tuple[str, ...]


def measure_qualities(
    stored: StoredStudy, on_source: Callable[[int, int], None] = lambda *_: None
) -> Qualities:
    """Judge the signals of every source on the sets of its first seeds; kept in quality/ beside the
    study, and measured when not there. A source whose inputs are gone is named as missing."""
    found: dict[str, list[SetQuality]] = {}
    missing = []
    for done, source in enumerate(stored.study.sources):
        on_source(done, len(stored.study.sources))
        try:
            found[source.source.name] = _of_source(stored, source)
        except (PreemptBenchError, OSError) as error:
            missing.append(f"{source.source.name}: {error}")
    on_source(len(stored.study.sources), len(stored.study.sources))
    return Qualities(found, tuple(missing))


def _of_source(stored: StoredStudy, source: SourceResult) -> list[SetQuality]:
    if all(signal.name == NO_SIGNAL for signal in source.matrix.signals):
        return []
    task = stored.tasks[source.source.name][0].removesuffix(".parquet")
    path = stored.out_dir / "quality" / f"{source.out_dir.name}-{task}.json"
    if not path.exists():
        seeds = range(min(NUM_SEEDS, source.matrix.num_seeds))
        rows = judge_signals(source.matrix, seeds)
        atomic_write_text(path, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return [SetQuality(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def quality_rows(
    found: Qualities, comparisons: Sequence[Comparison], policy: str
) -> list[QualityRow]:
    """Return a row for each part, source and signal of which ``policy`` has comparable cells."""
    rows = []
    for part in PARTS:
        for source, qualities in found.by_source.items():
            for quality in qualities:
                means = [
                    c.difference.mean
                    for c in comparisons
                    if (c.source, c.in_regime) == (source, part == PARTS[0])
                    and (c.rule[0], c.rule[1].removesuffix(SAMPLED_LABEL))
                    == (policy, quality.signal)
                ]
                if means and quality.num_sets:
                    rows.append(
                        QualityRow(part, source, quality, float(np.mean(means)), len(means))
                    )
    return rows


def rank_correlation(rows: Sequence[QualityRow]) -> float:
    """Return Spearman's rank correlation of concordance and difference over ``rows``; NaN for
    fewer than three, or where either does not vary. Descriptive: rows of a source share seeds."""
    from scipy.stats import spearmanr

    x = [row.quality.concordance for row in rows]
    y = [row.difference_pp for row in rows]
    if len(rows) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return float("nan")
    return float(spearmanr(x, y).statistic)
