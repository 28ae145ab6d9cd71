"""The TOML file of ``preemptbench sweep``: a study's settings, sources, and a grid of engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput, unknown_name
from contracts.settings import read_toml, updated
from eval.named_policies import checked_policy
from eval.study_config import Source, StudyConfig
from eval.sweep import EngineSetting, SweepConfig
from preemptbench.study_presets import QUICK, drawn_source, own_source
from serving_sim.config import EngineConfig
from serving_sim.fault_rates import FaultSource, faults_from_table
from serving_sim.offload import offload_from_table
from traces.length_profiles import length_laws

_TABLES = ("engine", "grid", "setting", "source", "faults")
_STUDY = tuple(
    f.name for f in fields(StudyConfig) if f.name not in ("engine", "margin_pp", "looks")
)


def read_sweep(path: Path, out_dir: Path) -> SweepConfig:
    """Read a sweep; its drawn runs and fitted predictors go to ``out_dir``/inputs.

    Paths in the file are relative to it. Raises InvalidInput, or UnknownName with the nearest known
    key.
    """
    where = f"sweep {path}"
    table = read_toml(path, "sweep")
    for key in table:
        if key not in (*_TABLES, *_STUDY):
            raise unknown_name(f"key in {where}", key, (*_TABLES, *_STUDY))
    plain = {key: value for key, value in table.items() if key in _STUDY}
    study = updated(replace(QUICK, name=path.stem), plain, where)
    engine = _engine(study.engine, _table(table, "engine", where), f"{where}, engine")
    study = replace(study, engine=engine, observe_s=_observe_s(study, plain))
    for policy in study.policies:
        checked_policy(policy)
    settings = [*_grid(table, engine, where), *_settings(table, engine, where)]
    sources = [
        _source(row, study, path.parent, out_dir, f"{where}, source {number}")
        for number, row in enumerate(_list(table, "source", where))
    ]
    return SweepConfig(study=study, settings=tuple(settings), sources=tuple(sources))


def _observe_s(study: StudyConfig, plain: Mapping[str, Any]) -> float:
    return study.observe_s if "observe_s" in plain else study.deadline_s


def _grid(table: dict[str, Any], engine: EngineConfig, where: str) -> list[EngineSetting]:
    """Return the cross product of the lists of ``[grid]``; the plain engine without any, unless
    there are settings by name."""
    grid = _table(table, "grid", where)
    if not grid and "setting" in table:
        return []
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InvalidInput(f"{where}, grid: {key} is {values!r}; give a list of values")
    found = []
    for values in product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        name = ", ".join(f"{key}={_shown(value)}" for key, value in point.items()) or "base"
        faults = point.pop("faults", table.get("faults", False))
        place = f"{where}, grid at {name}"
        found.append(
            EngineSetting(name, _engine(engine, point, place), _faults(faults, f"{place}, faults"))
        )
    return found


def _settings(table: dict[str, Any], engine: EngineConfig, where: str) -> list[EngineSetting]:
    """Return the engine settings that stand there by name."""
    found = []
    for number, row in enumerate(_list(table, "setting", where)):
        place = f"{where}, setting {number}"
        changes = dict(row)
        name = changes.pop("name", None)
        if not isinstance(name, str):
            raise InvalidInput(f"{place}: name is {name!r}; give it one")
        faults = changes.pop("faults", table.get("faults", False))
        found.append(
            EngineSetting(
                name, _engine(engine, changes, place), _faults(faults, f"{place}, faults")
            )
        )
    return found


def _engine(base: EngineConfig, changes: Mapping[str, Any], where: str) -> EngineConfig:
    """Return ``base`` with ``changes``; false takes a tier, or SGLang's scheduler, away."""
    plain = dict(changes)
    if "num_blocks" in plain:
        raise InvalidInput(f"{where}: num_blocks is set by the pressures; leave it out")
    if "drain_s" in plain:
        raise InvalidInput(f"{where}: drain_s is set by observe_s; leave it out")
    if plain.get("sglang") is False:
        base = replace(base, sglang=None)
        del plain["sglang"]
    if plain.get("offload") is False:
        base = replace(base, offload=None)
        del plain["offload"]
    if "offload" in plain:
        tier = offload_from_table(plain.pop("offload"), f"{where}, offload")
        base = replace(base, offload=tier)
    return updated(base, plain, where)


def _faults(table: object, where: str) -> FaultSource | None:
    return None if table is False or table == {} else faults_from_table(table, where)


def _source(row: dict[str, Any], study: StudyConfig, base: Path, out: Path, where: str) -> Source:
    for key in row:
        if key not in ("law", "runs", "checkpoints"):
            raise unknown_name(f"key in {where}", key, ("law", "runs", "checkpoints"))
    if ("law" in row) == ("runs" in row):
        raise InvalidInput(f"{where}: give either law (a bundled one) or runs (a run log)")
    if "law" in row:
        laws = {law.name: law for law in length_laws()}
        if row["law"] not in laws:
            raise unknown_name(f"law in {where}", str(row["law"]), laws)
        source = drawn_source(laws[row["law"]], study, out / "inputs")
    else:
        source = own_source(base / str(row["runs"]), study, out)
    named = _table(row, "checkpoints", where)
    more = tuple((name, base / str(folder)) for name, folder in named.items())
    return replace(source, checkpoints=(*source.checkpoints, *more))


def _table(table: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: {key} is {value!r}; write a table [{key}]")
    return value


def _list(table: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    rows = table.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidInput(f"{where}: {key} must be a list of tables, [[{key}]]")
    return rows


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return "{" + " ".join(f"{key}={_shown(item)}" for key, item in value.items()) + "}"
    return "[" + " ".join(map(_shown, value)) + "]" if isinstance(value, list) else f"{value}"
