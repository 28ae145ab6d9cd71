"""The built-in policies, the registry, and a policy of the user's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contracts.conformance import check_policy
from contracts.errors import InvalidInput, UnknownName
from contracts.policy import Policy, RunningView, views_from_rows
from serving_sim.policies import get_policy, list_policies, load_policy, register

NAMES = [name for name in list_policies() if "(" not in name] + ["young(0.1)", "young(1)"]

BASE = RunningView(
    request_id=0, admission_seq=0, arrival_s=0.0, deadline_s=9.0, prompt_tokens=10,
    generated_tokens=5, computed_tokens=15, kv_blocks=1, max_tokens=50, num_preemptions=0,
    priority=0, rank_from_youngest=2, num_running=3, now_s=1.0, recent_tpot_s=0.02,
    prefill_s_per_token=1e-4, remaining=10.0, remaining_upper=20.0, draw=0.5,
)  # fmt: skip
RUNNING = [
    BASE._replace(draw=0.9, generated_tokens=9, computed_tokens=19, kv_blocks=2, priority=1),
    BASE._replace(
        request_id=1, admission_seq=1, rank_from_youngest=1, remaining=40.0, prompt_tokens=30,
        computed_tokens=35, kv_blocks=3, priority=1, draw=0.2,
    ),
    BASE._replace(request_id=2, admission_seq=2, rank_from_youngest=0, remaining=3.0, draw=0.1),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_keeps_the_contract(name: str) -> None:
    policy = get_policy(name)
    assert policy.name == name
    check_policy(policy)


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("lifo", 2), ("fifo", 0), ("random", 0), ("largest-kv", 1), ("least-computed", 2),
        ("most-computed", 1), ("sglang-retract", 1), ("priority", 1), ("longest-remaining", 1),
        ("shortest-remaining", 2), ("young(0.1)", 2), ("young(0.5)", 1), ("young(1)", 0),
        ("least-generated", 1), ("most-generated", 0), ("remaining-times-sunk", 1),
        ("remaining-per-sunk", 1), ("most-slack", 2), ("slack-per-sunk", 2), ("doomed-first", 2),
        ("doomed-then-slack", 2), ("goodspeed-bid", 2), ("bidkv", 1),
        ("reclaimable-unfinished", 0), ("most-budget-left", 1), ("spare-evicted", 2),
    ],
)  # fmt: skip
def test_whom_a_built_in_evicts(name: str, victim: int) -> None:
    assert int(np.argmax(get_policy(name).score(views_from_rows(RUNNING)))) == victim


@pytest.mark.parametrize("name", ["doomed-first", "doomed-then-slack"])
def test_who_cannot_be_in_time_goes_before_all(name: str) -> None:
    late = [
        RUNNING[0]._replace(remaining=450.0),
        RUNNING[1]._replace(remaining=450.0),
        RUNNING[2],  # in time; the youngest, with most slack for what it sank
    ]
    scores = get_policy(name).score(views_from_rows(late))
    assert int(np.argmax(scores)) == 1
    assert int(np.argmax(get_policy("slack-per-sunk").score(views_from_rows(late)))) == 2


def test_who_was_evicted_is_spared_up_to_three_times() -> None:
    counts = (0, 3, 7)
    rows = [row._replace(num_preemptions=n) for row, n in zip(RUNNING, counts, strict=True)]
    scores = get_policy("spare-evicted").score(views_from_rows(rows))
    assert scores.argsort().tolist() == [1, 2, 0]


def test_a_passed_deadline_is_the_highest_bid() -> None:
    rows = [RUNNING[0], RUNNING[1]._replace(deadline_s=0.5), RUNNING[2]]
    assert int(np.argmin(get_policy("goodspeed-bid").score(views_from_rows(rows)))) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_scores_one_view_as_it_scores_many(name: str) -> None:
    policy = get_policy(name)
    assert policy.row is not None
    scores = policy.score(views_from_rows(RUNNING)).tolist()
    assert [float(policy.row(view)) for view in RUNNING] == scores


def test_the_policies_import_neither_numba_nor_the_engine() -> None:
    code = (
        "import sys, serving_sim.policies; "
        "sys.exit(bool({'numba', 'serving_sim.engine', 'serving_sim.jump'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'largest-kv'"):
        get_policy("largest-kvs")


@pytest.mark.parametrize("depth", ["0", "1.5", "-1", "nan"])
def test_a_depth_outside_its_range_is_refused(depth: str) -> None:
    with pytest.raises(InvalidInput, match=r"share of the running set in \(0, 1\]"):
        get_policy(f"young({depth})")


@pytest.mark.parametrize("argument", ["", "deep"])
def test_a_depth_that_is_no_number_is_refused(argument: str) -> None:
    with pytest.raises(InvalidInput, match="is not a number"):
        get_policy(f"young({argument})")


@pytest.mark.parametrize("name", ["lifo", "young"])
def test_a_name_is_registered_once(name: str) -> None:
    with pytest.raises(InvalidInput, match="exists already"):
        register(Policy(name, get_policy("lifo").score))


def write(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_policy_of_the_users_own(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def tight(view):\n"
        "    return view.remaining * view.recent_tpot_s - (view.deadline_s - view.now_s)\n"
        "def blind(view):\n"
        "    return float(view.kv_blocks)\n"
        "blind.reads_signal = blind.reads_deadline = False\n",
    )
    tight, blind = load_policy(f"{path}:tight"), load_policy(f"{path}:blind")
    assert (tight.name, tight.reads_signal, tight.reads_deadline) == ("tight", True, True)
    assert (blind.name, blind.reads_signal, blind.reads_deadline) == ("blind", False, False)
    check_policy(tight)
    check_policy(blind)
    assert blind.score(views_from_rows(RUNNING)).tolist() == [2.0, 3.0, 1.0]


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        ("def good(view): return 0.0", "god", "did you mean 'good'"),
        ("x = 1", "score", "it defines none"),
        ("def bad(view:\n", "bad", r"mine.py line 1 is not Python"),
        ("1 / 0", "score", "failed with ZeroDivisionError"),
    ],
)
def test_a_users_file_that_does_not_work_says_why(
    tmp_path: Path, text: str, function: str, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidInput, match=message):
        load_policy(f"{path}:{function}")


def test_a_users_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not exist"):
        load_policy(f"{tmp_path}/none.py:score")
    with pytest.raises(InvalidInput, match=r"file\.py:function"):
        load_policy("lifo.py")
