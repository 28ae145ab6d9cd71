"""A predictor's answers for live requests: streamed progress, cached, within a time budget.

An answer is computed at ages that are multiples of ``refresh_tokens`` and counted down between, as
the simulator's grids are, so that it depends on the request and its age only, not on when it was
asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from contracts.signals import ProgressTrack, SignalRequest
from integrations.counters import Counters
from integrations.live import EngineRequest, Tracked
from integrations.settings import DeploySettings
from integrations.visible import SAMPLED_FIELDS, UNSEEN_FIELDS, VisibleProgress
from predictors.base import Predictor
from predictors.features import PROGRESS_FEATURES, PROMPT_FEATURES

CHUNK_ROWS = 4  # requests a call: the budget is looked at between two calls
LONG_CALL = 4.0  # a call that takes so many budgets is followed by ...
REST_FACTOR = 20.0  # ... so many times its own rest: a slow predictor costs 5 % of the time


class _Asked(NamedTuple):
    """A request whose answer is due, at the multiple of the refresh that it reached."""

    request: EngineRequest
    tracked: Tracked
    age: int


class Late(Exception):
    """The budget was spent before all requests had an answer."""


class Unsound(Exception):
    """The predictor gave an answer that no signal may give."""


class Estimates:
    """Keeps ``remaining`` and ``upper`` of tracked requests fresh; asks for the stale ones only."""

    def __init__(
        self,
        predictor: Predictor,
        model: str,
        settings: DeploySettings,
        counters: Counters,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.predictor, self.settings, self._counters = predictor, settings, counters
        self.model = known_model(predictor, model)
        self._clock = clock
        self._rests_until_s = -math.inf
        self._spent_s = 0.0  # in this step
        names = predictor.settings().get("features")
        self.features = tuple(map(str, names)) if isinstance(names, list) else ()
        self._streams = any(name in PROGRESS_FEATURES for name in self.features)

    @property
    def blind_features(self) -> tuple[str, ...]:
        """Features that the predictor reads and a scheduler cannot supply: they are NaN here."""
        hidden = {f"{kind}_{name}" for kind in ("last", "mean") for name in UNSEEN_FIELDS}
        hidden |= {"num_newlines", "newlines_short_of_number"}
        hidden |= set(PROMPT_FEATURES) - {"prompt_tokens"}
        return tuple(name for name in self.features if name in hidden)

    @property
    def sampled_features(self) -> tuple[str, ...]:
        """Features that are there for requests that ask for log-probabilities, NaN for others."""
        sampled = {f"{kind}_{name}" for kind in ("last", "mean") for name in SAMPLED_FIELDS}
        sampled |= {"entropy_trend", "logprob_trend"}
        return tuple(name for name in self.features if name in sampled)

    def warm_up(self) -> None:
        """Ask once, so that what is compiled or loaded on first use is; raises what it raises."""
        request = self._signal_request("warm-up", 16, 64)
        answer = self._ask([request], np.array([0]))
        _check(answer[0])

    def new_step(self) -> None:
        """Start a step: the whole budget is there again."""
        self._spent_s = 0.0

    def refresh(
        self, running: Sequence[EngineRequest], track: Callable[[EngineRequest], Tracked]
    ) -> bool:
        """Give every request an answer for the last multiple of ``refresh_tokens`` it reached.

        Returns False when the step's budget is spent first and some answers are one multiple old;
        raises Late when some are older, or missing (those had so far are kept), Unsound on an
        answer that is no finite number of at least 1, and whatever the predictor raises.
        """
        stride = self.settings.refresh_tokens
        stale = []
        for request in running:
            tracked, age = track(request), request.num_output_tokens
            if age - tracked.answered_age >= stride or tracked.answered_age < 0:
                stale.append(_Asked(request, tracked, age // stride * stride))
        stale.sort(key=lambda one: one.tracked.answered_age - one.age)  # the most overdue first
        for at in range(0, len(stale), CHUNK_ROWS):
            if self._spent_s > self._budget_s or self._clock() < self._rests_until_s:
                late = stale[at]
                if late.tracked.answered_age < max(0, late.age - stride):
                    raise Late
                return False
            self._answer(stale[at : at + CHUNK_ROWS])
        return True

    @property
    def _budget_s(self) -> float:
        return 1e-6 * self.settings.budget_us

    def _answer(self, stale: list[_Asked]) -> None:
        start_s = self._clock()
        counters = self._counters
        try:
            ages = np.array([one.age for one in stale], dtype=np.int64)
            remaining, upper = self._ask([self._known_of(*one) for one in stale], ages)
        finally:
            took_s = self._clock() - start_s
            counters.predictor_calls += 1
            counters.predictor_rows += len(stale)
            counters.predictor_seconds += took_s
            counters.predictor_worst_s = max(counters.predictor_worst_s, took_s)
            self._spent_s += took_s
            if took_s > LONG_CALL * self._budget_s:
                self._rests_until_s = start_s + (1.0 + REST_FACTOR) * took_s
        _check(remaining)
        for one, answer, high in zip(stale, remaining.tolist(), upper.tolist(), strict=True):
            tracked = one.tracked
            tracked.answered_age, tracked.remaining, tracked.upper = one.age, answer, high

    def _ask(self, asked: list[SignalRequest], ages: np.ndarray) -> tuple[FloatArray, FloatArray]:
        remaining = np.asarray(self.predictor.remaining(asked, ages), dtype=np.float64)
        level = self.settings.upper_level
        if not level:
            return remaining, np.full(len(asked), math.nan)
        return remaining, self.predictor.quantile(asked, ages, level)

    def _known_of(self, request: EngineRequest, tracked: Tracked, age: int) -> SignalRequest:
        """Return what the predictor may know of ``request`` at ``age``."""
        if not self._streams:
            if tracked.asked is None:
                tracked.asked = self._signal_request(
                    request.request_id, request.num_prompt_tokens, request.max_tokens
                )
            known: SignalRequest = tracked.asked
            return known
        return self._signal_request(
            request.request_id,
            request.num_prompt_tokens,
            request.max_tokens,
            self._progress(request, tracked, age),
        )

    def _progress(self, request: EngineRequest, tracked: Tracked, age: int) -> ProgressTrack | None:
        """Return the records that the request closed up to ``age``, as far as they can be seen."""
        values = self.visible(tracked).read(request.output_token_ids, age)
        return ProgressTrack(self.settings.progress_stride, values) if len(values) else None

    def visible(self, tracked: Tracked) -> VisibleProgress:
        """Return what is seen of the request's progress, to be told what it was drawn from."""
        if tracked.progress is None:
            settings = self.settings
            marks = [m if m >= 0 else None for m in (settings.think_open, settings.think_close)]
            tracked.progress = VisibleProgress(settings.progress_stride, *marks)
        return tracked.progress

    def _signal_request(
        self, request_id: str, prompt_tokens: int, cap: int, progress: ProgressTrack | None = None
    ) -> SignalRequest:
        return SignalRequest(
            run_id=request_id,
            request_key=request_id,
            prompt_id=request_id,
            prompt_sha256="",
            benchmark="",
            family="",
            model=self.model,
            prompt_tokens=prompt_tokens,
            max_tokens=cap,
            progress=progress,
        )


def known_model(predictor: Predictor, model: str) -> str:
    """Return the name under which the predictor knows ``model``: its own, or, for a checkpoint
    of one model, that one's (a server may call it by a path). Raises InvalidInput otherwise."""
    models = predictor.provenance.models
    if model in models:
        return model
    if len(models) == 1:
        return models[0]
    raise InvalidInput(
        f"the checkpoint was trained on {', '.join(models) or 'no model'}; the engine serves "
        f"{model!r}: serve one of them under its name, or train a checkpoint for this one"
    )


def _check(remaining: FloatArray) -> None:
    if not bool(np.all(np.isfinite(remaining) & (remaining >= 1.0))):
        raise Unsound
