"""How much of the way from its mean to its longest context an uneven batch of decodes costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from serving_sim.calibration.result import Probe, work_of

if TYPE_CHECKING:
    from contracts.policy import FloatArray
    from serving_sim.surface import SurfaceProfile

_COARSE, _FINE = 0.02, 0.001  # steps of the share; the second is what a profile keeps of it


def with_skew_share(
    profile: SurfaceProfile, uneven: Sequence[Probe]
) -> tuple[SurfaceProfile, list[Probe]]:
    """Return ``profile`` with the skew share that fits ``uneven`` best, and what it then predicts.

    Best is the least sum of squared relative errors over shares of 0 to 1. It need not have one
    valley (the decode table bends), so the whole range is searched before the best part of it is.
    """
    if not uneven:
        return profile, []
    work = np.array([work_of(probe.shape) for probe in uneven], dtype=np.int64)
    measured_s = np.array([probe.measured_s for probe in uneven])

    def loss(share: float) -> float:
        found_s: FloatArray = replace(profile, skew_share=share).steps_s(work)
        return float(np.sum((found_s / measured_s - 1.0) ** 2))

    middle = min(_shares(0.0, 1.0, _COARSE), key=loss)
    share = min(_shares(max(0.0, middle - _COARSE), min(1.0, middle + _COARSE), _FINE), key=loss)
    fitted = replace(profile, skew_share=share)
    predicted_s = fitted.steps_s(work).tolist()
    return fitted, [replace(p, predicted_s=s) for p, s in zip(uneven, predicted_s, strict=True)]


def _shares(low: float, high: float, step: float) -> list[float]:
    return [round(low + i * step, 3) for i in range(round((high - low) / step) + 1)]
