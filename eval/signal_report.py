"""Everything ``score --details`` says of a signal: each metric with an interval over prompts.

Floors, signals and ceilings meet the same rows and the same running sets. The headline is the
victim regret of a signal minus that of LIFO in the same sets. Intervals resample prompts (2.5 and
97.5 percentiles): sets are drawn anew from the resampled prompts, so that a set's members, its ages
and the prompts all vary. Scored runs have a known served length; the concordance indices are on the
natural length, for which a run at its cap is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun
from contracts.signals import (
    DistributionalSignal,
    RemainingSignal,
    RoutedSignal,
    SignalRequest,
    signal_request,
)
from eval import set_metrics
from eval.calibration_metrics import Coverage, coverage, d_calibration, randomised_pit
from eval.survival_metrics import concordant_pairs, crps, log_likelihood, uno_pairs
from predictors.calibrated import Calibrated

NUM_SETS, SET_SIZE, MEETINGS_A_RUN = 300, 8, 8
_MAX_ROWS, _MAX_SINGLE = 60_000, 1_500
LIFO = "lifo"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric on all prompts, and the percentile interval of it over resampled prompts; NaN where
    a signal has no such number."""

    value: float
    low: float
    high: float


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


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """What every signal is asked: a grid over each life, each run once, and meetings for sets."""

    runs: tuple[DecodeRun, ...]
    requests: tuple[SignalRequest, ...]
    prompt: IntArray
    owner: IntArray
    age: IntArray
    left: IntArray
    exhausted: np.ndarray
    single: IntArray
    single_age: IntArray
    meetings: set_metrics.Meetings
    weights: FloatArray
    sets: tuple[IntArray, ...]


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
    rows = _rows(runs, num_bootstraps, seed)
    meetings = rows.meetings
    age = meetings.age.astype(np.float64)
    picks = {LIFO: -age, "fifo": age, "random": meetings.draw}
    of_sets = {name: _set_replicates(rows, scores) for name, scores in picks.items()}
    out = [
        ReportRow(name, "floor", _with_lifo(of_sets[name], of_sets[LIFO]), (), {}, {}, ())
        for name in picks
    ]
    errors = [_log_errors(signal, rows) for _, signal in signals]
    named = [
        own for (_, signal), own in zip(signals, errors, strict=True) if signal.name == reference
    ]
    base = named[0] if named else None
    for (role, signal), own_errors in zip(signals, errors, strict=True):
        asked = [rows.requests[i] for i in meetings.run.tolist()]
        replicates = _set_replicates(rows, signal.remaining(asked, meetings.age))
        metrics = dict(_with_lifo(replicates, of_sets[LIFO]))
        metrics |= _error_metrics(rows, own_errors, base)
        metrics |= _rank_metrics(rows, signal)
        pit: tuple[float, ...] = ()
        bounds: tuple[Coverage, ...] = ()
        if isinstance(signal, DistributionalSignal):
            likely, pit = _distribution_metrics(rows, signal)
            metrics |= likely
            bounds = _coverage(rows, signal)
        by_age, by_family = _profiles(rows, own_errors)
        out.append(ReportRow(signal.name, role, metrics, bounds, by_age, by_family, pit))
    return out


def _rows(runs: Sequence[DecodeRun], num_bootstraps: int, seed: int) -> _Rows:
    runs = tuple(runs)
    if len(runs) < SET_SIZE:
        raise InvalidInput(
            f"there are {len(runs)} runs to score: sets of {SET_SIZE} need as many; give more"
        )
    lengths = np.array([run.output_tokens for run in runs], dtype=np.int64)
    stride = 8
    while (-(-lengths // stride)).sum() > _MAX_ROWS:
        stride *= 2
    counts = -(-lengths // stride)
    owner = np.repeat(np.arange(len(runs)), counts)
    age = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * stride
    _, prompt = np.unique([run.prompt_sha256 for run in runs], return_inverse=True)
    meetings = set_metrics.draw_meetings(
        lengths, MEETINGS_A_RUN, keyed_generator(seed, "report-meetings")
    )
    rng = keyed_generator(seed, "report-single")
    single = np.sort(rng.permutation(len(runs))[:_MAX_SINGLE])
    weights = _resampled(prompt, num_bootstraps, seed)
    sets = tuple(
        set_metrics.draw_sets(
            meetings, weight * lengths, NUM_SETS if index else 4 * NUM_SETS,
            min(SET_SIZE, int((weight > 0).sum())), keyed_generator(seed, "report-sets", index),
        )
        for index, weight in enumerate(weights)
    )  # fmt: skip
    return _Rows(
        runs=runs,
        requests=tuple(signal_request(run) for run in runs),
        prompt=prompt,
        owner=owner,
        age=age,
        left=lengths[owner] - age,
        exhausted=age >= _longest_other(runs)[owner],
        single=single,
        single_age=(rng.random(len(single)) * lengths[single]).astype(np.int64),
        meetings=meetings,
        weights=weights,
        sets=sets,
    )


def _resampled(prompt: IntArray, count: int, seed: int) -> FloatArray:
    """Return (1 + count, n): ones, then how often each bootstrap drew the prompt of each run."""
    num_prompts = int(prompt.max()) + 1
    out = np.ones((1 + count, len(prompt)))
    for index in range(count):
        drawn = keyed_generator(seed, "report-prompts", index).integers(0, num_prompts, num_prompts)
        out[1 + index] = np.bincount(drawn, minlength=num_prompts)[prompt]
    return out


def _longest_other(runs: Sequence[DecodeRun]) -> FloatArray:
    """Return the longest other run (n,) of each run's request; infinity when it has none."""
    lengths: dict[str, list[int]] = {}
    for run in runs:
        lengths.setdefault(run.request_key, []).append(run.output_tokens)
    for group in lengths.values():
        group.sort()
    out = np.full(len(runs), np.inf)
    for index, run in enumerate(runs):
        group = lengths[run.request_key]
        if len(group) > 1:
            out[index] = group[-2] if run.output_tokens == group[-1] else group[-1]
    return out


def _set_replicates(rows: _Rows, scores: FloatArray) -> dict[str, FloatArray]:
    """Return each set metric (1 + b,): on the prompts as they are, then in each bootstrap."""
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
    out = {name: _estimate(values) for name, values in replicates.items()}
    for cost in ("length", "recompute"):
        difference = replicates[f"regret_{cost}"] - lifo[f"regret_{cost}"]
        out[f"regret_{cost}_minus_lifo"] = _estimate(difference)
    return out


def _log_errors(signal: RemainingSignal, rows: _Rows) -> FloatArray:
    answers = signal.remaining([rows.requests[i] for i in rows.owner.tolist()], rows.age)
    return np.asarray(np.abs(np.log1p(answers) - np.log1p(rows.left)))


def _error_metrics(rows: _Rows, errors: FloatArray, base: FloatArray | None) -> dict[str, Estimate]:
    every = np.ones(len(errors), dtype=bool)
    log_mae = _request_means(rows, errors, every)
    out = {"log_mae": _estimate(log_mae)}
    if base is not None:
        out["skill"] = _estimate(1.0 - log_mae / _request_means(rows, base, every))
    if rows.exhausted.any():
        out["log_mae_exhausted"] = _estimate(_request_means(rows, errors, rows.exhausted))
    return out


def _request_means(rows: _Rows, values: FloatArray, chosen: np.ndarray) -> FloatArray:
    """Return (1 + b,) means over requests of each request's own mean over ``chosen`` rows."""
    count = np.bincount(rows.owner, chosen, len(rows.runs))
    total = np.bincount(rows.owner, np.where(chosen, values, 0.0), len(rows.runs))
    some = count > 0
    means = np.divide(total, count, out=np.zeros(len(count)), where=some)
    weights = rows.weights * some
    share = weights.sum(axis=1)
    out: FloatArray = np.full(len(share), np.nan)
    np.divide(weights @ means, share, out=out, where=share > 0)
    return out


def _rank_metrics(rows: _Rows, signal: RemainingSignal) -> dict[str, Estimate]:
    from scipy.stats import kendalltau

    asked, left, weights = _single(rows)
    answers = signal.remaining(asked, rows.single_age)
    event = np.array([rows.runs[i].event_observed is True for i in rows.single.tolist()])
    out = {}
    for name, pair in (("harrell_c", np.ones(len(left))), ("uno_c", uno_pairs(left, event))):
        right, total = concordant_pairs(left, event, answers, pair)
        worth = ((weights @ total) * weights).sum(axis=1)
        share = np.full(len(worth), np.nan)
        np.divide(((weights @ right) * weights).sum(axis=1), worth, out=share, where=worth > 0)
        out[name] = _estimate(share)
    taus = []
    for weight in weights:
        again = np.repeat(np.arange(len(left)), weight.astype(np.int64))
        taus.append(float(kendalltau(answers[again], left[again]).statistic))
    return out | {"tau_b": _estimate(np.array(taus))}


def _distribution_metrics(
    rows: _Rows, signal: DistributionalSignal
) -> tuple[dict[str, Estimate], tuple[float, ...]]:
    asked, left, weights = _single(rows)
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
    out = {name: _estimate(weights @ values / share) for name, values in each.items()}
    draw = keyed_generator(0, "report-pit").random(len(left))
    pit, reached = randomised_pit(signal, asked, ages, left, draw)
    _, first = np.unique(rows.prompt[rows.single], return_index=True)  # one row for each prompt
    even = d_calibration(pit[first], reached[first], known[first])
    nothing = float("nan")
    out["d_calibration_p"] = Estimate(even.p_value, nothing, nothing)
    return out, even.shares


def _coverage(rows: _Rows, signal: DistributionalSignal) -> tuple[Coverage, ...]:
    asked = [rows.requests[i] for i in rows.owner.tolist()]
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


def _profiles(rows: _Rows, errors: FloatArray) -> tuple[dict[int, float], dict[str, float]]:
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
        by_family[name] = float(_request_means(rows, errors, inside)[0])
    return by_age, by_family


def _single(rows: _Rows) -> tuple[list[SignalRequest], IntArray, FloatArray]:
    """Return each run once: its request, what it had left (n,), its weights (1 + b, n)."""
    asked = [rows.requests[i] for i in rows.single.tolist()]
    lengths = np.array([rows.runs[i].output_tokens for i in rows.single.tolist()])
    return asked, lengths - rows.single_age, rows.weights[:, rows.single]


def _estimate(replicates: FloatArray) -> Estimate:
    """Return the first value with the percentile interval of the others."""
    others = replicates[1:][~np.isnan(replicates[1:])]
    if not others.size:
        return Estimate(float(replicates[0]), float("nan"), float("nan"))
    low, high = np.quantile(others, [0.025, 0.975])
    return Estimate(float(replicates[0]), float(low), float(high))
