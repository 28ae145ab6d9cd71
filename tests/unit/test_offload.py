"""The offload tier: by hand in the engine, and alone against a model of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.errors import InvalidInput
from serving_sim.config import EngineConfig, OffloadSettings, SglangSettings
from serving_sim.engine import SimResult, StepLog, simulate
from serving_sim.faults import FaultPlan, WorkerLoss
from serving_sim.jump import unsupported
from serving_sim.offload import Tier, offload_from_table
from serving_sim.profile import AffineProfile
from serving_sim.requests import LiveRequest, live_requests
from tests.by_hand import workload

SECOND = AffineProfile("one second a step", 1.0, 0.0, 0.0)
DEAR = AffineProfile("one second a step, a tenth more a token", 1.0, 0.1, 0.0)
# Two requests of 8 + 20 tokens in 6 usable blocks of 8: each can have 4, both cannot. "b" is
# preempted at 17 s with 24 tokens of KV, and can return when "a" ended at 20 s.
PAIR = workload([8, 8], [20, 20], cap=20)
TIGHT = EngineConfig(num_blocks=7, block_size=8, enable_prefix_caching=False)
BYTE = OffloadSettings(bytes_per_s=12.0, kv_bytes_per_token=1, latency_s=0.5)  # 24 tokens: 2.5 s


def run(tier: OffloadSettings | None, profile: AffineProfile = SECOND, **kwargs: Any) -> SimResult:
    return simulate(PAIR, replace(TIGHT, offload=tier), profile, **kwargs)


def test_without_a_tier_everything_is_computed_again() -> None:
    result = run(None)
    assert (result.recomputed_tokens, result.loaded_tokens, result.end_s) == (24, 0, 23.0)


def test_others_go_on_while_a_request_waits_for_its_load() -> None:
    """Written from 17 to 19.5 s, loaded from 20 to 22.5 s; "b" then writes its last 3 tokens."""
    steps: list[StepLog] = []
    result = run(BYTE, on_step=steps.append)
    b = result.records[1]
    assert (b.end_s, b.loaded_tokens, b.recomputed_tokens, b.preempted_s) == (25.5, 24, 0, 3.0)
    assert (result.offloaded_tokens, result.loaded_tokens, result.load_s) == (24, 24, 2.5)
    assert result.computed_tokens == 2 * 27
    waiting = steps[20]
    assert (waiting.start_s, waiting.scheduled, waiting.running) == (20.0, {}, ("b",))
    assert waiting.num_free_blocks == 6 - 3
    assert steps[21].start_s == 22.5 and steps[21].scheduled == {"b": 1}


def test_a_wait_ends_early_when_somebody_arrives() -> None:
    """ "c" arrives at 21 s and computes while "b" is loaded until 22.5 s."""
    jobs = workload([8, 8, 8], [20, 20, 2], [0.0, 0.0, 21.0], cap=20)
    steps: list[StepLog] = []
    result = simulate(jobs, replace(TIGHT, offload=BYTE), SECOND, on_step=steps.append)
    assert [(s.start_s, s.scheduled) for s in steps[20:24]] == [
        (20.0, {}), (21.0, {"c": 8}), (22.0, {"c": 1}), (23.0, {"b": 1}),
    ]  # fmt: skip
    assert [r.end_s for r in result.records] == [20.0, 26.0, 23.0]


def test_without_overlap_the_step_that_resumes_lasts_longer() -> None:
    steps: list[StepLog] = []
    result = run(replace(BYTE, overlap=False), on_step=steps.append)
    assert steps[20].scheduled == {"b": 1} and steps[21].start_s == 20.0 + 1.0 + 2.5
    assert (result.records[1].end_s, result.load_s) == (25.5, 2.5)


def test_nothing_is_loaded_before_it_was_written() -> None:
    """At 6 B/s: written from 17 to 21.5 s, so loaded from 21.5 to 26 s."""
    slow = replace(BYTE, bytes_per_s=6.0)
    result = run(slow)
    assert (result.load_s, result.records[1].end_s) == (6.0, 29.0)


@pytest.mark.parametrize(("bytes_per_s", "loaded"), [(12.0, 0), (1000.0, 24)])
def test_the_cheaper_way_is_taken(bytes_per_s: float, loaded: int) -> None:
    """24 tokens cost 2.4 s to compute; to load, 2.5 s or 0.524 s."""
    result = run(replace(BYTE, bytes_per_s=bytes_per_s, rule="cheaper"), DEAR)
    assert (result.loaded_tokens, result.recomputed_tokens) == (loaded, 24 - loaded)


def test_only_what_the_gpu_no_longer_holds_is_loaded() -> None:
    """ "a" took one of b's three full blocks: two are found (16 tokens), 8 tokens are loaded."""
    result = simulate(PAIR, replace(TIGHT, enable_prefix_caching=True, offload=BYTE), SECOND)
    b = result.records[1]
    assert (b.cache_hit_tokens, b.loaded_tokens, b.recomputed_tokens) == (16, 8, 0)


def test_a_lost_worker_takes_host_memory_along_but_not_a_disk() -> None:
    loss = FaultPlan((WorkerLoss(at_s=19.5, restart_s=1.0),))  # strikes at 20 s
    assert run(BYTE, faults=loss).loaded_tokens == 0
    assert run(replace(BYTE, is_durable=True), faults=loss).loaded_tokens == 24
    early = FaultPlan((WorkerLoss(at_s=18.5, restart_s=0.0),))  # 0.5 s before it is written
    assert run(replace(BYTE, is_durable=True), faults=early).loaded_tokens == 0


def test_the_jump_engine_hands_a_tier_to_the_step_engine() -> None:
    reason = unsupported(PAIR, replace(TIGHT, offload=BYTE), SECOND)
    assert reason is not None and "offload" in reason


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bytes_per_s": 0.0}, "bytes_per_s is 0.0"),
        ({"bytes_per_s": math.nan}, "bytes_per_s is nan"),
        ({"latency_s": -1.0}, "latency_s is -1.0"),
        ({"latency_s": math.inf}, "latency_s is inf"),
        ({"capacity_bytes": -1.0}, "capacity_bytes is -1.0"),
        ({"capacity_blocks": -1}, "capacity_blocks is -1"),
        ({"capacity_blocks": 1, "capacity_bytes": 1.0}, "give one of them"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token is 0"),
        ({"rule": "cheap"}, "did you mean 'cheaper'"),
    ],
)
def test_a_bad_tier_is_one_clear_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        OffloadSettings(**{"bytes_per_s": 1e9, **settings})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"bytes_per_sec": 1.0}, "did you mean 'bytes_per_s'"),
        ({"bytes_per_s": "fast"}, "'fast'; it must be a float"),
        ({"bytes_per_s": 1e9, "overlap": 1}, "overlap is 1; it must be a bool"),
        ({"bytes_per_s": True}, "bytes_per_s is True"),
        ({"latency_s": 1.0}, "bytes_per_s is missing"),
        ([], "write a table"),
    ],
)
def test_a_bad_table_is_one_clear_error(table: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        offload_from_table(table, "matrix m.toml, offload")
    assert message in str(caught.value)


def test_a_table_names_the_settings() -> None:
    table = {"bytes_per_s": 25_000_000_000, "capacity_blocks": 100, "rule": "cheaper"}
    assert offload_from_table(table, "t") == OffloadSettings(
        bytes_per_s=25e9, capacity_blocks=100, rule="cheaper"
    )


def test_sglang_mode_has_no_tier() -> None:
    with pytest.raises(InvalidInput, match="which SGLang's scheduler does not have"):
        replace(TIGHT, enable_prefix_caching=True, sglang=SglangSettings(), offload=BYTE)


def test_capacity_in_bytes_is_whole_blocks() -> None:
    tier = OffloadSettings(bytes_per_s=1e9, capacity_bytes=2.0**30)
    assert tier.blocks(16) == 512  # 2 MiB a block of 16 tokens of 128 KiB


class TierMachine(RuleBasedStateMachine):
    """A tier of 10 blocks of 4 tokens beside a model: who lies there, least recently used first,
    with how many tokens, and until when each is being loaded."""

    CAPACITY = 10

    def __init__(self) -> None:
        super().__init__()
        config = EngineConfig(num_blocks=100, block_size=4)
        link = OffloadSettings(bytes_per_s=4.0, kv_bytes_per_token=1, capacity_blocks=self.CAPACITY)
        self.tier = Tier(link, config, 1.0, checks=True)
        jobs = workload([40] * 5, [8] * 5)
        self.requests = live_requests(jobs, [True] * 5, [8] * 5, config)
        self.now_s = 0.0
        self.held: dict[int, tuple[int, float]] = {}
        self.written_s: dict[int, float] = {}
        self.write_ends_s = self.load_ends_s = 0.0

    @staticmethod
    def blocks(tokens: int) -> int:
        return -(-tokens // 4)

    def used(self) -> int:
        return sum(self.blocks(tokens) for tokens, _ in self.held.values())

    @rule(seconds=st.sampled_from([0.5, 1.0, 8.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(at=st.integers(0, 4), tokens=st.integers(1, 47))
    def preempt(self, at: int, tokens: int) -> None:
        request = self.requests[at]
        request.computed_tokens = tokens
        before, (kept, busy_s) = dict(self.held), self.held.get(at, (0, 0.0))
        self.tier.store(request, self.now_s)
        if tokens <= kept:
            return
        wanted = self.blocks(tokens) - self.blocks(kept)
        for other in list(self.held):
            if self.used() + wanted <= self.CAPACITY:
                break
            if other != at and self.held[other][1] <= self.now_s:
                del self.held[other]
        if self.used() + wanted > self.CAPACITY:
            self.held = before
            return
        self.held.pop(at, None)
        self.held[at] = (tokens, busy_s)
        self.write_ends_s = max(self.now_s, self.write_ends_s) + (tokens - kept) / 4
        self.written_s[at] = self.write_ends_s

    @rule(at=st.integers(0, 4), found=st.sampled_from([0, 4, 8]))
    def resume(self, at: int, found: int) -> None:
        request = self.requests[at]
        request.known_tokens = 40
        load = self.tier.offer(request, found, self.now_s)
        expected = min(self.held.get(at, (0, 0.0))[0], 39) - found
        assert load.tokens == max(0, expected)
        if not load.tokens:
            return
        start_s = max(self.now_s, self.written_s[at], self.load_ends_s)
        assert load.ends_s == start_s + load.tokens / 4
        self.tier.load(request, load, self.now_s)
        self.load_ends_s = load.ends_s
        self.held[at] = (self.held.pop(at)[0], load.ends_s)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        at = data.draw(st.sampled_from(sorted(self.held)))
        self.tier.drop(self.requests[at])
        self.tier.drop(self.requests[at])
        del self.held[at]

    @rule()
    def lose(self) -> None:
        self.tier.lose(self.now_s)
        self.held.clear()
        self.load_ends_s = self.now_s
        self.write_ends_s = min(self.write_ends_s, self.now_s)

    @invariant()
    def blocks_are_conserved(self) -> None:
        assert self.tier.used_blocks == self.used() <= self.CAPACITY


TestTier = TierMachine.TestCase
TestTier.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
)


def test_a_request_is_not_in_the_tier_before_it_was_preempted() -> None:
    config = EngineConfig(num_blocks=100)
    tier = Tier(OffloadSettings(bytes_per_s=1.0), config, 1.0, checks=True)
    request: LiveRequest = live_requests(PAIR, [True] * 2, [20, 20], config)[0]
    assert tier.offer(request, 0, 3.0).tokens == 0
