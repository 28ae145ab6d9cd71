"""How a deployed victim rule is set: environment variables over vLLM's ``additional_config``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from contracts.errors import InvalidInput
from contracts.settings import require_at_least, updated

PREFIX = "PREEMPTBENCH_"
TABLE = "preemptbench"  # the key of additional_config that holds the same settings


@dataclass(frozen=True, slots=True)
class DeploySettings:
    """Each field is also an environment variable, PREEMPTBENCH_POLICY and so on.

    ``policy`` picks victims, ``fallback`` (which may read no signal) when the signal cannot answer.
    ``checkpoint`` is a predictor's folder. An answer is computed at multiples of
    ``refresh_tokens`` and counted down between. ``budget_us`` bounds the predictor's time in one
    step. ``upper_level`` asks for a quantile as well (0: none). ``decisions`` and ``metrics`` are
    files to write: the decision log, and counters as Prometheus text; empty: none. ``seed`` keys
    the draws of randomised policies. ``prefill_s_per_token`` is what policies that weigh
    recomputation read (from ``preemptbench profiles``; NaN: unknown). ``think_open`` and
    ``think_close`` are token ids of the thinking marks (-1: none).
    """

    policy: str = "lifo"
    checkpoint: str = ""
    refresh_tokens: int = 64
    budget_us: int = 1000
    fallback: str = "lifo"
    decisions: str = ""
    metrics: str = ""
    report_every_s: float = 60.0
    seed: int = 0
    upper_level: float = 0.0
    prefill_s_per_token: float = math.nan
    progress_stride: int = 8
    think_open: int = -1
    think_close: int = -1

    def __post_init__(self) -> None:
        require_at_least(self, refresh_tokens=1, budget_us=1, progress_stride=1)
        if not self.report_every_s > 0.0:
            raise InvalidInput(f"report_every_s is {self.report_every_s}: it must be above 0 s")
        if not 0.0 <= self.upper_level < 1.0:
            raise InvalidInput(
                f"upper_level is {self.upper_level}: it must be a quantile in (0, 1), or 0 for none"
            )


def read_settings(
    additional_config: object = None, environ: Mapping[str, str] = os.environ
) -> DeploySettings:
    """Return the settings of ``additional_config["preemptbench"]``, overridden by ``environ``.

    Raises InvalidInput for an unknown key or a value of another type.
    """
    table = additional_config.get(TABLE, {}) if isinstance(additional_config, dict) else {}
    if not isinstance(table, dict):
        raise InvalidInput(f"additional_config[{TABLE!r}] is {table!r:.80}; it must be an object")
    settings = updated(DeploySettings(), table, f"additional_config[{TABLE!r}]")
    changes: dict[str, Any] = {}
    for field in fields(DeploySettings):
        variable = PREFIX + field.name.upper()
        if environ.get(variable):
            changes[field.name] = _parsed(variable, environ[variable], field.default)
    return updated(settings, changes, "the environment")


def _parsed(variable: str, text: str, default: object) -> object:
    """Return ``text`` as what the setting's default is."""
    kind = type(default)
    if kind is str:
        return text
    try:
        return kind(text)  # type: ignore[call-arg]
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise InvalidInput(f"{variable} is {text!r}: it must be {wanted}") from None
