"""What a matrix is: its settings, and what cannot be crossed. eval.matrix runs it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import InvalidInput, unknown_name
from eval.named_policies import find_policy
from eval.signal_sources import NO_SIGNAL, SignalSource
from serving_sim.config import EngineConfig
from serving_sim.fault_rates import FaultSource
from serving_sim.jump import ENGINES
from serving_sim.profile import AffineProfile, load_profile, strictly
from serving_sim.surface import SurfaceProfile
from traces.arrivals import trace_rate_per_s
from traces.deadlines import DeadlineClass, check_classes


@dataclass(frozen=True, slots=True)
class Pressure:
    """A named size of the KV pool, in blocks (vLLM's null block included)."""

    name: str
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixConfig:
    """What a matrix is. Rates in requests per second, times in seconds.

    Requests are drawn with replacement from the run log: warm-up first, then the tagged cohort,
    then as much filler as keeps arriving until the last tagged request has met its deadline. With
    ``trace``, requests are a stretch of a measured trace instead (a seed picks where it begins),
    its gaps and lengths untouched; nobody ran its prompts, so no signal can answer for them.
    ``simulator`` names the implementation, "jump" or "step"; their results are equal. With
    ``strict_profile``, a step beyond the range that the profile was measured in is an error.
    ``faults`` strike all cells of a seed alike; an offload tier is a setting of ``engine``. Tagged
    requests are watched for ``observe_s`` (by default ``deadline_s``): records can be rescored up
    to there. With ``deadline_classes`` every request has the deadline of its class, is scored at
    that, and ``deadline_s`` is not used.
    """

    runs: Path
    policies: tuple[str, ...]
    signals: tuple[SignalSource, ...]
    pressures: tuple[Pressure, ...]
    engine: EngineConfig
    profile: str
    num_seeds: int = 10
    first_seed: int = 0
    rate_per_s: float = 1.0
    arrival_cv: float = 1.0
    num_warmup: int = 40
    num_tagged: int = 160
    deadline_s: float = 10.0
    observe_s: float | None = None
    grid_stride: int = 8
    trace: Path | None = None
    simulator: str = "jump"
    strict_profile: bool = False
    faults: FaultSource | None = None
    deadline_classes: tuple[DeadlineClass, ...] = ()

    def __post_init__(self) -> None:
        if self.num_seeds < 1:
            raise InvalidInput(f"num_seeds is {self.num_seeds}: it must be at least 1")
        if self.simulator not in ENGINES:
            raise unknown_name("simulator", self.simulator, tuple(ENGINES))
        if not self.policies or not self.signals or not self.pressures:
            raise InvalidInput("a matrix needs at least one policy, one signal and one pressure")
        check_classes(self.deadline_classes)
        if self.watched_s < self.longest_deadline_s:
            raise InvalidInput(
                f"observe_s is {self.observe_s} s, below the deadline of {self.longest_deadline_s} "
                "s: a request must be watched at least that long"
            )
        if self.engine.scheduling == "priority":
            raise InvalidInput(
                "engine scheduling is 'priority', but the requests of a run log or a trace have no "
                "priorities: use 'fcfs', or simulate a driver workload that gives them"
            )
        if not self.runs.exists():
            raise InvalidInput(f"run log {self.runs} does not exist: collect or import one")
        for kind, names in (
            ("policy", self.policies),
            ("signal", [signal.name for signal in self.signals]),
            ("pressure", [pressure.name for pressure in self.pressures]),
        ):
            if len(set(names)) < len(names):
                raise InvalidInput(f"a {kind} stands twice in {', '.join(names)}: name each once")
        if self.trace is not None and any(s.name != NO_SIGNAL for s in self.signals):
            raise InvalidInput(
                f"no signal can answer for the requests of trace {self.trace}: use {NO_SIGNAL!r} "
                "only, and policies that read none"
            )
        crossed = {policy for policy, _ in self.crossings()}
        for name in self.policies:
            if name not in crossed:
                reads = find_policy(name).reads_signal
                if self.trace is not None:
                    raise InvalidInput(
                        f"policy {name!r} reads a signal, and none can answer for a trace: use "
                        "policies that read none, or a run log"
                    )
                raise InvalidInput(
                    f"policy {name!r} {'reads a signal' if reads else 'reads no signal'}, but the "
                    f"signals are {', '.join(signal.name for signal in self.signals)}: add "
                    f"{'one that answers, such as oracle' if reads else 'none'}"
                )

    def step_profile(self) -> AffineProfile | SurfaceProfile:
        """Load the profile, as strict as asked for."""
        profile = load_profile(self.profile)
        return strictly(profile) if self.strict_profile else profile

    @property
    def watched_s(self) -> float:
        """How long a tagged request is watched after its arrival, at least."""
        return self.longest_deadline_s if self.observe_s is None else self.observe_s

    @property
    def longest_deadline_s(self) -> float:
        """The deadline, or the longest of the classes."""
        return max((c.deadline_s for c in self.deadline_classes), default=self.deadline_s)

    @property
    def num_filler(self) -> int:
        """Arrivals while the last tagged request is watched, plus four standard deviations."""
        rate_per_s = self.rate_per_s if self.trace is None else trace_rate_per_s(self.trace)
        expected = rate_per_s * self.watched_s
        return math.ceil(expected + 4 * math.sqrt(expected) * max(1.0, self.arrival_cv))

    def crossings(self) -> list[tuple[str, SignalSource]]:
        """Return every (policy, signal) pair: only policies that read a signal meet the signals;
        the others run once, without."""
        pairs = []
        for name in self.policies:
            reads = find_policy(name).reads_signal
            for signal in self.signals:
                if reads == (signal.name != NO_SIGNAL):
                    pairs.append((name, signal))
        return pairs
