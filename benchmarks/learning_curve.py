"""What gbm-hazard gains from more training prompts; table and figure of docs/signal_quality.md.

    python -m benchmarks.learning_curve [--out docs/img] [--prompts 400]

The bundled SmolLM2 log, and synthetic runs of the tests with as many prompts as asked. One split of
each (30 % of the prompts held out), nested shares 1/16 to 1 of the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.synthetic_runs import synthetic_runs
from traces.bundled import bundled_runs
from traces.runlog import RunLog
from traces.split import split_runs
from training.learning_curve import curve_text, draw_curves, learning_curve
from training.recipe import default_recipe
from training.rows import read_run_log


def main() -> None:
    """Print the tables, write the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    parser.add_argument("--prompts", type=int, default=400)
    options = parser.parse_args()
    logs = {
        "SmolLM2": read_run_log(bundled_runs()),
        "synthetic": RunLog.from_runs(synthetic_runs(num_prompts=options.prompts)),
    }
    curves = {}
    for name, log in logs.items():
        train, test = split_runs(log, test_share=0.3)
        curves[name] = learning_curve(list(train), list(test), default_recipe("gbm-hazard"))
        print(f"{name}\n{curve_text(curves[name])}", flush=True)
    draw_curves(curves, options.out / "learning-curve.png")


if __name__ == "__main__":
    main()
