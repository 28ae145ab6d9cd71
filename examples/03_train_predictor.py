"""Fit gbm-hazard on three quarters of the prompts, save it, load it, ask it about the others.

A predictor answers with an expectation, and with any quantile of what remains.

    python examples/03_train_predictor.py [RUNS.parquet]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from contracts.signals import signal_request
from predictors.gbm_hazard import GbmHazardSettings
from predictors.registry import load_predictor
from traces.bundled import bundled_runs
from traces.runlog import read_runs
from traces.split import split_runs
from training.rows import training_set

AGE = 32


def main(runs_path: Path) -> None:
    split = split_runs(read_runs(runs_path), test_share=0.25, seed=0)
    fitted = GbmHazardSettings().fit(training_set(split.train))
    with tempfile.TemporaryDirectory() as folder:
        fitted.save_pretrained(folder)
        print("checkpoint:", ", ".join(sorted(path.name for path in Path(folder).iterdir())))
        predictor = load_predictor(folder)
    unseen = [run for run in split.test if run.repeat == 0 and run.output_tokens > AGE][:8]
    requests = [signal_request(run) for run in unseen]
    ages = np.full(len(unseen), AGE)
    mean, upper = predictor.remaining(requests, ages), predictor.quantile(requests, ages, 0.9)
    print(f"prompt        truth at age {AGE}   expected   90 % below")
    for run, expected, bound in zip(unseen, mean, upper, strict=True):
        print(f"{run.prompt_id:<14}{run.output_tokens - AGE:>14}{expected:>11.0f}{bound:>13.0f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else bundled_runs())
