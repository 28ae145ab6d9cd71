"""The offload tier: KV of preempted requests in host memory or on disk, loaded back on resumption.

A victim's KV is written out while the engine computes on; its GPU blocks are free at once (as in
vLLM, whose connector defers that in one case only). Writes queue for one direction of a link,
loads for the other. Nothing can be loaded before it was written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from contracts.errors import InvalidInput, LawViolation, unknown_name
from serving_sim.config import EngineConfig, OffloadSettings
from serving_sim.requests import LiveRequest


def offload_from_table(table: object, where: str) -> OffloadSettings:
    """Return the tier that a table of a configuration describes; ``where`` names it in errors."""
    if not isinstance(table, Mapping):
        raise InvalidInput(f"{where}: got a {type(table).__name__}; write a table")
    kinds = {item.name: item.type for item in fields(OffloadSettings)}
    for key, value in table.items():
        if key not in kinds:
            raise unknown_name(f"setting in {where}", str(key), kinds)
        wanted = {"bool": bool, "LoadRule": str}.get(str(kinds[key]), (int, float))
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise InvalidInput(f"{where}: {key} is {value!r}; it must be a {kinds[key]}")
    if "bytes_per_s" not in table:
        raise InvalidInput(f"{where}: bytes_per_s is missing; give the speed of the link")
    return OffloadSettings(**table)


class Load(NamedTuple):
    """What a load would bring: KV of ``tokens``, complete at ``ends_s``."""

    tokens: int
    ends_s: float


@dataclass(slots=True)
class _Entry:
    """The first ``tokens`` of a request; ``busy_until_s`` is when its last load ends."""

    tokens: int
    written_s: float
    busy_until_s: float


class Tier:
    """What lies in the tier, by request, least recently used first.

    An entry stays until its request ends, so that a second preemption writes only what is new. It
    may be thrown out for another before that, unless it is being loaded.
    """

    def __init__(
        self,
        settings: OffloadSettings,
        config: EngineConfig,
        prefill_s_per_token: float,
        *,
        checks: bool,
    ) -> None:
        self.capacity_blocks = settings.blocks(config.block_size)
        self.used_blocks = 0
        self.offloaded_tokens = self.loaded_tokens = 0
        self.load_s = 0.0
        self._settings, self._blocks_for = settings, config.blocks_for
        self._prefill_s_per_token, self._checks = prefill_s_per_token, checks
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._write_ends_s = self._load_ends_s = 0.0  # of the last transfer each way

    @property
    def overlaps(self) -> bool:
        """Whether others go on while a request waits for its load."""
        return self._settings.overlap

    def store(self, request: LiveRequest, now_s: float) -> None:
        """Keep the KV of a ``request`` that is being preempted, if there is room to be made."""
        tokens, entry = request.computed_tokens, self._entries.get(request.index)
        kept_tokens = entry.tokens if entry is not None else 0
        if self._settings.rule == "always_recompute" or tokens <= kept_tokens:
            return
        missing = self._blocks_for(tokens) - self._blocks_for(kept_tokens)
        if not self._make_room(missing, request.index, now_s):
            return
        start_s = max(now_s, self._write_ends_s)
        self._write_ends_s = start_s + self._settings.transfer_s(tokens - kept_tokens)
        busy_until_s = entry.busy_until_s if entry is not None else now_s
        self._entries[request.index] = _Entry(tokens, self._write_ends_s, busy_until_s)
        self._entries.move_to_end(request.index)
        self.offloaded_tokens += tokens - kept_tokens
        self._use(missing)

    def offer(self, request: LiveRequest, found_tokens: int, now_s: float) -> Load:
        """Return what to load for ``request``, whose first ``found_tokens`` the GPU has; 0 tokens
        where the tier has no more, or where computing them is chosen."""
        entry = self._entries.get(request.index)
        # at least one token is computed again, so that there is something to sample from
        useful = min(entry.tokens, request.known_tokens - 1) if entry is not None else 0
        tokens = useful - found_tokens
        if entry is None or tokens <= 0:
            return Load(0, now_s)
        start_s = max(now_s, entry.written_s, self._load_ends_s)
        ends_s = start_s + self._settings.transfer_s(tokens)
        recompute_s = tokens * self._prefill_s_per_token
        if self._settings.rule == "cheaper" and ends_s - now_s > recompute_s:
            return Load(0, now_s)
        return Load(tokens, ends_s)

    def load(self, request: LiveRequest, load: Load, now_s: float) -> None:
        """Start what :meth:`offer` returned."""
        entry = self._entries[request.index]
        entry.busy_until_s = self._load_ends_s = load.ends_s
        self._entries.move_to_end(request.index)
        self.loaded_tokens += load.tokens
        self.load_s += load.ends_s - now_s
        request.loaded_tokens += load.tokens

    def drop(self, request: LiveRequest) -> None:
        """Forget a request that ended."""
        entry = self._entries.pop(request.index, None)
        if entry is not None:
            self._use(-self._blocks_for(entry.tokens))

    def lose(self, now_s: float) -> None:
        """Lose what dies with a worker: all of it, or in a durable tier what was half written."""
        self._write_ends_s, self._load_ends_s = min(self._write_ends_s, now_s), now_s
        for index, entry in list(self._entries.items()):
            if entry.written_s > now_s or not self._settings.is_durable:
                self._use(-self._blocks_for(self._entries.pop(index).tokens))
            else:
                entry.busy_until_s = now_s

    def _make_room(self, num_blocks: int, index: int, now_s: float) -> bool:
        """Throw out other entries, least recently used first; none if that is not enough."""
        if self.capacity_blocks is None:
            return True
        lacking = self.used_blocks + num_blocks - self.capacity_blocks
        victims = []
        for other, entry in self._entries.items():
            if lacking <= 0:
                break
            if other != index and entry.busy_until_s <= now_s:
                victims.append(other)
                lacking -= self._blocks_for(entry.tokens)
        if lacking > 0:
            return False
        for other in victims:
            self._use(-self._blocks_for(self._entries.pop(other).tokens))
        return True

    def _use(self, num_blocks: int) -> None:
        self.used_blocks += num_blocks
        if not self._checks:
            return
        limit = self.capacity_blocks
        held = sum(self._blocks_for(entry.tokens) for entry in self._entries.values())
        if self.used_blocks != held or (limit is not None and held > limit):
            raise LawViolation(
                f"{self.used_blocks} blocks of the offload tier should be used; its entries hold "
                f"{held}, of {'any number' if limit is None else limit}"
            )
