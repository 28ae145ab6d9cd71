"""Writes survival_figures.json: what other survival libraries say of our fixtures.

    pip install lifelines scikit-survival scoringrules     # an environment of its own
    python tests/golden/make_survival_figures.py > tests/golden/survival_figures.json

scikit-survival is GPL and lifelines pins old libraries: neither is ever installed with the project,
and only the numbers they print are kept. Fixtures are whole tokens, full of ties, a third cut.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import numpy as np

NUM_RUNS = 60
LONGEST_TOKENS = 25


def fixture(seed: int) -> dict[str, Any]:
    """Return durations, what ended them (0: cut), estimates with ties, and survival predictions."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, LONGEST_TOKENS + 1, NUM_RUNS)
    cut = rng.integers(5, 2 * LONGEST_TOKENS, NUM_RUNS)
    times = np.minimum(length, cut)
    causes = np.where(cut < length, 0, rng.choice([1, 2], NUM_RUNS, p=[0.7, 0.3]))
    estimates = np.round(length + rng.normal(0, 6, NUM_RUNS))
    horizons = np.arange(4, 21, 4)
    alive = 1.0 / (1.0 + np.exp((horizons[None, :] - estimates[:, None]) / 4.0))
    return {
        "times": times.tolist(),
        "causes": causes.tolist(),
        "estimates": estimates.tolist(),
        "horizons": horizons.tolist(),
        "alive": alive.round(6).tolist(),
    }


def figures(case: dict[str, Any]) -> dict[str, Any]:
    """Return what the libraries make of one fixture."""
    from lifelines import KaplanMeierFitter
    from lifelines.utils import restricted_mean_survival_time
    from scoringrules import crps_ensemble
    from sksurv.metrics import (
        brier_score,
        concordance_index_censored,
        concordance_index_ipcw,
        integrated_brier_score,
    )
    from sksurv.nonparametric import (
        CensoringDistributionEstimator,
        cumulative_incidence_competing_risks,
        kaplan_meier_estimator,
    )
    from sksurv.util import Surv

    times, causes = np.array(case["times"]), np.array(case["causes"])
    ended, horizons = causes > 0, np.array(case["horizons"])
    risk, alive = -np.array(case["estimates"]), np.array(case["alive"])
    truth = Surv.from_arrays(ended, times)
    at, survival = kaplan_meier_estimator(ended, times)
    fitter = KaplanMeierFitter().fit(times, ended)
    until = {t: float(restricted_mean_survival_time(fitter, t)) for t in (0, 5, 10, 20, 23)}
    alive_at = {a: float(fitter.predict(a)) for a in (0, 5, 10)}
    of_time, incidence = cumulative_incidence_competing_risks(causes, times)
    staying = CensoringDistributionEstimator().fit(truth)
    tau = 20
    return {
        "sksurv_kaplan_meier": [at.tolist(), survival.tolist()],
        "lifelines_kaplan_meier": [float(fitter.predict(t)) for t in at],
        "lifelines_restricted_mean": until,
        "lifelines_mean_residual_to_23": {
            a: (until[23] - until[a]) / share for a, share in alive_at.items()
        },
        "sksurv_harrell_c": float(concordance_index_censored(ended, times, risk)[0]),
        "sksurv_uno_c": float(concordance_index_ipcw(truth, truth, risk, tau=tau)[0]),
        "tau": tau,
        "sksurv_censoring_survival": staying.predict_proba(horizons).tolist(),
        "sksurv_brier": brier_score(truth, truth, alive, horizons)[1].tolist(),
        "sksurv_ibs": float(integrated_brier_score(truth, truth, alive, horizons)),
        "sksurv_incidence": [of_time.tolist(), incidence[1].tolist(), incidence[2].tolist()],
        "scoringrules_crps": crps_ensemble(
            np.array(case["times"][7:17], dtype=float),
            np.array(case["times"], dtype=float).reshape(10, 6),
            estimator="nrg",
        ).tolist(),
    }


def main() -> None:
    """Print the JSON."""
    cases = [fixture(seed) for seed in range(4)]
    out = {
        "made_with": {
            name: version(name) for name in ("lifelines", "scikit-survival", "scoringrules")
        },
        "cases": [case | {"figures": figures(case)} for case in cases],
    }
    sys.stdout.write(json.dumps(out, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
