"""What the requests of a workload write and what it was drawn from; a model's part, made up.

Wholly drawn from the request's index, so that vLLM's environment and the test's agree without
telling each other. The first token of a request is its own: nobody else's KV can be found for it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from contracts.randomness import keyed_generator

MAX_TOKENS = 256
THINK_OPEN, THINK_CLOSE = 1_999_999_998, 1_999_999_999
_OWN_TOKENS = 2_000_000_000
_WORDS = 5  # so few that what was written is often written again
_VOCABULARY = 12
LISTED = 4  # log-probabilities that a request asks for, where it asks


@lru_cache(maxsize=4096)
def tokens_of(index: int) -> list[int]:
    """Return the MAX_TOKENS tokens that request ``index`` would write."""
    rng = keyed_generator(0, "speech", index)
    own = _OWN_TOKENS + _WORDS * index
    words = own + rng.integers(0, _WORDS, MAX_TOKENS)
    words[rng.random(MAX_TOKENS) < 0.02] = THINK_OPEN
    words[rng.random(MAX_TOKENS) < 0.02] = THINK_CLOSE
    words[0] = own
    found: list[int] = words.tolist()
    return found


@lru_cache(maxsize=4096)
def logprobs_of(index: int) -> np.ndarray:
    """Return float32 (MAX_TOKENS, 1 + vocabulary): of each token, then of the likeliest down."""
    rng = keyed_generator(0, "distributions", index)
    sharpness = rng.uniform(0.1, 3.0, (MAX_TOKENS, 1))
    scores = sharpness * rng.standard_normal((MAX_TOKENS, _VOCABULARY))
    logprobs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    ranked = np.sort(logprobs, axis=1)[:, ::-1]
    rank = np.minimum(rng.geometric(0.6, MAX_TOKENS), _VOCABULARY) - 1
    drawn = ranked[np.arange(MAX_TOKENS), rank]
    return np.column_stack([drawn, ranked]).astype(np.float32)


def asked_by(index: int) -> int | None:
    """Return how many log-probabilities request ``index`` asks for; every third asks for none."""
    return (LISTED, -1, None)[index % 3]
