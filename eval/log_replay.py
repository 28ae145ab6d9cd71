"""A decision log replayed in our engine: which steps it plans alike, which victims it names.

The engine *follows* the log. In a live log it meets arrivals, aborts and returning steps where the
log has them; in a driver's log, at the times of the driver's clock. Where the log evicted somebody,
the policy is asked in the same state, its answer is counted, and the logged victim goes. So one
other victim costs one count, not the rest of the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from contracts.errors import InvalidInput, PreemptBenchError
from contracts.policy import Policy
from contracts.signals import RemainingGrid
from serving_sim.decisions import step_line
from serving_sim.engine import Run, StepLog, play, victim_rule
from serving_sim.live_log import ENDED_REASONS, Recorded
from serving_sim.profile import AffineProfile
from serving_sim.requests import LiveRequest
from serving_sim.scheduler import ChooseVictim

_FIELDS = ("sched", "preempted", "finished_before", "running", "waiting", "free")
_SHOWN_CHARS = 200
# a followed log brings its own times; what a step would take here is not read
_NO_CLOCK = AffineProfile("the log's own", fixed_s=1.0, per_token_s=0.0, per_context_token_s=0.0)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where log and replay part: ``what`` of a step, with both values, cut to a line each."""

    step: int
    what: str
    logged: str
    replayed: str


@dataclass(frozen=True, slots=True)
class LogReplay:
    """How the replay of a log compares with it.

    ``num_equal_steps`` of the ``num_steps`` logged were planned alike: the same tokens for the same
    requests in the same order, victims, queues and free blocks. ``num_equal_victims`` of the
    ``num_victims`` logged are those that the policy names in the same state; a victim that could
    not be asked for, because the states had parted, counts as another. ``logged_policy`` is None
    where the log does not say. ``stopped`` says why the replay ended before the log.
    """

    log: str
    logged_policy: str | None
    policy: str
    signal: str
    num_requests: int
    num_censored: int
    num_steps: int
    num_equal_steps: int
    num_victims: int
    num_equal_victims: int
    first_difference: Difference | None
    first_other_victim: Difference | None
    stopped: str | None

    @property
    def is_equal(self) -> bool:
        """True when every step and every victim agreed."""
        return (
            self.stopped is None
            and self.num_equal_steps == self.num_steps
            and self.num_equal_victims == self.num_victims
        )


class _LogOver(Exception):
    """The log ends here."""


class _Follower:
    """A victim rule that evicts whom the log evicted, and counts what ``rule`` would have done."""

    def __init__(self, steps: tuple[dict[str, Any], ...], rule: ChooseVictim) -> None:
        self._steps, self._rule = steps, rule
        self._at = self._num_taken = 0
        self.num_equal_steps = self.num_equal_victims = 0
        self.first_difference: Difference | None = None
        self.first_other_victim: Difference | None = None

    def __call__(self, running: list[LiveRequest], now_s: float) -> int:
        """Return the position of the logged victim; of our own where the log has none."""
        own = self._rule(running, now_s)
        logged = self._steps[self._at]["preempted"] if self._at < len(self._steps) else ()
        name = logged[self._num_taken] if self._num_taken < len(logged) else None
        self._num_taken += 1
        if running[own].request_id == name:
            self.num_equal_victims += 1
        elif self.first_other_victim is None:
            ours = running[own].request_id
            self.first_other_victim = self._differs("victim", name or "nobody", ours)
        names = [request.request_id for request in running]
        return names.index(name) if name in names else own

    def compare(self, step: StepLog) -> None:
        """Hold a planned step to the log's; raises _LogOver behind its last."""
        if self._at >= len(self._steps):
            raise _LogOver
        logged, ours = self._steps[self._at], step_line(step)
        different = next(
            (f for f in _FIELDS if f in logged and not _same(logged[f], ours[f])), None
        )
        if different is None:
            self.num_equal_steps += 1
        elif self.first_difference is None:
            self.first_difference = self._differs(different, logged[different], ours[different])
        self._at += 1
        self._num_taken = 0

    def _differs(self, what: str, logged: object, ours: object) -> Difference:
        return Difference(self._at + 1, what, _short(logged), _short(ours))


def replay_log(
    recorded: Recorded, policy: Policy | None = None, signal: RemainingGrid | None = None
) -> LogReplay:
    """Replay ``recorded`` under ``policy``; without one, under the engine's own rule.

    Raises InvalidInput for a policy that reads deadlines (a log has none), or a signal that was not
    given, and for a log without steps.
    """
    if policy is not None and policy.reads_deadline:
        raise InvalidInput(
            f"policy {policy.name!r} reads deadlines, and a decision log holds none: its victims "
            "cannot be checked"
        )
    if not recorded.steps:
        raise InvalidInput(
            f"{recorded.log.path} holds no step: give a decision log, not a bare workload"
        )
    log = recorded.log
    rule = victim_rule(log.config, _NO_CLOCK, policy, signal, recorded.seed)
    follower = _Follower(recorded.steps, rule)
    stopped = None
    try:
        if recorded.events is None:
            _play_timed(recorded, follower)
        else:
            _play_events(recorded, recorded.events, follower)
    except _LogOver:
        pass
    except PreemptBenchError as error:
        stopped = f"step {follower._at + 1}: {error}"
    return LogReplay(
        log=str(log.path),
        logged_policy=recorded.victims_by,
        policy=policy.name if policy is not None else f"the engine's own ({log.config.scheduling})",
        signal=signal.name if signal is not None else "none",
        num_requests=len(log.workload),
        num_censored=recorded.num_censored,
        num_steps=recorded.num_steps,
        num_equal_steps=follower.num_equal_steps,
        num_victims=recorded.num_preemptions,
        num_equal_victims=follower.num_equal_victims,
        first_difference=follower.first_difference,
        first_other_victim=follower.first_other_victim,
        stopped=stopped,
    )


def _play_timed(recorded: Recorded, follower: _Follower) -> None:
    """Follow a driver's log: its clock says when requests arrive and steps return."""
    log = recorded.log
    play(Run(log.workload, log.config, log.profile, follower, checks=False), follower.compare)


def _play_events(recorded: Recorded, events: Iterable[dict[str, Any]], follower: _Follower) -> None:
    """Follow a live log, line by line. A request that was cut off ends where the log says so, not
    where it had got to."""
    workload = recorded.log.workload
    is_cut = np.array([name in recorded.censored for name in workload.request_ids])
    lengths = np.where(is_cut, workload.max_tokens, workload.output_tokens)
    workload = replace(workload, output_tokens=lengths)
    run = Run(workload, recorded.log.config, _NO_CLOCK, follower, checks=False)
    requests = {request.request_id: request for request in run.requests}
    for line in events:
        if "arrived" in line:
            run.admit(requests[line["arrived"]["id"]])
        elif "returned" in line:
            run.finish_until(line["returned"])
        elif "sched" in line:
            run.clock_s = line["t"]
            plan = run.scheduler.begin(run.clock_s)
            run.scheduler.schedule_running(plan)
            run.scheduler.schedule_waiting(plan)
            follower.compare(run.step_log(plan))
            run.start(plan)
        elif line["reason"] not in (*ENDED_REASONS, "unfinished") and line["ended"] in requests:
            run.give_up(requests[line["ended"]], "withdrawn", line["reason"])


def _same(logged: object, ours: object) -> bool:
    """Say whether two values are equal; of two objects, the order of their keys too."""
    if isinstance(logged, dict) and isinstance(ours, dict):
        return list(logged.items()) == list(ours.items())
    return logged == ours


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
