"""What a vLLM scheduler writes into its decision log: its settings first, then each step."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from integrations.live_log import LiveLog
from integrations.settings import DeploySettings

_MAX_IN_FLIGHT = 64  # steps whose number is remembered until their output returns
_NEWER_SETTINGS = {
    "reserve_full_isl": "scheduler_reserve_full_isl",
    "watermark": "watermark",
    "long_prefill_token_threshold_adaptive": "long_prefill_token_threshold_adaptive",
}


class SchedulerLog:
    """The decision log of one ``scheduler``; ``is_async`` says whether it plans a step ahead."""

    def __init__(
        self, scheduler: Any, settings: DeploySettings, version: str, *, is_async: bool
    ) -> None:
        self._scheduler = scheduler
        self._victims: list[str] = []
        self._in_flight: deque[tuple[Any, int]] = deque(maxlen=_MAX_IN_FLIGHT)
        header = {
            "vllm_version": version,
            "victims_by": settings.policy,
            "seed": settings.seed,
            "refresh_tokens": settings.refresh_tokens,
            "upper_level": settings.upper_level,
            "engine": _engine_of(scheduler, is_async),
        }
        self._log = LiveLog(Path(settings.decisions), header, scheduler.now_s())

    def arrived(self, request: Any) -> None:
        """Take note of a request."""
        row = {
            "id": request.request_id,
            "prompt": request.num_prompt_tokens,
            "max_tokens": request.max_tokens,
            "priority": request.priority,
        }
        self._log.arrived(row, request.arrival_time)

    def preempted(self, request: Any) -> None:
        """Take note of a victim of the step being planned."""
        self._victims.append(request.request_id)

    def step(self, planned: Any) -> None:
        """Write a planned step."""
        scheduler = self._scheduler
        running, waiting = scheduler.running, scheduler.waiting
        line = {
            "sched": planned.num_scheduled_tokens,
            "preempted": self._victims,
            "finished_before": sorted(planned.finished_req_ids),
            "running": [request.request_id for request in running],
            "waiting": [request.request_id for request in waiting],
            "n_running": len(running),
            "n_waiting": len(waiting),
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }
        self._in_flight.append((planned, self._log.step(scheduler.now_s(), line)))
        self._victims = []

    def returned(self, planned: Any) -> None:
        """Write that a step's output was taken."""
        while self._in_flight:
            step, number = self._in_flight.popleft()
            if step is planned:
                self._log.returned(number)
                return

    def ended(self, request: Any, reason: str) -> None:
        """Write how a request ended."""
        self._log.ended(request.request_id, request.num_output_tokens, reason)

    def close(self) -> None:
        """Write who has not ended, and close the file."""
        for request in self._scheduler.requests.values():
            self.ended(request, "unfinished")
        self._log.close()


def _engine_of(scheduler: Any, is_async: bool) -> dict[str, Any]:
    """Return the settings that a replay needs, by the names of the public driver."""
    config, cache = scheduler.scheduler_config, scheduler.cache_config
    engine = {
        "num_blocks": scheduler.kv_cache_config.num_blocks,
        "block_size": scheduler.block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": scheduler.max_model_len,
        "policy": scheduler.policy.value,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "enable_chunked_prefill": bool(config.enable_chunked_prefill),
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "async_scheduling": is_async,
    }
    for ours, theirs in _NEWER_SETTINGS.items():
        if hasattr(config, theirs):  # which of them exist depends on vLLM's version
            engine[ours] = getattr(config, theirs)
    return engine
