"""The block pool against a model of plain lists, in any order of moves (hypothesis state machine).

The model keeps the free queue as a list and says in one line each what a move does to it. The pool
is compared through its public methods only: after each move what can be found and what is free,
and at the end the order in which the free blocks are taken.
"""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contracts.errors import LawViolation
from serving_sim.blocks import BlockPool, Content

REQUESTS = range(3)
CONTENTS: list[Content] = [(owner, position) for owner in (-1, 0) for position in range(2)]

some_request = st.sampled_from(REQUESTS)
some_content = st.sampled_from(CONTENTS)
pick = st.integers(0, 1000)


class BlockMachine(RuleBasedStateMachine):
    """``free``: blocks in the order in which they are taken; ``owned``: those of each request, in
    its own order; ``published``: (block, content), first published first."""

    is_started = False

    @initialize(num_blocks=st.integers(1, 9), blank_first=st.booleans())
    def start(self, num_blocks: int, blank_first: bool) -> None:
        self.pool = BlockPool(num_blocks, blank_first=blank_first)
        self.num_blocks, self.blank_first = num_blocks, blank_first
        self.free = list(range(1, num_blocks + 1))
        self.owned: dict[int, list[int]] = {request: [] for request in REQUESTS}
        self.published: list[tuple[int, Content]] = []
        self.is_started = True

    def holds(self, block: int) -> bool:
        return any(block == other for other, _ in self.published)

    def users(self, block: int) -> list[int]:
        return [request for request in REQUESTS if block in self.owned[request]]

    def forget(self, blocks: list[int]) -> None:
        self.published = [pair for pair in self.published if pair[0] not in blocks]

    def holder(self, content: Content) -> int | None:
        return next((block for block, held in self.published if held == content), None)

    @rule(request=some_request, wanted=st.integers(0, 4))
    def take(self, request: int, wanted: int) -> None:
        count = min(wanted, len(self.free))
        taken, self.free = self.free[:count], self.free[count:]
        assert self.pool.take(request, count) == taken
        self.owned[request] += taken
        self.forget(taken)

    @rule(request=some_request, at=pick, content=some_content)
    def publish(self, request: int, at: int, content: Content) -> None:
        blank = [block for block in self.owned[request] if not self.holds(block)]
        if blank:
            block = blank[at % len(blank)]
            self.pool.publish(block, content)
            self.published.append((block, content))

    @rule(at=pick)
    def unpublish(self, at: int) -> None:
        """Of a free block, of one with a single user (a withdrawn step's), or of a blank one."""
        block = 1 + at % self.num_blocks
        if len(self.users(block)) <= 1:
            self.pool.unpublish(block)
            self.forget([block])

    @rule(request=some_request, contents=st.lists(some_content, max_size=4, unique=True))
    def share(self, request: int, contents: list[Content]) -> None:
        expected: list[int] = []
        for content in contents:
            block = self.holder(content)
            if block is None:
                break
            expected.append(block)
        found = self.pool.find(contents)
        assert found == expected
        assert self.pool.count_free(found) == sum(block in self.free for block in found)
        if not set(found) & set(self.owned[request]):
            self.pool.share(request, found)
            self.free = [block for block in self.free if block not in found]
            self.owned[request] += found

    @rule(request=some_request)
    def release(self, request: int) -> None:
        blocks, self.owned[request] = self.owned[request], []
        self.pool.release(request, blocks)
        freed = [block for block in reversed(blocks) if not self.users(block)]
        soft = [block for block in freed if self.holds(block) or not self.blank_first]
        self.free = [block for block in freed if block not in soft] + self.free + soft

    @rule(count=st.integers(0, 4))
    def forget_free(self, count: int) -> None:
        self.pool.forget_free(count)
        self.forget(self.free[:count])

    @precondition(lambda self: any(self.owned.values()))
    @rule(request=some_request, at=pick)
    def return_what_another_holds(self, request: int, at: int) -> None:
        """A copy is asked: what a violation leaves behind is nobody's business."""
        others = [
            b for blocks in self.owned.values() for b in blocks if request not in self.users(b)
        ]
        if others:
            with pytest.raises(LawViolation, match="a block is returned once by each user"):
                copy.deepcopy(self.pool).release(request, [others[at % len(others)]])

    @rule(request=some_request)
    def return_twice(self, request: int) -> None:
        if self.owned[request]:
            twice = [*self.owned[request], self.owned[request][0]]
            with pytest.raises(LawViolation, match="a block is returned once by each user"):
                copy.deepcopy(self.pool).release(request, twice)

    @invariant()
    def free_and_used_add_up(self) -> None:
        blocks = range(1, self.num_blocks + 1)
        assert self.pool.num_free == len(self.free)
        assert [b for b in blocks if self.pool.count_free([b])] == sorted(self.free)
        assert all(bool(self.users(block)) != (block in self.free) for block in blocks)
        assert all(self.holds(block) for block in blocks if len(self.users(block)) > 1)

    @invariant()
    def what_was_published_is_found_until_it_is_taken(self) -> None:
        for content in CONTENTS:
            block = self.holder(content)
            assert self.pool.find([content]) == ([] if block is None else [block])

    def teardown(self) -> None:
        """The order of the free queue shows when all of it is taken."""
        if self.is_started:
            for request in REQUESTS:
                self.release(request)
            assert self.pool.take(0, self.num_blocks) == self.free
            assert not any(self.pool.find([content]) for content in CONTENTS)


BlockMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestBlockPool = BlockMachine.TestCase
