"""A step-time profile as measured surfaces: piecewise-linear tables with a header that says whose.

seconds = tokens(prefill + decodes) + head(requests) + attention(prefill chunk, decodes)

Attention is a plane over (chunk, prefix) for prefill, one over (decodes, context) for decodes, and,
where steps with both were measured, a table over all four; without it, the two planes add up.
serving_sim/kernels/surface.py holds the arithmetic, serving_sim/surface_file.py the file format.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from serving_sim.kernels.surface import alone_seconds, many_step_seconds, step_seconds
from serving_sim.profile import StepWork

# name of each table, in the kernel's order, and its axes (tokens, or requests)
TABLES: Mapping[str, tuple[str, ...]] = {
    "tokens": ("tokens",),
    "head": ("requests",),
    "prefill": ("chunk_tokens", "prefix_tokens"),
    "decode": ("decodes", "context_tokens"),
    "mixed": ("chunk_tokens", "prefix_tokens", "decodes", "context_tokens"),
}
OPTIONAL = ("mixed",)
MAX_CELLS = 200_000
MAX_GRAPH_SIZES = 1024


@dataclass(frozen=True, slots=True)
class ProfileHeader:
    """Whose seconds a profile holds. ``versions`` go by software name; ``clock_state`` says how the
    GPU's clocks stood; None where nobody knows. KV bytes are of all layers and of all GPUs, as are
    the weights; with tensor parallelism each GPU holds its share."""

    name: str
    hardware: str
    model: str
    source: str
    licence: str
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    kernel: str = "not stated"
    versions: Mapping[str, str] = field(default_factory=dict)
    clock_state: str = "not stated"
    num_layers: int | None = None
    kv_bytes_per_token: int | None = None
    weight_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors |fitted - measured| / measured of whole-step seconds, over ``num_points``
    measured points that no table was fitted to."""

    num_points: int
    median: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Seconds over a grid: ``seconds`` has one dimension for each of ``axes``, which rise."""

    axes: tuple[tuple[float, ...], ...]
    seconds: FloatArray


@dataclass(frozen=True, slots=True)
class MeasuredRange:
    """The largest step that was measured, each quantity by itself."""

    tokens: float
    chunk_tokens: float
    prefix_tokens: float
    decodes: float
    context_tokens: float


@dataclass(frozen=True, slots=True, eq=False)
class SurfaceProfile:
    """The cost of a step from measured surfaces. ``tables`` go by the names of TABLES.

    ``graph_batch_sizes`` are the captured CUDA graphs: a step of decodes only is padded to the
    next. ``skew_share`` is how far an uneven batch of decodes goes from its mean KV to all of them
    being as long as the longest. ``errors`` go by surface. Beyond the measured range the tables go
    on linearly; the first such step of a profile warns, or is refused if ``strict``. Equal profiles
    have equal tables and names.
    """

    header: ProfileHeader
    tables: Mapping[str, Table]
    errors: Mapping[str, FitError] = field(default_factory=dict)
    skew_share: float = 0.0
    graph_batch_sizes: tuple[int, ...] = ()
    strict: bool = False
    flat: FloatArray = field(init=False, repr=False)
    digest: str = field(init=False, repr=False)
    range: MeasuredRange = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check(self)
        flat = _flatten(self)
        identity = f"{self.header.name}\0{self.strict}\0".encode() + flat.tobytes()
        tables = self.tables
        reach = MeasuredRange(
            tables["tokens"].axes[0][-1],
            *(axis[-1] for axis in tables["prefill"].axes),
            *(axis[-1] for axis in tables["decode"].axes),
        )
        object.__setattr__(self, "flat", flat)
        object.__setattr__(self, "digest", hashlib.sha256(identity).hexdigest()[:16])
        object.__setattr__(self, "range", reach)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SurfaceProfile) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def name(self) -> str:
        """The header's name."""
        return self.header.name

    @property
    def source(self) -> str:
        """Whose measurements, where."""
        return self.header.source

    @property
    def licence(self) -> str:
        """The licence of the measurements."""
        return self.header.licence

    @property
    def hardware(self) -> str:
        """The GPU."""
        return self.header.hardware

    @property
    def model(self) -> str:
        """The model that was timed."""
        return self.header.model

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds of one more token, averaged over the measured range of the token curve."""
        curve = self.tables["tokens"]
        span = curve.axes[0][-1] - curve.axes[0][0]
        return float(curve.seconds[-1] - curve.seconds[0]) / span

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of a step; raises InvalidInput beyond the range if strict."""
        if self.strict or self.digest not in _warned:
            self._check_range(work)
        return float(step_seconds(self.flat, *work))

    def steps_s(self, work: IntArray) -> FloatArray:
        """Return the seconds of many steps; ``work`` has shape (steps, 6), StepWork's fields."""
        seconds: FloatArray = many_step_seconds(self.flat, work)
        return seconds

    def alone_s(self, prompt_tokens: int, output_tokens: int, budget_tokens: int) -> float:
        """Return the seconds a request takes alone, in chunks of ``budget_tokens`` at most."""
        tokens = prompt_tokens + output_tokens
        if self.strict or self.digest not in _warned:
            chunk = min(prompt_tokens, budget_tokens)
            self._check_range(StepWork(chunk, prompt_tokens, 0, 0, 1))
            self._check_range(StepWork(0, 0, 1, tokens, 1, tokens))
        return float(alone_seconds(self.flat, prompt_tokens, output_tokens, budget_tokens))

    def note_reach(self, reached: MeasuredRange) -> None:
        """Warn, or refuse if strict, when the steps of a run went beyond the measured range."""
        if self.strict or self.digest not in _warned:
            self._note(_beyond(self.range, asdict(reached)))

    def _check_range(self, work: StepWork) -> None:
        self._note(beyond_range(self.range, work))

    def _note(self, beyond: str) -> None:
        if not beyond:
            return
        message = f"profile {self.name!r}: {beyond}"
        if self.strict:
            raise InvalidInput(f"{message}; without strict, seconds go on linearly from there")
        _warned.add(self.digest)
        warnings.warn(f"{message}: seconds go on linearly from there (said once)", stacklevel=4)


_warned: set[str] = set()  # digests of the profiles that have warned in this process


def beyond_range(measured: MeasuredRange, work: StepWork) -> str:
    """Return in words what of ``work`` lies beyond the measured range; empty if nothing does."""
    prefill, prefill_context, decodes, decode_context, requests, _ = work
    prefills = requests - decodes
    mean_prefix = (prefill_context - prefill) / prefills if prefills > 0 else 0.0
    found = {
        "tokens": prefill + decodes,
        "chunk_tokens": prefill,
        "prefix_tokens": mean_prefix,
        "decodes": decodes,
        "context_tokens": decode_context / decodes if decodes else 0.0,
    }
    return _beyond(measured, found)


def _beyond(measured: MeasuredRange, found: Mapping[str, float]) -> str:
    return ", ".join(
        f"a step has {value:.0f} {name}, measured up to {getattr(measured, name):.0f}"
        for name, value in found.items()
        if value > getattr(measured, name)
    )


def _check(profile: SurfaceProfile) -> None:
    where = f"profile {profile.header.name!r}"
    missing = [name for name in TABLES if name not in (*profile.tables, *OPTIONAL)]
    unknown = [name for name in profile.tables if name not in TABLES]
    if missing or unknown:
        raise InvalidInput(
            f"{where}: tables {missing} are missing, {unknown} are unknown; "
            f"give {', '.join(TABLES)} (mixed may be left out)"
        )
    if sum(table.seconds.size for table in profile.tables.values()) > MAX_CELLS:
        raise InvalidInput(f"{where}: the tables hold more than {MAX_CELLS} cells; thin the grid")
    for name, table in profile.tables.items():
        _check_table(table, TABLES[name], f"{where}, table {name!r}")
    curve = profile.tables["tokens"]
    if len(curve.axes[0]) < 2 or curve.seconds[0] <= 0.0:
        raise InvalidInput(f"{where}: table 'tokens' needs two points, and seconds above 0 in each")
    if not 0.0 <= profile.skew_share <= 1.0:
        raise InvalidInput(f"{where}: skew_share is {profile.skew_share!r}; give 0 to 1")
    sizes = profile.graph_batch_sizes
    rising = all(a < b for a, b in pairwise((0, *sizes)))
    if not rising or len(sizes) > MAX_GRAPH_SIZES or not all(type(size) is int for size in sizes):
        raise InvalidInput(
            f"{where}: graph_batch_sizes must be at most {MAX_GRAPH_SIZES} whole numbers above 0 "
            f"that rise, and are {str(sizes)[:80]}"
        )


def _check_table(table: Table, axes: tuple[str, ...], where: str) -> None:
    """Refuse what is no measurement: wrong sizes, holes, negative or falling seconds."""
    if table.seconds.shape != tuple(map(len, table.axes)) or table.seconds.ndim != len(axes):
        raise InvalidInput(
            f"{where}: seconds have shape {table.seconds.shape}, the axes "
            f"{tuple(map(len, table.axes))}; give one value for each point of {', '.join(axes)}"
        )
    if table.seconds.size == 0:
        raise InvalidInput(f"{where} is empty: give at least one point on each axis")
    for name, axis in zip(axes, table.axes, strict=True):
        if not all(math.isfinite(x) and x >= 0 for x in axis):
            raise InvalidInput(f"{where}: {name} holds a value that is not finite and >= 0")
        if not all(a < b for a, b in pairwise(axis)):
            raise InvalidInput(f"{where}: {name} must rise from point to point")
    bad = ~np.isfinite(table.seconds) | (table.seconds < 0.0)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        point = {name: axis[i] for name, axis, i in zip(axes, table.axes, at, strict=True)}
        raise InvalidInput(
            f"{where}: {table.seconds[at]} s at {point}; every point needs seconds >= 0, finite "
            "(a hole must be measured, or its line left out)"
        )
    for i, name in enumerate(axes):
        if (np.diff(table.seconds, axis=i) < 0.0).any():
            raise InvalidInput(
                f"{where}: seconds fall as {name} grows, which no more work can cause; refit it"
            )


def _flatten(profile: SurfaceProfile) -> FloatArray:
    """Return the tables as the kernel reads them."""
    sizes: list[float] = []
    parts: list[FloatArray] = [np.array(profile.graph_batch_sizes, dtype=np.float64)]
    for name, axes in TABLES.items():
        table = profile.tables.get(name)
        sizes += [0] * len(axes) if table is None else map(len, table.axes)
        if table is not None:
            parts += [np.array(axis, dtype=np.float64) for axis in table.axes]
            parts.append(np.ascontiguousarray(table.seconds, dtype=np.float64).ravel())
    header = [profile.skew_share, len(profile.graph_batch_sizes), *sizes]
    flat = np.concatenate([np.array(header, dtype=np.float64), *parts])
    flat.setflags(write=False)
    return flat
