"""How well the adaptive grid of a calibration finds a cost that is known: no device, a formula.

    python -m benchmarks.calibrate_formula [--rounds 8]

The formula is Llama-3.1-8B on an H200 as a cartoon: launches (1.2 ms, and 12 ms at least above 512
tokens), weights at 85 % of the bandwidth or tiles of 128 tokens at 65 % of the peak, KV at 75 % of
the bandwidth, prefill attention at 40 % of the peak. It is harsher than a GPU: nothing smooths the
tiles. Printed: steps timed, the GPU seconds they would take (20 runs and 0.4 s for a capture each),
and the errors of the profile on 400 random steps of each kind.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np

from serving_sim.calibration.adaptive import CalibrationSettings, calibrate
from serving_sim.calibration.grid import coarse_grid
from serving_sim.calibration.journal import Journal
from serving_sim.calibration.result import work_of
from serving_sim.calibration.run import fit_with
from serving_sim.calibration.steps import StepDoesNotFit, StepShape
from serving_sim.calibration.timing import Timing
from serving_sim.models import MODELS
from serving_sim.roofline import PEAKS
from serving_sim.surface import ProfileHeader

MODEL, PEAK = MODELS["Llama-3.1-8B"], PEAKS["h200"]


class Formula:
    """The bench of the formula; ``device_s`` is what its timings would have taken."""

    room_tokens = int((0.9 * 139e9 - MODEL.weight_bytes - 2e9) / MODEL.kv_bytes_per_token)

    def __init__(self) -> None:
        self.device_s = 0.0

    def time(self, shape: StepShape) -> Timing:
        if shape.kv_tokens > self.room_tokens:
            raise StepDoesNotFit(f"{shape}: no room")
        seconds = self.seconds(shape)
        self.device_s += 20 * seconds + 0.4
        return Timing(seconds, 0.003 * seconds, 14)

    @staticmethod
    def seconds(shape: StepShape) -> float:
        chunk, prefix, decodes, context, _ = shape
        rows = shape.tokens if shape.tokens <= 128 else -(-shape.tokens // 128) * 128
        compute = 2 * MODEL.num_parameters * rows / (0.65 * PEAK.flops_per_s)
        weights = MODEL.weight_bytes / (0.85 * PEAK.bytes_per_s)
        kv = decodes * context * MODEL.kv_bytes_per_token / (0.75 * PEAK.bytes_per_s)
        pairs = chunk * (prefix + chunk / 2)
        prefill = 4 * MODEL.layers * MODEL.heads * MODEL.head_dim * pairs
        seconds = 0.0012 + (compute**4 + weights**4) ** 0.25 + kv
        seconds += prefill / (0.4 * PEAK.flops_per_s)
        return max(seconds, 0.012) if shape.tokens > 512 else seconds


def random_shape(kind: str, source: random.Random) -> StepShape:
    """Return a step of ``kind``, log-uniform in chunk, batch and context, uniform in prefix."""
    chunk, batch = round(2 ** source.uniform(4, 13)), round(2 ** source.uniform(0, 8))
    prefix, context = source.randrange(24_577), round(2 ** source.uniform(5, 15))
    if kind == "decode":
        return StepShape(0, 0, batch, context)
    return StepShape(chunk, prefix, *((batch, context) if kind == "mixed" else (0, 0)))


def main() -> None:
    """Calibrate the formula and print how far off the profile is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    bench, header = Formula(), ProfileHeader("formula", "none", "Llama-3.1-8B", "formula", "none")
    with tempfile.TemporaryDirectory() as folder:
        result = calibrate(
            bench,
            coarse_grid(256, 32_768, 8192),
            fit_with(header),
            Journal(Path(folder) / "formula.jsonl", {}),
            CalibrationSettings(budget_s=1e6, max_rounds=rounds),
        )
    steps = len(result.measured) + len(result.mixed)
    print(f"{steps} steps, {bench.device_s:.0f} s, {len(result.rounds)} rounds: {result.stopped}")
    print(f"{'kind':<8}{'median':>8}{'p90':>8}{'p99':>8}{'max':>8}")
    source = random.Random(1)
    for kind in ("decode", "prefill", "mixed"):
        shapes = [random_shape(kind, source) for _ in range(400)]
        errors = [
            abs(result.profile.step_s(work_of(s)) / bench.seconds(s) - 1.0)
            for s in shapes
            if s.kv_tokens <= bench.room_tokens
        ]
        quantiles = np.quantile(errors, (0.5, 0.9, 0.99, 1.0))
        print(f"{kind:<8}" + "".join(f"{100 * q:>7.2f}%" for q in quantiles))


if __name__ == "__main__":
    main()
