"""The shipped conformance suite: what it means to be a policy, and what it means to be a signal.

Run it on your own: ``check_policy(my_policy)``, ``check_signal(my_signal, runs)``. Each check
raises ConformanceError saying which rule broke, on which input, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from contracts.errors import ConformanceError
from contracts.policy import Policy, RunningViews
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun
from contracts.signals import (
    DistributionalSignal,
    ProgressTrack,
    RemainingSignal,
    SignalRequest,
    build_grid,
    signal_request,
)

_NUM_SETS = 40
_MAX_RUNNING = 12


def check_policy(policy: Policy) -> None:
    """Hold ``policy`` to its contract on random running sets, with and without a signal.

    Rules: one finite float a request when a signal is there; the same answer for the same input
    (pure); the answer for a request does not depend on the order of the rows; ``row`` scores as
    ``score`` does; a policy that says it reads no signal or no deadline does not change when they
    do.
    """
    for index in range(_NUM_SETS):
        rng = keyed_generator(index, "conformance-views")
        views = random_views(rng, with_signal=True)
        scores = _scores(policy, views)
        if not np.isfinite(scores).all():
            raise ConformanceError(
                f"policy {policy.name!r} scores {scores.tolist()}: every score must be finite "
                "when every field is"
            )
        if not np.array_equal(scores, _scores(policy, views)):
            raise ConformanceError(
                f"policy {policy.name!r} answered twice differently to one input: it must be a "
                "pure function; use view.draw for randomness"
            )
        _check_rows_alone(policy, views, scores)
        _check_scalar_form(policy, views, scores)
        _check_blindness(policy, views, scores, rng)


def _scores(policy: Policy, views: RunningViews) -> np.ndarray:
    scores = policy.score(views)
    count = len(views.request_id)
    if not isinstance(scores, np.ndarray) or scores.shape != (count,):
        raise ConformanceError(
            f"policy {policy.name!r} returned {type(scores).__name__} of shape "
            f"{np.shape(scores)} for {count} requests: return a float array of shape ({count},)"
        )
    return scores.astype(np.float64)


def _check_rows_alone(policy: Policy, views: RunningViews, scores: np.ndarray) -> None:
    """A row scored alone scores the same."""
    for row, expected in enumerate(scores):
        alone = _scores(policy, take_rows(views, np.array([row])))[0]
        if alone != expected:
            raise ConformanceError(
                f"policy {policy.name!r} scores row {row} {expected} among others and {alone} "
                "alone: a score may depend on its own row only (num_running and "
                "rank_from_youngest are in it)"
            )


def _check_scalar_form(policy: Policy, views: RunningViews, scores: np.ndarray) -> None:
    if policy.row is None:
        return
    for row, expected in enumerate(scores):
        own = float(policy.row(views.row(row)))
        if own != expected:
            raise ConformanceError(
                f"policy {policy.name!r} scores row {row} {expected} by score and {own} by row: "
                "the two are one rule in two forms; change both, or give row=None"
            )


def _check_blindness(
    policy: Policy, views: RunningViews, scores: np.ndarray, rng: np.random.Generator
) -> None:
    count = len(views.request_id)
    wild = rng.uniform(1, 999, count)
    poisons = (
        ("signal", policy.reads_signal, views._replace(remaining=wild, remaining_upper=wild * 2)),
        ("deadline", policy.reads_deadline, views._replace(deadline_s=wild)),
    )
    for what, reads, poisoned in poisons:
        if not reads and not np.array_equal(scores, _scores(policy, poisoned)):
            raise ConformanceError(
                f"policy {policy.name!r} changed when only the {what} did, but says "
                f"reads_{what}=False: declare reads_{what}=True"
            )


def random_views(rng: np.random.Generator, *, with_signal: bool) -> RunningViews:
    """Return a plausible running set of 1 to 12 requests, in admission order."""
    count = int(rng.integers(1, _MAX_RUNNING + 1))
    prompt = rng.integers(1, 400, count)
    generated = rng.integers(0, 300, count)
    now_s = 50.0 + float(rng.uniform(0, 50))
    remaining = rng.uniform(1, 300, count) if with_signal else np.full(count, np.nan)
    return RunningViews(
        request_id=rng.permutation(count),
        admission_seq=np.sort(rng.choice(1000, count, replace=False)),
        arrival_s=rng.uniform(0, 50, count),
        deadline_s=rng.uniform(60, 200, count),
        prompt_tokens=prompt,
        generated_tokens=generated,
        computed_tokens=prompt + generated,
        kv_blocks=(prompt + generated + 15) // 16,
        max_tokens=np.full(count, 600),
        num_preemptions=rng.integers(0, 4, count),
        priority=rng.integers(0, 3, count),
        rank_from_youngest=np.arange(count)[::-1].copy(),
        num_running=np.full(count, count),
        now_s=np.full(count, now_s),
        recent_tpot_s=rng.uniform(0.01, 0.1, count),
        prefill_s_per_token=np.full(count, 1e-4),
        remaining=remaining,
        remaining_upper=remaining * 1.5,
        draw=rng.uniform(0, 1, count),
    )


def take_rows(views: RunningViews, rows: np.ndarray) -> RunningViews:
    """Return the chosen rows of a running set, every field untouched."""
    return RunningViews(*(column[rows] for column in views))


def check_signal(signal: RemainingSignal, runs: Sequence[DecodeRun], *, stride: int = 8) -> None:
    """Hold a predictor or an oracle to its contract on the requests of ``runs``.

    Rules: one float64 a request, finite, within [1, max(1, max_tokens - age)]; pure; rows are
    independent; quantiles rise with their level and stay in the same bounds; survival falls from
    1; and **causality**: editing what a run shows after age t changes no answer at ages <= t.
    """
    requests = [signal_request(run) for run in runs]
    rng = keyed_generator(0, "conformance-ages", signal.name)
    ages = np.array([int(rng.integers(0, r.max_tokens)) for r in requests], dtype=np.int64)
    answers = _answers(signal, requests, ages)
    if not np.array_equal(answers, _answers(signal, requests, ages)):
        raise ConformanceError(f"signal {signal.name!r} answered twice differently to one input")
    order = rng.permutation(len(requests))
    shuffled = _answers(signal, [requests[i] for i in order.tolist()], ages[order])
    if not np.allclose(answers[order], shuffled, rtol=1e-12, atol=0.0):
        raise ConformanceError(
            f"signal {signal.name!r} depends on the order of the rows: answer each on its own"
        )
    if isinstance(signal, DistributionalSignal):
        _check_distribution(signal, requests, ages)
    _check_causality(signal, requests, stride)


def _answers(
    signal: RemainingSignal, requests: Sequence[SignalRequest], ages: np.ndarray
) -> np.ndarray:
    answers = signal.remaining(requests, ages)
    caps = np.array([request.max_tokens for request in requests])
    _check_bounds(signal.name, "remaining", answers, np.maximum(1, caps - ages))
    return answers


def _check_bounds(name: str, what: str, answers: np.ndarray, upper: np.ndarray) -> None:
    if answers.shape != upper.shape or answers.dtype != np.float64:
        raise ConformanceError(
            f"signal {name!r}: {what} has shape {answers.shape} and type {answers.dtype}; "
            f"return float64 of shape {upper.shape}"
        )
    bad = np.flatnonzero(~((answers >= 1.0) & (answers <= upper + 1e-9)))
    if bad.size:
        raise ConformanceError(
            f"signal {name!r}: {what} is {answers[bad[0]]} in row {bad[0]}; it must lie between "
            f"1 and max_tokens - age = {upper[bad[0]]}"
        )


def _check_distribution(
    signal: DistributionalSignal, requests: Sequence[SignalRequest], ages: np.ndarray
) -> None:
    upper = np.maximum(1, np.array([r.max_tokens for r in requests]) - ages)
    before = np.ones(len(requests))
    for level in (0.1, 0.5, 0.9):
        answers = signal.quantile(requests, ages, level)
        _check_bounds(signal.name, f"quantile {level}", answers, upper)
        if (answers < before - 1e-9).any():
            raise ConformanceError(f"signal {signal.name!r}: its quantiles fall as levels rise")
        before = answers
    after = np.ones(len(requests))
    for horizon in (0.0, 1.0, 8.0, 64.0, 1e9):
        alive = signal.survival(requests, ages, np.full(len(requests), horizon))
        if not ((alive >= 0) & (alive <= after + 1e-9)).all():
            raise ConformanceError(
                f"signal {signal.name!r}: survival at horizon {horizon} is not within [0, 1] "
                "and falling"
            )
        after = alive


def _check_causality(
    signal: RemainingSignal, requests: Sequence[SignalRequest], stride: int
) -> None:
    """Answers up to age t are the same whether the run's later progress is there, gone or wild."""
    rng = keyed_generator(0, "conformance-causality", signal.name)
    with_progress = [request for request in requests if request.progress is not None]
    for request in with_progress[:20]:
        track = request.progress
        assert track is not None
        # ages over the whole life of the run: beyond its last record nothing could be edited
        lived = len(track.values) * track.stride
        for age in (0, *sorted(rng.integers(0, lived + 1, 4).tolist())):
            kept = track.seen(age)
            wild = np.concatenate([kept, np.full((5, kept.shape[1]), 0.77)])
            horizon = np.array([min(age // stride * stride, request.max_tokens - 1)])
            answers = [
                build_grid(
                    signal,
                    [replace(request, progress=ProgressTrack(track.stride, values))],
                    stride=stride,
                    horizons=horizon,
                ).remaining
                for values in (track.values, kept, wild)
            ]
            if not all(np.array_equal(answers[0], other) for other in answers[1:]):
                raise ConformanceError(
                    f"signal {signal.name!r} reads the future: its answers up to age {age} of "
                    f"run {request.run_id!r} changed with progress after that age; read "
                    "request.progress.seen(age) only"
                )
