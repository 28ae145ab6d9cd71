"""Which of the scored requests goes: the one rule that the simulator and real engines share."""

from __future__ import annotations

import numpy as np

from contracts.errors import ConformanceError
from contracts.policy import Policy, RunningViews

DRAW_PURPOSE = "policy-draw"  # keys the draws of randomised policies
TPOT_WINDOW_STEPS = 32  # steps that ``recent_tpot_s`` is the mean of


def choose_victim(policy: Policy, views: RunningViews) -> tuple[int, bool]:
    """Return the position of the victim among ``views`` (in admission order), and whether a score
    was NaN.

    The highest score goes, ties go to the youngest. A request scored NaN is not chosen; when all
    are, the youngest goes. Raises ConformanceError on scores of another shape.
    """
    count = len(views.admission_seq)
    scores = np.asarray(policy.score(views), dtype=np.float64)
    if scores.shape != (count,):
        raise ConformanceError(
            f"policy {policy.name!r} returned scores of shape {scores.shape} for "
            f"{count} requests: return one float a request"
        )
    # the last maximum is the youngest; argmax takes a NaN for the largest of all
    youngest = count - 1 - int(scores[::-1].argmax())
    if scores[youngest] == scores[youngest]:
        return youngest, False
    scored = np.flatnonzero(~np.isnan(scores))
    if not scored.size:
        return count - 1, True
    return int(scored[scored.size - 1 - int(np.argmax(scores[scored][::-1]))]), True
