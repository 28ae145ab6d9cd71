"""Step times estimated from a request log: what an engine's own record says about its speed.

The log gives when each request was queued, got its first token and ended. The step engine, run on
the same arrivals and lengths with a trial profile, says which steps lay between; their seconds are
linear in an affine profile's coefficients, so non-negative least squares over requests gives the
next trial. For engines that nobody can calibrate: it sees sums of thousands of steps, never one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.randomness import keyed_generator
from serving_sim.config import EngineConfig
from serving_sim.engine import SimResult, StepLog, simulate
from serving_sim.models import Architecture
from serving_sim.profile import AffineProfile, StepWork
from traces.workload import Workload

MIN_REQUESTS = 20
HELD_OUT_SHARE = 0.2
NUM_ROUNDS = 8
SETTLED = 0.002  # relative change of every coefficient below which trials stop


@dataclass(frozen=True, slots=True)
class LogFit:
    """The estimate, and |simulated / real - 1| of end-to-end times: its median and mean over the
    requests that were fitted, and over the one in five that were not."""

    profile: AffineProfile
    num_fitted: int
    num_held_out: int
    fitted_median_error: float
    fitted_mean_error: float
    held_out_median_error: float
    held_out_mean_error: float
    num_rounds: int


def fit_from_log(
    workload: Workload,
    config: EngineConfig,
    first_token_s: FloatArray,
    end_s: FloatArray,
    name: str,
    *,
    start: AffineProfile | None = None,
    context_share: float | None = None,
    seed: int = 0,
    on_round: Callable[[int, int], None] | None = None,
) -> LogFit:
    """Return the profile under which ``config``, run on ``workload``, comes nearest to the log.

    ``first_token_s`` and ``end_s`` are in the workload's order and clock. ``context_share`` ties
    the seconds of a token of context to the fixed ones: a step reads all weights and each token's
    KV once, so their bytes say how they compare (:func:`context_share_of`); a log whose KV is
    always full cannot. None leaves both free. Of the trials, the one
    with the least mean error of the fitted requests is kept; ``on_round`` hears (trials done, at
    most). Raises InvalidInput for fewer than
    MIN_REQUESTS requests, or times out of order.
    """
    _check(workload, first_token_s, end_s)
    held_out = keyed_generator(seed, "log-held-out").random(len(workload)) < HELD_OUT_SHARE
    trial = start or _first_guess(workload, first_token_s, end_s)
    trial = replace(trial, name=name, per_request_s=0.0, source="estimated from a request log")
    ties = np.eye(3) if context_share is None else np.array([[1, 0], [0, 1], [context_share, 0]])
    best: tuple[float, AffineProfile, FloatArray] | None = None
    rounds = 0
    for rounds in range(1, NUM_ROUNDS + 1):
        result, steps = _run(workload, config, trial)
        error = _errors(result, workload, end_s)
        score = float(error[~held_out].mean())
        if best is None or score < best[0]:
            best = score, trial, error
        if on_round is not None:
            on_round(rounds, NUM_ROUNDS)
        before = trial
        trial = _next_trial(trial, result, steps, first_token_s, end_s, ~held_out, ties)
        if _moved(before, trial) < SETTLED:
            break
    assert best is not None
    _, profile, error = best
    rest = error[held_out] if held_out.any() else np.array([math.nan])
    return LogFit(
        profile=profile,
        num_fitted=int((~held_out).sum()),
        num_held_out=int(held_out.sum()),
        fitted_median_error=float(np.median(error[~held_out])),
        fitted_mean_error=float(error[~held_out].mean()),
        held_out_median_error=float(np.median(rest)),
        held_out_mean_error=float(rest.mean()),
        num_rounds=rounds,
    )


def context_share_of(shape: Architecture) -> float:
    """Return the bytes of one token's KV as a share of the weights' that a step reads."""
    return shape.kv_bytes_per_token / shape.weight_bytes


def _check(workload: Workload, first_token_s: FloatArray, end_s: FloatArray) -> None:
    if len(workload) < MIN_REQUESTS:
        raise InvalidInput(
            f"the log holds {len(workload)} requests; at least {MIN_REQUESTS} are needed to tell "
            "a step's fixed cost from that of its tokens and context"
        )
    right = (workload.arrival_s <= first_token_s) & (first_token_s <= end_s) & np.isfinite(end_s)
    if not right.all():
        at = int(np.argmin(right))
        raise InvalidInput(
            f"request {workload.request_ids[at]!r}: queued at {workload.arrival_s[at]} s, first "
            f"token at {first_token_s[at]} s, last at {end_s[at]} s; times must be in that order"
        )


def _first_guess(workload: Workload, first_token_s: FloatArray, end_s: FloatArray) -> AffineProfile:
    """Return a profile in which a step takes what tokens lay apart in the quickest requests."""
    long = workload.output_tokens > 1
    gaps_s = (end_s - first_token_s)[long] / (workload.output_tokens[long] - 1)
    if not gaps_s.size or np.median(gaps_s) <= 0.0:
        raise InvalidInput("no request of the log wrote two tokens at different times")
    step_s = float(np.quantile(gaps_s, 0.1))
    return AffineProfile("guess", 0.7 * step_s, 0.001 * step_s, 1e-6 * step_s)


class _Recorder:
    """A profile that keeps what it was asked for."""

    def __init__(self, inner: AffineProfile) -> None:
        self.inner, self.name = inner, inner.name
        self.prefill_s_per_token = inner.prefill_s_per_token
        self.works: list[StepWork] = []

    def step_s(self, work: StepWork) -> float:
        self.works.append(work)
        return self.inner.step_s(work)


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Every step of a run: when it ended, and the running sums of what it cost."""

    end_s: FloatArray
    sums: FloatArray  # (steps + 1, 3): steps, tokens, context tokens


def _run(
    workload: Workload, config: EngineConfig, profile: AffineProfile
) -> tuple[SimResult, _Steps]:
    recorder = _Recorder(profile)
    planned_s: list[float] = []

    def note(log: StepLog) -> None:
        # a step that computes nothing asks no profile; the next one takes its place
        del planned_s[len(recorder.works) :]
        planned_s.append(log.start_s)

    result = simulate(workload, config, recorder, on_step=note)
    works = np.array(recorder.works[: len(planned_s)], dtype=np.float64)
    features = np.column_stack(
        [np.ones(len(works)), works[:, 0] + works[:, 2], works[:, 1] + works[:, 3]]
    )
    seconds = features @ _coefficients(profile)
    ends, clock_s = [], 0.0
    for start_s, step_s in zip(planned_s, seconds.tolist(), strict=False):
        clock_s = max(clock_s, start_s) + step_s
        ends.append(clock_s)
    return result, _Steps(np.array(ends), np.vstack([np.zeros(3), np.cumsum(features, axis=0)]))


def _next_trial(
    trial: AffineProfile,
    result: SimResult,
    steps: _Steps,
    first_token_s: FloatArray,
    end_s: FloatArray,
    fitted: np.ndarray,
    ties: FloatArray,
) -> AffineProfile:
    """Return half way to the coefficients that give the log's times to the steps of this trial;
    they are ``ties`` times what is free.

    Two equations a request: first to last token, and, if it was admitted as soon as it came, queue
    to first token, which is what prefill takes. Errors are relative.
    """
    rows, times = [], []
    half_s = float(np.diff(steps.end_s).min(initial=steps.end_s[0])) / 2
    for at in np.flatnonzero(fitted):
        record = result.records[at]
        assert record.first_token_s is not None
        assert record.end_s is not None
        spans = [(record.first_token_s, record.end_s, end_s[at] - first_token_s[at])]
        if record.queued_s == 0.0:
            real_s = first_token_s[at] - record.arrival_s
            spans.append((record.arrival_s, record.first_token_s, real_s))
        for begin_s, finish_s, real_s in spans:
            low, high = np.searchsorted(steps.end_s, (begin_s + half_s, finish_s + half_s))
            if high > low and real_s > 0.0:
                rows.append((steps.sums[high] - steps.sums[low]) / real_s)
                times.append(1.0)
    if len(rows) < 3:
        return trial
    free = np.array(rows) @ ties
    scale = np.linalg.norm(free, axis=0)
    scale = np.where(scale > 0.0, scale, 1.0)
    found, _ = nnls(free / scale, np.array(times))
    fixed_s, token_s, context_s = (_coefficients(trial) + ties @ (found / scale)) / 2
    return replace(
        trial, fixed_s=float(fixed_s), per_token_s=float(token_s),
        per_context_token_s=float(context_s),
    )  # fmt: skip


def _coefficients(profile: AffineProfile) -> FloatArray:
    return np.array([profile.fixed_s, profile.per_token_s, profile.per_context_token_s])


def _moved(before: AffineProfile, after: AffineProfile) -> float:
    old, new = _coefficients(before), _coefficients(after)
    return float(np.max(np.abs(new - old) / np.maximum(old, 1e-12)))


def _errors(result: SimResult, workload: Workload, end_s: FloatArray) -> FloatArray:
    """Return |simulated / real - 1| of each request's end-to-end time."""
    simulated = [record.end_s for record in result.records]
    if any(end is None for end in simulated):
        raise InvalidInput(
            "a request of the log does not end in the simulation; are the engine's settings (KV "
            "blocks, model length) those of the log?"
        )
    ends = np.array(simulated, dtype=np.float64)
    error: FloatArray = np.abs((ends - workload.arrival_s) / (end_s - workload.arrival_s) - 1.0)
    return error
