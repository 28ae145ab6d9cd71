"""The demo, top to bottom: run log -> oracle -> predictors -> signal quality -> matrix -> report.

It simulates the collected runs themselves: nothing is stretched. The KV pool supplies the
pressure; rate and deadline are scaled to short outputs.
"""

from __future__ import annotations

from pathlib import Path

from eval.matrix import MatrixConfig, Pressure
from eval.signal_sources import NO_SIGNAL, SignalSource
from serving_sim.config import EngineConfig

NUM_FOLDS = 5
PREDICTORS = ("age-km", "countdown", "gbm-hazard")
MATRIX_PREDICTORS = ("age-km", "gbm-hazard")
POLICIES = (
    "lifo",
    "fifo",
    "random",
    "largest-kv",
    "least-computed",
    "most-computed",
    "sglang-retract",
    "young(0.25)",
    "young(0.5)",
    "longest-remaining",
    "shortest-remaining",
)
PRESSURES = (Pressure("low", 241), Pressure("medium", 181), Pressure("high", 141))


def demo_matrix(
    runs: Path,
    checkpoints: dict[str, Path],
    *,
    num_seeds: int = 10,
    policies: tuple[str, ...] = POLICIES,
    pressures: tuple[Pressure, ...] = PRESSURES,
) -> MatrixConfig:
    """Return the matrix of the demo; ``checkpoints`` maps a predictor's name to its folder."""
    return MatrixConfig(
        runs=runs,
        policies=policies,
        signals=(
            SignalSource(NO_SIGNAL),
            *(SignalSource(name, folder) for name, folder in checkpoints.items()),
            SignalSource("oracle"),
            SignalSource("clairvoyant"),
        ),
        pressures=pressures,
        engine=EngineConfig(num_blocks=2, max_num_seqs=64, max_num_batched_tokens=2048),
        profile="rtx4090-llama-3.1-8b",
        num_seeds=num_seeds,
        rate_per_s=4.0,
        num_warmup=40,
        num_tagged=160,
        num_filler=120,
        deadline_s=12.0,
    )
