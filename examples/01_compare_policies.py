"""The matrix: two victim policies beside LIFO, at one size of the KV pool, over three seeds.

Every policy meets the same arrivals and lengths; differences are paired by seed.

    python examples/01_compare_policies.py [RUNS.parquet]
"""

import sys
import tempfile
from pathlib import Path

from eval.matrix import run_matrix
from eval.matrix_config import MatrixConfig, Pressure
from eval.signal_sources import SignalSource
from eval.summary import format_table, summarise
from serving_sim.config import EngineConfig
from traces.bundled import bundled_runs


def main(runs: Path) -> None:
    config = MatrixConfig(
        runs=runs,
        policies=("lifo", "largest-kv", "longest-remaining"),
        signals=(SignalSource("none"), SignalSource("oracle")),
        pressures=(Pressure("high", num_blocks=161),),
        engine=EngineConfig(num_blocks=161, max_num_seqs=64, max_num_batched_tokens=2048),
        profile="rtx4090-llama-3.1-8b",
        num_seeds=3,
        rate_per_s=10.0,
        num_warmup=30,
        num_tagged=120,
        deadline_s=8.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        cells = run_matrix(config, Path(folder), num_jobs=1)
    print(format_table(summarise(cells)))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else bundled_runs())
