"""How long gbm-hazard takes to fit a million binary rows.

    python -m benchmarks.bench_training [--rows 1000000] [--threads 2]

Synthetic runs of the tests, enough of them for as many (run, age, bin) rows as asked. The bar is 60
seconds on two cores: CPU seconds are printed beside wall seconds, because a busy machine stretches
only the latter; CPU seconds over threads is what two free cores would take at best.
"""

from __future__ import annotations

import argparse
import time

from predictors.gbm_hazard import GbmHazardSettings, hazard_rows, horizon_edges, landmarks
from tests.synthetic_runs import synthetic_runs
from training.rows import training_set


def main() -> None:
    """Make runs, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    settings = GbmHazardSettings()
    rows, num_prompts = 0, 1000
    while rows < options.rows:
        training = training_set(synthetic_runs(num_prompts=num_prompts))
        edges = horizon_edges(settings.first_edge_tokens, training.cap_tokens, settings.num_bins)
        run, ages = landmarks(training, settings.num_landmarks, 0)
        rows = len(hazard_rows(training, run, ages, edges)[0])
        num_prompts = int(num_prompts * max(1.05, 1.02 * options.rows / rows))
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    settings.fit(training, num_threads=options.threads)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    print("| runs | binary rows | threads | CPU, s | wall, s | CPU / threads, s |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(
        f"| {len(training.requests):,} | {rows:,} | {options.threads} | {cpu_s:.1f} "
        f"| {wall_s:.1f} | {cpu_s / options.threads:.1f} |"
    )


if __name__ == "__main__":
    main()
