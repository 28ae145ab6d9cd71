"""The KV block pool: who uses a block, what it holds, and in which order free ones are taken.

The order is vLLM's (vllm/v1/core/block_pool.py). A full block of known tokens is *published* under
its content when the step that fills it is planned; from then on it can be found: by its own
request after a preemption ("soft" KV), and by others that start with the same tokens. A request
returns its blocks last first. Free blocks without published content go to the head of the free
queue and are taken first; published ones go to its tail, and are lost when they are taken again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from contracts.errors import LawViolation

Content = tuple[int, int]
"""(owner, position): the owner is a request's index, or below 0 a group with a common prefix."""


class BlockPool:
    """``num_blocks`` usable blocks, numbered from 1. ``num_free`` counts published ones too.

    With ``checks`` every move is verified: only published blocks have several users, and
    free + used = total. ``blank_first=False`` frees all blocks to the tail (vLLM before 0.27).
    """

    def __init__(self, num_blocks: int, *, blank_first: bool = True, checks: bool = True) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._blank_first, self._checks = blank_first, checks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._num_made = num_blocks
        self._users: dict[int, list[int]] = {}
        self._content: dict[int, Content] = {}
        self._holders: dict[Content, list[int]] = {}  # first published first

    def take(self, request: int, count: int) -> list[int]:
        """Give ``count`` blocks to ``request``; the caller made sure that they are free."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.unpublish(block)
            if self._checks and block in self._users:
                raise LawViolation(
                    f"KV block {block} is on the free list and used by {self._users[block]}"
                )
            self._users[block] = [request]
        self._count(-count)
        return taken

    def find(self, contents: Iterable[Content]) -> list[int]:
        """Return the blocks that hold ``contents``, up to the first that is nowhere."""
        found: list[int] = []
        for content in contents:
            holders = self._holders.get(content)
            if not holders:
                break
            found.append(holders[0])
        return found

    def count_free(self, blocks: list[int]) -> int:
        """Return how many of ``blocks`` are free, so that sharing them takes them from the rest."""
        return sum(block not in self._users for block in blocks)

    def share(self, request: int, found: list[int]) -> None:
        """Let ``request`` use the blocks that :meth:`find` returned, too."""
        num_free = self.count_free(found)
        for block in found:
            if block not in self._users:
                del self._free[block]
            self._users.setdefault(block, []).append(request)
        self._count(-num_free)

    def publish(self, block: int, content: Content) -> None:
        """Let ``block`` be found under ``content`` until it is taken again."""
        self._content[block] = content
        self._holders.setdefault(content, []).append(block)

    def unpublish(self, block: int) -> None:
        """Forget what ``block`` holds, if it was published."""
        content = self._content.pop(block, None)
        if content is None:
            return
        holders = self._holders[content]
        holders.remove(block)
        if not holders:
            del self._holders[content]

    def forget_free(self, count: int) -> None:
        """Make the ``count`` free blocks that are taken next hold nothing; fewer if fewer are."""
        for block in islice(self._free, count):
            self.unpublish(block)

    def resize(self, num_blocks: int) -> None:
        """Add blank blocks, or remove the free ones that would be taken next; the caller made sure
        that enough are free."""
        change = num_blocks - self.num_blocks
        self.num_blocks = num_blocks
        for block in range(self._num_made + 1, self._num_made + 1 + change):
            self._free[block] = None
            if self._blank_first:
                self._free.move_to_end(block, last=False)
        self._num_made += max(0, change)
        for _ in range(-change):
            self.unpublish(self._free.popitem(last=False)[0])
        self._count(change)

    def release(self, request: int, blocks: list[int]) -> None:
        """Take back the blocks of ``request``; those that nobody else uses become free."""
        freed = [block for block in reversed(blocks) if self._drop_user(block, request)]
        for block in freed:
            self._free[block] = None
        if self._blank_first:
            for block in reversed(freed):
                if block not in self._content:
                    self._free.move_to_end(block, last=False)
        self._count(len(freed))

    def _drop_user(self, block: int, request: int) -> bool:
        """Say whether ``request`` was the last user."""
        users = self._users.get(block, [])
        if self._checks:
            if request not in users:
                raise LawViolation(
                    f"request {request} returns KV block {block}, which is used by "
                    f"{users or 'nobody'}: a block is returned once by each user"
                )
            if len(users) > 1 and block not in self._content:
                raise LawViolation(
                    f"KV block {block} is used by {users}: only a published block has several users"
                )
        users.remove(request)
        if not users:
            del self._users[block]
        return not users

    def _count(self, change: int) -> None:
        self.num_free += change
        if self._checks and (
            self.num_free != len(self._free) or self.num_free + len(self._users) != self.num_blocks
        ):
            raise LawViolation(
                f"{self.num_free} KV blocks should be free; {len(self._free)} are on the free list "
                f"and {len(self._users)} used, of {self.num_blocks} in all"
            )
