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
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, cast, get_args

from contracts.errors import InvalidInput, unknown_name
from contracts.files import atomic_path
from contracts.policy import Policy
from contracts.settings import updated
from serving_sim.config import (
    OFF,
    SINCE,
    EngineConfig,
    OffloadSettings,
    SglangSettings,
    VllmVersion,
    follows,
)
from serving_sim.driver_rows import check_row, request_rows, workload_of
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
_MAX_CHARS = 256_000_000  # of a header: some three million requests
_HEADER_KEYS = ("engine", "requests", "totals", "vllm_version", "written_by")


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
            with open_log(self.path) as file:
                next(file)
                lines = enumerate(file, start=2)
                while True:
                    with readable(self.path):
                        number, line = next(lines, (0, ""))
                    if not number:
                        return
                    yield parse_object(line, f"{self.path} line {number}")


def read_driver_file(path: Path) -> DriverLog:
    """Read a driver workload (.json) or a stored log (.jsonl, .jsonl.gz).

    Raises InvalidInput naming file, field and value.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InvalidInput(f"{path} {what}: give a driver workload or a decision log")
    with readable(path), open_log(path) as file:
        text = file.readline(_MAX_CHARS + 1) if _is_log(path) else file.read(_MAX_CHARS + 1)
    if not text.strip():
        raise InvalidInput(f"{path} is empty: it must begin with an object that lists 'requests'")
    if len(text) > _MAX_CHARS:
        raise InvalidInput(f"{path}: the header is longer than {_MAX_CHARS} characters: split it")
    header = parse_object(text, f"{path}, header")
    for key in header:
        if key not in _HEADER_KEYS:
            raise unknown_name(f"field in the header of {path}:", key, _HEADER_KEYS)
    rows = header.get("requests")
    if not isinstance(rows, list) or not rows:
        raise InvalidInput(f"{path}: field 'requests' is {rows!r:.80}; it must be a non-empty list")
    engine, sums = header.get("engine", {}), header.get("totals", {})
    for key, value in (("engine", engine), ("totals", sums)):
        if not isinstance(value, dict):
            raise InvalidInput(f"{path}: field {key!r} is {value!r:.80}; it must be an object")
    for number, row in enumerate(rows):
        check_row(row, f"{path}: request {number}")
    if engine.get("policy") == "priority" and not any("priority" in row for row in rows):
        raise InvalidInput(
            f"{path}: policy is 'priority', but none of the {len(rows)} requests has a 'priority': "
            "give them one (a whole number, the smallest goes first), or set policy to 'fcfs'"
        )
    version = version_of(path, header.get("vllm_version"))
    return DriverLog(path, engine, workload_of(path.name, rows), sums, version)


def version_of(path: Path, text: object) -> VllmVersion:
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

    A setting that ``vllm_version`` lacks is off, as the driver does not pass it on. A table
    ``sglang``, which the driver does not know, asks for SGLang's scheduler. Raises InvalidInput for
    a key that nobody knows.
    """
    for key in engine:
        if key not in (*_ENGINE_KEYS, *_DRIVER_DEFAULTS, *_IGNORED_KEYS, "sglang"):
            raise unknown_name("driver setting", key, {*_ENGINE_KEYS, *_DRIVER_DEFAULTS, "sglang"})
    table = engine.get("sglang")
    if table is not None and not isinstance(table, dict):
        raise InvalidInput(f"driver setting 'sglang' is {table!r:.80}; it must be an object")
    sglang = None if table is None else updated(SglangSettings(), table, "driver setting 'sglang'")
    settings = _DRIVER_DEFAULTS | dict(engine)
    ours = {key: settings[key] for key in _ENGINE_KEYS if key in settings}
    ours |= {key: OFF[key] for key, since in SINCE.items() if not follows(vllm_version, since)}
    return EngineConfig(
        scheduling=settings["policy"],
        trust_withdrawn_blocks=sglang is None,
        vllm_version=vllm_version,
        sglang=sglang,
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


def write_log(
    driver: DriverLog,
    path: Path,
    policy: Policy | None = None,
    on_step: Callable[[StepLog], None] | None = None,
) -> SimResult:
    """Simulate ``driver`` and write its decision log to ``path`` (gzipped when it ends in .gz);
    ``on_step`` listens as well."""
    with atomic_path(path) as scratch, tempfile.TemporaryFile("w+", encoding="utf-8") as body:
        write = step_writer(body)

        def write_and_tell(log: StepLog) -> None:
            write(log)
            if on_step is not None:
                on_step(log)

        result = simulate_driver(driver, policy, write_and_tell)
        header = {
            "written_by": "preemptbench",
            "vllm_version": driver.vllm_version,
            "engine": dict(driver.engine),
            "requests": request_rows(driver.workload),
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


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what reading a damaged file raises into InvalidInput naming ``path``."""
    try:
        yield
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InvalidInput(
            f"{path} cannot be read ({error}): it may be truncated or damaged; fetch or write it "
            "again"
        ) from None


def _is_log(path: Path) -> bool:
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def open_log(path: Path) -> TextIO:
    """Open a log for reading, gzipped or not."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return a JSON object; raises InvalidInput naming ``where``."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{where} is a {type(data).__name__}: it must be a JSON object")
    return data
