"""What the compiled loop works on: the fields of a request and of the engine, as numpy records.

Names are those of LiveRequest, EngineConfig, Scheduler and Run, where there is one.
"""

from __future__ import annotations

import numpy as np

_INT, _FLOAT = np.int64, np.float64

REQUEST = np.dtype(
    [(name, _INT) for name in (
        # what every step touches, side by side; output_tokens is given, cut at max_model_len
        "output_tokens", "known_tokens", "generated_tokens", "computed_tokens",
        "peak_computed_tokens", "num_blocks", "scheduled_tokens",
        # what else a policy may see, in the next cache line
        "prompt_tokens", "max_tokens", "priority", "admission_seq", "num_preemptions",
    )]
    + [(name, _FLOAT) for name in ("arrival_s", "deadline_s", "draw")]
    + [(name, _INT) for name in (
        # given; rank is the place in PRIORITY order
        "rank", "is_refused", "is_awaited",
        # free blocks that still hold its prefix, and the requests whose soft blocks are taken
        # before and after them
        "soft_blocks", "before", "after",
        "status", "recomputed_tokens", "cache_hit_tokens",
    )]
    + [(name, _FLOAT) for name in (
        "first_scheduled_s", "first_token_s", "evicted_at_s", "preempted_s", "end_s",
    )]
)  # fmt: skip

ENGINE = np.dtype(
    [(name, _INT) for name in (
        # EngineConfig's
        "block_size", "max_num_seqs", "max_num_batched_tokens", "is_priority", "caches",
        "chunks_prefill", "long_prefill_token_threshold", "reserves_full_isl",
        "watermark_blocks", "max_idle_steps",
        "rule", "grid_stride", "draws", "checks", "usable_blocks",
        # state of the run
        "num_running", "num_waiting", "num_awaited", "next_arrival", "num_admissions",
        "num_free", "num_blank", "oldest", "newest",
        "num_steps", "num_timed_steps", "idle_steps", "num_preemptions", "num_fallbacks",
        "computed_tokens", "recomputed_tokens", "is_broken", "work", "has_run_out",
        # state of the step being planned; missing_blocks is -1 when nobody asks for blocks
        "is_planning", "cursor", "budget_tokens", "asked_tokens", "missing_blocks",
        "has_preempted", "victim_at",
        # the largest steps that a surface was asked for
        "most_tokens", "most_chunk", "most_decodes",
    )]
    + [(name, _FLOAT) for name in (
        "clock_s", "horizon_s", "fixed_s", "per_token_s", "per_context_token_s", "per_request_s",
        "prefill_s_per_token", "most_prefix", "most_context",
    )]
)  # fmt: skip

# the columns of RunningViews by kind, in its order: two ids, two times, then all other of each kind
INT_VIEWS = (
    "request_id", "admission_seq",
    "prompt_tokens", "generated_tokens", "computed_tokens", "kv_blocks", "max_tokens",
    "num_preemptions", "priority", "rank_from_youngest", "num_running",
)  # fmt: skip
FLOAT_VIEWS = (
    "arrival_s", "deadline_s",
    "now_s", "recent_tpot_s", "prefill_s_per_token", "remaining", "remaining_upper", "draw",
)  # fmt: skip
