"""What a signal's choice of victim costs in missed deadlines, by replay of the rest of the run.

One engine runs under LIFO. At sampled moments of preemption the rest of the run is replayed once
for each candidate: this victim, and LIFO again from then on. A choice's regret is the breaches of
its replay minus those of the best candidate, so it prices one decision and nothing else. The
candidates are what LIFO, FIFO, a random draw and every signal choose, and others drawn from the
running set until there are ``MAX_CANDIDATES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray, Policy, RunningViews
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun
from contracts.signals import RemainingSignal, SignalRequest
from eval.matrix import SeedInputs, offered_kv_load, prepare_seed
from eval.matrix_config import MatrixConfig, Pressure
from eval.replay import ReplayCase, Script, replay
from eval.signal_sources import NO_SIGNAL, SignalSource
from serving_sim.jump import simulate_fast
from serving_sim.policies import lifo
from serving_sim.profile import single_stream_s

MAX_CANDIDATES = 12
CONCURRENCY = 32.0  # requests that would run on average if each ran alone
_NUM_BOOTSTRAPS = 1000


@dataclass(frozen=True, slots=True)
class SloRegret:
    """Breaches that one decision of ``signal`` costs above the best candidate's, and above LIFO's
    (below 0 is better), each a mean over moments with its 95 % interval over seeds and moments;
    ``best`` is the share of moments at which no candidate was better."""

    signal: str
    regret: tuple[float, float, float]
    minus_lifo: tuple[float, float, float]
    best: float


@dataclass(frozen=True, slots=True)
class SloReport:
    """The cell that was replayed, and a row for each rule and signal. ``spread`` is the mean over
    moments of the worst candidate's breaches minus the best one's: what there is to choose."""

    num_blocks: int
    rate_per_s: float
    deadline_s: float
    lifo_breach: float
    num_seeds: int
    num_moments: int
    num_replays: int
    spread: float
    rows: tuple[SloRegret, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Moment:
    """One preemption of the LIFO run: its number, and who ran (n,), with what the rules see."""

    decision: int
    views: RunningViews


def slo_cell(config: MatrixConfig, runs: Sequence[DecodeRun], pressure: float) -> MatrixConfig:
    """Return ``config`` for LIFO alone, its pool, rate and deadline fitted to ``runs``:
    ``CONCURRENCY`` requests, KV demand ``pressure`` times the pool, twice the longest run's time.

    A pool holds two of the longest requests at least. Raises InvalidInput.
    """
    if not pressure > 0:
        raise InvalidInput(f"pressure is {pressure}: it must be above 0")
    if not runs:
        raise InvalidInput("there are no runs to replay: give a run log with some")
    profile = config.step_profile()
    alone_s = [
        single_stream_s(r.prompt_tokens, r.output_tokens, config.engine, profile) for r in runs
    ]
    placed = replace(
        config,
        policies=("lifo",),
        signals=(SignalSource(NO_SIGNAL),),
        rate_per_s=CONCURRENCY / float(np.mean(alone_s)),
        deadline_s=2.0 * max(alone_s),
        observe_s=None,
        pressures=(Pressure("all", 2),),
    )
    demand = offered_kv_load(placed, runs)["all"]
    longest = max(config.engine.blocks_for(r.prompt_tokens + r.max_new_tokens) for r in runs)
    num_blocks = 1 + max(2 * longest, round(demand / pressure))
    return replace(placed, pressures=(Pressure("cell", num_blocks),))


def slo_regret(
    config: MatrixConfig,
    runs: Sequence[DecodeRun],
    signals: Sequence[RemainingSignal],
    *,
    num_moments: int = 10,
    on_seed: Callable[[int, int], None] = lambda *_: None,
) -> SloReport:
    """Replay ``num_moments`` moments of each seed of ``config`` (see :func:`slo_cell`) on ``runs``.

    Every signal must answer for every run of ``runs``. Deterministic in its arguments. Raises
    InvalidInput when nobody is ever preempted, or two signals share a name.
    """
    names = ["lifo", "fifo", "random", *(signal.name for signal in signals)]
    if len(set(names)) < len(names):
        raise InvalidInput(f"a signal stands twice in {', '.join(names)}: name each once")
    seeds = range(config.first_seed, config.first_seed + config.num_seeds)
    regrets, differences, spreads, breaches, num_replays = [], [], [], [], 0
    for done, seed in enumerate(seeds):
        on_seed(done, len(seeds))
        inputs = prepare_seed(config, runs, seed)
        case = _case(config, inputs, seed)
        breaches.append(replay(case, Script("lifo")).breach)
        for moment in _sampled(_moments(case), num_moments, seed):
            chosen = _choices(moment, inputs.requests, signals)
            missed = _missed(case, moment, chosen, seed)
            cost = np.array([missed[victim] for victim in chosen.values()], dtype=np.float64)
            regrets.append((seed, cost - min(missed.values())))
            differences.append((seed, cost - cost[0]))
            spreads.append(max(missed.values()) - min(missed.values()))
            num_replays += len(missed)
    on_seed(len(seeds), len(seeds))
    if not regrets:
        raise InvalidInput(
            f"nobody is preempted with {config.pressures[0].num_blocks} blocks: raise the pressure"
        )
    return SloReport(
        num_blocks=config.pressures[0].num_blocks,
        rate_per_s=config.rate_per_s,
        deadline_s=config.deadline_s,
        lifo_breach=float(np.mean(breaches)),
        num_seeds=len(seeds),
        num_moments=len(regrets),
        num_replays=num_replays,
        spread=float(np.mean(spreads)),
        rows=_rows(names, regrets, differences),
    )


def slo_text(report: SloReport) -> str:
    """Return the report for a terminal."""
    width = max(len(row.signal) for row in report.rows)
    lines = [
        f"SLO regret: {report.num_moments} preemptions of {report.num_seeds} LIFO runs, "
        f"{report.num_replays} replays ({report.num_blocks} blocks, {report.rate_per_s:.3g} "
        f"requests/s, deadline {report.deadline_s:.3g} s, LIFO breaches {report.lifo_breach:.1%})",
        f"worst minus best candidate: {report.spread:.2f} breaches a decision",
        f"{'signal':<{width}}  {'regret, breaches':>22}  {'minus LIFO':>22}  {'best':>6}",
    ]
    for row in report.rows:
        regret, minus = (
            f"{value:.3f} [{low:.3f}, {high:.3f}]"
            for value, low, high in (row.regret, row.minus_lifo)
        )
        lines.append(f"{row.signal:<{width}}  {regret:>22}  {minus:>22}  {row.best:>6.1%}")
    return "\n".join(lines)


def _case(config: MatrixConfig, inputs: SeedInputs, seed: int) -> ReplayCase:
    engine = replace(
        config.engine, num_blocks=config.pressures[0].num_blocks, drain_s=config.watched_s
    )
    return ReplayCase(inputs.workload, engine, config.step_profile(), config.deadline_s, seed=seed)


def _moments(case: ReplayCase) -> list[_Moment]:
    """Return the preemptions of a LIFO run at which there was a choice."""
    seen: list[RunningViews] = []

    def watched_lifo(views: RunningViews) -> FloatArray:
        seen.append(views)
        return np.asarray(lifo(views), dtype=np.float64)

    policy = Policy("watched-lifo", watched_lifo)
    simulate_fast(case.workload, case.config, case.profile, policy, seed=case.seed, checks=False)
    return [_Moment(at, views) for at, views in enumerate(seen) if len(views.request_id) > 1]


def _sampled(moments: list[_Moment], count: int, seed: int) -> list[_Moment]:
    drawn = keyed_generator(seed, "slo-moments").permutation(len(moments))[:count]
    return [moments[i] for i in np.sort(drawn).tolist()]


def _choices(
    moment: _Moment, requests: Sequence[SignalRequest], signals: Sequence[RemainingSignal]
) -> dict[str, int]:
    """Return whom each rule picks at ``moment``: of equals the youngest, as the engine does."""
    views = moment.views
    running = views.request_id
    scores: dict[str, FloatArray | IntArray] = {
        "lifo": views.admission_seq,
        "fifo": -views.admission_seq,
        "random": views.draw,
    }
    asked = [requests[i] for i in running.tolist()]
    for signal in signals:
        scores[signal.name] = signal.remaining(asked, views.generated_tokens)
    return {
        name: int(running[len(running) - 1 - int(np.argmax(score[::-1]))])
        for name, score in scores.items()
    }


def _missed(
    case: ReplayCase, moment: _Moment, chosen: Mapping[str, int], seed: int
) -> dict[int, int]:
    """Return the breaches of the run's rest for each candidate, by its number."""
    candidates = list(dict.fromkeys(chosen.values()))
    rng = keyed_generator(seed, "slo-candidates", moment.decision)
    others = [i for i in rng.permutation(moment.views.request_id).tolist() if i not in candidates]
    candidates += others[: max(0, MAX_CANDIDATES - len(candidates))]
    return {
        victim: replay(case, Script("lifo", changes={moment.decision: victim})).missed
        for victim in candidates
    }


def _rows(
    names: Sequence[str],
    regrets: Sequence[tuple[int, FloatArray]],
    differences: Sequence[tuple[int, FloatArray]],
) -> tuple[SloRegret, ...]:
    seeds = np.array([seed for seed, _ in regrets])
    costs = np.stack([values for _, values in regrets])
    minus = np.stack([values for _, values in differences])
    drawn = _resampled(seeds)
    return tuple(
        SloRegret(
            signal=name,
            regret=_estimate(costs[:, at], drawn),
            minus_lifo=_estimate(minus[:, at], drawn),
            best=float(np.mean(costs[:, at] == 0)),
        )
        for at, name in enumerate(names)
    )


def _resampled(seeds: IntArray) -> list[IntArray]:
    """Return the moments of each bootstrap: seeds drawn with replacement, then moments in each."""
    of_seed = [np.flatnonzero(seeds == seed) for seed in np.unique(seeds).tolist()]
    out = []
    for index in range(_NUM_BOOTSTRAPS):
        rng = keyed_generator(0, "slo-bootstrap", index)
        drawn = rng.integers(0, len(of_seed), len(of_seed)).tolist()
        out.append(np.concatenate([rng.choice(of_seed[i], len(of_seed[i])) for i in drawn]))
    return out


def _estimate(values: FloatArray, drawn: Sequence[IntArray]) -> tuple[float, float, float]:
    low, high = np.quantile([values[rows].mean() for rows in drawn], [0.025, 0.975])
    return float(values.mean()), float(low), float(high)
