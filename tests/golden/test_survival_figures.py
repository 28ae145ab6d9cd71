"""Ours against the figures of lifelines, scikit-survival and scoringrules.

make_survival_figures.py made them; those libraries are not installed here. 1e-9 everywhere: both
sides compute the same sums of some sixty terms in double precision, in another order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest, signal_request
from contracts.survival import kaplan_meier
from contracts.survival_many import kaplan_meier_by
from eval.rescoring import cumulative_incidence
from eval.survival_metrics import (
    brier_score,
    censoring_survival,
    crps,
    harrell_c,
    integrated_brier_score,
    uno_c,
)
from tests.synthetic_runs import make_run

STORED = json.loads((Path(__file__).parent / "survival_figures.json").read_text(encoding="utf-8"))
EXACT = 1e-9


@pytest.fixture(params=range(len(STORED["cases"])))
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    stored = STORED["cases"][request.param]
    arrays = {name: np.array(stored[name]) for name in ("times", "causes", "estimates", "alive")}
    ended = arrays["causes"] > 0
    assert 0.1 < 1 - ended.mean() < 0.6
    assert len(np.unique(arrays["times"])) < len(ended) / 2  # ties
    return stored | arrays | {"ended": ended}


def test_kaplan_meier(case: dict[str, Any]) -> None:
    curve = kaplan_meier(case["times"], case["ended"])
    at, survival = case["figures"]["sksurv_kaplan_meier"]
    assert curve(np.array(at)) == pytest.approx(survival, abs=EXACT)
    assert curve(np.array(at)) == pytest.approx(
        case["figures"]["lifelines_kaplan_meier"], abs=EXACT
    )
    many = kaplan_meier_by(np.zeros(len(case["times"]), np.int64), case["times"], case["ended"], 1)
    first = np.zeros(len(at), np.int64)
    assert many.at(first, np.array(at)) == pytest.approx(survival, abs=EXACT)


def test_restricted_mean_and_residual_life(case: dict[str, Any]) -> None:
    curve = kaplan_meier(case["times"], case["ended"])
    zero = np.array([0])
    for cap, mean in case["figures"]["lifelines_restricted_mean"].items():
        assert curve.mean_residual(zero, np.array([int(cap)])) == pytest.approx([mean], abs=EXACT)
    for age, mean in case["figures"]["lifelines_mean_residual_to_23"].items():
        left = curve.mean_residual(np.array([int(age)]), np.array([23]))
        assert left == pytest.approx([mean], abs=EXACT)


def test_concordance(case: dict[str, Any]) -> None:
    said, figures = case["estimates"], case["figures"]
    assert harrell_c(case["times"], case["ended"], said) == pytest.approx(
        figures["sksurv_harrell_c"], abs=EXACT
    )
    assert uno_c(case["times"], case["ended"], said, tau=figures["tau"]) == pytest.approx(
        figures["sksurv_uno_c"], abs=EXACT
    )


def test_brier_scores(case: dict[str, Any]) -> None:
    times, ended, horizons = case["times"], case["ended"], np.array(case["horizons"])
    figures = case["figures"]
    assert censoring_survival(times, ended)(horizons) == pytest.approx(
        figures["sksurv_censoring_survival"], abs=EXACT
    )
    ours = [brier_score(times, ended, case["alive"][:, j], h) for j, h in enumerate(horizons)]
    assert ours == pytest.approx(figures["sksurv_brier"], abs=EXACT)
    whole = integrated_brier_score(times, ended, case["alive"], horizons)
    assert whole == pytest.approx(figures["sksurv_ibs"], abs=EXACT)


def test_competing_risks(case: dict[str, Any]) -> None:
    at, *by_cause = case["figures"]["sksurv_incidence"]
    for cause, incidence in enumerate(by_cause, 1):
        ours = cumulative_incidence(case["times"], case["causes"], at, cause)
        assert ours == pytest.approx(incidence, abs=EXACT)


class _Ensemble:
    """Six equally likely lengths."""

    name = "ensemble"

    def __init__(self, members: IntArray) -> None:
        self.members = members

    def survival(
        self, requests: list[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        assert not ages.any()
        return (self.members[None, :] > horizon[:, None]).mean(axis=1)


def test_crps_of_an_ensemble(case: dict[str, Any]) -> None:
    request = signal_request(make_run(prompt="p", prompt_id="p", natural_tokens=9))
    truth = case["times"][7:17]
    members = case["times"].reshape(10, 6)
    for row, figure in enumerate(case["figures"]["scoringrules_crps"]):
        tokens, _ = crps(
            _Ensemble(members[row]),  # type: ignore[arg-type]
            [request],
            np.array([0]),
            truth[row : row + 1],
        )
        assert tokens == pytest.approx([figure], abs=EXACT)
