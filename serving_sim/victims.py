"""Who goes when KV runs out: the engine's own rules, and a Policy asked through RunningViews."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from contracts.choice import DRAW_PURPOSE, TPOT_WINDOW_STEPS, choose_victim
from contracts.errors import InvalidInput
from contracts.policy import FloatArray, Policy, RunningViews
from contracts.randomness import keyed_uniform
from contracts.signals import RemainingGrid
from serving_sim.faults import Answer, SignalOutage
from serving_sim.requests import LiveRequest

GARBAGE: dict[Answer, float] = {"nan": math.nan, "inf": math.inf, "negative": -1.0}


def youngest(running: list[LiveRequest], now_s: float) -> int:  # noqa: ARG001
    """vLLM's FCFS rule: the tail of the running list, i.e. the last admitted."""
    return len(running) - 1


def least_urgent(running: list[LiveRequest], now_s: float) -> int:  # noqa: ARG001
    """vLLM's PRIORITY rule: the largest (priority, arrival), the first such in running order."""
    return max(range(len(running)), key=lambda i: (running[i].priority, running[i].arrival_s))


def least_decoded(running: list[LiveRequest], now_s: float) -> int:  # noqa: ARG001
    """SGLang's rule: the fewest generated tokens, then the longest prompt, then the youngest."""
    return min(
        range(len(running)),
        key=lambda i: (running[i].generated_tokens, -running[i].prompt_tokens, -i),
    )


class PolicyRule:
    """Asks a Policy: the highest score goes, ties go to the larger ``admission_seq``.

    A column that the policy does not declare to read (``reads_signal``, ``reads_deadline``) is
    NaN, so an undeclared dependence cannot creep in. A request scored NaN is not chosen; when all
    are, the youngest goes. During ``outages`` the signal answers garbage, and the youngest goes
    unasked, or it answers what it said at age 0. ``num_fallbacks`` counts the decisions that met a
    NaN score or garbage.
    """

    def __init__(
        self, policy: Policy, signal: RemainingGrid | None, seed: int, prefill_s_per_token: float
    ) -> None:
        if policy.reads_signal and signal is None:
            raise InvalidInput(
                f"policy {policy.name!r} reads a signal, but none was given: pass signal=, or "
                "declare the policy with reads_signal=False"
            )
        self.policy = policy
        self.signal = signal if policy.reads_signal else None
        self.outages: tuple[SignalOutage, ...] = ()
        self.num_fallbacks = 0
        self.recent_steps_s: deque[float] = deque(maxlen=TPOT_WINDOW_STEPS)
        self.seed = seed
        self._prefill_s_per_token = prefill_s_per_token

    def __call__(self, running: list[LiveRequest], now_s: float) -> int:
        """Return the position of the victim in ``running``."""
        views = self.views(running, now_s)
        if self.outages and self.signal is not None and not _is_sound(views.remaining):
            self.num_fallbacks += 1
            return len(running) - 1
        return self.victim_of(views)

    def victim_of(self, views: RunningViews) -> int:
        """Return the position of the victim among ``views``, which are in admission order."""
        position, met_nan = choose_victim(self.policy, views)
        self.num_fallbacks += met_nan
        return position

    def views(self, running: list[LiveRequest], now_s: float) -> RunningViews:
        """Return what the policy may know of ``running``, in admission order."""
        count = len(running)
        remaining, upper = self._remaining(running, now_s)
        reads_deadline = self.policy.reads_deadline
        return RunningViews(
            request_id=_ints([r.index for r in running]),
            admission_seq=_ints([r.admission_seq for r in running]),
            arrival_s=_floats([r.arrival_s for r in running]),
            deadline_s=_floats([r.deadline_s for r in running] if reads_deadline else count),
            prompt_tokens=_ints([r.prompt_tokens for r in running]),
            generated_tokens=_ints([r.generated_tokens for r in running]),
            computed_tokens=_ints([r.computed_tokens for r in running]),
            kv_blocks=_ints([len(r.blocks) for r in running]),
            max_tokens=_ints([r.max_tokens for r in running]),
            num_preemptions=_ints([r.num_preemptions for r in running]),
            priority=_ints([r.priority for r in running]),
            rank_from_youngest=np.arange(count - 1, -1, -1),
            num_running=np.full(count, count),
            now_s=np.full(count, now_s),
            recent_tpot_s=np.full(count, self._recent_tpot_s()),
            prefill_s_per_token=np.full(count, self._prefill_s_per_token),
            remaining=remaining,
            remaining_upper=upper,
            draw=_floats([self._draw(r) for r in running]),
        )

    def _remaining(self, running: list[LiveRequest], now_s: float) -> tuple[FloatArray, FloatArray]:
        if self.signal is None:
            return _floats(len(running)), _floats(len(running))
        outage = next((o.answer for o in self.outages if o.at_s <= now_s < o.until_s), None)
        if outage in GARBAGE:
            garbage = np.full(len(running), GARBAGE[outage])
            return garbage, garbage.copy()
        is_stale = outage is not None
        answers = [
            self.signal.read(r.index, 0 if is_stale else r.generated_tokens) for r in running
        ]
        return _floats([a[0] for a in answers]), _floats([a[1] for a in answers])

    def _recent_tpot_s(self) -> float:
        """Mean seconds of the last TPOT_WINDOW_STEPS steps: a decode gets one token in each."""
        total_s = 0.0
        for step_s in self.recent_steps_s:
            total_s += step_s  # sum() rounds otherwise since Python 3.12; the compiled loop cannot
        return total_s / max(1, len(self.recent_steps_s))

    def _draw(self, request: LiveRequest) -> float:
        if request.draw is None:
            request.draw = keyed_uniform(
                self.seed, DRAW_PURPOSE, request.request_id, request.num_preemptions
            )
        return request.draw


def _is_sound(remaining: FloatArray) -> bool:
    """Say whether every answer keeps the contract of a signal: finite, at least 1 token."""
    return bool(np.all(np.isfinite(remaining) & (remaining >= 1.0)))


def _ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _floats(values: list[float] | int) -> FloatArray:
    """Return the values; or, for a count, so many NaN."""
    return np.full(values, np.nan) if isinstance(values, int) else np.array(values, np.float64)
