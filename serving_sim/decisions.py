"""Decision logs: the format that the vLLM driver writes, read as a workload and written by us.

A log is JSON lines (optionally gzipped): a header with the engine's settings and the requests,
then one line a planned step. A driver workload is the header alone, as one JSON object. A request
may name a ``prefix_group`` and how many ``shared`` leading tokens it has in common with the group,
and a ``max_tokens`` above its output (it then stops by itself).
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, cast, get_args

import numpy as np

from contracts.errors import InvalidInput
from contracts.files import atomic_path
from contracts.policy import Policy
from contracts.records import COHORTS
from serving_sim.config import SINCE, EngineConfig, OffloadSettings, VllmVersion, follows
from serving_sim.engine import SimResult, StepLog, simulate
from serving_sim.faults import FaultPlan
from serving_sim.profile import AffineProfile
from traces.workload import Workload

# The driver's own names and defaults (EngineCfg), where they differ from ours.
_DRIVER_DEFAULTS: dict[str, Any] = {
    "num_blocks": 10_000,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "max_model_len": 16_384,
    "enable_prefix_caching": False,
    "policy": "fcfs",
    "t_fixed": 0.008,
    "t_token": 1.0e-4,
    "t_ctx": 2.0e-8,
}
_ENGINE_KEYS = (
    "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
    "enable_prefix_caching", "enable_chunked_prefill", "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive", "reserve_full_isl", "watermark", "async_scheduling",
)  # fmt: skip
_IGNORED_KEYS = ("scheduler_cls", "log_stats", "stub_config")  # how vLLM is built, not what it does
_MAX_LINE_CHARS = 16_000_000


@dataclass(frozen=True, slots=True)
class DriverLog:
    """A driver file: the raw ``engine`` settings, the workload, and where it came from.

    ``engine`` stays raw because a log may use a setting that this engine refuses;
    :func:`driver_config` and :func:`driver_profile` read it.
    """

    path: Path
    engine: Mapping[str, Any]
    workload: Workload
    totals: Mapping[str, int]
    vllm_version: VllmVersion = "0.33"

    @property
    def config(self) -> EngineConfig:
        """The engine that the file asks for."""
        return driver_config(self.engine, self.vllm_version)

    @property
    def profile(self) -> AffineProfile:
        """The clock that the file asks for."""
        return driver_profile(self.engine)

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield the logged steps in order (none for a bare workload)."""
        if _is_log(self.path):
            with _open(self.path) as file:
                next(file)
                for number, line in enumerate(file, start=2):
                    yield _parse(line, f"{self.path} line {number}")


def read_driver_file(path: Path) -> DriverLog:
    """Read a driver workload (.json) or a stored log (.jsonl, .jsonl.gz).

    Raises InvalidInput naming file, field and value.
    """
    if not path.is_file():
        raise InvalidInput(f"{path} does not exist: give a driver workload or a decision log")
    try:
        with _open(path) as file:
            text = file.readline(_MAX_LINE_CHARS) if _is_log(path) else file.read(_MAX_LINE_CHARS)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read ({error}): it may be truncated") from None
    header = _parse(text, f"{path}, header")
    rows = header.get("requests")
    if not isinstance(rows, list) or not rows:
        raise InvalidInput(f"{path}: field 'requests' is {rows!r:.80}; it must be a non-empty list")
    engine = header.get("engine", {})
    if not isinstance(engine, dict):
        raise InvalidInput(f"{path}: field 'engine' is {engine!r:.80}; it must be an object")
    version = _version(path, header.get("vllm_version"))
    return DriverLog(path, engine, _workload(path, rows), header.get("totals", {}), version)


def _version(path: Path, text: object) -> VllmVersion:
    """Return the version series of a log, as in 0.33 for 0.33.0; without one, the newest."""
    known = get_args(VllmVersion)
    if text is None:
        return "0.33"
    for version in known:
        if text == version or str(text).startswith(f"{version}."):
            return cast(VllmVersion, version)
    raise InvalidInput(f"{path}: vllm_version is {text!r}; the engine follows {', '.join(known)}")


def driver_config(engine: Mapping[str, Any], vllm_version: VllmVersion = "0.33") -> EngineConfig:
    """Return our settings of the driver's, with the one fault of vLLM that its logs show.

    A setting that ``vllm_version`` lacks is off, as the driver does not pass it on. Raises
    InvalidInput for a key that nobody knows.
    """
    for key in engine:
        if key not in (*_ENGINE_KEYS, *_DRIVER_DEFAULTS, *_IGNORED_KEYS):
            raise InvalidInput(f"driver setting {key!r} is unknown: remove it or correct its name")
    settings = _DRIVER_DEFAULTS | dict(engine)
    ours = {key: settings[key] for key in _ENGINE_KEYS if key in settings}
    ours |= {key: 0 for key, since in SINCE.items() if not follows(vllm_version, since)}
    return EngineConfig(
        scheduling=settings["policy"],
        trust_withdrawn_blocks=True,
        vllm_version=vllm_version,
        **ours,
    )


def driver_profile(engine: Mapping[str, Any]) -> AffineProfile:
    """Return the driver's virtual clock as a profile; its seconds are invented, not measured."""
    settings = _DRIVER_DEFAULTS | dict(engine)
    return AffineProfile(
        name="vllm-driver",
        fixed_s=settings["t_fixed"],
        per_token_s=settings["t_token"],
        per_context_token_s=settings["t_ctx"],
        source="the virtual clock of the decision-log driver (not measured)",
    )


def step_line(log: StepLog) -> dict[str, Any]:
    """Return one step as the driver writes it."""
    return {
        "step": log.step,
        "t": round(log.start_s, 9),
        "sched": log.scheduled,
        "preempted": list(log.preempted),
        "finished_before": list(log.finished_before),
        "running": list(log.running),
        "waiting": list(log.waiting),
        "n_running": len(log.running),
        "n_waiting": len(log.waiting),
        "free": log.num_free_blocks,
    }


def step_writer(file: TextIO) -> Callable[[StepLog], None]:
    """Return an ``on_step`` that writes one JSON line a step to ``file``."""

    def write(log: StepLog) -> None:
        file.write(json.dumps(step_line(log)) + "\n")

    return write


def simulate_driver(
    driver: DriverLog,
    policy: Policy | None = None,
    on_step: Callable[[StepLog], None] | None = None,
    faults: FaultPlan | None = None,
    offload: OffloadSettings | None = None,
) -> SimResult:
    """Run the workload of ``driver`` on the engine and the clock that it asks for; the driver
    itself knows neither faults nor a slower tier."""
    config = replace(driver.config, offload=offload)
    return simulate(driver.workload, config, driver.profile, policy, on_step=on_step, faults=faults)


def write_log(driver: DriverLog, path: Path, policy: Policy | None = None) -> SimResult:
    """Simulate ``driver`` and write its decision log to ``path`` (gzipped when it ends in .gz)."""
    with atomic_path(path) as scratch, tempfile.TemporaryFile("w+", encoding="utf-8") as body:
        result = simulate_driver(driver, policy, step_writer(body))
        header = {
            "written_by": "preemptbench",
            "vllm_version": driver.vllm_version,
            "engine": dict(driver.engine),
            "requests": _rows(driver.workload),
            "totals": totals(driver, result),
        }
        body.seek(0)
        open_file = gzip.open if path.suffix == ".gz" else open
        with open_file(scratch, "wt", encoding="utf-8") as file:
            file.write(json.dumps(header) + "\n")
            shutil.copyfileobj(body, file)
    return result


def totals(driver: DriverLog, result: SimResult) -> dict[str, int]:
    """Return the sums that a log's header ends with."""
    return {
        "steps": result.num_steps,
        "finished": sum(r.state in ("completed", "length_capped") for r in result.records),
        "preemptions": result.num_preemptions,
        "sampled_tokens": sum(record.output_tokens for record in result.records),
        "usable_blocks": driver.config.usable_blocks,
    }


def _rows(workload: Workload) -> list[dict[str, Any]]:
    columns = {
        "id": workload.request_ids,
        "prompt": workload.prompt_tokens.tolist(),
        "output": workload.output_tokens.tolist(),
        "max_tokens": workload.max_tokens.tolist(),
        "arrival": workload.arrival_s.tolist(),
        "priority": workload.priority.tolist(),
    }
    if workload.prefix_groups is not None:
        columns["prefix_group"], columns["shared"] = workload.prefix_groups.T.tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _is_log(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{where} is a {type(data).__name__}: it must be a JSON object")
    return data


def _workload(path: Path, rows: list[Any]) -> Workload:
    """Requests in arrival order. The driver's cap is the output unless it says otherwise."""
    for number, row in enumerate(rows):
        for key in ("id", "prompt", "output"):
            if not isinstance(row, dict) or key not in row:
                raise InvalidInput(f"{path}: request {number} has no {key!r}: {row!r:.80}")
    rows = sorted(rows, key=lambda row: row.get("arrival", 0.0))
    count = len(rows)
    return Workload(
        name=path.name,
        request_ids=tuple(row["id"] for row in rows),
        arrival_s=np.array([row.get("arrival", 0.0) for row in rows], dtype=np.float64),
        prompt_tokens=np.array([row["prompt"] for row in rows], dtype=np.int64),
        output_tokens=np.array([row["output"] for row in rows], dtype=np.int64),
        max_tokens=np.array([row.get("max_tokens", row["output"]) for row in rows], np.int64),
        priority=np.array([row.get("priority", 0) for row in rows], dtype=np.int64),
        deadline_s=np.full(count, np.nan),
        cohort=np.full(count, COHORTS.index("tagged")),
        capped=np.zeros(count, dtype=bool),
        manifest={"source": path.name},
        prefix_groups=_prefix_groups(rows),
    )


def _prefix_groups(rows: list[Any]) -> np.ndarray | None:
    """Return shape (n, 2), or None when no request names a group."""
    if not any("prefix_group" in row for row in rows):
        return None
    pairs = [(row.get("prefix_group", 0), row.get("shared", 0)) for row in rows]
    return np.array(pairs, dtype=np.int64)
