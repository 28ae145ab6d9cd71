"""Workloads: open-loop arrivals x the lengths of decode runs, or the replay of a measured trace.

Arrivals are drawn, never rescaled: n requests at a rate take as long as they take, and the total
differs from seed to seed as it would in a system.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_generator, keyed_uniform
from contracts.records import COHORTS
from contracts.runs import DecodeRun
from traces.tables import open_parquet, readable
from traces.workload import Workload

TRACE_COLUMNS = ("arrival_s", "context_tokens", "generated_tokens")


def arrival_times(count: int, *, rate_per_s: float, cv: float = 1.0, seed: int) -> FloatArray:
    """Return float64 (count,) arrival times in seconds with independent gamma gaps.

    ``cv`` is the coefficient of variation of a gap: 1 is a Poisson process, above 1 is bursty.
    A longer series of one seed starts with the shorter one.
    """
    if not (np.isfinite(rate_per_s) and rate_per_s > 0):
        raise InvalidInput(f"rate_per_s is {rate_per_s}: it must be above 0 requests per second")
    if not (np.isfinite(cv) and cv > 0):
        raise InvalidInput(f"cv is {cv}: it must be above 0 (1 is a Poisson process)")
    generator = keyed_generator(seed, "arrivals")
    gaps = generator.gamma(shape=cv**-2, scale=cv**2 / rate_per_s, size=count)
    return np.cumsum(gaps)


def build_workload(
    runs: Sequence[DecodeRun],
    *,
    rate_per_s: float,
    cv: float = 1.0,
    num_warmup: int,
    num_tagged: int,
    num_filler: int,
    seed: int,
    deadline_s: float | None,
    name: str,
    length_scale: int = 1,
) -> Workload:
    """Return a workload of requests drawn from ``runs`` with replacement, in order of arrival.

    Which run the i-th request is depends on (seed, i) and the set of runs, not on their order.
    ``length_scale`` multiplies output lengths and caps alike (never prompts). A request counts as
    ``capped`` where its run was cut at its cap; runs cut short of it end where they were cut, and
    the manifest counts them.
    """
    if not runs:
        raise InvalidInput("a workload needs at least one decode run; the sequence is empty")
    if length_scale < 1 or length_scale != int(length_scale):
        raise InvalidInput(f"length_scale is {length_scale}: it must be a whole number, at least 1")
    cohort = _cohort(num_warmup, num_tagged, num_filler)
    ordered = sorted(runs, key=lambda run: run.run_id)
    draws = (keyed_uniform(seed, "requests", i) for i in range(len(cohort)))
    chosen = [ordered[int(draw * len(ordered))] for draw in draws]
    cut = [run.event_observed is not True for run in chosen]
    at_cap = [run.output_tokens >= run.max_new_tokens for run in chosen]
    return _workload(
        name,
        arrival_times(len(cohort), rate_per_s=rate_per_s, cv=cv, seed=seed),
        prompt_tokens=_ints(run.prompt_tokens for run in chosen),
        output_tokens=_ints(run.output_tokens for run in chosen) * length_scale,
        max_tokens=_ints(run.max_new_tokens for run in chosen) * length_scale,
        cohort=cohort,
        deadline_s=deadline_s,
        capped=np.array(cut) & np.array(at_cap),
        run_ids=tuple(run.run_id for run in chosen),
        manifest={
            "arrivals": "poisson" if cv == 1.0 else "gamma",
            "rate_per_s": rate_per_s,
            "cv": cv,
            "seed": seed,
            "length_scale": length_scale,
            "num_source_runs": len(runs),
            "num_cut_below_cap": int((np.array(cut) & ~np.array(at_cap)).sum()),
            "models": sorted({run.model for run in runs}),
            "benchmarks": sorted({run.benchmark for run in runs}),
        },
    )


def workload_from_trace(
    path: Path,
    *,
    num_warmup: int,
    num_tagged: int,
    num_filler: int,
    seed: int,
    deadline_s: float | None,
    name: str,
    max_tokens: int | None = None,
) -> Workload:
    """Return a stretch of a measured trace, its gaps untouched; the first request arrives at 0 s.

    The trace is a CSV or Parquet file with arrival_s, context_tokens and generated_tokens; the
    seed picks where the stretch begins. A trace names no cap: all requests get ``max_tokens``,
    by default the longest output of the whole trace, so that a cap tells nothing of its request.
    """
    arrival_s, prompt_tokens, output_tokens = _read_trace(path)
    cohort = _cohort(num_warmup, num_tagged, num_filler)
    spare = len(arrival_s) - len(cohort)
    if spare < 0:
        raise InvalidInput(
            f"{path} holds {len(arrival_s)} requests; warm-up, tagged and filler ask for "
            f"{len(cohort)}: ask for fewer"
        )
    start = int(keyed_uniform(seed, "arrivals", "trace") * (spare + 1))
    part = slice(start, start + len(cohort))
    cap = int(output_tokens.max()) if max_tokens is None else max_tokens
    return _workload(
        name,
        arrival_s[part] - arrival_s[start],
        prompt_tokens=prompt_tokens[part],
        output_tokens=np.minimum(output_tokens[part], cap),
        max_tokens=np.full(len(cohort), cap, dtype=np.int64),
        cohort=cohort,
        deadline_s=deadline_s,
        capped=output_tokens[part] > cap,
        run_ids=None,
        manifest={
            "arrivals": "trace",
            "trace": path.name,
            "trace_start_row": start,
            "seed": seed,
            "length_scale": 1,
            "max_tokens": cap,
        },
    )


def trace_rate_per_s(path: Path) -> float:
    """Return the mean arrival rate of a whole trace, in requests per second."""
    arrival_s, _, _ = _read_trace(path)
    span_s = float(arrival_s[-1] - arrival_s[0])
    if not span_s > 0:
        raise InvalidInput(f"{path}: all {len(arrival_s)} requests arrive at once; it has no rate")
    return (len(arrival_s) - 1) / span_s


def _cohort(num_warmup: int, num_tagged: int, num_filler: int) -> IntArray:
    sizes = (num_warmup, num_tagged, num_filler)
    for label, size in zip(COHORTS, sizes, strict=True):
        if size < 0:
            raise InvalidInput(f"the workload asks for {size} {label} requests: at least 0")
    if num_tagged < 1:
        raise InvalidInput(f"num_tagged is {num_tagged}: at least one request must be scored")
    return np.repeat(np.arange(len(COHORTS)), sizes).astype(np.int64)


def _workload(
    name: str,
    arrival_s: FloatArray,
    *,
    prompt_tokens: IntArray,
    output_tokens: IntArray,
    max_tokens: IntArray,
    cohort: IntArray,
    deadline_s: float | None,
    capped: np.ndarray,
    run_ids: tuple[str, ...] | None,
    manifest: dict[str, object],
) -> Workload:
    count = len(cohort)
    sizes = dict(zip(COHORTS, np.bincount(cohort, minlength=len(COHORTS)).tolist(), strict=True))
    return Workload(
        name=name,
        request_ids=tuple(f"r{i:06d}" for i in range(count)),
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=max_tokens,
        priority=np.zeros(count, dtype=np.int64),
        deadline_s=np.full(count, np.nan if deadline_s is None else deadline_s),
        cohort=cohort,
        capped=capped,
        run_ids=run_ids,
        manifest={**manifest, "deadline_s": deadline_s, "cohorts": sizes},
    )


def _ints(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64)


def _read_trace(path: Path) -> tuple[FloatArray, IntArray, IntArray]:
    columns = _csv_columns(path) if path.suffix == ".csv" else _parquet_columns(path)
    for column, values in zip(TRACE_COLUMNS, columns, strict=True):
        if column == "arrival_s":
            good, rule = (values >= 0) & np.isfinite(values), "finite and at least 0 s"
        else:
            good, rule = (values >= 1) & (values % 1 == 0), "a whole number of at least 1 token"
        if not good.all():
            row = int(np.flatnonzero(~good)[0])
            raise InvalidInput(f"{path} row {row}: {column} is {values[row]}; it must be {rule}")
    order = np.argsort(columns[0], kind="stable")
    arrival, context, generated = (values[order] for values in columns)
    return arrival, context.astype(np.int64), generated.astype(np.int64)


def _parquet_columns(path: Path) -> list[FloatArray]:
    file = open_parquet(path)
    with readable(path):
        missing = [name for name in TRACE_COLUMNS if name not in file.schema_arrow.names]
        if missing:
            raise InvalidInput(f"{path} lacks {missing}: a trace has {', '.join(TRACE_COLUMNS)}")
        table = file.read(columns=list(TRACE_COLUMNS))
        return [table[name].cast("double").to_numpy() for name in TRACE_COLUMNS]


def _csv_columns(path: Path) -> list[FloatArray]:
    if not path.is_file():
        raise InvalidInput(f"{path} does not exist: give the path of a trace")
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        missing = [name for name in TRACE_COLUMNS if name not in header]
        if missing:
            raise InvalidInput(f"{path} lacks {missing}: a trace has {', '.join(TRACE_COLUMNS)}")
        places = [header.index(name) for name in TRACE_COLUMNS]
        try:
            table = [[float(row[place]) for place in places] for row in rows if row]
        except (ValueError, IndexError, csv.Error) as error:
            raise InvalidInput(
                f"{path} near line {rows.line_num}: {error}; write three numbers a row"
            ) from None
    if not table:
        raise InvalidInput(f"{path} holds 0 requests: there is nothing to replay")
    return list(np.array(table).T)
