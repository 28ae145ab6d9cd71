"""What tokens were drawn from, as far as an engine reports it: log-probabilities and entropy.

An engine that is asked for ``k`` log-probabilities a token gives those of the token it drew and of
the ``k`` likeliest ones; the rest of the vocabulary is a mass without names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contracts.policy import FloatArray
from integrations.visible import VisibleProgress


def entropy_of_listed(logprobs: FloatArray, drawn: FloatArray) -> FloatArray:
    """Return the entropy (n,) in nats of distributions of which the ``k`` likeliest tokens are
    listed, (n, k), and the one that was ``drawn``, (n,), whether it is among them or not.

    What is not listed counts as one token: a lower bound, and exact where the whole vocabulary is
    listed. NaN with ``k`` = 0, where a single token says nothing.
    """
    count, listed = logprobs.shape
    if not listed:
        return np.full(count, np.nan)
    unlisted = np.where(drawn < logprobs[:, -1], np.exp(drawn), 0.0)
    shares = np.column_stack([np.exp(logprobs), unlisted])
    rest = np.maximum(0.0, 1.0 - shares.sum(axis=1))
    shares = np.column_stack([shares, rest])
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0.0)
    return np.asarray(-(shares * logs).sum(axis=1))


def signals_of(rows: np.ndarray, asked: int) -> tuple[FloatArray, FloatArray]:
    """Return (entropy, log-probability), each (n,), of drawn tokens.

    ``rows`` (n, 1 + m) are log-probabilities as vLLM lists them: of the token drawn, then of the
    ``m`` likeliest. A batch lists as many as its hungriest request ``asked`` for (-1: all); a
    request's signals must not depend on who runs beside it, so only its own are read.
    """
    values = rows.astype(np.float64)
    drawn = values[:, 0]
    likeliest = values[:, 1:] if asked < 0 else values[:, 1 : 1 + asked]
    return entropy_of_listed(likeliest, drawn), drawn


@dataclass(frozen=True, slots=True)
class Asking:
    """A request of vLLM that asks for ``count`` log-probabilities a token (-1: all), and who is to
    be told of them."""

    request: Any
    count: int
    progress: VisibleProgress


def tell_drawn(
    before: Sequence[tuple[Asking, int]], places: Mapping[str, int], listed: Any
) -> None:
    """Tell each request what its new tokens were drawn from: those after the number of tokens that
    it had ``before``. ``places`` say where in the step's ``listed`` (vLLM's LogprobsLists) a
    request stands. All that ask for as many are read at once."""
    starts = listed.cu_num_generated_tokens
    rows: dict[int, list[int]] = {}
    grown: dict[int, list[tuple[VisibleProgress, int, int]]] = {}
    for asking, at in before:
        count = asking.request.num_output_tokens - at
        if count:
            place = places[asking.request.request_id]
            row = place if starts is None else starts[place]
            rows.setdefault(asking.count, []).extend(range(row, row + count))
            grown.setdefault(asking.count, []).append((asking.progress, at, count))
    for asked, some in grown.items():
        entropies, logprobs = signals_of(listed.logprobs[rows[asked]], asked)
        drawn = list(zip(entropies.tolist(), logprobs.tolist(), strict=True))
        start = 0
        for progress, at, count in some:
            progress.tell(at, drawn[start : start + count])
            start += count
