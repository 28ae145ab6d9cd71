"""From cells to the table: one row for each pressure, policy and signal, beside LIFO."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput
from eval.cells import Cell, same_cohort
from eval.signal_sources import NO_SIGNAL
from eval.statistics import PairedDifference, paired_difference

BASELINE = "lifo"


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """Means over seeds (rates as shares of 1). ``difference`` is paired with LIFO by seed, in
    percentage points; None for LIFO itself. ``comparable`` is False when the requests
    accepted are not LIFO's in some seed: a difference would compare different requests."""

    pressure: str
    num_blocks: int
    policy: str
    signal: str
    num_seeds: int
    breach: float
    completed_only: float
    floor: float
    difference: PairedDifference | None
    comparable: bool
    preemptions_per_1000: float
    recompute_tax: float
    breach_by_half: tuple[float, float]
    accepted: int
    met: int
    late: int
    failed: int
    unfinished: int
    withdrawn: int
    rejected: int

    @property
    def label(self) -> str:
        """The row's name in a table: the policy, and the signal if it reads one."""
        return self.policy if self.signal == NO_SIGNAL else f"{self.policy} / {self.signal}"


def summarise(cells: Sequence[Cell]) -> list[SummaryRow]:
    """Return the rows in the order the cells come in; every pressure must hold LIFO."""
    groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.pressure, cell.policy, cell.signal].append(cell)
    rows = []
    for (pressure, policy, _), group in groups.items():
        baseline = groups.get((pressure, BASELINE, NO_SIGNAL))
        if baseline is None:
            raise InvalidInput(
                f"pressure {pressure!r} has no {BASELINE!r} cells: every comparison is with "
                f"{BASELINE}, so add it to the policies"
            )
        rows.append(_row(group, baseline if policy != BASELINE else None))
    return rows


def _row(group: Sequence[Cell], baseline: Sequence[Cell] | None) -> SummaryRow:
    group = sorted(group, key=lambda cell: cell.seed)
    if len({cell.seed for cell in group}) < len(group):
        raise InvalidInput(
            f"{group[0].policy}/{group[0].signal} at {group[0].pressure} holds a seed twice: a "
            "seed counted twice makes an interval too narrow"
        )
    first, scores = group[0], [cell.score for cell in group]
    difference, comparable = None, True
    if baseline is not None:
        lifo = sorted(baseline, key=lambda cell: cell.seed)
        if [c.seed for c in lifo] != [c.seed for c in group]:
            raise InvalidInput(
                f"{first.policy}/{first.signal} at {first.pressure} ran seeds "
                f"{[c.seed for c in group]}, {BASELINE} ran {[c.seed for c in lifo]}: run both "
                "on the same seeds"
            )
        comparable = same_cohort(group, lifo)
        difference = paired_difference(
            [100 * s.breach for s in scores], [100 * c.score.breach for c in lifo]
        )
    return SummaryRow(
        pressure=first.pressure,
        num_blocks=first.num_blocks,
        policy=first.policy,
        signal=first.signal,
        num_seeds=len(group),
        breach=float(np.mean([s.breach for s in scores])),
        completed_only=float(np.mean([s.completed_only for s in scores])),
        floor=float(np.mean([s.floor for s in scores])),
        difference=difference,
        comparable=comparable,
        preemptions_per_1000=float(np.mean([c.preemptions_per_1000 for c in group])),
        recompute_tax=float(np.mean([c.recompute_tax for c in group])),
        breach_by_half=(
            float(np.mean([c.breach_by_half[0] for c in group])),
            float(np.mean([c.breach_by_half[1] for c in group])),
        ),
        accepted=sum(s.accepted for s in scores),
        met=sum(s.met for s in scores),
        late=sum(s.late for s in scores),
        failed=sum(s.failed for s in scores),
        unfinished=sum(s.unfinished for s in scores),
        withdrawn=sum(s.withdrawn for s in scores),
        rejected=sum(s.rejected for s in scores),
    )


def format_table(rows: Sequence[SummaryRow]) -> str:
    """Return the table as fixed-width text, a block for each pressure."""
    width = max(len(row.label) for row in rows) + 2
    head = (
        f"{'policy / signal':<{width}}{'breach':>8}{'vs LIFO, pp [95 % interval]':>30}"
        f"{'floor':>8}{'completed only':>16}{'preempt/1k':>12}{'recompute':>11}"
    )
    lines: list[str] = []
    pressure = None
    for row in rows:
        if row.pressure != pressure:
            pressure = row.pressure
            lines += ["", _title(row), head, "-" * len(head)]
        lines.append(
            f"{row.label:<{width}}{row.breach:>8.1%}{_difference_text(row):>30}"
            f"{row.floor:>8.1%}{row.completed_only:>16.1%}{row.preemptions_per_1000:>12.0f}"
            f"{row.recompute_tax:>11.1%}"
        )
    return "\n".join(lines[1:])


def _title(row: SummaryRow) -> str:
    """Name a block of the table; ``row`` is its first, LIFO as a rule."""
    first, second = row.breach_by_half
    blocks = f"{row.num_blocks} blocks"
    named = "" if row.pressure == blocks else f"{row.pressure}: "
    refused = f", {row.rejected} never fit and were refused" if row.rejected else ""
    return (
        f"KV pressure {named}{blocks}, {row.num_seeds} seeds, "
        f"{row.accepted} requests{refused}; {row.label} breaches {first:.1%} of the earlier half "
        f"and {second:.1%} of the later"
    )


def _difference_text(row: SummaryRow) -> str:
    d = row.difference
    if d is None:
        return "baseline"
    if not row.comparable:
        return "not comparable"
    mark = "*" if d.excludes_zero else " "
    return f"{d.mean:+.1f} [{d.low:+.1f}, {d.high:+.1f}]{mark}"
