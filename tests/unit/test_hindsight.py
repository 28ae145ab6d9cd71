"""Hindsight search: against all victim sequences of tiny cells, and its own promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import InvalidInput
from eval.hindsight import BASES, exhaust, search
from eval.replay import Replay, ReplayCase, Script
from eval.replay import replay as run_script
from serving_sim.config import EngineConfig
from serving_sim.jump import simulate_fast
from serving_sim.policies import get_policy
from tests.laws.test_engine_laws import PROFILE, clairvoyant_grid, make_workload

# (seed, requests, deadline in s, blocks); of 21 such cells tried, the search missed one optimum
TINY = (
    (0, 6, 0.9, 18), (2, 8, 0.7, 16), (3, 8, 1.1, 20), (2, 10, 0.7, 16), (2, 10, 0.9, 16),
    (5, 10, 0.9, 18),
)  # fmt: skip


def tiny(seed: int, count: int = 6, deadline_s: float = 0.9, blocks: int = 16) -> ReplayCase:
    """Return a cell with so few requests and blocks that all its schedules can be replayed."""
    workload = make_workload(seed, count)
    workload = replace(workload, deadline_s=np.full(count, deadline_s))
    config = EngineConfig(num_blocks=blocks, block_size=8, max_idle_steps=200)
    return ReplayCase(workload, config, PROFILE, deadline_s, clairvoyant_grid(workload))


@pytest.mark.parametrize("cell", TINY)
def test_search_finds_what_trying_every_schedule_finds(
    cell: tuple[int, int, float, int],
) -> None:
    case = tiny(*cell)
    every = exhaust(case, max_replays=1500)
    found = search(case, num_replays=600)
    assert found.breach == every.breach
    assert every.is_optimal
    assert every.floor <= every.breach < every.breach_by_rule["lifo"]
    assert every.num_replays > 20


def test_some_schedules_beat_every_rule() -> None:
    """Otherwise the rules alone would pass the test above."""
    found = [search(tiny(*cell), num_replays=600) for cell in TINY]
    assert sum(f.breach < f.breach_by_rule[f.best_rule] for f in found) >= 3


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_never_worse_than_the_best_rule_and_never_below_the_floor(seed: int) -> None:
    found = search(tiny(seed, count=14, blocks=24), num_replays=60)
    assert found.floor <= found.breach <= found.breach_by_rule[found.best_rule]
    assert set(found.breach_by_rule) == set(BASES)


@pytest.mark.parametrize("base", ["lifo", "longest-remaining", "slack-per-sunk", "random"])
def test_an_unchanged_script_is_the_rule_itself(base: str) -> None:
    case = tiny(3, count=14, blocks=24)
    run = run_script(case, Script(base))
    assert run.victims
    result = simulate_fast(
        case.workload, case.config, PROFILE, get_policy(base), signal=case.signal, seed=case.seed
    )
    late = [r for r in result.records if r.end_s is None or r.end_s - r.arrival_s > case.deadline_s]
    assert (run.missed, len(run.victims)) == (len(late), result.num_preemptions)


def cost_and_victims(run: Replay) -> tuple[tuple[int, float], tuple[int, ...]]:
    return run.cost, run.victims


def test_the_victims_alone_replay_the_schedule() -> None:
    case = tiny(5, count=14, blocks=24)
    found = search(case, num_replays=80, seed=2)
    again = run_script(case, Script("fifo", changes=dict(enumerate(found.victims))))
    assert (again.breach, again.victims) == (found.breach, found.victims)


def test_a_change_changes_one_victim_and_leaves_those_before_it() -> None:
    case = tiny(3, count=14, blocks=24)
    run = run_script(case, Script("lifo"))
    number = len(run.victims) // 2
    other = next(r for r in run.running[number] if r != run.victims[number])
    changed = run_script(case, Script("lifo", changes={number: other}))
    assert changed.victims[:number] == run.victims[:number]
    assert changed.victims[number] == other


def test_the_higher_class_goes_first() -> None:
    case = tiny(3, count=14, blocks=24)
    spared = run_script(case, Script("lifo")).victims[0]
    run = run_script(case, Script("lifo", classes={spared: -1}))
    for victim, running in zip(run.victims, run.running, strict=True):
        assert victim != spared or running == (spared,)


def test_a_seed_decides_all() -> None:
    case = tiny(4, count=14, blocks=24)
    assert search(case, num_replays=60, seed=7) == search(case, num_replays=60, seed=7)


def test_a_search_goes_on_where_it_ended(tmp_path: Path) -> None:
    case = tiny(4, count=14, blocks=24)
    journal = tmp_path / "search.json"
    for num_replays in (30, 75):
        parts = search(case, num_replays=num_replays, journal=journal)
    whole = search(case, num_replays=75)
    assert whole.breach > whole.floor  # or both might have ended early
    assert parts == whole


@pytest.mark.parametrize("text", [None, "{", "[]", '{"done": 3}'])
def test_a_foreign_journal_is_refused(tmp_path: Path, text: str | None) -> None:
    journal = tmp_path / "search.json"
    if text is None:
        search(tiny(4), num_replays=10, journal=journal)
    else:
        journal.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match="name another file, or remove it"):
        search(tiny(5), num_replays=10, journal=journal)


def test_too_large_a_tree_is_not_begun_in_vain() -> None:
    with pytest.raises(InvalidInput, match="more than 50 victim sequences: use search"):
        exhaust(tiny(3, count=14, blocks=24), max_replays=50)


def test_a_budget_below_the_rules_is_refused() -> None:
    with pytest.raises(InvalidInput, match="num_replays is 2 for 5 base rules"):
        search(tiny(0), num_replays=2)


def test_ample_blocks_leave_no_choice() -> None:
    found = search(tiny(0, blocks=200), num_replays=50)
    assert found.is_optimal
    assert (found.victims, found.num_replays) == ((), len(BASES))
