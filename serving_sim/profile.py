"""Step-time profiles: what one engine step costs, in seconds, and where the number comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from contracts.errors import InvalidInput, unknown_name
from contracts.files import atomic_write_text
from serving_sim.config import EngineConfig
from serving_sim.models import model_key
from traces.safe_json import parse_json

if TYPE_CHECKING:
    from serving_sim.surface import SurfaceProfile

MAX_PROFILE_BYTES = 8 << 20
_T = TypeVar("_T")


class StepWork(NamedTuple):
    """What one step computes. A request that computes a single token counts as a decode (it costs
    what one costs); context is each request's KV in tokens, this step's own included. The longest
    decode's is for profiles that tell uneven batches from even ones; 0 where nobody counted it."""

    prefill_tokens: int
    prefill_context_tokens: int
    num_decodes: int
    decode_context_tokens: int
    num_requests: int
    max_decode_context_tokens: int = 0


@runtime_checkable
class StepProfile(Protocol):
    """The cost of a step. Implementations are hashable and pure: equal work, equal seconds."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def prefill_s_per_token(self) -> float:
        """Marginal seconds of one more prefill token: what throwing a token away costs."""
        ...

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of a step; at least 0."""
        ...


@runtime_checkable
class TimesAlone(Protocol):
    """A profile that sums up the steps of a lone request by itself, faster and bit for bit."""

    def alone_s(self, prompt_tokens: int, output_tokens: int, budget_tokens: int) -> float:
        """Return the seconds of the request, its prefill in chunks of ``budget_tokens``."""
        ...


@dataclass(frozen=True, slots=True)
class FitReport:
    """How an affine profile was fitted, and how far off it is where it was not (held out).

    Errors are relative, |predicted - measured| / measured, for steps of decodes only and for steps
    with a prefill chunk. The ranges bound the fitted points.
    """

    num_fitted: int
    num_held_out: int
    decode_median_error: float
    decode_p90_error: float
    prefill_median_error: float
    prefill_p90_error: float
    max_prefill_tokens: int
    max_num_decodes: int
    max_context_tokens_per_request: int


@dataclass(frozen=True, slots=True)
class AffineProfile:
    """seconds = fixed + per_token * tokens + per_context_token * KV tokens + per_request * batch.

    ``source``, ``licence``, ``hardware`` and ``model`` say whose seconds they are.
    """

    name: str
    fixed_s: float
    per_token_s: float
    per_context_token_s: float
    per_request_s: float = 0.0
    source: str = "given by the caller"
    licence: str = "not stated"
    hardware: str = "not stated"
    model: str = "not stated"
    fit: FitReport | None = None

    def __post_init__(self) -> None:
        for field in ("fixed_s", "per_token_s", "per_context_token_s", "per_request_s"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
                raise InvalidInput(
                    f"profile {self.name!r}: {field} is {value!r}; give seconds >= 0, finite"
                )
        if self.fixed_s + self.per_token_s <= 0.0:
            raise InvalidInput(
                f"profile {self.name!r}: fixed_s and per_token_s are both 0, so time would stand "
                "still; give at least one of them"
            )

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds of one more token in a step."""
        return self.per_token_s

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of a step; the sum's order is part of the definition."""
        prefill, prefill_context, decodes, decode_context, requests, _ = work
        return (
            self.fixed_s
            + self.per_token_s * (prefill + decodes)
            + self.per_context_token_s * (prefill_context + decode_context)
            + self.per_request_s * requests
        )


def single_stream_s(
    prompt_tokens: int, output_tokens: int, config: EngineConfig, profile: StepProfile
) -> float:
    """Return the seconds a request takes alone, with ample KV, from its first step to its end."""
    return _alone_s(prompt_tokens, output_tokens, config.lone_chunk_tokens, profile)


@lru_cache(maxsize=65_536)
def _alone_s(prompt_tokens: int, output_tokens: int, budget: int, profile: StepProfile) -> float:
    if isinstance(profile, TimesAlone):
        return profile.alone_s(prompt_tokens, output_tokens, budget)
    clock_s = 0.0
    computed, known = 0, prompt_tokens
    while known < prompt_tokens + output_tokens:
        tokens = min(known - computed, budget)
        computed += tokens
        is_decode = tokens == 1
        clock_s += profile.step_s(
            StepWork(0, 0, 1, computed, 1) if is_decode else StepWork(tokens, computed, 0, 0, 1)
        )
        known += computed == known
    return clock_s


def save_profile(profile: AffineProfile | SurfaceProfile, path: Path) -> None:
    """Write ``profile`` as JSON; the file is whole or absent."""
    if isinstance(profile, AffineProfile):
        text = json.dumps(asdict(profile), indent=1) + "\n"
    else:
        from serving_sim.surface_file import surface_text

        text = surface_text(profile)
    atomic_write_text(path, text)


def profile_document(profile: AffineProfile | SurfaceProfile) -> dict[str, Any]:
    """Return all that a profile says, as plain values."""
    if isinstance(profile, AffineProfile):
        return asdict(profile)
    from serving_sim.surface_file import surface_document

    return surface_document(profile)


def list_profiles() -> tuple[str, ...]:
    """Return the names of the bundled profiles."""
    folder = resources.files("serving_sim") / "profiles"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_profile(name_or_path: str | Path) -> AffineProfile | SurfaceProfile:
    """Load a bundled profile by name, or a JSON file by path (anything that ends in .json).

    A file with a ``format`` is a SurfaceProfile, one without an AffineProfile. Raises UnknownName
    for a name that is not bundled, InvalidInput for a file that breaks a rule.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".json"):
        path = Path(name_or_path)
        if not path.is_file():
            raise InvalidInput(
                f"profile {path} does not exist: give a JSON file or one of "
                f"{', '.join(list_profiles())}"
            )
        if path.stat().st_size > MAX_PROFILE_BYTES:
            raise InvalidInput(
                f"profile {path} has {path.stat().st_size} bytes; the bound is {MAX_PROFILE_BYTES}"
            )
        return _parse(path.read_text(encoding="utf-8", errors="replace"), str(path))
    if text not in list_profiles():
        raise unknown_name("profile", text, list_profiles())
    return _bundled(text)


@lru_cache
def _bundled(name: str) -> AffineProfile | SurfaceProfile:
    file = resources.files("serving_sim") / "profiles" / f"{name}.json"
    return _parse(file.read_text(encoding="utf-8"), name)


def model_name(profile: AffineProfile | SurfaceProfile) -> str:
    """Return the short name of the profile's model: no owner, no remarks, no variant."""
    return model_key((str(profile.model).split() or [""])[0])


def check_model(profile: AffineProfile | SurfaceProfile, model: str) -> None:
    """Refuse a profile that was measured with another model than ``model``."""
    if model_key(model) != model_name(profile):
        raise InvalidInput(
            f"profile {profile.name!r} holds step times of {profile.model!r}, not of {model!r}; "
            "choose a profile of that model ('preemptbench profiles' lists them)"
        )


def strictly(profile: AffineProfile | SurfaceProfile) -> SurfaceProfile:
    """Return the profile that refuses steps beyond its measured range."""
    if isinstance(profile, AffineProfile):
        raise InvalidInput(
            f"profile {profile.name!r} is affine and keeps no range to be strict about; choose a "
            "profile with measured tables"
        )
    return replace(profile, strict=True)


def _parse(text: str, where: str) -> AffineProfile | SurfaceProfile:
    data = parse_json(text, f"profile {where}")
    if isinstance(data, Mapping) and "format" in data:
        from serving_sim.surface_file import parse_surface

        return parse_surface(data, where)
    _check_keys(data, AffineProfile, where)
    report = data.pop("fit", None)
    if report is not None:
        _check_keys(report, FitReport, f"{where}, fit")
        report = _build(FitReport, report, f"{where}, fit")
    return _build(AffineProfile, data | {"fit": report}, where)


def _check_keys(data: object, kind: type, where: str) -> None:
    if not isinstance(data, Mapping):
        raise InvalidInput(f"profile {where} is a {type(data).__name__}: write a JSON object")
    known = [field.name for field in fields(kind)]
    for key in data:
        if key not in known:
            raise unknown_name(f"profile key in {where}", str(key), known)


def _build(kind: type[_T], data: Mapping[str, object], where: str) -> _T:
    try:
        return kind(**data)
    except TypeError as error:
        raise InvalidInput(f"profile {where} is incomplete: {error}") from None
