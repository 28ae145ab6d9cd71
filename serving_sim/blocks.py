"""The KV block pool: who owns a block, and in which order free blocks are taken again.

The order is vLLM's (vllm/v1/core/block_pool.py). A request returns its blocks last first. Blocks
without content go to the head of the free queue and are taken first; blocks that hold a full,
computed stretch of the request ("soft" KV) go to its tail, least recently freed first, and can be
found again until they are taken. With prefix caching off nothing is soft.
"""

from __future__ import annotations

from collections import OrderedDict

from contracts.errors import LawViolation

_FREE = -1


class BlockPool:
    """``num_blocks`` usable blocks. ``num_free`` counts soft blocks too.

    With ``checks`` every move is verified: a block has one owner at most, and free + used = total.
    """

    def __init__(self, num_blocks: int, *, caching: bool, checks: bool = True) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._caching, self._checks = caching, checks
        self._blank = list(range(num_blocks, 0, -1))  # a stack: its end is the queue's head
        self._soft: OrderedDict[int, tuple[int, int]] = OrderedDict()
        # content (request, position) -> blocks that hold it, first filled first
        self._holders: dict[tuple[int, int], list[int]] = {}
        self._content: dict[int, tuple[int, int]] = {}
        self._owner = [_FREE] * (num_blocks + 1)

    def take(self, request: int, count: int) -> list[int]:
        """Give ``count`` blocks to ``request``; the caller made sure that they are free."""
        taken = [self._pop() for _ in range(count)]
        self._own(request, taken)
        return taken

    def find(self, request: int, limit: int) -> list[int]:
        """Return the free blocks that still hold the first (up to ``limit``) blocks of
        ``request``, cut at the first one that was overwritten. Takes nothing."""
        found: list[int] = []
        holders = self._holders
        while len(found) < limit:
            blocks = holders.get((request, len(found)))
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def reuse(self, request: int, found: list[int]) -> None:
        """Give the blocks that :meth:`find` returned back to ``request``."""
        for block in found:
            del self._soft[block]
        self._own(request, found)

    def release(self, request: int, blocks: list[int], num_full: int) -> None:
        """Take back the blocks of ``request``; the first ``num_full`` are full of computed KV."""
        self._disown(request, blocks)
        if not self._caching:
            self._blank.extend(blocks)
            return
        self._blank.extend(blocks[num_full:])
        for position in range(num_full - 1, -1, -1):
            block, content = blocks[position], (request, position)
            if block not in self._content:
                self._content[block] = content
                self._holders.setdefault(content, []).append(block)
            self._soft[block] = content

    def _pop(self) -> int:
        if self._blank:
            return self._blank.pop()
        block, content = self._soft.popitem(last=False)
        del self._content[block]
        holders = self._holders[content]
        holders.remove(block)
        if not holders:
            del self._holders[content]
        return block

    def _own(self, request: int, blocks: list[int]) -> None:
        self.num_free -= len(blocks)
        if self._checks:
            for block in blocks:
                self._expect_owner(block, _FREE)
                self._owner[block] = request
            self._check_sum()

    def _disown(self, request: int, blocks: list[int]) -> None:
        self.num_free += len(blocks)
        if self._checks:
            for block in blocks:
                self._expect_owner(block, request)
                self._owner[block] = _FREE

    def _expect_owner(self, block: int, owner: int) -> None:
        if self._owner[block] != owner:
            raise LawViolation(
                f"KV block {block} belongs to request {self._owner[block]}, not to {owner} "
                f"({_FREE} means free): a block has one owner"
            )

    def _check_sum(self) -> None:
        listed = len(self._blank) + len(self._soft)
        if listed != self.num_free:
            raise LawViolation(
                f"{listed} blocks are on the free list, but {self.num_blocks} in all less "
                f"{self.num_blocks - self.num_free} owned make {self.num_free}"
            )
