"""Two result sets side by side: the same cells, and the difference where their seeds pair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from contracts.errors import InvalidInput
from eval.cells import Cell
from eval.intervals import Interval, t_interval, within_grid
from eval.stored import StoredStudy
from eval.study import SourceResult
from eval.study_summary import Rule

# may differ: then only what both have is compared
_FREE = (
    "name", "policies", "signals", "pressures", "num_seeds", "num_pilots", "margin_pp", "looks",
)  # fmt: skip
_PAIRING = ("arrival_cv", "num_warmup", "num_tagged")


@dataclass(frozen=True, slots=True)
class PairedCell:
    """One rule in one cell of both sets: breach (shares of 1), pool sizes, and B less A in pp over
    the seeds both have; None where the two sets did not serve the same requests."""

    source: str
    pressure: str
    rule: Rule
    breach: tuple[float, float]
    num_blocks: tuple[int, int]
    difference: Interval | None


@dataclass(frozen=True, slots=True)
class PairedRule:
    """One rule over all cells whose seeds pair: breach of both sets, and B less A in pp."""

    rule: Rule
    num_cells: int
    breach: tuple[float, float]
    difference: Interval


@dataclass(frozen=True, slots=True)
class StudyComparison:
    """``differs`` says what is not the same in the two sets; ``only`` how many engine runs of A and
    of B have no counterpart."""

    differs: tuple[str, ...]
    only: tuple[int, int]
    cells: list[PairedCell]
    rules: list[PairedRule]


def compare_studies(a: StoredStudy, b: StoredStudy, *, anyway: bool = False) -> StudyComparison:
    """Compare two stored studies cell by cell.

    Raises InvalidInput when they come from two versions of the semantics or differ in a setting
    that moves every cell, unless ``anyway``; and when they have no cell in common.
    """
    differs = _differences(a, b)
    if differs and not anyway:
        raise InvalidInput(
            f"{a.out_dir} and {b.out_dir} are not two measurements of one thing: "
            f"{'; '.join(differs)}. Run one of them again, or say --anyway and read the "
            "difference as the effect of all of that"
        )
    cells, by_rule = [], defaultdict[Rule, dict[str, tuple[list[Cell], list[Cell]]]](dict)
    counts = [_count(study) for study in (a, b)]
    for ours in a.study.sources:
        theirs = next((s for s in b.study.sources if s.source.name == ours.source.name), None)
        if theirs is None:
            continue
        pairs = _seeds_pair(a, ours, b, theirs)
        first, second = _runs(ours), _runs(theirs)
        for key in (key for key in first if key in second):
            (pressure, rule), both = key, _common_seeds(first[key], second[key])
            cells.append(_paired_cell(ours.source.name, pressure, rule, both, pairs))
            counts = [count - len(side) for count, side in zip(counts, both, strict=True)]
            if pairs:
                by_rule[rule][f"{ours.source.name}, {pressure}"] = both
    if not cells:
        raise InvalidInput(
            f"{a.out_dir} and {b.out_dir} have no cell in common: sources "
            f"{_sources(a)} against {_sources(b)}"
        )
    rules = [_paired_rule(rule, found) for rule, found in by_rule.items()]
    return StudyComparison(tuple(differs), (counts[0], counts[1]), cells, rules)


def _differences(a: StoredStudy, b: StoredStudy) -> list[str]:
    found = []
    if a.semantics != b.semantics:
        found.append(
            f"they come from two versions of the semantics ({a.semantics[:12]} and "
            f"{b.semantics[:12]})"
        )
    ours, theirs = asdict(a.study.config), asdict(b.study.config)
    found += [
        f"{name} is {ours[name]} in one and {theirs[name]} in the other"
        for name in ours
        if name not in _FREE and ours[name] != theirs[name]
    ]
    return found


def _seeds_pair(a: StoredStudy, ours: SourceResult, b: StoredStudy, theirs: SourceResult) -> bool:
    """Say whether a seed is the same requests at the same times in both."""
    return (
        a.runs_sha256(ours) == b.runs_sha256(theirs)
        and ours.pilot.rate_per_s == theirs.pilot.rate_per_s
        and all(getattr(a.study.config, n) == getattr(b.study.config, n) for n in _PAIRING)
    )


def _runs(source: SourceResult) -> dict[tuple[str, Rule], list[Cell]]:
    out: dict[tuple[str, Rule], list[Cell]] = defaultdict(list)
    for cell in sorted(source.cells, key=lambda cell: cell.seed):
        out[cell.pressure, (cell.policy, cell.signal)].append(cell)
    return out


def _common_seeds(first: Sequence[Cell], second: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    seeds = {cell.seed for cell in first} & {cell.seed for cell in second}
    both = [[cell for cell in side if cell.seed in seeds] for side in (first, second)]
    return both[0], both[1]


def _paired_cell(
    source: str, pressure: str, rule: Rule, both: tuple[list[Cell], list[Cell]], pairs: bool
) -> PairedCell:
    first, second = both
    return PairedCell(
        source=source,
        pressure=pressure,
        rule=rule,
        breach=(_breach(first), _breach(second)),
        num_blocks=(first[0].num_blocks, second[0].num_blocks),
        difference=t_interval(_differences_pp(both)) if pairs else None,
    )


def _paired_rule(rule: Rule, found: dict[str, tuple[list[Cell], list[Cell]]]) -> PairedRule:
    by_cell = {name: _differences_pp(both) for name, both in found.items()}
    sides = [[cell for both in found.values() for cell in both[side]] for side in (0, 1)]
    breach = (_breach(sides[0]), _breach(sides[1]))
    return PairedRule(rule, len(found), breach, within_grid(by_cell))


def _differences_pp(both: tuple[list[Cell], list[Cell]]) -> list[float]:
    return [100 * (y.score.breach - x.score.breach) for x, y in zip(*both, strict=True)]


def _breach(cells: Sequence[Cell]) -> float:
    return sum(cell.score.breach for cell in cells) / len(cells)


def _count(stored: StoredStudy) -> int:
    return sum(len(source.cells) for source in stored.study.sources)


def _sources(stored: StoredStudy) -> str:
    return ", ".join(source.source.name for source in stored.study.sources)
