"""EngineConfig: the settings of one engine, checked when built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from contracts.errors import InvalidInput, unknown_name

Scheduling = Literal["fcfs", "priority"]
VllmVersion = Literal["0.15", "0.20", "0.27", "0.33"]
LoadRule = Literal["always_load", "always_recompute", "cheaper"]


def follows(version: VllmVersion, other: VllmVersion) -> bool:
    """Say whether ``version`` is ``other`` or a later series."""
    known = get_args(VllmVersion)
    return bool(known.index(version) >= known.index(other))


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    """What SGLang's scheduler has and vLLM's lacks; names and defaults are SGLang's.

    The *new-token ratio* is the share of its remaining ``max_new_tokens`` that a running request is
    expected to write. It starts at ``init_new_token_ratio`` x ``schedule_conservativeness`` (1 at
    most) and falls in ``new_token_ratio_decay_steps`` decode steps to
    ``min_new_token_ratio_factor`` of that. Of ``max_new_tokens`` at most
    ``clip_max_new_tokens_estimation`` tokens are reserved. ``retract_decode_steps`` is the slack
    after a retraction, in tokens a request. ``max_prefill_tokens`` bounds a prefill batch;
    ``max_queued_requests`` bounds the waiting queue, None does not.
    """

    schedule_conservativeness: float = 1.0
    init_new_token_ratio: float = 0.7
    min_new_token_ratio_factor: float = 0.14
    new_token_ratio_decay_steps: int = 600
    clip_max_new_tokens_estimation: int = 4096
    retract_decode_steps: int = 20
    max_prefill_tokens: int = 16384
    max_queued_requests: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST_SGLANG.items():
            _check_whole_number("sglang", name, getattr(self, name), least)
        if not 0.0 < self.schedule_conservativeness < math.inf:
            raise InvalidInput(
                f"sglang schedule_conservativeness is {self.schedule_conservativeness}: give a "
                "finite number above 0"
            )
        for name in ("init_new_token_ratio", "min_new_token_ratio_factor"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise InvalidInput(
                    f"sglang {name} is {getattr(self, name)}: it must be a share in (0, 1]"
                )

    @property
    def initial_ratio(self) -> float:
        """The new-token ratio of an idle engine."""
        return min(self.init_new_token_ratio * self.schedule_conservativeness, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """A slower tier that the KV of preempted requests moves to (docs/faults.md).

    A transfer of n tokens takes ``latency_s`` + n x ``kv_bytes_per_token`` / ``bytes_per_s``; the
    default is 16-bit Llama-3.1-8B (32 layers x 8 KV heads x 128 x key and value x 2 bytes). The
    capacity is given in bytes or in blocks; with neither it is unlimited. ``rule`` says whether a
    resumed request loads what it can: ``cheaper`` does where that ends sooner than the profile says
    that computing takes. With ``overlap`` others go on while a request waits for its load, as with
    vLLM's connector; without, the step that resumes it lasts so much longer. ``is_durable`` KV
    outlives a lost worker (disk, or a process of its own).
    """

    bytes_per_s: float
    latency_s: float = 0.0
    capacity_bytes: float | None = None
    capacity_blocks: int | None = None
    kv_bytes_per_token: int = 131_072
    rule: LoadRule = "always_load"
    overlap: bool = True
    is_durable: bool = False

    def __post_init__(self) -> None:
        if self.rule not in get_args(LoadRule):
            raise unknown_name("offload rule", str(self.rule), get_args(LoadRule))
        if not self.bytes_per_s > 0.0:
            raise InvalidInput(
                f"offload bytes_per_s is {self.bytes_per_s}: it must be above 0 (inf is allowed)"
            )
        for name in ("latency_s", "capacity_bytes"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise InvalidInput(f"offload {name} is {value}: give a finite number >= 0")
        _check_whole_number("offload", "capacity_blocks", self.capacity_blocks, 0)
        _check_whole_number("offload", "kv_bytes_per_token", self.kv_bytes_per_token, 1)
        if self.capacity_bytes is not None and self.capacity_blocks is not None:
            raise InvalidInput(
                f"offload capacity_bytes is {self.capacity_bytes} and capacity_blocks "
                f"{self.capacity_blocks}: give one of them, or neither for an unlimited tier"
            )

    def transfer_s(self, tokens: int) -> float:
        """Return the seconds that moving the KV of ``tokens`` takes, one way."""
        return self.latency_s + tokens * self.kv_bytes_per_token / self.bytes_per_s

    def blocks(self, block_size: int) -> int | None:
        """Return the capacity in blocks; None is unlimited."""
        if self.capacity_bytes is None:
            return self.capacity_blocks
        return int(self.capacity_bytes // (block_size * self.kv_bytes_per_token))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the vLLM V1 scheduler that this engine follows; names and defaults are vLLM's.

    ``num_blocks`` counts vLLM's null block, so ``num_blocks - 1`` are usable. ``scheduling`` is
    the order of the waiting queue (and, without a policy, of the victims). ``reserve_full_isl``
    admits a request only when its whole known sequence fits; ``watermark`` is the share of blocks
    kept free at admission while something runs. With ``enable_prefix_caching`` a filled block can
    be found again, by its request or by one with the same prefix, until it is overwritten. Under
    ``async_scheduling`` a step is planned before the one before it returned.

    ``trust_withdrawn_blocks`` copies a fault of vLLM 0.33.0 (decision log 0036, step 1349): a
    victim that was already scheduled in the same step leaves blocks which are marked as filled
    although that step never ran for it, and may "find" them when it resumes. Off, such blocks
    hold nothing; only victims other than the youngest can tell the difference.

    ``vllm_version`` is the series whose rules are followed where they differ
    (docs/vllm_versions.md). ``long_prefill_token_threshold_adaptive`` lifts the threshold to an
    equal share of the budget.

    With ``sglang`` SGLang's scheduler plans instead (docs/sglang.md): ``block_size`` is its page
    size, ``max_num_seqs`` its max_running_requests and ``max_num_batched_tokens`` its
    chunked_prefill_size; what only vLLM has must stay at its default.

    ``offload`` is a tier that preempted KV moves to; without one it is computed again.

    ``drain_s`` bounds the wait for the tagged requests after the last of them arrived;
    ``max_idle_steps`` is how many steps may pass without one output token.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    scheduling: Scheduling = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    reserve_full_isl: bool = True
    watermark: float = 0.0
    async_scheduling: bool = False
    trust_withdrawn_blocks: bool = False
    vllm_version: VllmVersion = "0.33"
    sglang: SglangSettings | None = None
    offload: OffloadSettings | None = None
    drain_s: float = math.inf
    max_idle_steps: int = 20_000

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            _check_whole_number("engine", name, getattr(self, name), least)
        for name, known in (("scheduling", Scheduling), ("vllm_version", VllmVersion)):
            if getattr(self, name) not in get_args(known):
                raise unknown_name(name, str(getattr(self, name)), get_args(known))
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidInput(
                f"engine watermark is {self.watermark}: it must be a share of blocks in [0, 1)"
            )
        if not self.drain_s >= 0.0:
            raise InvalidInput(f"engine drain_s is {self.drain_s}: it must be at least 0 s")
        for name, version in SINCE.items():
            value = getattr(self, name)
            if value and not self.follows(version):
                raise InvalidInput(
                    f"engine {name} is {value!r}, which came with vLLM {version}, but vllm_version "
                    f"is {self.vllm_version!r}: set it to {type(value)()!r}"
                )
        self._check_whole_prompts()
        if self.sglang is not None:
            self._check_no_vllm_setting()

    def _check_no_vllm_setting(self) -> None:
        for name, plain in VLLM_ONLY.items():
            if getattr(self, name) != plain:
                raise InvalidInput(
                    f"engine {name} is {getattr(self, name)!r}, which SGLang's scheduler does not "
                    f"have: leave it at {plain!r}, or drop sglang="
                )

    def _check_whole_prompts(self) -> None:
        """Without chunked prefill a known sequence must fit one step, or it waits for ever."""
        if self.enable_chunked_prefill:
            return
        if self.max_model_len is None or self.max_model_len > self.max_num_batched_tokens:
            raise InvalidInput(
                f"enable_chunked_prefill is False with max_model_len {self.max_model_len} and "
                f"max_num_batched_tokens {self.max_num_batched_tokens}: set max_model_len to at "
                "most max_num_batched_tokens"
            )

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can own."""
        return self.num_blocks - 1

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free at admission while something runs."""
        return int(self.watermark * self.num_blocks)

    def follows(self, version: VllmVersion) -> bool:
        """Say whether the scheduler is that of ``version`` or of a later one."""
        return follows(self.vllm_version, version)

    @property
    def lone_chunk_tokens(self) -> int:
        """Tokens that a request may compute in one step while it is alone."""
        threshold = self.long_prefill_token_threshold
        if not threshold or self.follows("0.33"):
            return self.max_num_batched_tokens
        return min(threshold, self.max_num_batched_tokens)

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold ``tokens``."""
        return -(-tokens // self.block_size)

    def fitting_tokens(self, tokens: int) -> int:
        """Return ``tokens`` cut at max_model_len."""
        return tokens if self.max_model_len is None else min(tokens, self.max_model_len)


def _check_whole_number(owner: str, name: str, value: object, least: int) -> None:
    if value is not None and (not isinstance(value, int) or value < least):
        raise InvalidInput(f"{owner} {name} is {value!r}: give a whole number >= {least}")


_LEAST = {
    "num_blocks": 2,
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "long_prefill_token_threshold": 0,
    "max_idle_steps": 1,
}
_LEAST_SGLANG = {
    "new_token_ratio_decay_steps": 1,
    "clip_max_new_tokens_estimation": 1,
    "retract_decode_steps": 0,
    "max_prefill_tokens": 1,
    "max_queued_requests": 1,
}
VLLM_ONLY: dict[str, object] = {
    "scheduling": "fcfs",
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "reserve_full_isl": True,
    "watermark": 0.0,
    "async_scheduling": False,
    "trust_withdrawn_blocks": False,
    "vllm_version": "0.33",
    "offload": None,
}
"""Settings without a counterpart in SGLang, and what they must be there."""
# settings that older series lack
SINCE: dict[str, VllmVersion] = {
    "reserve_full_isl": "0.20",
    "watermark": "0.27",
    "long_prefill_token_threshold_adaptive": "0.33",
}
