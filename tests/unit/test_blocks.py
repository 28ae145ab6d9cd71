"""The block pool: order of reuse, soft KV, and the invariants that checks hold it to."""

from __future__ import annotations

import pytest

from contracts.errors import LawViolation
from serving_sim.blocks import BlockPool


def test_blocks_are_handed_out_in_order() -> None:
    pool = BlockPool(4, caching=True)
    assert pool.take(0, 3) == [1, 2, 3]
    assert pool.num_free == 1


def test_blank_blocks_are_reused_before_soft_ones() -> None:
    pool = BlockPool(4, caching=True)
    blocks = pool.take(0, 3)
    pool.release(0, blocks, num_full=2)  # the third block is partly filled
    assert pool.take(1, 2) == [3, 4]
    assert pool.find(0, 2) == [1, 2]


def test_the_tail_of_a_request_is_overwritten_first() -> None:
    pool = BlockPool(4, caching=True)
    pool.release(0, pool.take(0, 4), num_full=4)
    assert pool.take(1, 1) == [4]
    assert pool.find(0, 4) == [1, 2, 3]


def test_least_recently_freed_soft_blocks_go_first() -> None:
    pool = BlockPool(4, caching=True)
    old, young = pool.take(0, 2), pool.take(1, 2)
    pool.release(0, old, num_full=2)
    pool.release(1, young, num_full=2)
    assert pool.take(2, 2) == [2, 1]
    assert pool.find(0, 2) == []
    assert pool.find(1, 2) == [3, 4]


def test_found_blocks_can_be_owned_again_and_stay_findable() -> None:
    pool = BlockPool(4, caching=True)
    pool.release(0, pool.take(0, 3), num_full=3)
    found = pool.find(0, 2)
    assert found == [1, 2]
    pool.reuse(0, found)
    assert pool.num_free == 2
    pool.release(0, found, num_full=2)
    assert pool.find(0, 3) == [1, 2, 3]


def test_a_second_copy_of_a_block_waits_behind_the_first() -> None:
    pool = BlockPool(4, caching=True)
    pool.release(0, pool.take(0, 2), num_full=2)
    pool.reuse(0, pool.find(0, 1))
    pool.release(0, [1, *pool.take(0, 1)], num_full=2)  # position 1 again, in block 3
    assert pool.find(0, 2) == [1, 2]
    assert pool.take(1, 2) == [4, 2]
    assert pool.find(0, 2) == [1, 3]


def test_nothing_is_soft_without_caching() -> None:
    pool = BlockPool(3, caching=False)
    pool.release(0, pool.take(0, 3), num_full=3)
    assert pool.find(0, 3) == []
    assert pool.num_free == 3


def test_a_block_has_one_owner() -> None:
    pool = BlockPool(3, caching=True)
    blocks = pool.take(0, 2)
    with pytest.raises(LawViolation, match="one owner"):
        pool.release(1, blocks, num_full=0)


def test_a_block_is_not_freed_twice() -> None:
    pool = BlockPool(3, caching=True)
    blocks = pool.take(0, 2)
    pool.release(0, blocks, num_full=0)
    with pytest.raises(LawViolation, match="-1 means free"):
        pool.release(0, blocks, num_full=0)


def test_a_free_list_that_lost_a_block_is_noticed() -> None:
    pool = BlockPool(3, caching=True)
    pool._blank.pop()
    with pytest.raises(LawViolation, match="free list"):
        pool.take(0, 1)
