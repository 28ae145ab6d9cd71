"""Single-stream seconds, compiled: what serving_sim/profile.py sums up step by step."""

from __future__ import annotations

import numba
import numpy as np

from contracts.policy import FloatArray, IntArray


@numba.njit(cache=True, nogil=True)
def alone_seconds(
    prompt_tokens: IntArray,
    output_tokens: IntArray,
    budget_tokens: int,
    fixed_s: float,
    per_token_s: float,
    per_context_token_s: float,
    per_request_s: float,
) -> FloatArray:
    """Return what profile.single_stream_s returns for each request, bit for bit."""
    seconds = np.empty(len(prompt_tokens))
    for i in range(len(prompt_tokens)):
        clock_s = 0.0
        computed, known = 0, prompt_tokens[i]
        while computed < known:
            tokens = min(known - computed, budget_tokens)
            computed += tokens
            step_s = fixed_s + per_token_s * tokens + per_context_token_s * computed + per_request_s
            clock_s += step_s
        decode_s = fixed_s + per_token_s
        for _ in range(output_tokens[i] - 1):
            computed += 1
            clock_s += decode_s + per_context_token_s * computed + per_request_s
        seconds[i] = clock_s
    return seconds
