"""RemainingSignal: anything that answers "how many tokens remain?", and the grid the engine reads.

A signal is asked for requests at their ages. It may read a request's progress up to that age and
nothing after it; :func:`contracts.conformance.check_signal` tests that by editing the future.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.runs import DecodeRun, ProgressRecord

NUM_PROGRESS = len(ProgressRecord._fields)
TEXT_STRIDE = 16  # tokens between two readings of a text whose run has no progress stride


@dataclass(frozen=True, slots=True, eq=False)
class ProgressTrack:
    """The progress records of one run: ``values[j]`` (shape (m, 6), fields of ProgressRecord)
    describes output tokens [j * stride, (j + 1) * stride)."""

    stride: int
    values: FloatArray

    def seen(self, age: int) -> FloatArray:
        """Return the records closed by ``age`` tokens, oldest first."""
        return self.values[: age // self.stride]


@dataclass(frozen=True, slots=True, eq=False)
class TextTrack:
    """What one run wrote: its first (j + 1) * stride tokens are ``text[: ends[j]]``."""

    stride: int
    text: str
    ends: IntArray

    def seen(self, age: int) -> str:
        """Return the text of the strides closed by ``age`` tokens."""
        closed = min(age // self.stride, len(self.ends))
        return self.text[: self.ends[closed - 1]] if closed else ""


def text_track(text: str, output_tokens: int, stride: int) -> TextTrack:
    """Return the track of a stored text whose token borders nobody kept: every token is taken to
    be as long as the run's mean token."""
    tokens = np.arange(stride, output_tokens + 1, stride, dtype=np.int64)
    return TextTrack(stride, text, len(text) * tokens // output_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class HiddenStates:
    """Hidden states of one run: ``states[j]`` (m, layers, width) float16 has read its first
    (j + 1) * stride tokens less one; ``layers`` are counted from the embeddings, 0."""

    stride: int
    layers: tuple[int, ...]
    states: np.ndarray

    def seen(self, age: int) -> np.ndarray:
        """Return the states of the strides closed by ``age`` tokens."""
        return self.states[: age // self.stride]


@dataclass(frozen=True, slots=True)
class HiddenTrack:
    """Where the hidden states of one run lie: a safetensors file that is read when asked."""

    path: str

    def load(self) -> HiddenStates:
        """Return them; raises InvalidInput when the file is absent or is none."""
        return _read_hidden(self.path)


@lru_cache(maxsize=1024)
def _read_hidden(path: str) -> HiddenStates:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            about, states = file.metadata() or {}, file.get_tensor("states")
        layers = tuple(int(layer) for layer in about["layers"].split(","))
        found = HiddenStates(int(about["stride"]), layers, states)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InvalidInput(
            f"{path} holds no hidden states ({error}): keep the folder 'hidden' beside the run "
            "log, or collect again"
        ) from None
    if states.ndim != 3 or states.shape[1] != len(layers) or found.stride < 1:
        raise InvalidInput(
            f"{path} holds states of shape {states.shape} for {len(layers)} layers: collect again"
        )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class SignalRequest:
    """What a signal may know of a request: who asks, what was asked, and its progress so far.

    ``run_id`` names the run that executes. Only the clairvoyant signal looks it up.
    """

    run_id: str
    request_key: str
    prompt_id: str
    prompt_sha256: str
    benchmark: str
    family: str
    model: str
    prompt_tokens: int
    max_tokens: int
    prompt: str | None = None
    progress: ProgressTrack | None = None
    text: TextTrack | None = None
    hidden: HiddenTrack | None = None


def signal_request(run: DecodeRun) -> SignalRequest:
    """Return the request of a decode run: everything but how it ended."""
    progress = None
    if run.progress is not None and run.progress_stride is not None:
        values = np.array(run.progress, dtype=np.float64).reshape(-1, NUM_PROGRESS)
        progress = ProgressTrack(run.progress_stride, values)
    text = None
    if run.text is not None:
        text = text_track(run.text, run.output_tokens, run.progress_stride or TEXT_STRIDE)
    return SignalRequest(
        run_id=run.run_id,
        request_key=run.request_key,
        prompt_id=run.prompt_id,
        prompt_sha256=run.prompt_sha256,
        benchmark=run.benchmark,
        family=run.family,
        model=run.model,
        prompt_tokens=run.prompt_tokens,
        max_tokens=run.max_new_tokens,
        prompt=run.prompt,
        progress=progress,
        text=text,
        hidden=None if run.hidden_ref is None else HiddenTrack(run.hidden_ref),
    )


@dataclass(frozen=True, slots=True)
class AnyRuns:
    """Run ids of several sources; ask with ``in``."""

    sources: tuple[Container[str], ...]

    def __contains__(self, run_id: object) -> bool:
        return any(run_id in source for source in self.sources)


@runtime_checkable
class RemainingSignal(Protocol):
    """Expected served remaining length of running requests.

    ``name`` labels tables. ``source_run_ids`` holds the runs the signal was built from, so that
    the matrix can refuse to score it on one of them; it is asked with ``in``. ``clairvoyant`` is
    True only for the signal that reads the executing run's own length.
    """

    @property
    def name(self) -> str: ...

    @property
    def source_run_ids(self) -> Container[str]: ...

    @property
    def clairvoyant(self) -> bool: ...

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Return float64 (n,): expected tokens still to come, 1 <= r <= max(1, max_tokens - age).

        ``ages`` (n,) are output tokens generated so far, 0 <= age < max_tokens.
        """
        ...


@runtime_checkable
class DistributionalSignal(RemainingSignal, Protocol):
    """A signal that also answers with the distribution of the served remaining length."""

    def quantile(
        self, requests: Sequence[SignalRequest], ages: IntArray, level: float
    ) -> FloatArray:
        """Return float64 (n,): the smallest r with P(remaining <= r) >= level."""
        ...

    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        """Return float64 (n,): P(remaining > horizon), ``horizon`` (n,) in tokens."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RemainingGrid:
    """A signal's answers for every request of a workload at every ``stride`` tokens of age.

    Request i at age a reads ``remaining[offsets[i] + a // stride]`` (``offsets`` is (n + 1,)) and
    counts down the ``a % stride`` tokens written since. ``upper`` is a quantile at ``upper_level``
    (NaN when the signal has none). Request i was answered from the runs ``sources[source_of[i]]``.
    """

    name: str
    stride: int
    offsets: IntArray
    remaining: FloatArray
    upper: FloatArray
    upper_level: float
    sources: tuple[Container[str], ...]
    source_of: IntArray
    clairvoyant: bool = False

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise InvalidInput(f"grid stride is {self.stride}: it must be at least 1 token")
        if len(self.offsets) != len(self.source_of) + 1 or self.offsets[-1] != len(self.remaining):
            raise InvalidInput(
                f"grid {self.name!r}: {len(self.offsets)} offsets end at {self.offsets[-1]} for "
                f"{len(self.source_of)} requests and {len(self.remaining)} answers; give one "
                "offset a request and the total"
            )
        bad = np.flatnonzero(~(np.isfinite(self.remaining) & (self.remaining >= 1.0)))
        if bad.size:
            row = int(np.searchsorted(self.offsets, bad[0], side="right")) - 1
            raise InvalidInput(
                f"signal {self.name!r} answers {self.remaining[bad[0]]} for request {row} "
                f"({bad.size} such answers): every answer must be finite and at least 1 token"
            )

    def read(self, request: int, age: int) -> tuple[float, float]:
        """Return (remaining, upper) of one request at ``age``, counted down inside the stride.

        Raises InvalidInput beyond the horizon the grid was built for.
        """
        slot = self.offsets[request] + age // self.stride
        if slot >= self.offsets[request + 1]:
            raise InvalidInput(
                f"signal {self.name!r} has no answer for request {request} at age {age}: its grid "
                "was built for another workload or a shorter horizon; build it for this one"
            )
        down = age % self.stride
        upper = self.upper[slot] - down
        return max(1.0, self.remaining[slot] - down), upper if not upper < 1.0 else 1.0


def age_rows(tokens: IntArray, stride: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return the rows of ages 0, stride, ... below ``tokens`` (n,) of each request: where each
    request's rows begin (n + 1,), and request and age (r,) of every row."""
    counts = -(-tokens // stride)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    owner = np.repeat(np.arange(len(tokens)), counts)
    return offsets, owner, (np.arange(offsets[-1]) - offsets[owner]) * stride


def build_grid(
    signal: RemainingSignal,
    requests: Sequence[SignalRequest],
    *,
    stride: int = 8,
    horizons: IntArray | None = None,
    upper_level: float = 0.9,
) -> RemainingGrid:
    """Ask ``signal`` once for all ``requests`` at ages 0, stride, … up to each horizon.

    ``horizons`` (n,) is the last age that will be read; by default max_tokens - 1. A longer
    horizon only appends answers, so it tells the signal nothing.
    """
    caps = np.array([request.max_tokens for request in requests], dtype=np.int64)
    last = caps - 1 if horizons is None else np.minimum(horizons, caps - 1)
    offsets, owner, ages = age_rows(np.maximum(last, 0) + 1, stride)
    asked = [requests[i] for i in owner.tolist()]
    remaining = signal.remaining(asked, ages)
    upper = np.full(len(asked), np.nan)
    if isinstance(signal, DistributionalSignal):
        upper = signal.quantile(asked, ages, upper_level)
    sources, source_of = _sources(signal, requests)
    return RemainingGrid(
        name=signal.name,
        stride=stride,
        offsets=offsets,
        remaining=remaining,
        upper=upper,
        upper_level=upper_level,
        sources=sources,
        source_of=source_of,
        clairvoyant=signal.clairvoyant,
    )


class RoutedSignal:
    """Cross-fitting: each request is answered by the signal of the fold that never saw its prompt.

    ``fold_of`` maps a prompt's SHA-256 to an index into ``signals``.
    """

    def __init__(
        self, name: str, signals: Sequence[RemainingSignal], fold_of: Mapping[str, int]
    ) -> None:
        self.name = name
        self.signals = tuple(signals)
        self.fold_of = dict(fold_of)
        self.clairvoyant = any(signal.clairvoyant for signal in signals)

    @property
    def source_run_ids(self) -> frozenset[str]:
        """Every run any fold was built from; ask :meth:`fold` for what one request leans on."""
        sources = [signal.source_run_ids for signal in self.signals]
        named = [ids for ids in sources if isinstance(ids, frozenset)]
        if len(named) < len(sources):
            raise InvalidInput(f"a fold of {self.name!r} keeps hashes of its runs: ask that fold")
        return frozenset().union(*named)

    def fold(self, request: SignalRequest) -> int:
        """Return the index of the signal that answers for ``request``."""
        if request.prompt_sha256 not in self.fold_of:
            raise InvalidInput(
                f"prompt {request.prompt_id!r} belongs to no fold of {self.name!r}: "
                "cross-fit on a run log that holds it"
            )
        return self.fold_of[request.prompt_sha256]

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        """Answer fold by fold; see RemainingSignal."""

        def ask(signal: RemainingSignal, rows: IntArray) -> FloatArray:
            return signal.remaining([requests[i] for i in rows.tolist()], ages[rows])

        return self._by_fold(requests, ask)

    def quantile(
        self, requests: Sequence[SignalRequest], ages: IntArray, level: float
    ) -> FloatArray:
        """Answer fold by fold; NaN from a fold that has no distribution."""

        def ask(signal: RemainingSignal, rows: IntArray) -> FloatArray:
            if not isinstance(signal, DistributionalSignal):
                return np.full(len(rows), np.nan)
            return signal.quantile([requests[i] for i in rows.tolist()], ages[rows], level)

        return self._by_fold(requests, ask)

    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        """Answer fold by fold; NaN from a fold that has no distribution."""

        def ask(signal: RemainingSignal, rows: IntArray) -> FloatArray:
            if not isinstance(signal, DistributionalSignal):
                return np.full(len(rows), np.nan)
            chosen = [requests[i] for i in rows.tolist()]
            return signal.survival(chosen, ages[rows], horizon[rows])

        return self._by_fold(requests, ask)

    def _by_fold(
        self,
        requests: Sequence[SignalRequest],
        ask: Callable[[RemainingSignal, IntArray], FloatArray],
    ) -> FloatArray:
        out = np.empty(len(requests))
        folds = np.array([self.fold(request) for request in requests], dtype=np.int64)
        for index, signal in enumerate(self.signals):
            rows = np.flatnonzero(folds == index)
            if rows.size:
                out[rows] = ask(signal, rows)
        return out


class WrappedSignal:
    """A signal made of another's answers: same runs behind it, same claim to clairvoyance.

    A subclass adds ``name`` and ``remaining``. Where its base routes a request to a fold, the grid
    of the wrapper leans on that fold's runs only.
    """

    def __init__(self, base: RemainingSignal) -> None:
        self.base = base

    @property
    def source_run_ids(self) -> Container[str]:
        """The runs of the base."""
        return self.base.source_run_ids

    @property
    def clairvoyant(self) -> bool:
        """True when the base reads the executing run's own length."""
        return self.base.clairvoyant


def _sources(
    signal: object, requests: Sequence[SignalRequest]
) -> tuple[tuple[Container[str], ...], IntArray]:
    while isinstance(signal, WrappedSignal):
        signal = signal.base
    if isinstance(signal, RoutedSignal):
        folds = np.array([signal.fold(request) for request in requests], dtype=np.int64)
        return tuple(fold.source_run_ids for fold in signal.signals), folds
    assert isinstance(signal, RemainingSignal)
    return (signal.source_run_ids,), np.zeros(len(requests), dtype=np.int64)
