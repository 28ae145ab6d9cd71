"""Replays of one engine run with other victims: a base rule, and what a script changes about it.

An engine run is fixed by its victims, so every replay is a schedule that some rule could have made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from contracts.errors import NoProgressError
from contracts.policy import FloatArray, Policy, RunningViews
from contracts.records import RequestRecord
from contracts.signals import RemainingGrid
from eval.outcomes import outcome, score_breach
from serving_sim.config import EngineConfig
from serving_sim.jump import simulate_fast
from serving_sim.policies import get_policy
from serving_sim.profile import AffineProfile
from serving_sim.surface import SurfaceProfile
from serving_sim.victims import PolicyRule
from traces.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class ReplayCase:
    """One cell to be replayed. ``signal`` answers the base rules that read one; ``seed`` keys the
    draws of those that are random. All tagged requests are due ``deadline_s`` after arrival."""

    workload: Workload
    config: EngineConfig
    profile: AffineProfile | SurfaceProfile
    deadline_s: float
    signal: RemainingGrid | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """A base rule and what is changed about it: ``classes`` (request -> class, 0 if absent: the
    highest class that runs goes first) and ``changes`` (decision -> victim, if it runs then).
    Requests are numbered in arrival order, decisions in the order they are met, both from 0."""

    base: str
    classes: dict[int, int] = field(default_factory=dict)
    changes: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a script led to. ``missed`` of ``accepted`` tagged requests breached, ``late_s`` in sum
    beyond their deadlines; ``running`` says who ran at each decision, ``victims`` who went."""

    missed: int
    late_s: float
    accepted: int
    hopeless: int
    victims: tuple[int, ...]
    running: tuple[tuple[int, ...], ...]

    @property
    def cost(self) -> tuple[int, float]:
        """What the search makes small: breaches, then lateness."""
        return self.missed, self.late_s

    @property
    def breach(self) -> float:
        """Share of the accepted cohort."""
        return self.missed / self.accepted


class _Prompter:
    """Answers the engine's questions from a script, and writes down who ran and who went."""

    def __init__(self, script: Script, case: ReplayCase) -> None:
        base = get_policy(script.base)
        classes = np.zeros(len(case.workload), np.int64)
        classes[list(script.classes)] = list(script.classes.values())

        def score_highest_class(views: RunningViews) -> FloatArray:
            own = classes[views.request_id]
            return np.where(own == own.max(), base.score(views), np.nan)

        ruled = replace(base, score=score_highest_class, row=None)
        cost_s = case.profile.prefill_s_per_token
        self._rule = PolicyRule(ruled, case.signal, case.seed, cost_s)
        self._changes = script.changes
        self.running: list[tuple[int, ...]] = []
        self.victims: list[int] = []

    def score(self, views: RunningViews) -> FloatArray:
        """Score 1 whom the script names, and 0 all others."""
        running = tuple(views.request_id.tolist())
        wanted = self._changes.get(len(self.victims))
        at = running.index(wanted) if wanted in running else self._rule.victim_of(views)
        self.running.append(running)
        self.victims.append(running[at])
        scores: FloatArray = np.zeros(len(running))
        scores[at] = 1.0
        return scores


def replay(case: ReplayCase, script: Script) -> Replay:
    """Run ``case`` by ``script``. Victims that undo each other for ever miss every deadline."""
    prompter = _Prompter(script, case)
    reads_signal = case.signal is not None
    policy = Policy("hindsight", prompter.score, reads_signal=reads_signal, reads_deadline=True)
    run = (case.workload, case.config, case.profile)
    try:
        result = simulate_fast(*run, policy, signal=case.signal, seed=case.seed, checks=False)
    except NoProgressError:
        count = len(case.workload)
        return Replay(count, np.inf, count, 0, tuple(prompter.victims), tuple(prompter.running))
    tagged = [r for r in result.records if r.cohort == "tagged" and r.state != "rejected"]
    score = score_breach(tagged, case.deadline_s)
    late_s = [_late_s(r, case.deadline_s) for r in tagged if _is_missed(r, case.deadline_s)]
    return Replay(
        missed=len(late_s),
        late_s=round(sum(late_s), 6),
        accepted=len(tagged),
        hopeless=round(score.floor * len(tagged)),
        victims=tuple(prompter.victims),
        running=tuple(prompter.running),
    )


def _is_missed(record: RequestRecord, deadline_s: float) -> bool:
    return outcome(record, deadline_s) not in ("met", "withdrawn")


def _late_s(record: RequestRecord, deadline_s: float) -> float:
    end_s = record.censor_s if record.end_s is None else record.end_s
    return max(0.0, end_s - record.arrival_s - deadline_s)
