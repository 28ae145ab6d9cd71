"""A recorded log under other policies: the same requests, the same engine, other victims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import Policy
from contracts.records import RequestRecord
from contracts.signals import RemainingGrid, SignalRequest, age_rows, build_grid
from predictors.base import Predictor
from serving_sim.engine import SimResult
from serving_sim.jump import simulate_fast
from serving_sim.live_log import Recorded
from serving_sim.profile import StepProfile
from traces.workload import Workload

STRIDE = 8


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One policy on a recorded workload. Latencies are seconds of the simulated clock.

    ``recompute_tax`` is recomputed / all computed tokens; ``late`` counts requests that took longer
    than the deadline (None: none was asked for); ``moved`` counts those whose end moved against
    LIFO's by more than 1 ms.
    """

    policy: str
    signal: str
    num_preemptions: int
    recomputed_tokens: int
    recompute_tax: float
    mean_e2e_s: float
    p50_e2e_s: float
    p99_e2e_s: float
    p99_ttft_s: float
    makespan_s: float
    late: int | None
    moved: int
    fallbacks: int


def what_if(
    recorded: Recorded,
    policies: Sequence[Policy],
    signal: RemainingGrid | None = None,
    profile: StepProfile | None = None,
    deadline_s: float | None = None,
    seed: int = 0,
) -> list[WhatIf]:
    """Replay ``recorded`` under each policy, LIFO's result given by ``policies[0]``.

    Policies that read a signal get ``signal``; raises InvalidInput when there is none.
    """
    config, workload = recorded.log.config, recorded.log.workload
    profile = recorded.profile if profile is None else profile
    rows: list[WhatIf] = []
    baseline: SimResult | None = None
    for policy in policies:
        if policy.reads_signal and signal is None:
            raise InvalidInput(
                f"policy {policy.name!r} reads a signal: give --signal, a checkpoint folder or "
                "'clairvoyant'"
            )
        given = signal if policy.reads_signal else None
        result = simulate_fast(workload, config, profile, policy, signal=given, seed=seed)
        baseline = baseline or result
        rows.append(_row(policy, given, result, baseline, deadline_s))
    return rows


def _row(
    policy: Policy,
    signal: RemainingGrid | None,
    result: SimResult,
    baseline: SimResult,
    deadline_s: float | None,
) -> WhatIf:
    ended = [r for r in result.records if r.end_s is not None]
    e2e = np.array([_e2e_s(r) for r in ended])
    ttft = np.array([r.first_token_s - r.arrival_s for r in ended if r.first_token_s is not None])
    ends = zip(result.records, baseline.records, strict=True)
    moved = sum(abs((a.end_s or 0.0) - (b.end_s or 0.0)) > 1e-3 for a, b in ends)
    late = None
    if deadline_s is not None:
        late = len(result.records) - int((e2e <= deadline_s).sum())
    return WhatIf(
        policy=policy.name,
        signal=signal.name if signal is not None else "none",
        num_preemptions=result.num_preemptions,
        recomputed_tokens=result.recomputed_tokens,
        recompute_tax=result.recomputed_tokens / max(1, result.computed_tokens),
        mean_e2e_s=float(e2e.mean()),
        p50_e2e_s=float(np.quantile(e2e, 0.5)),
        p99_e2e_s=float(np.quantile(e2e, 0.99)),
        p99_ttft_s=float(np.quantile(ttft, 0.99)),
        makespan_s=result.end_s,
        late=late,
        moved=moved,
        fallbacks=result.signal_fallbacks,
    )


def _e2e_s(record: RequestRecord) -> float:
    assert record.end_s is not None
    return record.end_s - record.arrival_s


def clairvoyant_grid(workload: Workload) -> RemainingGrid:
    """Return what a signal that knew every length would answer: an upper bound, no predictor."""
    offsets, owner, ages = age_rows(np.maximum(workload.output_tokens, 1), STRIDE)
    remaining = np.maximum(1.0, workload.output_tokens[owner] - ages)
    return RemainingGrid(
        name="clairvoyant",
        stride=STRIDE,
        offsets=offsets,
        remaining=remaining,
        upper=np.full(len(remaining), np.nan),
        upper_level=0.9,
        sources=(frozenset(),),
        source_of=np.zeros(len(workload), dtype=np.int64),
        clairvoyant=True,
    )


def predictor_grid(
    predictor: Predictor, workload: Workload, stride: int = STRIDE, *, whole: bool = False
) -> RemainingGrid:
    """Return a predictor's answers for a log's requests, up to their ends or, if ``whole``, caps.

    It sees lengths of prompts and ages only: a log holds neither texts nor progress. Raises
    InvalidInput for a checkpoint of many models.
    """
    models = predictor.provenance.models
    if len(models) != 1:
        raise InvalidInput(
            f"the checkpoint knows {len(models)} models and a log does not name its own: train "
            "one on runs of the served model"
        )
    rows = zip(
        workload.request_ids,
        workload.prompt_tokens.tolist(),
        workload.max_tokens.tolist(),
        strict=True,
    )
    requests = [
        SignalRequest(name, name, name, "", "", "", models[0], prompt, cap)
        for name, prompt, cap in rows
    ]
    horizons = None if whole else np.maximum(workload.output_tokens - 1, 0)
    return build_grid(predictor, requests, stride=stride, horizons=horizons)
