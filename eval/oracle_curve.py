"""The learning curve of oracle-K in K: what a second, a fourth, a sixty-fourth run is worth.

One run of each request is the truth, K others drawn at random are the oracle, on the same requests
and the same running sets for every K. Beside the oracle stands the mistake it guards against:
reading an age beyond all K runs as "never ends".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import IntArray
from contracts.randomness import keyed_generator
from contracts.runs import DecodeRun, by_request
from eval.save_figure import save_figure
from eval.signal_quality import HeldOut, SignalQuality, held_out, mean_quality, score_signal
from oracles.empirical import EmpiricalOracle
from oracles.run_table import RunTable, run_table

DEFAULT_KS = (1, 2, 4, 8, 16, 32, 64)
_EVERY_K_TO = 8


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Oracle-``k``: its scores, those of the same runs without the log-t rung and with exhausted
    ages read as endless, and how often a fresh run outlives all K: strictly, and with ties broken
    at random, which is 1 / (K + 1) by exchangeability."""

    k: int
    quality: SignalQuality
    without_log_t: SignalQuality
    endless: SignalQuality
    outlived_strictly: float
    outlived_by_chance: float


def possible_ks(runs: Sequence[DecodeRun]) -> tuple[int, ...]:
    """Return the Ks that at least half of the repeated requests can serve beside a truth: each up
    to 8, then powers of two, and the largest. Raises InvalidInput when no request ran twice."""
    counts = sorted(len(group) for group in by_request(runs).values() if len(group) > 1)
    if not counts:
        raise InvalidInput(
            f"each request of these {len(runs)} runs ran once: oracle-K needs other runs of a "
            "request; collect with --repeats 2 or more"
        )
    most = counts[len(counts) // 2] - 1
    return tuple(k for k in range(1, most + 1) if k <= _EVERY_K_TO or k in (*DEFAULT_KS, most))


def learning_curve(
    runs: Sequence[DecodeRun],
    ks: Sequence[int] = DEFAULT_KS,
    *,
    num_draws: int = 3,
    seed: int = 0,
    on_point: Callable[[int, int], None] | None = None,
) -> list[CurvePoint]:
    """Score oracle-K for each of ``ks``, means over ``num_draws`` draws of truth and K runs.

    Requests with fewer than max(ks) + 1 runs are left out of every point. Raises InvalidInput when
    none is left, or a K is below 1.
    """
    if not ks or min(ks) < 1:
        raise InvalidInput(f"K is {min(ks, default=0)}: an oracle needs at least 1 run of a prompt")
    groups = by_request(runs)
    kept = {key: group for key, group in groups.items() if len(group) > max(ks)}
    if not kept:
        most = max(map(len, groups.values()), default=0)
        raise InvalidInput(
            f"K = {max(ks)} needs {max(ks) + 1} runs of a request; the log has at most {most}"
        )
    draws = [_draw(kept, max(ks), seed + draw) for draw in range(num_draws)]
    points = []
    for index, k in enumerate(ks):
        points.append(_point(k, draws))
        if on_point is not None:
            on_point(index + 1, len(ks))
    return points


def curve_table(points: Sequence[CurvePoint]) -> str:
    """Return the points as aligned text."""
    head = (
        f"{'K':>4}{'log-MAE':>9}{'MAE':>8}{'tau':>7}{'concord.':>10}{'regret':>8}{'endless':>9}"
        f"{'no log-t':>10}{'outlived':>10}{'(chance)':>10}{'1/(K+1)':>9}"
    )
    lines = [
        f"{p.k:>4}{p.quality.log_mae:>9.3f}{p.quality.mae:>8.1f}{p.quality.kendall_tau:>7.3f}"
        f"{p.quality.concordance:>10.3f}{p.quality.victim_regret:>8.3f}"
        f"{p.endless.victim_regret:>9.3f}{p.without_log_t.victim_regret:>10.3f}"
        f"{p.outlived_strictly:>10.3f}{p.outlived_by_chance:>10.3f}{1 / (p.k + 1):>9.3f}"
        for p in points
    ]
    return "\n".join([head, *lines])


def write_curve_figure(points: Sequence[CurvePoint], title: str, path: Path) -> Path:
    """Write the picture: error, order, victims and exhaustion against K."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.4), layout="constrained")
    axes = figure.subplots(1, 3)
    ks = [p.k for p in points]
    axes[0].plot(ks, [p.quality.log_mae for p in points], "o-", color=_BLUE, label="oracle-K")
    axes[0].set_ylabel("log-MAE")
    axes[0].set_title(title, fontsize=10)
    for values, colour, name in (
        ([p.quality.victim_regret for p in points], _BLUE, "oracle-K"),
        ([p.without_log_t.victim_regret for p in points], _GREEN, "without log-t"),
        ([p.endless.victim_regret for p in points], _RED, "exhausted = endless"),
    ):
        axes[1].plot(ks, values, "o-", color=colour, label=name)
    axes[1].set_ylabel("longest-remaining regret")
    axes[1].set_ylim(bottom=0)
    axes[2].plot(ks, [1 / (k + 1) for k in ks], color="black", lw=0.8, label="1 / (K + 1)")
    axes[2].plot(ks, [p.outlived_by_chance for p in points], "o", color=_BLUE, label="ties random")
    axes[2].plot(
        ks, [p.outlived_strictly for p in points], "s", color=_RED, label="strictly longer"
    )
    axes[2].set_ylabel("a fresh run outlives all K")
    axes[2].set_yscale("log")
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(ks, [str(k) for k in ks])
        ax.set_xlabel("K, runs of the same request")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, frameon=False)
    return save_figure(figure, path)


_BLUE, _GREEN, _RED = "#0072B2", "#009E73", "#D55E00"  # Okabe and Ito's palette


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """One truth of each request, the rows it is scored on, and a table of other runs in random
    order; ``place`` (n,) numbers those of one request."""

    truth: list[DecodeRun]
    rows: HeldOut
    others: RunTable
    place: IntArray


def _draw(groups: dict[str, list[DecodeRun]], most: int, seed: int) -> _Draw:
    truth: list[DecodeRun] = []
    others: list[DecodeRun] = []
    for key, group in sorted(groups.items()):
        order = keyed_generator(seed, "oracle-curve", key).permutation(len(group))[: most + 1]
        first, *rest = (group[i] for i in order.tolist())
        truth.append(first)
        others += rest
    place = np.tile(np.arange(most), len(truth))
    return _Draw(truth, held_out(truth, seed=seed), run_table(others), place)


def _point(k: int, draws: Sequence[_Draw]) -> CurvePoint:
    scores: dict[str, list[SignalQuality]] = defaultdict(list)
    strictly, by_chance = [], []
    for draw in draws:
        chosen = draw.others.take(draw.place < k)
        for name, levels in _LADDERS.items():
            scores[name].append(score_signal(EmpiricalOracle(chosen, levels=levels), draw.rows))
        lengths = draw.others.output_tokens.reshape(len(draw.truth), -1)[:, :k]
        longest = lengths.max(axis=1)
        ties = (lengths == longest[:, None]).sum(axis=1)
        strictly.append(np.mean(draw.rows.lengths > longest))
        tied = np.where(draw.rows.lengths == longest, 1.0 / (ties + 1), 0.0)
        by_chance.append(strictly[-1] + tied.mean())
    names = {name: f"{rows[0].signal}{name}" for name, rows in scores.items()}
    means = {name: mean_quality(names[name], rows) for name, rows in scores.items()}
    return CurvePoint(
        k=k,
        quality=means[""],
        without_log_t=means[" without log-t"],
        endless=means[" endless"],
        outlived_strictly=float(np.mean(strictly)),
        outlived_by_chance=float(np.mean(by_chance)),
    )


_LADDERS = {
    "": ("prompt", "near-duplicate", "log-t", "family", "model"),
    " without log-t": ("prompt", "near-duplicate", "family", "model"),
    " endless": ("prompt",),
}
