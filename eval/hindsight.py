"""Hindsight: how far could *any* victim rule have gone? A search over victim sequences by replay.

Every replay (eval/replay.py) is a schedule that some rule could have made. The best one found is an
**upper bound** on the least breach possible, the floor a lower one: no rule can beat the floor, and
a schedule with the breach found exists. Only :func:`exhaust`, or a search that meets the floor,
settles the optimum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import InvalidInput
from contracts.files import atomic_write_text
from contracts.randomness import keyed_generator
from eval.replay import Replay, ReplayCase, Script, replay
from serving_sim.profile import profile_document

BASES = ("lifo", "longest-remaining", "remaining-per-sunk", "doomed-first", "doomed-then-slack")
NUM_WALKERS = 3
_SAVE_EVERY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """What a search found; shares of the accepted tagged cohort.

    ``breach`` is that of the best schedule found, whose victims are ``victims``: an upper bound on
    the least possible, which it is when ``is_optimal``. Replay ``improved_at`` found it.
    """

    breach_by_rule: dict[str, float]
    breach: float
    floor: float
    num_replays: int
    improved_at: int
    victims: tuple[int, ...]
    is_optimal: bool

    @property
    def best_rule(self) -> str:
        """The base rule with the least breach; of equals the first."""
        return min(self.breach_by_rule, key=self.breach_by_rule.__getitem__)

    def __str__(self) -> str:
        rules = " .. ".join(
            f"{name} {self.breach_by_rule[name]:.1%}" for name in dict.fromkeys(
                [next(iter(self.breach_by_rule)), self.best_rule])
        )  # fmt: skip
        found = "the optimum is" if self.is_optimal else "no rule can beat the floor; a schedule"
        tail = "" if self.is_optimal else " was found"
        return f"{rules} .. floor {self.floor:.1%}: {found} {self.breach:.1%}{tail}"


def search(
    case: ReplayCase,
    *,
    bases: Sequence[str] = BASES,
    num_replays: int = 2000,
    seed: int = 0,
    journal: Path | None = None,
    on_replay: Callable[[int, int], None] = lambda *_: None,
) -> Hindsight:
    """Walk from the best base rules to schedules with less breach, for ``num_replays`` replays.

    A few walkers start at the rules that breach least. A move changes one decision (those after it
    follow the base rule, or stay as they were) or the class of one request, at times several, and
    is kept unless it makes things worse (two of three walkers may stray a little). ``journal``
    keeps the state: a second call goes on where the first one ended, and finds what one long call
    would have. ``on_replay`` hears replays done and to do.
    Never worse than the best base rule. Raises InvalidInput.
    """
    if num_replays < len(bases) or not bases:
        raise InvalidInput(
            f"num_replays is {num_replays} for {len(bases)} base rules: each is replayed once, so "
            "name a rule and allow more replays than rules"
        )
    walk = _Walk(case, tuple(bases), seed, journal)
    while walk.done < num_replays and walk.may_improve():
        walk.move()
        on_replay(walk.done, num_replays)
        if walk.done % _SAVE_EVERY == 0:
            walk.save()
    walk.save()
    return walk.result()


class _Walk:
    """The state of one search: what each base rule breaches, the walkers, the best schedule."""

    def __init__(
        self, case: ReplayCase, bases: tuple[str, ...], seed: int, journal: Path | None
    ) -> None:
        self._case, self._seed, self._journal = case, seed, journal
        self._key = _content_key(case, bases, seed)
        stored = self._load()
        if stored is None:
            starts = [Script(base) for base in bases]
            runs = [replay(case, start) for start in starts]
            order = sorted(range(len(bases)), key=lambda i: runs[i].cost)
            self.by_rule = {base: run.breach for base, run in zip(bases, runs, strict=True)}
            self._walkers = [starts[i] for i in order[:NUM_WALKERS]]
            self._runs = [runs[i] for i in order[:NUM_WALKERS]]
            self._best, self._found = self._runs[0], len(bases)
            self.done = len(bases)
            return
        self.by_rule, self.done, self._found = stored["by_rule"], stored["done"], stored["found"]
        self._walkers = [_script_of(document) for document in stored["walkers"]]
        self._runs = [replay(case, script) for script in self._walkers]
        self._best = replay(case, _script_of(stored["best"]))

    def may_improve(self) -> bool:
        """Say whether a better schedule is conceivable: the floor is not met, and there is a
        choice."""
        return self._best.missed > self._best.hopeless and any(
            len(running) > 1 for run in self._runs for running in run.running
        )

    def move(self) -> None:
        """Try one change to the walker whose turn it is."""
        at = self.done % len(self._walkers)
        rng = keyed_generator(self._seed, "hindsight-move", self.done)
        self.done += 1
        if not self._runs[at].victims:
            return
        script = self._walkers[at]
        for _ in range(int(rng.geometric(0.5))):  # now and then several, or a dip holds it for ever
            script = _neighbour(script, self._runs[at], rng)
        run = replay(self._case, script)
        # walker 0 only goes down; 1 minds breaches alone; 2 may stray one above the best known
        if run.cost <= self._runs[at].cost or run.missed < self._best.missed + at:
            self._walkers[at], self._runs[at] = script, run
        if run.cost < self._best.cost:
            self._best, self._found = run, self.done

    def result(self) -> Hindsight:
        """Return what was found until now."""
        best = self._best
        return Hindsight(
            breach_by_rule=self.by_rule,
            breach=best.breach,
            floor=best.hopeless / best.accepted,
            num_replays=self.done,
            improved_at=self._found,
            victims=best.victims,
            is_optimal=not self.may_improve(),
        )

    def save(self) -> None:
        """Write the journal, if there is one."""
        if self._journal is None:
            return
        best = Script("lifo", changes=dict(enumerate(self._best.victims)))
        document = {
            "key": self._key,
            "done": self.done,
            "found": self._found,
            "by_rule": self.by_rule,
            "walkers": [asdict(script) for script in self._walkers],
            "best": asdict(best),
        }
        atomic_write_text(self._journal, json.dumps(document) + "\n")

    def _load(self) -> dict[str, Any] | None:
        if self._journal is None or not self._journal.exists():
            return None
        try:
            stored: dict[str, Any] = json.loads(self._journal.read_text(encoding="utf-8"))
            key = stored["key"]
        except (ValueError, KeyError, TypeError):
            key = "no search"
        if key != self._key:
            raise InvalidInput(
                f"{self._journal} is the journal of {key}, not of this search ({self._key}): name "
                "another file, or remove it"
            )
        return stored


def _script_of(document: dict[str, Any]) -> Script:
    classes, changes = (
        {int(number): value for number, value in document[name].items()}
        for name in ("classes", "changes")
    )
    return Script(document["base"], classes, changes)


def _neighbour(script: Script, run: Replay, rng: np.random.Generator) -> Script:
    """Return ``script`` with one decision changed, or the class of one request."""
    number = int(rng.integers(len(run.victims)))
    running = run.running[number]
    request = int(rng.choice(running))
    if rng.random() < 0.5:
        shift = int(rng.choice((-1, 1)))
        moved = max(-1, min(1, script.classes.get(request, 0) + shift))
        return replace(script, classes=script.classes | {request: moved})
    keeps_later = rng.random() < 0.5
    kept = {k: v for k, v in script.changes.items() if keeps_later or k < number}
    return replace(script, changes=kept | {number: request})


def exhaust(case: ReplayCase, *, max_replays: int = 20_000) -> Hindsight:
    """Replay every victim sequence that there is; the result is the optimum. For tiny cells only:
    raises InvalidInput when there are more than ``max_replays`` sequences."""
    best, found, count = None, 0, 0
    path: dict[int, int] | None = {}
    lifo = replay(case, Script("lifo"))
    while path is not None:
        if count == max_replays:
            raise InvalidInput(
                f"there are more than {max_replays} victim sequences: use search(), or a smaller "
                "cell"
            )
        run = replay(case, Script("fifo", changes=path))  # beyond the path, the first that runs
        count += 1
        if best is None or run.cost < best.cost:
            best, found = run, count
        path = _next_path(run)
    assert best is not None
    return Hindsight(
        breach_by_rule={"lifo": lifo.breach},
        breach=best.breach,
        floor=best.hopeless / best.accepted,
        num_replays=count,
        improved_at=found,
        victims=best.victims,
        is_optimal=True,
    )


def _next_path(run: Replay) -> dict[int, int] | None:
    """Return the victim sequence after ``run``'s, counting as an odometer does; None at the end."""
    for number in reversed(range(len(run.victims))):
        running = run.running[number]
        at = running.index(run.victims[number]) + 1
        if at < len(running):
            return dict(enumerate(run.victims[:number])) | {number: running[at]}
    return None


def _content_key(case: ReplayCase, bases: tuple[str, ...], seed: int) -> str:
    """Return a digest of all that decides what a search finds, its length aside."""
    digest = hashlib.sha256()
    workload = case.workload
    columns = [getattr(workload, name) for name in _COLUMNS]
    if case.signal is not None:
        columns += [case.signal.offsets, case.signal.remaining, case.signal.upper]
    for column in columns:
        digest.update(np.ascontiguousarray(column).tobytes())
    settings = (workload.request_ids, case.config, case.deadline_s, case.seed, bases, seed)
    digest.update(repr((settings, profile_document(case.profile), NUM_WALKERS)).encode())
    return digest.hexdigest()[:16]


_COLUMNS = (
    "arrival_s", "prompt_tokens", "output_tokens", "max_tokens", "priority", "deadline_s", "cohort",
)  # fmt: skip
