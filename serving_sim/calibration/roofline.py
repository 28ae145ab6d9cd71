"""The peaks of the GPU that was timed, and the roofline of a step on it."""

from __future__ import annotations

from collections.abc import Mapping

from serving_sim.calibration.capacity import ModelFacts
from serving_sim.calibration.result import work_of
from serving_sim.calibration.steps import StepShape
from serving_sim.roofline import PEAKS, Peak, roofline_s

# By what torch.cuda.get_device_name() begins with; the longest name that fits counts. Dense 16-bit
# rates and bandwidths of NVIDIA's data sheets.
GPUS: Mapping[str, Peak] = {
    "NVIDIA A100-SXM4-40GB": Peak(312e12, 1.555e12),
    "NVIDIA A100-SXM4-80GB": Peak(312e12, 2.039e12),
    "NVIDIA A100 80GB PCIe": Peak(312e12, 1.935e12),
    "NVIDIA H100 80GB HBM3": PEAKS["h100"],
    "NVIDIA H100 PCIe": Peak(756e12, 2.0e12),
    "NVIDIA H100 NVL": Peak(835e12, 3.9e12),
    "NVIDIA H200": PEAKS["h200"],
    "NVIDIA B200": Peak(2250e12, 8.0e12),
    "NVIDIA L4": Peak(121e12, 0.300e12),
    "NVIDIA L40S": Peak(362e12, 0.864e12),
    "NVIDIA GeForce RTX 4090": PEAKS["rtx4090"],
    "NVIDIA RTX PRO 6000 Blackwell": PEAKS["rtxpro6000"],
}


def gpu_peak(hardware: str) -> Peak | None:
    """Return the peak of the GPU with this name; None for one that the table lacks."""
    fits = [name for name in GPUS if hardware == name or hardware.startswith(f"{name} ")]
    return GPUS[max(fits, key=len)] if fits else None


def step_roofline_s(shape: StepShape, facts: ModelFacts, peak: Peak) -> float:
    """Return the roofline seconds of a step of a model with 16-bit weights on one GPU."""
    return roofline_s(facts.sizes, peak, 1, work_of(shape))
