"""The block pool: order of reuse, soft KV, sharing, and the invariants that checks hold it to."""

from __future__ import annotations

import pytest

from contracts.errors import LawViolation
from serving_sim.blocks import BlockPool


def fill(pool: BlockPool, request: int, blocks: list[int], first: int = 0) -> None:
    """Publish ``blocks`` as the positions of ``request`` from ``first`` on."""
    for position, block in enumerate(blocks, start=first):
        pool.publish(block, (request, position))


def find(pool: BlockPool, request: int, limit: int) -> list[int]:
    return pool.find((request, position) for position in range(limit))


def released(pool: BlockPool, request: int, count: int) -> list[int]:
    """Take, fill and release ``count`` blocks."""
    blocks = pool.take(request, count)
    fill(pool, request, blocks)
    pool.release(request, blocks)
    return blocks


def test_blocks_are_handed_out_in_order() -> None:
    pool = BlockPool(4)
    assert pool.take(0, 3) == [1, 2, 3]
    assert pool.num_free == 1


def test_blank_blocks_are_reused_before_soft_ones() -> None:
    pool = BlockPool(4)
    blocks = pool.take(0, 3)
    fill(pool, 0, blocks[:2])  # the third block is partly filled
    pool.release(0, blocks)
    assert pool.take(1, 2) == [3, 4]
    assert find(pool, 0, 2) == [1, 2]


def test_blank_blocks_are_reused_last_first() -> None:
    pool = BlockPool(4)
    pool.release(0, pool.take(0, 3))
    assert pool.take(1, 4) == [3, 2, 1, 4]


def test_an_older_queue_puts_blank_blocks_at_the_tail() -> None:
    pool = BlockPool(4, blank_first=False)
    blocks = pool.take(0, 3)
    fill(pool, 0, blocks[:2])
    pool.release(0, blocks)
    assert pool.take(1, 4) == [4, 3, 2, 1]


def test_the_tail_of_a_request_is_overwritten_first() -> None:
    pool = BlockPool(4)
    released(pool, 0, 4)
    assert pool.take(1, 1) == [4]
    assert find(pool, 0, 4) == [1, 2, 3]


def test_least_recently_freed_soft_blocks_go_first() -> None:
    pool = BlockPool(4)
    old, young = pool.take(0, 2), pool.take(1, 2)
    fill(pool, 0, old)
    fill(pool, 1, young)
    pool.release(0, old)
    pool.release(1, young)
    assert pool.take(2, 2) == [2, 1]
    assert find(pool, 0, 2) == []
    assert find(pool, 1, 2) == [3, 4]


def test_found_blocks_can_be_used_again_and_stay_findable() -> None:
    pool = BlockPool(4)
    released(pool, 0, 3)
    found = find(pool, 0, 2)
    assert found == [1, 2]
    pool.share(0, found)
    assert pool.num_free == 2
    pool.release(0, found)
    assert find(pool, 0, 3) == [1, 2, 3]


def test_a_second_copy_of_a_block_waits_behind_the_first() -> None:
    pool = BlockPool(4)
    released(pool, 0, 2)
    pool.share(0, find(pool, 0, 1))
    copy = pool.take(0, 1)
    fill(pool, 0, copy, first=1)  # position 1 again, in block 3
    pool.release(0, [1, *copy])
    assert find(pool, 0, 2) == [1, 2]
    assert pool.take(1, 2) == [4, 2]
    assert find(pool, 0, 2) == [1, 3]


def test_a_shared_block_is_free_when_its_last_user_returns_it() -> None:
    pool = BlockPool(4)
    blocks = pool.take(0, 2)
    fill(pool, -1, blocks)
    found = find(pool, -1, 2)
    assert pool.count_free(found) == 0
    pool.share(1, found)
    assert pool.num_free == 2
    pool.release(0, blocks)
    assert pool.num_free == 2
    pool.release(1, blocks)
    assert pool.num_free == 4


def test_an_unpublished_block_is_not_found() -> None:
    pool = BlockPool(3)
    blocks = pool.take(0, 2)
    fill(pool, 0, blocks)
    pool.unpublish(2)
    assert find(pool, 0, 2) == [1]
    pool.release(0, blocks)
    assert pool.take(1, 3) == [2, 3, 1]


def test_a_block_is_returned_by_its_user() -> None:
    pool = BlockPool(3)
    blocks = pool.take(0, 2)
    with pytest.raises(LawViolation, match=r"request 1 returns KV block 2.*used by \[0\]"):
        pool.release(1, blocks)


def test_a_block_is_not_freed_twice() -> None:
    pool = BlockPool(3)
    blocks = pool.take(0, 2)
    pool.release(0, blocks)
    with pytest.raises(LawViolation, match="used by nobody"):
        pool.release(0, blocks)


def test_only_a_published_block_has_several_users() -> None:
    pool = BlockPool(3)
    blocks = pool.take(0, 1)
    pool.share(1, blocks)
    with pytest.raises(LawViolation, match="only a published block has several users"):
        pool.release(0, blocks)


def test_a_block_is_not_free_and_used() -> None:
    pool = BlockPool(3)
    pool.take(0, 1)
    pool._free[1] = None
    pool._free.move_to_end(1, last=False)
    with pytest.raises(LawViolation, match=r"on the free list and used by \[0\]"):
        pool.take(1, 1)


def test_a_free_list_that_lost_a_block_is_noticed() -> None:
    pool = BlockPool(3)
    pool._free.popitem()
    with pytest.raises(LawViolation, match="2 KV blocks should be free; 1 are on the free list"):
        pool.take(0, 1)


def test_free_blocks_are_forgotten_in_the_order_in_which_they_are_taken() -> None:
    pool = BlockPool(4)
    blocks = pool.take(0, 3)
    for position, block in enumerate(blocks):
        pool.publish(block, (0, position))
    pool.release(0, blocks)
    contents = [(0, position) for position in range(3)]
    pool.forget_free(1)  # the fourth block holds nothing
    assert pool.find(contents) == blocks
    pool.forget_free(2)  # the last block of a request is freed first
    assert pool.find(contents) == blocks[:2]
    pool.forget_free(9)
    assert pool.find(contents) == []
    assert pool.num_free == 4


def test_a_pool_that_grows_makes_new_blocks() -> None:
    pool = BlockPool(2)
    pool.resize(4)
    pool.resize(3)
    pool.resize(6)
    assert len(set(pool.take(0, 6))) == 6
    assert (pool.num_blocks, pool.num_free) == (6, 0)


def test_what_a_removed_block_held_is_not_found() -> None:
    """Blank blocks are removed first, then published ones in the order they would be taken."""
    pool = BlockPool(4)
    blocks = pool.take(0, 3)
    for position, block in enumerate(blocks):
        pool.publish(block, (0, position))
    pool.release(0, blocks)
    contents = [(0, position) for position in range(3)]
    pool.resize(3)
    assert pool.find(contents) == blocks
    pool.resize(1)
    assert pool.find(contents) == blocks[:1]
