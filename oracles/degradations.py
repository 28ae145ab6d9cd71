"""The axes of the degradation ladder: each a frozen class of a number or two.

Every one errs to both sides unless its name says otherwise. Noise is drawn from (seed, axis, run),
never in the order of events, so all policies meet the same errors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_generator, keyed_uniform
from contracts.signals import RemainingSignal, SignalRequest

_Requests = Sequence[SignalRequest]


def _at_least(low: float, default: Any = MISSING) -> Any:
    """Declare a number of an axis, checked when one is made."""
    return _number(lambda x: x >= low, f"at least {low:g}", default)


def _above(low: float) -> Any:
    return _number(lambda x: x > low, f"above {low:g}", MISSING)


def _between(low: float, high: float) -> Any:
    return _number(lambda x: low <= x <= high, f"between {low:g} and {high:g}", MISSING)


def _number(holds: Callable[[float], bool], words: str, default: Any) -> Any:
    return field(default=default, metadata={"holds": holds, "words": words})


@dataclass(frozen=True, slots=True)
class Degradation(ABC):
    """One axis at one strength: frozen numbers, each held to the bound it was declared with,
    written as ``axis(number, …)``."""

    axis: ClassVar[str]

    def __post_init__(self) -> None:
        for number in numbers_of(type(self)):
            if not number.metadata["holds"](getattr(self, number.name)):
                raise InvalidInput(
                    f"degradation {label(self)} breaks its bound: {number.name} must be "
                    f"{number.metadata['words']}"
                )

    @abstractmethod
    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """Return degraded answers (n,); bounds are kept by the caller."""


@dataclass(frozen=True, slots=True)
class Noise(Degradation):
    """``noise(sigma)``: times exp(sigma z), one normal z a run, the same all its life."""

    axis: ClassVar[str] = "noise"
    sigma: float = _at_least(0)

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        return base.remaining(requests, ages) * np.exp(
            self.sigma * _normals(requests, seed, self.axis)
        )


@dataclass(frozen=True, slots=True)
class Wander(Degradation):
    """``wander(sigma, tokens)``: times exp(sigma z), z a stationary walk over the run's life whose
    correlation falls to 1/e over ``tokens``; the error heals, where that of ``noise`` stays."""

    axis: ClassVar[str] = "wander"
    sigma: float = _at_least(0)
    tokens: int = _at_least(1, default=256)

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        # the walk moves once in an eighth of its memory: a first-order autoregression
        step = max(1, self.tokens // 8)
        keep = math.exp(-step / self.tokens)
        owner, firsts = _owners(requests)
        at = ages // step
        last = np.zeros(len(firsts), dtype=np.int64)
        np.maximum.at(last, owner, at)
        z = np.empty(len(requests))
        by_owner = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])
        for index, rows in enumerate(by_owner):
            key = requests[firsts[index]].run_id
            draws = keyed_generator(seed, "wander", key).standard_normal(last[index] + 1)
            draws[1:] *= math.sqrt(1.0 - keep**2)
            walk = _autoregression(draws, keep)
            z[rows] = walk[at[rows]]
        return base.remaining(requests, ages) * np.exp(self.sigma * z)


@dataclass(frozen=True, slots=True)
class Swap(Degradation):
    """``swap(tau)``: ranks swapped to a Kendall tau of ``tau``, the distribution of answers kept.

    An answer's rank among ``reference`` (sorted answers of the base) is taken to a normal score,
    mixed with the run's own noise at correlation sin(pi tau / 2), which gives that tau, and read
    back at the mixed rank. Rows stay independent: the order against a whole population is swapped,
    not that within one batch, so the tau of one small set scatters around it.
    """

    axis: ClassVar[str] = "swap"
    tau: float = _between(-1, 1)
    reference: tuple[float, ...] = ()

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        from scipy.special import ndtr, ndtri

        _check_reference(self, self.reference, 2)
        known = np.array(self.reference)
        at = (np.arange(len(known)) + 0.5) / len(known)
        answers = base.remaining(requests, ages)
        low = np.searchsorted(known, answers, side="left")
        high = np.searchsorted(known, answers, side="right")
        own = _uniforms(requests, seed, "swap-tie")  # where in its tie an answer stands
        rank = (low + (high - low) * own) / len(known)
        rank = np.where(high > low, rank, np.interp(answers, known, at))
        rho = math.sin(math.pi * self.tau / 2.0)
        z = ndtri(np.clip(rank, 1e-6, 1 - 1e-6))
        mixed = rho * z + math.sqrt(1.0 - rho**2) * _normals(requests, seed, self.axis)
        return np.asarray(np.interp(ndtr(mixed), at, known))


@dataclass(frozen=True, slots=True)
class Shrink(Degradation):
    """``shrink(share)``: log answers drawn to what is usual at that age until ``share`` of their
    distance is left. Usual is the mean of log(total - age) over the totals of ``reference`` (what
    the base says at age 0) above the age; beyond the last of them answers stay. A predictor that
    minimises its error does so where it knows little: its answers vary less than the truth."""

    axis: ClassVar[str] = "shrink"
    share: float = _between(0, 1)
    reference: tuple[float, ...] = ()

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        del seed
        _check_reference(self, self.reference, 1)
        answers = base.remaining(requests, ages)
        known = np.array(self.reference)
        distinct, at = np.unique(ages, return_inverse=True)
        usual = np.full(len(distinct), np.nan)
        for index, age in enumerate(distinct.tolist()):
            left = known[np.searchsorted(known, age, side="right") :] - age
            if left.size:
                usual[index] = np.log(left).mean()
        centre = np.where(np.isnan(usual[at]), np.log(answers), usual[at])
        return np.asarray(np.exp(centre + self.share * (np.log(answers) - centre)))


@dataclass(frozen=True, slots=True)
class Bias(Degradation):
    """``bias(factor)``: times ``factor``: below 1 optimistic, above 1 pessimistic. Order stays."""

    axis: ClassVar[str] = "bias"
    factor: float = _above(0)

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        del seed
        return base.remaining(requests, ages) * self.factor


@dataclass(frozen=True, slots=True)
class Optimistic(Degradation):
    """``optimistic(sigma)``: one-sided noise, times exp(-sigma |z|): never too long."""

    axis: ClassVar[str] = "optimistic"
    sigma: float = _at_least(0)

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        z = np.abs(_normals(requests, seed, "noise"))
        return base.remaining(requests, ages) * np.exp(-self.sigma * z)


@dataclass(frozen=True, slots=True)
class Pessimistic(Degradation):
    """``pessimistic(sigma)``: one-sided noise, times exp(sigma |z|): never too short."""

    axis: ClassVar[str] = "pessimistic"
    sigma: float = _at_least(0)

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        z = np.abs(_normals(requests, seed, "noise"))
        return base.remaining(requests, ages) * np.exp(self.sigma * z)


@dataclass(frozen=True, slots=True)
class Buckets(Degradation):
    """``buckets(count)``: one of ``count`` classes, equal in log length from 1 to max_tokens; the
    answer is the geometric middle of its class. One class tells nothing."""

    axis: ClassVar[str] = "buckets"
    count: int = _at_least(1)

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        del seed
        width = np.log(np.maximum(2, caps_of(requests))) / self.count
        slot = np.minimum(np.log(base.remaining(requests, ages)) // width, self.count - 1)
        return np.exp((slot + 0.5) * width)


@dataclass(frozen=True, slots=True)
class Stale(Degradation):
    """``stale(tokens)``: what was said that many tokens ago, as it was said then."""

    axis: ClassVar[str] = "stale"
    tokens: int = _at_least(0)

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        del seed
        return base.remaining(requests, np.maximum(0, ages - self.tokens))


@dataclass(frozen=True, slots=True)
class Refresh(Degradation):
    """``refresh(tokens)``: asked again every that many tokens, counted down in between."""

    axis: ClassVar[str] = "refresh"
    tokens: int = _at_least(1)

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        del seed
        asked = ages // self.tokens * self.tokens
        return base.remaining(requests, asked) - (ages - asked)


@dataclass(frozen=True, slots=True)
class Missing(Degradation):
    """``missing(share, tokens)``: no answer for that share of runs, or with ``tokens`` above 0 of
    stretches that long of a run; the cap itself, max_tokens - age, stands in."""

    axis: ClassVar[str] = "missing"
    share: float = _between(0, 1)
    tokens: int = _at_least(0, default=0)

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        stretch = ages // self.tokens if self.tokens else np.zeros(len(ages), dtype=np.int64)
        seen: dict[tuple[str, int], bool] = {}
        absent = np.zeros(len(requests), dtype=bool)
        for row, (request, index) in enumerate(zip(requests, stretch.tolist(), strict=True)):
            key = (request.run_id, index)
            if key not in seen:
                seen[key] = keyed_uniform(seed, self.axis, *key) < self.share
            absent[row] = seen[key]
        return np.where(absent, caps_of(requests) - ages, base.remaining(requests, ages))


@dataclass(frozen=True, slots=True)
class Anti(Degradation):
    """``anti``: the order turned round, long for short: max_tokens / answer."""

    axis: ClassVar[str] = "anti"

    def apply(
        self, base: RemainingSignal, requests: _Requests, ages: IntArray, seed: int
    ) -> FloatArray:
        """See Degradation."""
        del seed
        return caps_of(requests) / base.remaining(requests, ages)


AXES: dict[str, type[Degradation]] = {
    how.axis: how
    for how in (
        Noise, Wander, Swap, Shrink, Bias, Optimistic, Pessimistic, Buckets, Stale, Refresh,
        Missing, Anti,
    )
}  # fmt: skip


def label(how: Degradation) -> str:
    """Return ``how`` as :func:`parse_degradations` reads it: its axis, and its numbers up to the
    last that is not the default."""
    numbers = numbers_of(type(how))
    while numbers and getattr(how, numbers[-1].name) == numbers[-1].default:
        numbers.pop()
    texts = [f"{getattr(how, number.name):g}" for number in numbers]
    return f"{how.axis}({', '.join(texts)})" if texts else how.axis


def numbers_of(axis: type[Degradation]) -> list[Field[Any]]:
    """Return the fields that are written in a spec: all but the population."""
    return [f for f in fields(axis) if f.name != "reference"]


def _check_reference(how: Degradation, reference: tuple[float, ...], least: int) -> None:
    if len(reference) < least:
        raise InvalidInput(
            f"{label(how)} knows no answers of its base: call with_reference(signal, requests, "
            "ages) first"
        )


def caps_of(requests: _Requests) -> IntArray:
    return np.array([request.max_tokens for request in requests], dtype=np.int64)


def _owners(requests: _Requests) -> tuple[IntArray, list[int]]:
    """Return which distinct run each row (n,) belongs to, and the first row of each."""
    index: dict[str, int] = {}
    firsts: list[int] = []
    owner = np.empty(len(requests), dtype=np.int64)
    for row, request in enumerate(requests):
        slot = index.setdefault(request.run_id, len(index))
        if slot == len(firsts):
            firsts.append(row)
        owner[row] = slot
    return owner, firsts


def _normals(requests: _Requests, seed: int, purpose: str) -> FloatArray:
    """Return the run's own normal number for ``purpose`` (n,)."""
    owner, firsts = _owners(requests)
    own = [keyed_generator(seed, purpose, requests[i].run_id).standard_normal() for i in firsts]
    return np.array(own)[owner] if firsts else np.zeros(0)


def _uniforms(requests: _Requests, seed: int, purpose: str) -> FloatArray:
    owner, firsts = _owners(requests)
    own = [keyed_uniform(seed, purpose, requests[i].run_id) for i in firsts]
    return np.array(own)[owner] if firsts else np.zeros(0)


def _autoregression(draws: FloatArray, keep: float) -> FloatArray:
    """Return x with x[0] = draws[0] and x[j] = keep x[j-1] + draws[j]."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], [1.0, -keep], draws))
