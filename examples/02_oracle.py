"""Oracle-K: leave one repeat out and ask the other runs of each prompt how many tokens remain.

The provenance says who answered: runs of the prompt itself, of its family, of its model, or
only the cap.

    python examples/02_oracle.py [RUNS.parquet]
"""

import sys
from pathlib import Path

import numpy as np

from contracts.signals import signal_request
from oracles.empirical import leave_one_out
from traces.bundled import bundled_runs
from traces.runlog import read_runs


def main(runs_path: Path) -> None:
    runs = list(read_runs(runs_path))
    oracle = leave_one_out(runs, repeat=0)  # it has not seen the runs it is asked about
    print(f"{oracle.name}, asked about the runs of repeat 0")
    for age in (0, 16, 64, 128):
        alive = [run for run in runs if run.repeat == 0 and run.output_tokens > age]
        if not alive:
            continue
        requests = [signal_request(run) for run in alive]
        answer = oracle.answer(requests, np.full(len(alive), age))
        truth = np.array([run.output_tokens - age for run in alive])
        error = np.mean(np.abs(answer.remaining - truth))
        print(
            f"age {age:>3}: {len(alive):>4} alive, mean error {error:4.1f} tokens, "
            f"answered by {answer.provenance()}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else bundled_runs())
