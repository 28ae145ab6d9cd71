"""Which bench a backend's name means; each is loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from serving_sim.calibration.bench_config import Bench, BenchConfig
from serving_sim.calibration.steps import StepShape


def open_bench(config: BenchConfig, shapes: Sequence[StepShape]) -> Bench:
    """Return the bench of ``config.backend`` with room for as many of ``shapes`` as fit.

    Raises InvalidInput, before anything is allocated, for what cannot be timed, MissingDependency
    for what is not installed.
    """
    if config.backend == "paged":
        from serving_sim.calibration.paged import open_paged_bench

        return open_paged_bench(config, shapes)
    if config.backend == "vllm":
        from serving_sim.calibration.vllm_bench import open_vllm_bench

        return open_vllm_bench(config, shapes)
    from serving_sim.calibration.bench import open_torch_bench

    return open_torch_bench(config, shapes)
