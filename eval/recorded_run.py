"""A recorded run of a real engine: what arrived, how the engine was set, when tokens came.

The folder layout is LLMServingSim's: vllm/requests.jsonl, vllm/timeseries.csv, vllm/meta.json and
config.json. Times count from the moment the first request was queued.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from contracts.errors import InvalidInput, unknown_name
from contracts.policy import FloatArray
from contracts.records import COHORTS
from serving_sim.config import EngineConfig, VllmVersion
from serving_sim.operator_profile import MODEL_SHAPES
from traces.safe_json import iter_jsonl, read_json
from traces.workload import Workload

GIB = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """What an engine held over time; arrays of shape (samples,). ``kv_share`` is of the usable
    blocks, NaN where it was not recorded."""

    t_s: FloatArray
    running: FloatArray
    waiting: FloatArray
    kv_share: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRun:
    """One run. ``first_token_s`` and ``end_s`` have shape (requests,), in workload order.

    ``notes`` name every setting of ``config`` that the run did not record, and where it is from.
    ``perf_path`` is where the operator times of this GPU and model lie beside the run, as a
    relative path below the data set's folder ``perf``.
    """

    name: str
    model: str
    workload: Workload
    config: EngineConfig
    notes: tuple[str, ...]
    first_token_s: FloatArray
    end_s: FloatArray
    occupancy: Occupancy
    perf_path: Path


@dataclass(frozen=True, slots=True, eq=False)
class RequestLog:
    """What arrived and when it was answered; times as in RecordedRun."""

    workload: Workload
    first_token_s: FloatArray
    end_s: FloatArray


def read_request_log(path: Path, name: str) -> RequestLog:
    """Read a requests.jsonl: request_id, input_toks, output_toks, queued_ts, first_token_ts,
    last_token_ts; raises InvalidInput for what is damaged."""
    rows = _rows(path)
    origin_s = rows["queued_ts"].min()
    queued_s = rows["queued_ts"] - origin_s
    order = np.argsort(queued_s, kind="stable")
    return RequestLog(
        workload=_workload(name, rows, queued_s, order),
        first_token_s=(rows["first_token_ts"] - origin_s)[order],
        end_s=(rows["last_token_ts"] - origin_s)[order],
    )


def read_recorded_run(folder: Path) -> RecordedRun:
    """Read a run folder; raises InvalidInput for what is damaged, missing or not covered."""
    meta = read_json(folder / "vllm" / "meta.json")
    hardware = read_json(folder / "config.json")
    engine = _object(meta, "engine_kwargs", folder)
    path = str(meta.get("model"))
    model = path.rpartition("/")[2]
    _refuse_uncovered(folder, model, engine)
    config, notes = _config(folder, meta, hardware, model)
    gpu = str(_instance(folder, hardware).get("hardware"))
    log = read_request_log(folder / "vllm" / "requests.jsonl", f"{gpu}/{model}")
    return RecordedRun(
        name=f"{gpu}/{model}",
        model=model,
        workload=log.workload,
        config=config,
        notes=tuple(notes),
        first_token_s=log.first_token_s,
        end_s=log.end_s,
        occupancy=_occupancy(folder / "vllm" / "timeseries.csv"),
        perf_path=Path(gpu, path, "bf16", f"tp{engine.get('tensor_parallel_size', 1)}"),
    )


def _refuse_uncovered(folder: Path, model: str, engine: Mapping[str, Any]) -> None:
    if engine.get("data_parallel_size", 1) != 1 or engine.get("enable_expert_parallel"):
        raise InvalidInput(
            f"{folder}: the run has {engine.get('data_parallel_size')} data-parallel ranks "
            f"(expert parallel: {bool(engine.get('enable_expert_parallel'))}); one engine is "
            "replayed, and which rank served which request is not recorded: not covered"
        )
    if model not in MODEL_SHAPES:
        raise unknown_name("model", model, MODEL_SHAPES)


def _config(
    folder: Path, meta: Mapping[str, Any], hardware: Mapping[str, Any], model: str
) -> tuple[EngineConfig, list[str]]:
    """Return the engine's settings, and a note on each that is not as recorded."""
    engine = _object(meta, "engine_kwargs", folder)
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if not isinstance(engine.get(name), int):
            raise InvalidInput(
                f"{folder}: meta.json gives {name} as {engine.get(name)!r}: give a number"
            )
    resolved = _object(meta, "resolved_config", folder, default={})
    scheduler, cache = (
        _object(resolved, f"{name}_config", folder, default={}) for name in ("scheduler", "cache")
    )
    notes: list[str] = []
    settings = {
        name: _setting(name, where, key, default, notes)
        for name, where, key, default in (
            ("enable_prefix_caching", cache, "enable_prefix_caching", True),
            ("enable_chunked_prefill", scheduler, "enable_chunked_prefill", True),
            ("long_prefill_token_threshold", scheduler, "long_prefill_token_threshold", 0),
            ("reserve_full_isl", scheduler, "scheduler_reserve_full_isl", True),
            ("async_scheduling", scheduler, "async_scheduling", True),
            ("scheduling", scheduler, "policy", "fcfs"),
            ("block_size", cache, "block_size", 16),
        )
    }
    num_blocks = _object(meta, "kv_cache", folder, default={}).get("num_gpu_blocks")
    if num_blocks is None:
        memory = _object(_instance(folder, hardware), "npu_mem", folder)
        num_blocks = derived_blocks(memory, model, settings["block_size"])
        notes.append(f"num_blocks = {num_blocks}: derived from memory x utilisation - weights")
    version = _series(str(meta.get("vllm_version")), settings["reserve_full_isl"])
    notes.append(f"vllm_version = {version}: the run's {meta.get('vllm_version')} is nearest to it")
    config = EngineConfig(
        num_blocks=num_blocks,
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine.get("max_model_len"),
        vllm_version=version,
        **settings,
    )
    return config, notes


def _setting(
    name: str, where: Mapping[str, Any], key: str, default: bool | int | str, notes: list[str]
) -> Any:
    if key not in where:
        notes.append(f"{name} = {default}: vLLM's default, not recorded")
    return where.get(key, default)


def derived_blocks(memory: Mapping[str, Any], model: str, block_size: int) -> int:
    """Return the KV blocks that ``mem_size`` (GiB) x ``mem_util`` leaves beside the weights."""
    shape = MODEL_SHAPES[model]
    try:
        free_bytes = memory["mem_size"] * memory["mem_util"] * GIB - shape.weight_bytes
        return int(free_bytes // (block_size * shape.kv_bytes_per_token))
    except (KeyError, TypeError):
        raise InvalidInput(
            f"neither num_gpu_blocks nor mem_size and mem_util are recorded ({memory!r:.80}): "
            "without the number of KV blocks a run cannot be replayed"
        ) from None


def _series(text: str, reserves_full_isl: bool) -> VllmVersion:
    """Return the series at or below version ``text``; one that has the full-prompt gate if on."""
    try:
        version = tuple(int(part) for part in text.split(".")[:2])
    except ValueError:
        raise InvalidInput(f"vllm_version is {text!r}; it must be like 0.19.0") from None
    known = cast(tuple[VllmVersion, ...], get_args(VllmVersion))
    numbers = {series: tuple(int(part) for part in series.split(".")) for series in known}
    series = max((s for s in known if numbers[s] <= version), key=known.index, default=known[0])
    return "0.20" if reserves_full_isl and numbers[series] < (0, 20) else series


_TIMES = ("queued_ts", "first_token_ts", "last_token_ts")
_COUNTS = ("input_toks", "output_toks")


def _rows(path: Path) -> dict[str, Any]:
    """Return the columns of requests.jsonl; tokens as integers, times in seconds."""
    columns: dict[str, list[Any]] = {name: [] for name in ("request_id", *_COUNTS, *_TIMES)}
    for number, row in iter_jsonl(path):
        for name, values in columns.items():
            value = row.get(name)
            kinds = str if name == "request_id" else int if name in _COUNTS else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise InvalidInput(
                    f"{path} line {number}: {name} is {value!r}; every request of a run to "
                    "validate against has an id, whole token counts and times"
                )
            values.append(value)
        if not row["queued_ts"] <= row["first_token_ts"] <= row["last_token_ts"]:
            raise InvalidInput(f"{path} line {number}: queued, first and last token out of order")
    if not columns["request_id"]:
        raise InvalidInput(f"{path} holds no request")
    return {"request_id": columns["request_id"]} | {
        name: np.array(columns[name], dtype=np.int64 if name in _COUNTS else np.float64)
        for name in (*_COUNTS, *_TIMES)
    }


def _workload(
    name: str, rows: Mapping[str, Any], queued_s: FloatArray, order: np.ndarray
) -> Workload:
    count = len(order)
    return Workload(
        name=name,
        request_ids=tuple(rows["request_id"][i] for i in order),
        arrival_s=queued_s[order],
        prompt_tokens=rows["input_toks"][order],
        output_tokens=rows["output_toks"][order],
        max_tokens=rows["output_toks"][order],
        priority=np.zeros(count, dtype=np.int64),
        deadline_s=np.full(count, np.nan),
        cohort=np.full(count, COHORTS.index("tagged"), dtype=np.int64),
        capped=np.zeros(count, dtype=bool),
    )


def _occupancy(path: Path) -> Occupancy:
    names = ("t", "running", "waiting", "kv_cache_pct")
    if not path.is_file():
        raise InvalidInput(f"{path} does not exist: a run folder holds what its engine held")
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        try:
            rows = [[float(row[name]) for name in names] for row in csv.DictReader(file)]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"{path} needs numbers in {', '.join(names)}: {error}") from None
    if not rows or not all(math.isfinite(x) for row in rows for x in row):
        raise InvalidInput(f"{path} holds no samples, or one that is not finite")
    t_s, running, waiting, percent = np.array(rows).T
    kv_share = percent / 100 if percent.any() else np.full(len(t_s), np.nan)
    return Occupancy(t_s, running, waiting, kv_share)


def _instance(folder: Path, hardware: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return cast(Mapping[str, Any], hardware["nodes"][0]["instances"][0])
    except (KeyError, IndexError, TypeError):
        raise InvalidInput(
            f"{folder / 'config.json'} names no instance (nodes, instances)"
        ) from None


def _object(
    data: Mapping[str, Any], key: str, folder: Path, default: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    value = data.get(key, default)
    if not isinstance(value, dict):
        raise InvalidInput(f"{folder}: field {key!r} is {value!r:.60}; it must be an object")
    return value
