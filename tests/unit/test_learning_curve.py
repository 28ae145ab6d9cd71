"""The learning curve: nested shares of the training prompts, one held-out side, more helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.errors import InvalidInput
from predictors.boosting import BoostingSettings
from predictors.gbm_hazard import GbmHazardSettings
from tests.synthetic_runs import synthetic_runs
from traces.runlog import RunLog
from training.learning_curve import _share_of, curve_text, draw_curves, learning_curve

RUNS = synthetic_runs(num_prompts=100, repeats=2)
LOG = RunLog.from_runs(RUNS)
SETTINGS = GbmHazardSettings(boosting=BoostingSettings(num_trees=40))


def test_a_smaller_share_lies_within_a_larger_one() -> None:
    small, large = _share_of(RUNS, 0.1, 0), _share_of(RUNS, 0.5, 0)
    prompts = [{run.prompt_sha256 for run in part} for part in (small, large)]
    assert prompts[0] < prompts[1]
    assert [len(part) for part in prompts] == [10, 50]
    assert len(small) == 20  # with every repeat
    assert _share_of(RUNS, 1.0, 0) == RUNS
    assert {r.prompt_sha256 for r in _share_of(RUNS, 0.1, 1)} != prompts[0]


def test_more_prompts_help_and_all_are_judged_on_the_same_rows(tmp_path: Path) -> None:
    curve = learning_curve(LOG, SETTINGS, shares=(1.0, 1 / 16, 1 / 4), num_bootstraps=20)
    assert [point.num_prompts for point in curve] == [4, 18, 70]
    first, last = curve[0], curve[-1]
    assert last.log_mae.value < first.log_mae.value
    assert last.concordance.value > first.concordance.value
    for point in curve:
        for estimate in (point.concordance, point.log_mae):
            assert estimate.low <= estimate.value <= estimate.high
    again = learning_curve(LOG, SETTINGS, shares=(1.0,), num_bootstraps=20)
    assert again == [last]  # the other fits change nothing
    assert curve_text("x", curve).count("\n") == 4
    draw_curves({"x": curve}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_shares_that_cannot_be_are_refused() -> None:
    for shares in ((), (0.0,), (1.5,)):
        with pytest.raises(InvalidInput, match=r"must lie in \(0, 1\]"):
            learning_curve(LOG, SETTINGS, shares=shares)
    with pytest.raises(InvalidInput, match="leaves 1 of 70 training prompts"):
        learning_curve(LOG, SETTINGS, shares=(0.01,))
