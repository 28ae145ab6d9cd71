"""The engine of ``simulate``: which scheduler, and its settings from a TOML file or --set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from contracts.errors import InvalidInput
from contracts.settings import assigned, read_toml, updated
from serving_sim.config import EngineConfig, SglangSettings

_ELSEWHERE = {"num_blocks": "--blocks", "drain_s": "--deadline"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a settings file may hold: the table ``[engine]``, with ``[engine.sglang]`` in it."""

    engine: EngineConfig


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --engine, --config and --set to a click command's function."""
    options = (
        click.option(
            "--engine", "scheduler", type=click.Choice(["vllm", "sglang"]),
            help="Whose scheduler plans (docs/sglang.md). Default: vllm, unless the settings have "
            "a table engine.sglang.",
        ),
        click.option(
            "--config", "config_path", type=click.Path(path_type=Path),
            help="TOML file with the engine's settings, in tables [engine] and [engine.sglang].",
        ),
        click.option(
            "--set", "assignments", multiple=True, metavar="KEY=VALUE",
            help="Change one setting, e.g. engine.max_num_seqs=32 or "
            "engine.sglang.schedule_conservativeness=0.5. Repeatable; wins over --config.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def chosen_engine(
    base: EngineConfig,
    scheduler: str | None,
    config_path: Path | None,
    assignments: Sequence[str],
) -> EngineConfig:
    """Return ``base`` with what the options say; raises InvalidInput or UnknownName."""
    engine = replace(base, sglang=SglangSettings()) if scheduler == "sglang" else base
    settings = Settings(engine)
    if config_path is not None:
        where = f"settings file {config_path}"
        settings = updated(settings, read_toml(config_path, "settings file"), where)
    engine = assigned(settings, assignments).engine
    if scheduler == "vllm" and engine.sglang is not None:
        raise InvalidInput("--engine is vllm, but the settings hold engine.sglang: drop one")
    for name, option in _ELSEWHERE.items():
        if getattr(engine, name) != getattr(base, name):
            raise InvalidInput(
                f"engine.{name} is {getattr(engine, name)!r}, but each cell sets it: use {option}"
            )
    return engine
