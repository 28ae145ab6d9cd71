"""Peak memory and seconds of training on a run log of 10^8 tokens, by the verb itself.

    python -m benchmarks.bench_big_log [--tokens 100000000] [--stride 8] [--folds 0] [--out DIR]

The log is synthetic: lengths are log-normal (median about 1,200 tokens, cap 16,384), every prompt
ran twice, progress is noise with a rising trend. The bar is 8 GB. It is kept in --out.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun, ProgressRecord
from tests.synthetic_runs import make_run
from traces.runlog import write_runs

CAP_TOKENS = 16_384
_LOG_MEDIAN, _SPREAD, _WITHIN = 7.1, 0.8, 0.2


def big_log(num_tokens: int, stride: int) -> Iterator[DecodeRun]:
    """Yield runs until they hold ``num_tokens``, two of each prompt."""
    written, number = 0, 0
    while written < num_tokens:
        rng = keyed_generator(0, "big-log", number)
        typical = _LOG_MEDIAN + _SPREAD * rng.standard_normal()
        for repeat in range(2):
            natural = max(2, int(np.exp(typical + _WITHIN * rng.standard_normal())))
            run = make_run(
                prompt=f"Prove lemma {number} of {natural % 97} in steps.",
                prompt_id=f"p{number}",
                natural_tokens=natural,
                repeat=repeat,
                cap_tokens=CAP_TOKENS,
            )
            count = run.output_tokens // stride
            values = rng.random((count, len(ProgressRecord._fields)))
            values[:, 0] += np.arange(count) / max(count, 1)
            records = tuple(map(ProgressRecord._make, values.tolist()))
            yield replace(run, progress=records, progress_stride=stride)
            written += run.output_tokens
        number += 1


def main() -> None:
    """Write the log, train, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--stride", type=int, default=8)
    parser.add_argument("--folds", type=int, default=0, help="of the calibration; train has 5")
    parser.add_argument("--out", type=Path, help="default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = options.out or Path(scratch)
        log = place / f"big-{options.tokens}-{options.stride}.parquet"
        if not log.exists():
            start = time.perf_counter()
            count = write_runs(big_log(options.tokens, options.stride), log)
            print(f"wrote {count:,} runs in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        start = time.perf_counter()
        command = [
            sys.executable, "-m", "preemptbench", "train", "--family", "gbm-hazard",
            "--runs", str(log), "--set", f"calibration_folds={options.folds}",
            "--out", str(Path(scratch) / "checkpoint"),
        ]  # fmt: skip
        subprocess.run(command, check=True, env=os.environ, stdout=sys.stderr)
        wall_s = time.perf_counter() - start
        size_mb = log.stat().st_size / 1e6
    peak_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    print("| tokens | stride | log, MB | calibration folds | wall, s | peak, GB |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(
        f"| {options.tokens:,} | {options.stride} | {size_mb:.0f} | {options.folds} "
        f"| {wall_s:.0f} | {peak_gb:.1f} |"
    )


if __name__ == "__main__":
    main()
