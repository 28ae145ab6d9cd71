"""The tables of a study beside breach: latency, who pays for it, and what preemption costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from eval.cells import Cell
from eval.study_summary import PARTS, Rule, label
from eval.tables import Column, Table, Value

if TYPE_CHECKING:
    from eval.study_numbers import StudyNumbers

Measure = tuple[Column, Callable[[Cell], float]]
"""A column, and what it says of one engine run; a row shows the mean over runs."""

_LATENCY: tuple[Measure, ...] = (
    (Column("ttft_mean_s", "TTFT mean, s", "number"), lambda c: c.service.ttft_mean_s),
    (Column("ttft_p50_s", "p50", "number"), lambda c: c.service.ttft_p50_s),
    (Column("ttft_p99_s", "p99", "number"), lambda c: c.service.ttft_p99_s),
    (Column("tpot_mean_ms", "TPOT mean, ms", "count"), lambda c: 1000 * c.service.tpot_mean_s),
    (Column("tpot_p50_ms", "p50", "count"), lambda c: 1000 * c.service.tpot_p50_s),
    (Column("tpot_p99_ms", "p99", "count"), lambda c: 1000 * c.service.tpot_p99_s),
    (Column("e2e_mean_s", "E2E mean, s", "seconds"), lambda c: c.service.e2e_mean_s),
    (Column("e2e_p50_s", "p50", "seconds"), lambda c: c.service.e2e_p50_s),
    (Column("e2e_p99_s", "p99", "seconds"), lambda c: c.service.e2e_p99_s),
    (Column("goodput_per_s", "goodput / s", "number"), lambda c: c.service.goodput_per_s),
    (Column("offered_per_s", "offered / s", "number"), lambda c: c.service.offered_per_s),
)
_WHO_PAYS: tuple[Measure, ...] = (
    (Column("breach", "breach", "share"), lambda c: c.score.breach),
    (Column("floor", "floor", "share"), lambda c: c.score.floor),
    (Column("excess_pp", "excess, pp", "pp"), lambda c: 100 * (c.score.breach - c.score.floor)),
    (Column("completed_only", "completed only", "share"), lambda c: c.score.completed_only),
    (
        Column("hidden_pp", "hidden, pp", "pp"),
        lambda c: 100 * (c.score.breach - c.score.completed_only),
    ),
    (Column("top_decile_breach", "longest tenth", "share"), lambda c: c.service.top_decile_breach),
    (Column("top_decile_floor", "its floor", "share"), lambda c: c.service.top_decile_floor),
    (Column("jain_fairness", "Jain fairness", "number"), lambda c: c.service.jain_fairness),
    (Column("preempted_share", "preempted", "share"), lambda c: c.service.preempted_share),
    (
        Column("preemptions_per_request", "preemptions / request", "number"),
        lambda c: c.service.preemptions_per_request,
    ),
    (Column("length_capped_share", "at its cap", "share"), lambda c: c.service.length_capped_share),
    (Column("offered", "offered", "number"), lambda c: c.service.offered),
    (Column("accepted", "accepted", "number"), lambda c: c.score.accepted),
    (Column("rejected", "rejected", "number"), lambda c: c.score.rejected),
)
_COST: tuple[Measure, ...] = (
    (Column("breach", "breach", "share"), lambda c: c.score.breach),
    (
        Column("preemptions_per_1000", "preemptions / 1000 requests", "count"),
        lambda c: c.preemptions_per_1000,
    ),
    (Column("recompute_tax", "recompute tax", "share"), lambda c: c.recompute_tax),
    (
        Column("soft_hits", "soft hits", "share"),
        lambda c: c.cache_hit_tokens / max(1, c.computed_tokens),
    ),
    (
        Column("recomputed_per_preemption_tokens", "recomputed tokens / preemption", "count"),
        lambda c: c.recomputed_tokens / max(1, c.num_preemptions),
    ),
    (
        Column("soft_hits_per_preemption_tokens", "found again / preemption", "count"),
        lambda c: c.cache_hit_tokens / max(1, c.num_preemptions),
    ),
    (Column("fallbacks_per_run", "fallbacks / run", "number"), lambda c: c.signal_fallbacks),
)
_PART = (Column("part", "part"), Column("rule", "policy / signal"))
_CELL = (Column("source", "source"), Column("pressure", "pressure"), _PART[1])


def service_tables(numbers: StudyNumbers) -> list[Table]:
    """Return latency and who pays for each part, then both for each cell of the grid, and breach
    by deadline class where the study has classes."""
    tables = [latency_table(numbers), payers_table(numbers), service_table(numbers)]
    if numbers.stored.study.config.deadline_classes:
        tables.append(class_table(numbers))
    return tables


def latency_table(numbers: StudyNumbers) -> Table:
    """Return times and rates of each rule over each part."""
    caption = (
        "Means over engine runs. Nobody is left out: a first token or an end that never came "
        "counts as the time watched, and no time counts for more. TTFT: scheduled arrival to first "
        "token; TPOT: time a token after it; E2E: arrival to end. Goodput: requests that met their "
        "deadline, for each second in which the scored ones arrived."
    )
    return _table("latency", caption, _PART, _by_part(numbers), _LATENCY)


def payers_table(numbers: StudyNumbers) -> Table:
    """Return who pays, by rule over each part: floor and excess, survivors, the longest tenth."""
    caption = (
        "Excess: breach above the floor (late even alone on an idle engine). Hidden: what a score "
        "over completed requests only would not show. Longest tenth: the requests that take "
        "longest alone. Jain fairness of slowdowns (E2E / seconds alone): 1 when all are slowed "
        "alike. At its cap: ended by max_tokens. Offered = accepted + rejected, a run."
    )
    return _table("payers", caption, _PART, _by_part(numbers), _WHO_PAYS)


def service_table(numbers: StudyNumbers) -> Table:
    """Return every measure for every rule in every cell of the grid."""
    groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for source in numbers.stored.study.sources:
        for cell in source.cells:
            rule = label((cell.policy, cell.signal))
            groups[source.source.name, cell.pressure, rule].append(cell)
    caption = "Latency and who pays, for every rule in every cell; means over seeds."
    return _table("service", caption, _CELL, groups, (*_LATENCY, *_WHO_PAYS))


def cost_table(numbers: StudyNumbers) -> Table:
    """Return preemptions and what they cost, by rule, over each part."""
    caption = (
        "Recompute tax: tokens computed a second time, of all computed. Soft hits: tokens found "
        "again in blocks not yet overwritten, for each computed one. Both are given for each "
        "preemption beside. Fallbacks: answers that a signal could not give from its own data."
    )
    return _table("cost", caption, _PART, _by_part(numbers), _COST)


def class_table(numbers: StudyNumbers) -> Table:
    """Return breach of each deadline class at its own deadline, by rule over each part."""
    classes = numbers.stored.study.config.deadline_classes
    measures = tuple(
        (
            Column(f"breach_{one.name}", f"{one.name} ({one.deadline_s:g} s)", "share"),
            _of_class(at),
        )
        for at, one in enumerate(classes)
    )
    caption = (
        "Breach of each deadline class at its own deadline: "
        + ", ".join(f"{one.name} {one.share:.0%} of requests" for one in classes)
        + "."
    )
    return _table("classes", caption, _PART, _by_part(numbers), measures)


def _of_class(at: int) -> Callable[[Cell], float]:
    return lambda cell: cell.breach_by_class[at]


def _by_part(numbers: StudyNumbers) -> dict[tuple[str, ...], list[Cell]]:
    groups: dict[tuple[str, Rule], list[Cell]] = defaultdict(list)
    for source in numbers.stored.study.sources:
        for cell in source.cells:
            is_low = numbers.curves.in_regime[source.source.name, cell.pressure]
            part = PARTS[0] if is_low else PARTS[1]
            groups[part, (cell.policy, cell.signal)].append(cell)
    order = sorted(groups, key=lambda key: PARTS.index(key[0]))
    return {(part, label(rule)): groups[part, rule] for part, rule in order}


def _table(
    name: str,
    caption: str,
    keys: Sequence[Column],
    groups: Mapping[tuple[str, ...], Sequence[Cell]],
    measures: Sequence[Measure],
) -> Table:
    rows: list[tuple[Value, ...]] = [
        (*key, *(float(np.mean([value(cell) for cell in cells])) for _, value in measures))
        for key, cells in groups.items()
    ]
    return Table(name, caption, (*keys, *(column for column, _ in measures)), tuple(rows))
