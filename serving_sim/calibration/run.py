"""A calibration from start to file: bench, journal, fit, profile, report."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import InvalidInput, unknown_name
from serving_sim.calibration.adaptive import (
    CalibrationSettings,
    Fit,
    OnStep,
    calibrate,
    refit,
    silent,
)
from serving_sim.calibration.backends import open_bench
from serving_sim.calibration.bench_config import Bench, BenchConfig
from serving_sim.calibration.capacity import ModelFacts
from serving_sim.calibration.grid import Grid, coarse_grid
from serving_sim.calibration.journal import Journal
from serving_sim.calibration.result import Calibration
from serving_sim.calibration.shapes import published_name, read_config
from serving_sim.calibration.skew import with_skew_share
from serving_sim.profile import save_profile

if TYPE_CHECKING:
    from serving_sim.fit_surface import StepMeasurement
    from serving_sim.surface import ProfileHeader, SurfaceProfile

LONGEST_CONTEXT_TOKENS = 32_768
LONGEST_CHUNK_TOKENS = 8192
_MAX_AXIS = 1000
_STEPS = {
    "torch": "transformers' model over contiguous caches",
    "paged": "transformers' continuous batching",
    "vllm": "vLLM's engine",
}  # whose steps, by backend
_SOFTWARE = ("torch", "transformers", "flash-attn", "vllm", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPlan:
    """Everything a calibration is told: the bench, the bounds of the grid, when to stop, and the
    name and licence that its profile carries. Bounds left None are the model's own, at most
    :data:`LONGEST_CONTEXT_TOKENS` and :data:`LONGEST_CHUNK_TOKENS`."""

    bench: BenchConfig
    max_batch: int = 256
    max_context_tokens: int | None = None
    max_chunk_tokens: int | None = None
    settings: CalibrationSettings = field(default_factory=CalibrationSettings)
    name: str = ""
    licence: str = "not stated"

    @property
    def grid(self) -> Grid:
        """The coarse grid; reads the model's config where a bound is left to it."""
        context = self.max_context_tokens or _context_tokens(self.bench.model)
        chunk = self.max_chunk_tokens or min(LONGEST_CHUNK_TOKENS, context // 2)
        return coarse_grid(self.max_batch, context, chunk)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished calibration, the sizes of its model, and the header of its profile."""

    calibration: Calibration[SurfaceProfile]
    facts: ModelFacts
    header: ProfileHeader


def _context_tokens(model: str) -> int:
    """Return how long a context to time when nobody says; a config that names none fails later."""
    text = read_config(model).get_text_config(decoder=True).to_dict()
    return min(
        LONGEST_CONTEXT_TOKENS, int(text.get("max_position_embeddings", LONGEST_CONTEXT_TOKENS))
    )


def journal_path(profile_path: Path) -> Path:
    """Return where the timings of a profile are kept: beside it."""
    return profile_path.with_suffix(".jsonl")


def open_journal(bench: Bench, grid: Grid, path: Path) -> Journal:
    """Return the journal of ``bench``; its header says all that a later fit needs to know."""
    about = {
        "facts": asdict(bench.facts),
        "grid": asdict(grid),
        "room_tokens": bench.room_tokens,
    }
    return Journal(path, bench.identity | {"grid": str(grid)}, about)


def run_calibration(plan: CalibrationPlan, profile_path: Path, on_step: OnStep = silent) -> Outcome:
    """Time, fit and write the profile; the timings lie beside it (:func:`journal_path`)."""
    started_s = time.monotonic()
    grid = plan.grid
    bench = open_bench(plan.bench, grid.shapes())
    journal = open_journal(bench, grid, journal_path(profile_path))
    calibration = calibrate(
        bench,
        grid,
        fit_with(_header(plan, journal)),
        journal,
        plan.settings,
        uneven=grid.uneven() if bench.takes_uneven else (),
        started_s=started_s,
        on_step=on_step,
    )
    calibration.notes.extend(bench.notes)
    journal.add_clock_state(bench.clock_state)
    if "slowdown" in bench.clock_state or "brake" in bench.clock_state:
        calibration.notes.append(f"the GPU was held back while it was timed: {bench.clock_state}")
    return _finish(calibration, bench.facts, _header(plan, journal), profile_path)


def refit_journal(plan: CalibrationPlan, journal_file: Path, profile_path: Path) -> Outcome:
    """Fit and write the profile of timings made elsewhere; needs no torch and times nothing."""
    journal = Journal(journal_file, None)
    facts, grid, room_tokens = _read_facts(journal), _read_grid(journal), _read_room(journal)
    header = _header(plan, journal)
    calibration = refit(journal, grid, fit_with(header), room_tokens, plan.settings.target_error)
    return _finish(calibration, facts, header, profile_path)


def summary(outcome: Outcome, path: Path) -> dict[str, Any]:
    """Return what a calibration found, as one flat object."""
    result, header = outcome.calibration, outcome.header
    return {
        "profile": str(path),
        "name": header.name,
        "hardware": header.hardware,
        "model": header.model,
        "dtype": header.dtype,
        "kernel": header.kernel,
        "versions": " ".join(f"{name} {version}" for name, version in header.versions.items()),
        "clocks": header.clock_state,
        "steps_timed": len(result.measured) + len(result.mixed) + len(result.uneven),
        "steps_skipped": len(result.skipped),
        "rounds": len(result.rounds),
        "stopped": result.stopped,
        "held_out_error": result.held_out_error,
        "mixed_error": result.mixed_error,
        "skew_share": result.profile.skew_share if result.uneven else "not measured",
        "uneven_error": result.uneven_error,
        "wall_s": round(result.wall_s, 1),
    }


def _finish(
    calibration: Calibration[SurfaceProfile],
    facts: ModelFacts,
    header: ProfileHeader,
    profile_path: Path,
) -> Outcome:
    profile = replace(calibration.profile, header=header)
    calibration.profile, calibration.uneven = with_skew_share(profile, calibration.uneven)
    save_profile(calibration.profile, profile_path)
    return Outcome(calibration, facts, header)


def fit_with(header: ProfileHeader) -> Fit[SurfaceProfile]:
    """Return the fit of a grid: its values are the knots, and what lies between is held out."""
    from serving_sim.fit_surface import fit_surface

    def fit(rows: Sequence[StepMeasurement], grid: Grid) -> SurfaceProfile:
        knots = {
            "chunk_tokens": grid.chunks,
            "prefix_tokens": grid.prefixes,
            "decodes": grid.batches,
            "context_tokens": grid.contexts,
        }
        return fit_surface(rows, header, knots=knots)

    return fit


def _header(plan: CalibrationPlan, journal: Journal) -> ProfileHeader:
    from serving_sim.surface import ProfileHeader

    identity, facts = journal.identity, _read_facts(journal)
    for key in ("model", "hardware", "kernel"):
        if key not in identity:
            raise InvalidInput(f"{journal.path} line 1: the configuration names no {key}")
    if identity.get("backend", "torch") not in _STEPS:
        raise unknown_name(f"backend in {journal.path} line 1", identity["backend"], _STEPS)
    model, hardware = identity["model"], identity["hardware"]
    return ProfileHeader(
        name=plan.name or _slug(f"{hardware}-{model}-{facts.dtype}"),
        hardware=hardware,
        model=published_name(model),
        source=f"preemptbench calibrate ({_STEPS[identity.get('backend', 'torch')]}): whole steps "
        "of a model with random weights",
        licence=plan.licence,
        dtype=facts.dtype,
        kernel=identity["kernel"],
        versions={name: identity[name] for name in _SOFTWARE if name in identity},
        clock_state=" | ".join(dict.fromkeys(journal.clock_states)) or "not recorded",
        num_layers=facts.num_layers,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        weight_bytes=facts.weight_bytes,
    )


def _read_facts(journal: Journal) -> ModelFacts:
    data = journal.about.get("facts")
    known = {f.name: f.type for f in fields(ModelFacts)}
    if not isinstance(data, Mapping) or set(data) != set(known):
        raise InvalidInput(f"{journal.path} line 1: facts must hold {', '.join(known)}")
    for name, kind in known.items():
        if kind == "int":
            _check_count(journal, name, data[name])
        elif not isinstance(data[name], str):
            raise InvalidInput(f"{journal.path} line 1: {name} is {data[name]!r}, not a text")
    return ModelFacts(**data)


def _read_grid(journal: Journal) -> Grid:
    data = journal.about.get("grid")
    axes = ("chunks", "prefixes", "batches", "contexts")
    if not isinstance(data, Mapping) or set(data) != {*axes, "max_context_tokens"}:
        raise InvalidInput(f"{journal.path} line 1: the grid must hold {', '.join(axes)}")
    for axis in axes:
        values = data[axis]
        if not isinstance(values, list) or not 0 < len(values) <= _MAX_AXIS:
            raise InvalidInput(f"{journal.path} line 1: {axis} must hold 1 to {_MAX_AXIS} counts")
        for value in values:
            _check_count(journal, axis, value)
        if values != sorted(set(values)) or (axis != "prefixes" and values[0] == 0):
            raise InvalidInput(f"{journal.path} line 1: {axis} {values} must rise, from above 0")
    _check_count(journal, "max_context_tokens", data["max_context_tokens"])
    values = {axis: tuple(data[axis]) for axis in axes}
    return Grid(**values, max_context_tokens=int(data["max_context_tokens"]))


def _read_room(journal: Journal) -> int:
    room = journal.about.get("room_tokens")
    _check_count(journal, "room_tokens", room)
    return int(room or 0)


def _check_count(journal: Journal, name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise InvalidInput(f"{journal.path} line 1: {name} holds {value!r}; it must be a count")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
