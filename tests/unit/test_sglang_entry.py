"""SGLang's retraction order from a policy, without SGLang: on stand-ins, and on our SGLang mode."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from contracts.errors import InvalidInput
from contracts.signals import RemainingGrid, SignalRequest, build_grid
from integrations import sglang_plugin
from integrations.settings import DeploySettings
from integrations.sglang_plugin import CHOSEN_AHEAD, Retraction, Server
from integrations.versions import check_sglang_version
from predictors.age_km import AgeKm, AgeKmSettings
from serving_sim.config import EngineConfig, SglangSettings
from serving_sim.engine import Run, SimResult, play, simulate
from serving_sim.policies import get_policy, list_policies
from serving_sim.profile import AffineProfile
from serving_sim.requests import LiveRequest
from tests.laws.test_sglang_laws import make_workload
from tests.synthetic_runs import MODEL, synthetic_runs
from training.rows import training_set

PROFILE = AffineProfile("test", 0.008, 1e-4, 2e-8)
CONFIG = EngineConfig(
    num_blocks=41,
    block_size=8,
    max_num_seqs=16,
    max_num_batched_tokens=128,
    sglang=SglangSettings(schedule_conservativeness=0.02),
)
POLICIES = [
    name
    for name in (name.replace("(depth)", "(0.5)") for name in list_policies())
    if not get_policy(name).reads_deadline
]
REFRESH_TOKENS = 8


def req(name: str, prompt: int, written: int, **fields: Any) -> SimpleNamespace:
    """Return a stand-in for SGLang's Req."""
    committed = prompt + written
    given = {
        "rid": name,
        "origin_input_ids": [0] * prompt,
        "output_ids": [0] * written,
        "sampling_params": SimpleNamespace(max_new_tokens=fields.pop("cap", 100)),
        "priority": None,
        "retraction_count": 0,
        "time_stats": SimpleNamespace(scheduler_recv_time=0.0),
        "kv": SimpleNamespace(kv_committed_len=committed, kv_allocated_len=committed),
    }
    return SimpleNamespace(**given | fields)


def stock(reqs: Sequence[Any]) -> list[int]:
    """SGLang's own order: whom to keep first."""
    key = [(len(r.output_ids), -len(r.origin_input_ids)) for r in reqs]
    return sorted(range(len(reqs)), key=lambda i: key[i], reverse=True)


def rule_of(
    policy: str, tp_size: int = 1, *, low_first: bool = True, **settings: Any
) -> Retraction:
    given = DeploySettings(policy=policy, fallback="sglang-retract", **settings)
    return Retraction(given, lambda: Server(tp_size, low_first))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("age-km")
    AgeKmSettings().fit(training_set(synthetic_runs())).save_pretrained(folder)
    return folder


def adapted(rule: Retraction, running: list[LiveRequest]) -> int:
    """Ask the hook for the next victim, as SGLang's loop does: from the end of the order."""
    reqs = [
        req(
            r.request_id,
            r.prompt_tokens,
            r.generated_tokens,
            cap=r.max_tokens,
            priority=r.priority,
            retraction_count=r.num_preemptions,
            kv=SimpleNamespace(
                kv_committed_len=r.computed_tokens,
                kv_allocated_len=len(r.blocks) * CONFIG.block_size,
            ),
        )
        for r in running
    ]
    order = rule.order(stock, reqs)
    assert sorted(order) == list(range(len(running)))
    return order[-1]


def grid_of(workload: Any, checkpoint: Path) -> RemainingGrid:
    rows = zip(workload.request_ids, workload.prompt_tokens, workload.max_tokens, strict=True)
    requests = [
        SignalRequest(name, name, name, "", "", "", MODEL, int(prompt), int(cap))
        for name, prompt, cap in rows
    ]
    return build_grid(AgeKm.from_pretrained(checkpoint), requests, stride=REFRESH_TOKENS)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_hook_decides_as_our_sglang_mode_does(policy: str, checkpoint: Path) -> None:
    """The same policy, asked through SGLang's hook and by the engine, on random workloads."""
    reads = get_policy(policy).reads_signal
    num_preemptions = 0
    for seed in range(6):
        workload = make_workload(seed, 24, 0.02)
        signal = grid_of(workload, checkpoint) if reads else None
        wanted = simulate(workload, CONFIG, PROFILE, get_policy(policy), signal=signal)
        rule = rule_of(
            policy,
            checkpoint=str(checkpoint) if reads else "",
            refresh_tokens=REFRESH_TOKENS,
            budget_us=60_000_000,
        )
        rule._page_tokens = CONFIG.block_size
        run = Run(workload, CONFIG, PROFILE, lambda running, _, r=rule: adapted(r, running), True)
        play(run)
        assert decisions(run.result(deadline_seen=False)) == decisions(wanted)
        assert rule.chooser.counters.fallbacks == 0
        num_preemptions += wanted.num_preemptions
    assert num_preemptions > 0


def decisions(result: SimResult) -> list[tuple[Any, ...]]:
    return [(r.request_id, r.num_preemptions, r.state, r.end_s) for r in result.records]


def test_victims_stand_at_the_end_one_chosen_after_the_other() -> None:
    rng = np.random.default_rng(0)
    reqs = [
        req(f"r{i}", int(rng.integers(1, 90)), int(rng.integers(0, 90)))
        for i in range(CHOSEN_AHEAD + 9)
    ]
    sizes = [r.kv.kv_committed_len for r in reqs]
    order = rule_of("largest-kv").order(stock, reqs)
    largest = sorted(range(len(reqs)), key=lambda i: (sizes[i], i), reverse=True)
    assert order[-CHOSEN_AHEAD:][::-1] == largest[:CHOSEN_AHEAD]
    assert order[:-CHOSEN_AHEAD] == [i for i in stock(reqs) if i in order[:-CHOSEN_AHEAD]]
    assert rule_of("sglang-retract").order(stock, reqs) == stock(reqs)
    assert rule_of("largest-kv").order(stock, reqs[:1]) == [0]


@pytest.mark.parametrize(("low_first", "victim"), [(True, "late"), (False, "urgent")])
def test_priority_follows_the_servers_direction(low_first: bool, victim: str) -> None:
    reqs = [req("urgent", 9, 9, priority=0), req("late", 9, 9, priority=5)]
    order = rule_of("priority", low_first=low_first).order(stock, reqs)
    assert reqs[order[-1]].rid == victim
    reqs.insert(0, req("unnamed", 9, 9))
    order = rule_of("priority", low_first=low_first).order(stock, reqs)
    assert reqs[order[-1]].rid == "unnamed"


def test_only_what_was_retracted_is_counted() -> None:
    rule = rule_of("fifo")
    reqs = [req(f"r{i}", 9, 9) for i in range(5)]
    pool = SimpleNamespace(page_size=4, available_size=lambda: 0)
    batch = SimpleNamespace(token_to_kv_pool_allocator=pool, reqs=reqs)

    def original(_: Any) -> Any:
        order = rule.order(stock, reqs)
        return [reqs[i] for i in order[:-3:-1]], 0.5, []

    taken, ratio, aborted = rule.retract(original, batch)
    assert [r.rid for r in taken] == ["r0", "r1"]
    assert (ratio, aborted) == (0.5, [])
    counters = rule.chooser.counters
    assert (counters.preemptions, counters.decisions, counters.unlike_lifo) == (2, 2, 2)
    rule.before_check(batch)
    rule.before_check(batch, [0, 1])
    assert counters.steps == 1


def test_a_predictor_is_asked_ahead_and_not_under_tensor_parallelism(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = SimpleNamespace(page_size=4, available_size=lambda: 0)
    reqs = [req(f"r{i}", 9, 9 + i) for i in range(5)]
    batch = SimpleNamespace(token_to_kv_pool_allocator=pool, reqs=reqs)
    alone = rule_of("shortest-remaining", checkpoint=str(checkpoint), budget_us=60_000_000)
    alone.before_check(batch)
    assert alone.chooser.counters.predictor_rows == 5
    ranks = rule_of("longest-remaining", tp_size=2, checkpoint=str(checkpoint))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ranks.before_check(batch)
            assert ranks.order(stock, reqs) == stock(reqs)
    assert sum("tensor parallelism over 2 ranks" in r.message for r in caplog.records) == 1
    assert ranks.chooser.counters.predictor_rows == 0


def test_a_fault_leaves_sglangs_own_order(caplog: pytest.LogCaptureFixture) -> None:
    rule = rule_of("fifo")
    reqs = [req("a", 9, 9), SimpleNamespace(rid="b", origin_input_ids=[0], output_ids=[])]
    with caplog.at_level(logging.WARNING):
        assert rule.order(stock, reqs) == rule.order(stock, reqs) == stock(reqs)
    assert rule.chooser.counters.fallback_error == 2
    assert len(caplog.records) == 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_plugin, "MAX_TRACKED", 10)
    rule = rule_of("random")
    for batch in range(9):
        rule.order(stock, [req(f"r{batch}-{i}", 9, 9) for i in range(4)])
        assert len(rule.chooser.tracked) <= 10 + 4


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(InvalidInput, match="reads deadlines"):
        rule_of("doomed-first")
    with pytest.raises(InvalidInput, match=r"SGLang 0\.4\.0 is not 0\.5\.23"):
        check_sglang_version("0.4.0")
    check_sglang_version("0.5.23")


def test_nothing_happens_unless_asked_for() -> None:
    """SGLang loads every plug-in it finds; this one must not import anything then."""
    code = (
        "from integrations.sglang_entry import register; register(); import sys;"
        "print(any(name in sys.modules for name in ('numpy', 'sglang', 'integrations.chooser')))"
    )
    environ = {k: v for k, v in os.environ.items() if k != "PREEMPTBENCH_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
