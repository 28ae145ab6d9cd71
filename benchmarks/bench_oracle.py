"""Time and memory of building oracle-K from a large run log in one streaming pass.

    python -m benchmarks.bench_oracle [--runs 10000000] [--per-request 100] [--log RUNS.parquet]

The log is synthetic: log-normal lengths round a log-normal location for each request, cap 32,768
(cut runs are censored), 50 families of one model, runs in random order within blocks of 1,000
requests, no prompt texts. It is written to a temporary folder (or --log names one of yours). Peak
memory is that of a child process that does nothing but read, build and answer.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from contracts.signals import SignalRequest
from oracles.empirical import EmpiricalOracle
from oracles.run_table import read_run_table
from traces.run_columns import REPEATED_COLUMNS, SCHEMA
from traces.tables import write_parquet

CAP_TOKENS = 32_768
BLOCK_REQUESTS = 1000
_CONSTANT: dict[str, Any] = {
    "benchmark": "synthetic", "model": "synthetic/model", "model_revision": "1",
    "tokenizer_sha256": "t", "chat_template_sha256": "c", "engine": "none", "engine_version": "0",
    "kernel": "none", "batch_invariant": False, "dtype": "none", "device": "none",
    "batch_size": 1, "concurrency": 1, "temperature": 0.0, "seed": 0,
    "max_new_tokens": CAP_TOKENS, "prompt_tokens": 100, "how_counted": "drawn",
    "licence": "Apache-2.0",
}  # fmt: skip


def synthetic_tables(num_runs: int, per_request: int, seed: int = 0) -> Iterator[pa.Table]:
    """Yield the log block by block, in the columns of a run log."""
    rng = np.random.default_rng(seed)
    for first in range(0, num_runs // per_request, BLOCK_REQUESTS):
        names = np.arange(first, min(first + BLOCK_REQUESTS, num_runs // per_request))
        location = rng.normal(7.0, 1.0, len(names))
        owner = rng.permutation(np.repeat(np.arange(len(names)), per_request))
        natural = np.exp(location[owner] + 0.25 * rng.standard_normal(len(owner)))
        lengths = np.clip(natural, 1, CAP_TOKENS).astype(np.int32)
        repeat = np.empty(len(owner), dtype=np.int32)
        repeat[np.argsort(owner, kind="stable")] = np.tile(np.arange(per_request), len(names))
        yield _table(names, owner, repeat, lengths)


def _table(names: np.ndarray, owner: np.ndarray, repeat: np.ndarray, lengths: np.ndarray) -> Any:
    keys = [f"{name:032x}" for name in names.tolist()]
    cut = lengths == CAP_TOKENS
    columns: dict[str, Any] = {
        "request_key": _texts(keys, owner),
        "prompt_id": _texts(keys, owner),
        "prompt_sha256": _texts([2 * key for key in keys], owner),
        "family": _texts([f"family {name % 50}" for name in names.tolist()], owner),
        "run_id": pa.array(
            [f"{keys[o]}-{r}" for o, r in zip(owner.tolist(), repeat.tolist(), strict=True)]
        ),
        "repeat": pa.array(repeat),
        "output_tokens": pa.array(lengths),
        "finish_reason": _texts(["stop", "length"], cut.astype(int)),
        "event_observed": pa.array(~cut),
    }
    for name, value in _CONSTANT.items():
        kind = SCHEMA.field(name).type
        columns[name] = pa.repeat(pa.scalar(value, kind), len(owner))
    for name in SCHEMA.names:
        if name not in columns:
            columns[name] = pa.nulls(len(owner), SCHEMA.field(name).type)
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _texts(values: list[str], codes: np.ndarray) -> pa.Array:
    return pa.array(values).take(pa.array(codes))


def measure(path: Path, pipe: Connection) -> None:
    """Read, build and answer in this process; send the figures."""
    begin_bytes = _peak_bytes()
    start = time.perf_counter()
    table = read_run_table(path)
    read_s = time.perf_counter() - start
    start = time.perf_counter()
    oracle = EmpiricalOracle(table)
    build_s = time.perf_counter() - start
    request = SignalRequest(
        "r", "0" * 32, "p", "0" * 64, "synthetic", "family 0", "synthetic/model", 100, CAP_TOKENS
    )
    start = time.perf_counter()
    answers = oracle.remaining([request] * 100_000, np.arange(100_000) % 4000)
    ask_s = time.perf_counter() - start
    pipe.send(
        {
            "oracle": oracle.name,
            "runs": len(table),
            "requests": table.num_requests,
            "read_s": read_s,
            "build_s": build_s,
            "answers_per_s": len(answers) / ask_s,
            "peak_gb": _peak_bytes() / 1e9,
            "of_it_imports_gb": begin_bytes / 1e9,
        }
    )


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    """Write the log, measure in a child process, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--per-request", type=int, default=100)
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.log or Path(folder) / "runs.parquet"
        if args.log is None:
            start = time.perf_counter()
            tables = synthetic_tables(args.runs, args.per_request)
            write_parquet(path, SCHEMA, tables, REPEATED_COLUMNS)
            took_s = time.perf_counter() - start
            print(f"wrote {args.runs:,} runs, {path.stat().st_size / 1e6:.0f} MB, {took_s:.0f} s")
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=measure, args=(path, theirs))
        child.start()
        theirs.close()
        for name, value in ours.recv().items():
            print(
                f"{name:<18}{value:>14,.2f}"
                if isinstance(value, float)
                else f"{name:<18}{value:>14}"
            )
        child.join()


if __name__ == "__main__":
    main()
