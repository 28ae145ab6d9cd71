"""A recorded run beside its replay: how far off makespan, latencies and occupancy are.

Nothing here is fitted. Errors are relative, simulated / real - 1, so that a positive one says that
the replay is slower.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.records import RequestRecord
from eval.recorded_run import Occupancy, RecordedRun
from serving_sim.engine import SimResult, StepLog, simulate
from serving_sim.profile import StepProfile

STATISTICS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True, eq=False)
class Latencies:
    """Seconds of each request, shape (requests,): to the first token, between two tokens (mean;
    NaN for one token), to the last. All from the moment the request was queued."""

    ttft: FloatArray
    tpot: FloatArray
    e2e: FloatArray


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One latency. ``real_s``, ``simulated_s`` and ``error`` go by statistic; ``mape`` is the mean
    |error| over requests, ``correlation`` Pearson's over requests (NaN if one side is constant)."""

    real_s: Mapping[str, float]
    simulated_s: Mapping[str, float]
    error: Mapping[str, float]
    mape: float
    correlation: float


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """What a replay reached. ``occupancy`` holds (real, simulated) means over the real samples of
    running and waiting requests and of the share of KV in use; NaN where not recorded."""

    run: str
    profile: str
    async_scheduling: bool
    num_requests: int
    real_makespan_s: float
    simulated_makespan_s: float
    makespan_error: float
    ttft: MetricComparison
    tpot: MetricComparison
    e2e: MetricComparison
    occupancy: Mapping[str, tuple[float, float]]
    num_steps: int
    num_preemptions: int
    recomputed_tokens: int
    cache_hit_tokens: int
    wall_s: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A simulated run and what its engine held after each planning."""

    result: SimResult
    occupancy: Occupancy
    wall_s: float


def replay(run: RecordedRun, profile: StepProfile) -> Replay:
    """Run the recorded arrivals and lengths through the step engine."""
    steps: list[tuple[float, int, int, int]] = []

    def note(log: StepLog) -> None:
        steps.append((log.start_s, len(log.running), len(log.waiting), log.num_free_blocks))

    started_s = time.perf_counter()
    result = simulate(run.workload, run.config, profile, on_step=note)
    wall_s = time.perf_counter() - started_s
    t_s, running, waiting, free = np.array(steps, dtype=np.float64).T
    kv_share = 1.0 - free / run.config.usable_blocks
    return Replay(result, Occupancy(t_s, running, waiting, kv_share), wall_s)


def report(run: RecordedRun, profile: StepProfile, replayed: Replay) -> ValidationReport:
    """Return every comparison of ``run`` with its replay."""
    result = replayed.result
    real, simulated = measured_latencies(run), record_latencies(result.records)
    real_makespan_s = float(run.end_s.max())
    simulated_makespan_s = max(r.end_s for r in result.records if r.end_s is not None)
    return ValidationReport(
        run=run.name,
        profile=profile.name,
        async_scheduling=run.config.async_scheduling,
        num_requests=len(run.workload),
        real_makespan_s=real_makespan_s,
        simulated_makespan_s=simulated_makespan_s,
        makespan_error=simulated_makespan_s / real_makespan_s - 1,
        ttft=compare(real.ttft, simulated.ttft),
        tpot=compare(real.tpot, simulated.tpot),
        e2e=compare(real.e2e, simulated.e2e),
        occupancy=compare_occupancy(run.occupancy, replayed.occupancy),
        num_steps=result.num_steps,
        num_preemptions=result.num_preemptions,
        recomputed_tokens=result.recomputed_tokens,
        cache_hit_tokens=result.cache_hit_tokens,
        wall_s=replayed.wall_s,
        notes=run.notes,
    )


def measured_latencies(run: RecordedRun) -> Latencies:
    """Return what the real engine took for each request."""
    start_s, tokens = run.workload.arrival_s, run.workload.output_tokens
    return _latencies(start_s, run.first_token_s, run.end_s, tokens)


def record_latencies(records: Sequence[RequestRecord]) -> Latencies:
    """Return what the records say; raises InvalidInput if a request has not ended."""
    for record in records:
        if record.end_s is None or record.first_token_s is None:
            raise InvalidInput(
                f"request {record.request_id!r} is {record.state} ({record.end_reason}); only a "
                "run in which every request ends can be compared"
            )
    columns = [[r.arrival_s, r.first_token_s, r.end_s, r.output_tokens] for r in records]
    return _latencies(*np.array(columns, dtype=np.float64).T)


def _latencies(
    start_s: FloatArray, first_s: FloatArray, end_s: FloatArray, tokens: np.ndarray
) -> Latencies:
    gaps = np.where(tokens > 1, tokens - 1, np.nan)
    return Latencies(first_s - start_s, (end_s - first_s) / gaps, end_s - start_s)


def compare(real_s: FloatArray, simulated_s: FloatArray) -> MetricComparison:
    """Compare one latency over requests in the same order; a NaN on either side is left out."""
    both = ~(np.isnan(real_s) | np.isnan(simulated_s))
    if not both.any() or not (real_s[both] > 0).all():
        raise InvalidInput("no request was measured on both sides, or one took no time at all")
    real_s, simulated_s = real_s[both], simulated_s[both]
    real, simulated = statistics(real_s), statistics(simulated_s)
    varies = real_s.std() > 0 and simulated_s.std() > 0
    return MetricComparison(
        real_s=real,
        simulated_s=simulated,
        error={name: simulated[name] / real[name] - 1 for name in STATISTICS},
        mape=float(np.mean(np.abs(simulated_s / real_s - 1))),
        correlation=float(np.corrcoef(real_s, simulated_s)[0, 1]) if varies else float("nan"),
    )


def statistics(seconds: FloatArray) -> dict[str, float]:
    """Return mean and percentiles (linear between order statistics) by name."""
    values = (np.mean(seconds), *np.percentile(seconds, (50, 90, 99)))
    return {name: float(value) for name, value in zip(STATISTICS, values, strict=True)}


def compare_occupancy(real: Occupancy, simulated: Occupancy) -> dict[str, tuple[float, float]]:
    """Return (real, simulated) means over the real sampling times; after its last step, the
    simulated engine is empty."""
    at = np.searchsorted(simulated.t_s, real.t_s, side="right") - 1
    held = (at >= 0) & (real.t_s <= simulated.t_s[-1])
    means = {}
    for name in ("running", "waiting", "kv_share"):
        series = np.where(held, getattr(simulated, name)[at], 0.0)
        means[name] = (float(getattr(real, name).mean()), float(series.mean()))
    return means
