"""This project's victim rule as SGLang's retraction order, through SGLang's own plug-in hooks.

SGLang asks ``_get_decode_retraction_order`` whom to keep, most wanted first, and retracts from its
end until the next decode step fits. The hook puts the policy's victims there, chosen one after the
other as in the simulator's SGLang mode; whoever comes before them stands in SGLang's own order.
integrations/sglang_entry.py is what SGLang finds.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from contracts.errors import InvalidInput
from integrations.chooser import Chooser
from integrations.settings import PREFIX, DeploySettings, read_settings
from integrations.versions import check_sglang_version
from serving_sim.policies import get_policy

log = logging.getLogger("sglang.preemptbench")  # SGLang shows what is logged below "sglang"

BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
OWN_FALLBACK = "sglang-retract"  # SGLang's rule: who goes when the signal cannot answer
CHOSEN_AHEAD = 16  # victims chosen for one retraction; SGLang rarely takes more than a few
MAX_TRACKED = 8192  # requests remembered; no hook tells of their end


@dataclass(frozen=True, slots=True)
class Server:
    """What must be known of the running server: ranks that decide alike, and what is urgent."""

    tp_size: int
    low_priority_first: bool


def read_server() -> Server:
    """Return it, once SGLang has published its settings."""
    from sglang.srt.runtime_context import (
        get_schedule,
        get_server_args,
    )

    low_first = bool(get_schedule().schedule_low_priority_values_first)
    return Server(int(get_server_args().tp_size), low_first)


class SglangRequest:
    """SGLang's Req under the names that a victim rule reads (vLLM's); a live view, not a copy."""

    __slots__ = ("_req", "_sign")

    def __init__(self, req: Any, sign: int) -> None:
        self._req, self._sign = req, sign

    @property
    def request_id(self) -> str:
        return str(self._req.rid)

    @property
    def arrival_time(self) -> float:
        return float(self._req.time_stats.scheduler_recv_time)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._req.origin_input_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self._req.output_ids)

    @property
    def num_computed_tokens(self) -> int:
        return int(self._req.kv.kv_committed_len)

    @property
    def max_tokens(self) -> int:
        return int(self._req.sampling_params.max_new_tokens)

    @property
    def num_preemptions(self) -> int:
        return int(self._req.retraction_count)

    @property
    def priority(self) -> int:
        """Smallest first, as in vLLM; a request without one goes last."""
        given = self._req.priority
        return 2**53 if given is None else self._sign * int(given)

    @property
    def output_token_ids(self) -> Sequence[int]:
        ids: Sequence[int] = self._req.output_ids
        return ids


class Retraction:
    """The three hooks and what they remember. ``server`` is asked when it is first needed."""

    def __init__(
        self, settings: DeploySettings, server: Callable[[], Server] = read_server
    ) -> None:
        if get_policy(settings.policy).reads_deadline:
            raise InvalidInput(
                f"policy {settings.policy!r} reads deadlines, which SGLang's requests do not carry "
                "here: choose one that reads none"
            )
        self.chooser = Chooser(settings, "", time.perf_counter)
        self._read_server = server
        self._server: Server | None = None
        self._page_tokens = 1
        self._unlike_lifo: list[bool] = []
        self._said: set[str] = set()

    # --- hooks

    def order(self, stock: Callable[..., list[int]], reqs: Sequence[Any]) -> list[int]:
        """Return positions in ``reqs``, whom to keep first; SGLang retracts from the end."""
        kept = stock(reqs)
        try:
            victims = self._victims(reqs)
        except Exception as error:  # a plug-in's fault must not take the engine down
            self.chooser.counters.fallback_error += 1
            self._say_once(f"the retraction order is SGLang's own: {type(error).__name__}: {error}")
            victims = []
        gone = set(victims)
        return [position for position in kept if position not in gone] + victims[::-1]

    def retract(self, original: Callable[[Any], Any], batch: Any) -> Any:
        """Let SGLang retract; count whom it took."""
        self._page_tokens = batch.token_to_kv_pool_allocator.page_size
        counters = self.chooser.counters
        decisions, unlike, self._unlike_lifo = counters.decisions, counters.unlike_lifo, []
        result = original(batch)
        count = len(result[0])
        counters.preemptions += count
        if self._unlike_lifo:  # those chosen ahead and not taken were no decisions
            counters.decisions = decisions + count
            counters.unlike_lifo = unlike + sum(self._unlike_lifo[:count])
        return result

    def before_check(self, batch: Any, selected_indices: Any = None) -> None:
        """Before each decode step: ask the predictor ahead, a budget's worth."""
        self.chooser.counters.steps += selected_indices is None
        if selected_indices is None and self._may_choose():
            allocator = batch.token_to_kv_pool_allocator
            num_free = allocator.available_size() // allocator.page_size
            self.chooser.prepare(self._requests(batch.reqs), num_free)
        self.chooser.report_if_due()

    # --- choosing

    def _victims(self, reqs: Sequence[Any]) -> list[int]:
        """Return positions in ``reqs``, the first victim first; never all of them."""
        if not self._may_choose():
            return []
        running = self._requests(reqs)
        allocated = {str(req.rid): int(req.kv.kv_allocated_len) for req in reqs}
        left, victims = list(range(len(reqs))), []
        for _ in range(min(CHOSEN_AHEAD, len(reqs) - 1)):
            at = self.chooser.choose(running, lambda name: -(-allocated[name] // self._page_tokens))
            self._unlike_lifo.append(at != len(left) - 1)
            victims.append(left.pop(at))
            del running[at]
        self._forget_ended(allocated)
        return victims

    def _may_choose(self) -> bool:
        """Say whether the policy may decide here. Ranks of tensor parallelism must retract alike,
        and a predictor's answers depend on how much time each of them had."""
        if self._server is None:
            self._server = self._read_server()
        if self._server.tp_size > 1 and self.chooser.policy.reads_signal:
            self._say_once(
                f"tensor parallelism over {self._server.tp_size} ranks: a policy that reads a "
                "signal might choose otherwise in each; the retraction order is SGLang's own"
            )
            return False
        return True

    def _requests(self, reqs: Sequence[Any]) -> list[SglangRequest]:
        sign = 1 if self._server is None or self._server.low_priority_first else -1
        return [SglangRequest(req, sign) for req in reqs]

    def _forget_ended(self, running: dict[str, int]) -> None:
        """Keep what is remembered bounded."""
        tracked = self.chooser.tracked
        if len(tracked) > MAX_TRACKED:
            for name in [name for name in tracked if name not in running]:
                self.chooser.ended(name)

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning("%s; not said again", message)


def hook() -> None:
    """Hook the retraction order. What cannot work is raised: SGLang logs it and serves with its own
    order."""
    import sglang
    from sglang.srt.plugins.hook_registry import (
        HookRegistry,
        HookType,
    )

    check_sglang_version(sglang.__version__)
    environ = {PREFIX + "FALLBACK": OWN_FALLBACK} | dict(os.environ)
    rule = Retraction(read_settings(None, environ))
    HookRegistry.register(f"{BATCH}._get_decode_retraction_order", rule.order, HookType.AROUND)
    HookRegistry.register(f"{BATCH}.retract_decode", rule.retract, HookType.AROUND)
    HookRegistry.register(f"{BATCH}.check_decode_mem", rule.before_check, HookType.BEFORE)
