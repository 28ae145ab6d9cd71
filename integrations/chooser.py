"""Victims for a real engine: a policy of serving_sim, a checkpoint, a fallback, and counters.

It knows no engine: it is handed running requests in admission order and returns a position. What
goes wrong inside a policy or a predictor ends here: it is counted, logged once, and the fallback
decides. Nothing is raised into the engine.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from contracts.choice import TPOT_WINDOW_STEPS, choose_victim
from contracts.errors import InvalidInput
from contracts.files import atomic_write_text
from contracts.policy import RunningViews
from integrations.counters import Counters
from integrations.estimates import Estimates, Late, Unsound
from integrations.live import EngineRequest, LiveViews, Tracked
from integrations.settings import DeploySettings
from predictors.registry import load_predictor
from serving_sim.policies import get_policy

log = logging.getLogger("vllm.preemptbench")  # vLLM shows what is logged below "vllm"

PREPARE_BLOCKS = 2  # free blocks a running request; a decode takes one in 16 steps


class Chooser:
    """Chooses victims and remembers what for; one for each scheduler. ``now_s`` reads the clock
    that arrivals are stamped with."""

    def __init__(
        self, settings: DeploySettings, model: str, now_s: Callable[[], float] = time.time
    ) -> None:
        self.settings, self._now_s = settings, now_s
        self.policy = get_policy(settings.policy)
        self.fallback = get_policy(settings.fallback)
        if self.fallback.reads_signal:
            raise InvalidInput(
                f"fallback {self.fallback.name!r} reads a signal: it decides when the signal "
                "cannot, so choose one that reads none, such as lifo"
            )
        self.counters = Counters()
        self.estimates = self._load(model)
        self.tracked: dict[str, Tracked] = {}
        self._numbers = itertools.count()
        self._returning: dict[str, Tracked] = {}  # preempted, not yet computed up to their peak
        self._recent_steps_s: deque[float] = deque(maxlen=TPOT_WINDOW_STEPS)
        self._last_step_s: float | None = None
        self._next_report_s = time.monotonic() + settings.report_every_s
        self._said: set[str] = set()

    def _load(self, model: str) -> Estimates | None:
        """Read the checkpoint of a policy that needs one, and warm it up."""
        settings = self.settings
        if not self.policy.reads_signal:
            if settings.checkpoint:
                log.warning(
                    "policy %s reads no signal: the checkpoint is not loaded", settings.policy
                )
            return None
        if not settings.checkpoint:
            raise InvalidInput(
                f"policy {settings.policy!r} reads a signal: set PREEMPTBENCH_CHECKPOINT to a "
                "predictor's folder (preemptbench train), or choose a policy that reads none"
            )
        predictor = load_predictor(Path(settings.checkpoint))
        estimates = Estimates(predictor, model, settings, self.counters)
        estimates.warm_up()
        self.counters.predictor_worst_s = 0.0
        if estimates.blind_features:
            log.warning(
                "the predictor reads %s, which a scheduler cannot see: they are missing here",
                ", ".join(estimates.blind_features),
            )
        return estimates

    @property
    def reads_sampling(self) -> bool:
        """True when the predictor reads what tokens were drawn from."""
        return self.estimates is not None and bool(self.estimates.sampled_features)

    def unsampled(self) -> None:
        """Take note of a request whose log-probabilities the predictor reads and will not see."""
        self.counters.without_logprobs += 1
        names = ", ".join(self.estimates.sampled_features) if self.estimates is not None else ""
        self._say_once("a request asks for no log-probabilities: %s are missing for it", names)

    def arrived(self, request: EngineRequest, deadline_s: float = math.nan) -> Tracked:
        """Remember a request, unless it is known; ``deadline_s`` is absolute, NaN for none."""
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            tracked = self.tracked[request.request_id] = Tracked(next(self._numbers), deadline_s)
        return tracked

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self.tracked.pop(request_id, None)
        self._returning.pop(request_id, None)

    def prepare(self, running: Sequence[EngineRequest], num_free_blocks: int) -> None:
        """Ask the predictor ahead, a budget's worth a step, once the pool may soon be short: so
        that the step which needs a victim need not ask for everybody at once."""
        if self.estimates is None:
            return
        self.estimates.new_step()
        if num_free_blocks >= PREPARE_BLOCKS * len(running):
            return
        # whoever needs the answer meets the same error, and counts it
        with contextlib.suppress(Exception):
            self.estimates.refresh(running, self.arrived)

    def choose(self, running: Sequence[EngineRequest], count_blocks: Callable[[str], int]) -> int:
        """Return the position of the victim in ``running``, which is in admission order."""
        start_s = time.perf_counter()
        self.counters.decisions += 1
        views = self._views(running, count_blocks)
        try:
            position, met_nan = self._ask_policy(running, views)
            self.counters.fallback_unsound += met_nan
        except Late:
            self.counters.fallback_late += 1
            self._say_once("the predictor's budget of %d us was spent", self.settings.budget_us)
            position = self._fall_back(views)
        except Unsound:
            self.counters.fallback_unsound += 1
            self._say_once("the predictor %s gave an answer that is no length", "of the checkpoint")
            position = self._fall_back(views)
        except Exception as error:  # a plug-in's fault must not take the engine down
            self.counters.fallback_error += 1
            self._say_once("choosing a victim failed with %s", f"{type(error).__name__}: {error}")
            position = self._fall_back(views)
        self.counters.unlike_lifo += position != len(running) - 1
        self.counters.decision_seconds += time.perf_counter() - start_s
        return position

    def _views(
        self, running: Sequence[EngineRequest], count_blocks: Callable[[str], int]
    ) -> RunningViews:
        steps = self._recent_steps_s
        views = LiveViews(
            running,
            self.arrived,
            count_blocks,
            self._now_s(),
            recent_tpot_s=sum(steps) / max(1, len(steps)),
            prefill_s_per_token=self.settings.prefill_s_per_token,
            seed=self.settings.seed,
            reads_deadline=self.policy.reads_deadline,
        )
        return cast(RunningViews, views)

    def _ask_policy(
        self, running: Sequence[EngineRequest], views: RunningViews
    ) -> tuple[int, bool]:
        if self.estimates is not None and not self.estimates.refresh(running, self.arrived):
            self.counters.old_answers += 1
        return choose_victim(self.policy, views)

    def _fall_back(self, views: RunningViews) -> int:
        return choose_victim(self.fallback, views)[0]

    def preempted(self, request: EngineRequest, computed_tokens: int) -> None:
        """Take note that ``request`` lost the KV of ``computed_tokens``."""
        self.counters.preemptions += 1
        tracked = self.arrived(request)
        tracked.peak_tokens = max(tracked.peak_tokens, computed_tokens)
        self._returning[request.request_id] = tracked

    def planned(self, scheduled: Mapping[str, int], requests: Mapping[str, EngineRequest]) -> None:
        """Take note of a planned step; ``requests`` count this step's tokens as computed."""
        self.counters.steps += 1
        step_s = time.monotonic()
        if scheduled and self._last_step_s is not None:
            self._recent_steps_s.append(step_s - self._last_step_s)
        self._last_step_s = step_s if scheduled else None
        for name, tracked in list(self._returning.items()):
            tokens = scheduled.get(name, 0)
            if tokens:
                after = requests[name].num_computed_tokens
                again = min(after, tracked.peak_tokens) - (after - tokens)
                self.counters.recomputed_tokens += max(0, again)
                if after >= tracked.peak_tokens:
                    tracked.peak_tokens = 0
                    del self._returning[name]
        self.report_if_due()

    def report_if_due(self) -> None:
        """Report, if ``report_every_s`` went by since the last time."""
        if time.monotonic() >= self._next_report_s:
            self.report()

    def report(self) -> None:
        """Log the counters, and write them where ``metrics`` says."""
        self._next_report_s = time.monotonic() + self.settings.report_every_s
        log.info("%s", self.counters.line(self.settings.policy))
        if not self.settings.metrics:
            return
        try:
            text = self.counters.prometheus(self.settings.policy)
            atomic_write_text(Path(self.settings.metrics), text)
        except OSError as error:
            self._say_once("the counters cannot be written: %s", error)

    def _say_once(self, message: str, value: object) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning(f"{message}; counted from now on, not said again", value)
