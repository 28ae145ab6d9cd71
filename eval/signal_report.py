"""Everything ``score --details`` says of a signal: each metric with an interval over prompts.

Floors, signals and ceilings meet the same rows and the same running sets (:mod:`eval.report_rows`).
The headline is the victim regret of a signal minus that of LIFO in the same sets. Scored runs have
a known served length; the concordance indices are on the natural length, for which a run at its cap
is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun
from contracts.signals import DistributionalSignal, RemainingSignal, RoutedSignal, SignalRequest
from eval import set_metrics
from eval.calibration_metrics import Coverage, coverage, d_calibration, randomised_pit
from eval.report_rows import Estimate, ReportRows, draw_rows
from eval.survival_metrics import concordant_pairs, crps, log_likelihood, uno_pairs
from predictors.calibrated import Calibrated
from predictors.targets import reach_cap

LIFO = "lifo"


@dataclass(frozen=True, slots=True, eq=False)
class ReportRow:
    """One signal: ``metrics`` by name, ``coverage`` of its 90 % bounds, log-MAE ``by_age`` (tenths
    of the rows, by the first age) and ``by_family`` of prompts, shares of the PIT in ten bins."""

    signal: str
    role: str
    metrics: Mapping[str, Estimate]
    coverage: tuple[Coverage, ...]
    by_age: Mapping[int, float]
    by_family: Mapping[str, float]
    pit: tuple[float, ...]


def report_signals(
    runs: Sequence[DecodeRun],
    signals: Sequence[tuple[str, RemainingSignal]],
    *,
    reference: str = "age-km",
    num_bootstraps: int = 200,
    seed: int = 0,
) -> list[ReportRow]:
    """Return LIFO, FIFO and random, then each of ``signals``, (role, signal) with role one of
    floor, signal and ceiling. ``skill`` is 1 - log-MAE / that of the first named ``reference``.

    ``runs`` must have a known served length and at least 8 members. Deterministic in its inputs.
    """
    rows = draw_rows(runs, num_bootstraps, seed)
    age = rows.meetings.age.astype(np.float64)
    picks = {LIFO: -age, "fifo": age, "random": rows.meetings.draw}
    of_sets = {name: _set_replicates(rows, scores) for name, scores in picks.items()}
    lifo = of_sets[LIFO]
    out = [
        ReportRow(name, "floor", _with_lifo(own, lifo), (), {}, {}, ())
        for name, own in of_sets.items()
    ]
    base = None
    errors = [log_errors(signal, rows) for _, signal in signals]
    for (_, signal), own in zip(signals, errors, strict=True):
        if base is None and signal.name == reference:
            base = own
    for (role, signal), own in zip(signals, errors, strict=True):
        metrics = _with_lifo(signal_replicates(signal, rows), lifo)
        metrics |= _error_metrics(rows, own, base) | _rank_metrics(rows, signal)
        pit: tuple[float, ...] = ()
        bounds: tuple[Coverage, ...] = ()
        if isinstance(signal, DistributionalSignal):
            likely, pit = _distribution_metrics(rows, signal)
            metrics |= likely
            bounds = _coverage(rows, signal)
        out.append(ReportRow(signal.name, role, metrics, bounds, *_profiles(rows, own), pit))
    return out


def signal_replicates(signal: RemainingSignal, rows: ReportRows) -> dict[str, FloatArray]:
    """Return each metric of running sets (1 + b,) when the most remaining is the victim: on the
    prompts as they are, then in each bootstrap."""
    meetings = rows.meetings
    return _set_replicates(rows, signal.remaining(rows.asked(meetings.run), meetings.age))


def log_errors(signal: RemainingSignal, rows: ReportRows) -> FloatArray:
    """Return |log(1 + answer) - log(1 + remaining)| (n,) on the rows of the grid."""
    answers = signal.remaining(rows.asked(rows.owner), rows.age)
    return np.asarray(np.abs(np.log1p(answers) - np.log1p(rows.left)))


def mean_log_errors(rows: ReportRows, errors: FloatArray) -> FloatArray:
    """Return the log-MAE (1 + b,) of ``errors`` (n,), every run weighing the same."""
    return rows.means(errors, np.ones(len(errors), dtype=bool))


def _set_replicates(rows: ReportRows, scores: FloatArray) -> dict[str, FloatArray]:
    """Return each set metric (1 + b,) when the highest of ``scores`` is the victim."""
    prompt_tokens = np.array([request.prompt_tokens for request in rows.requests])
    meetings = rows.meetings
    context = (prompt_tokens[meetings.run] + meetings.age).astype(np.float64)
    out: dict[str, list[float]] = {}
    for sets in rows.sets:
        picked, left = scores[sets], meetings.remaining[sets]
        longest = left.max(axis=1, keepdims=True)
        parts = {
            "concordance": set_metrics.concordance(picked, left),
            "ndcg": set_metrics.ndcg(picked, left),
            "top1": set_metrics.top_1(picked, left),
            "early_kills": set_metrics.early_kills(picked, left),
            "regret_length": set_metrics.regret(picked, (longest - left).astype(np.float64))
            * (longest - left).max(axis=1) / longest[:, 0],
            "regret_recompute": set_metrics.regret(picked, context[sets]),
        }  # fmt: skip
        for name, values in parts.items():
            out.setdefault(name, []).append(float(np.nanmean(values)))
    return {name: np.array(values) for name, values in out.items()}


def _with_lifo(
    replicates: Mapping[str, FloatArray], lifo: Mapping[str, FloatArray]
) -> dict[str, Estimate]:
    out = {name: Estimate.of(values) for name, values in replicates.items()}
    for cost in ("length", "recompute"):
        difference = replicates[f"regret_{cost}"] - lifo[f"regret_{cost}"]
        out[f"regret_{cost}_minus_lifo"] = Estimate.of(difference)
    return out


def _error_metrics(
    rows: ReportRows, errors: FloatArray, base: FloatArray | None
) -> dict[str, Estimate]:
    log_mae = mean_log_errors(rows, errors)
    out = {"log_mae": Estimate.of(log_mae)}
    if base is not None:
        out["skill"] = Estimate.of(1.0 - log_mae / mean_log_errors(rows, base))
    if rows.exhausted.any():
        out["log_mae_exhausted"] = Estimate.of(rows.means(errors, rows.exhausted))
    return out


def _rank_metrics(rows: ReportRows, signal: RemainingSignal) -> dict[str, Estimate]:
    from scipy.stats import kendalltau

    asked, left, weights = rows.once()
    answers = signal.remaining(asked, rows.single_age)
    event = np.array([rows.runs[i].event_observed is True for i in rows.single.tolist()])
    out = {}
    for name, pair in (("harrell_c", np.ones(len(left))), ("uno_c", uno_pairs(left, event))):
        right, total = concordant_pairs(left, event, answers, pair)
        worth = ((weights @ total) * weights).sum(axis=1)
        share = np.full(len(worth), np.nan)
        np.divide(((weights @ right) * weights).sum(axis=1), worth, out=share, where=worth > 0)
        out[name] = Estimate.of(share)
    taus = []
    for weight in weights:
        again = np.repeat(np.arange(len(left)), weight.astype(np.int64))
        taus.append(float(kendalltau(answers[again], left[again]).statistic))
    return out | {"tau_b": Estimate.of(np.array(taus))}


def _distribution_metrics(
    rows: ReportRows, signal: DistributionalSignal
) -> tuple[dict[str, Estimate], tuple[float, ...]]:
    asked, left, weights = rows.once()
    ages, known = rows.single_age, np.ones(len(left), dtype=bool)
    in_tokens, on_log = crps(signal, asked, ages, left)
    horizons = np.unique(np.quantile(left, np.linspace(0.1, 0.9, 9)).astype(np.int64))
    alive = np.column_stack(
        [signal.survival(asked, ages, np.full(len(left), float(h))) for h in horizons]
    )
    squared = (alive - (left[:, None] > horizons)) ** 2
    span = max(int(horizons[-1] - horizons[0]), 1)
    each = {
        "crps": in_tokens,
        "log_crps": on_log,
        "log_likelihood": log_likelihood(signal, asked, ages, left, known),
        "ibs": np.trapezoid(squared, horizons, axis=1) / span,
    }
    share = weights.sum(axis=1)
    out = {name: Estimate.of(weights @ values / share) for name, values in each.items()}
    draw = keyed_generator(0, "report-pit").random(len(left))
    pit, reached = randomised_pit(signal, asked, ages, left, draw)
    _, first = np.unique(rows.prompt[rows.single], return_index=True)  # one row for each prompt
    even = d_calibration(pit[first], reached[first], known[first])
    nothing = float("nan")
    out["d_calibration_p"] = Estimate(even.p_value, nothing, nothing)
    return out | _cap_metrics(rows, signal), even.shares


def _cap_metrics(rows: ReportRows, signal: DistributionalSignal) -> dict[str, Estimate]:
    """Return how often runs were expected to reach their cap and did, and the Brier score."""
    asked, left, weights = rows.once()
    reached = left >= np.array([r.max_tokens for r in asked]) - rows.single_age
    said = reach_cap(signal, asked, rows.single_age)
    each = {"cap_said": said, "cap_seen": reached * 1.0, "cap_brier": (said - reached) ** 2}
    share = weights.sum(axis=1)
    return {name: Estimate.of(weights @ values / share) for name, values in each.items()}


def _coverage(rows: ReportRows, signal: DistributionalSignal) -> tuple[Coverage, ...]:
    asked = rows.asked(rows.owner)
    caps = np.array([request.max_tokens for request in rows.requests])[rows.owner]
    room = (caps - rows.age).astype(np.float64)
    bounds = {
        "upper 90 %": (np.ones(len(room)), signal.quantile(asked, rows.age, 0.9)),
        "lower 90 %": (signal.quantile(asked, rows.age, 0.1), room),
        "central 90 %": _central(signal, asked, rows.age, 0.9),
    }
    weight = (1.0 / np.bincount(rows.prompt))[rows.prompt[rows.owner]]
    return tuple(
        coverage(name, low, high, rows.age, rows.left, caps, weight, owner=rows.owner)
        for name, (low, high) in bounds.items()
    )


def _central(
    signal: DistributionalSignal, asked: Sequence[SignalRequest], ages: IntArray, share: float
) -> tuple[FloatArray, FloatArray]:
    """Return the central interval: a calibrated predictor's own, else two quantiles."""
    if isinstance(signal, Calibrated):
        return signal.interval(asked, ages, share)
    if isinstance(signal, RoutedSignal):
        low, high = np.empty(len(ages)), np.empty(len(ages))
        folds = np.array([signal.fold(request) for request in asked])
        for index, fold in enumerate(signal.signals):
            part = np.flatnonzero(folds == index)
            if part.size and isinstance(fold, DistributionalSignal):
                some = [asked[i] for i in part.tolist()]
                low[part], high[part] = _central(fold, some, ages[part], share)
        return low, high
    tail = (1.0 - share) / 2.0
    return signal.quantile(asked, ages, tail), signal.quantile(asked, ages, 1.0 - tail)


def _profiles(rows: ReportRows, errors: FloatArray) -> tuple[dict[int, float], dict[str, float]]:
    """Return the mean log error in tenths of the rows by age, and in each family of prompts."""
    edges = np.unique(np.quantile(rows.age, np.arange(1, 10) / 10, method="higher"))
    group = np.searchsorted(edges, rows.age, side="right")
    by_age = {
        int(rows.age[group == index].min()): float(errors[group == index].mean())
        for index in np.unique(group).tolist()
    }
    family = np.array([run.family for run in rows.runs])
    by_family = {}
    for name in np.unique(family).tolist():
        inside = (family == name)[rows.owner]
        by_family[name] = float(rows.means(errors, inside)[0])
    return by_age, by_family
