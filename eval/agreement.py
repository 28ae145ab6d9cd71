"""How far repeated temperature-zero runs of one request agree, and the ceiling that sets.

A signal that knows a prompt perfectly still cannot know which of its runs executes. The ceiling is
what the other runs of the same request score for the run left out: predictors are judged against
it, not against zero error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from contracts.errors import InvalidInput
from contracts.policy import FloatArray, IntArray
from contracts.runs import DecodeRun, by_request
from eval.save_figure import save_figure
from eval.signal_quality import SignalQuality, held_out, mean_quality, score_signal
from eval.signal_sources import split_truth
from oracles.empirical import SAMPLED_LABEL, EmpiricalOracle


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of requests that ran twice or more: ``identical_share`` have one length (and one text, where
    texts or their hashes exist); ``cv_p50`` and ``ratio_p50`` … are quantiles over requests of the
    coefficient of variation and of longest / shortest. ``divergence_chars_p50`` is the median
    request's first differing character, ``divergence_share_p50`` the same as a share of its
    shortest text; NaN without texts, or where no texts differ. ``cut_share`` counts runs."""

    num_runs: int
    num_requests: int
    runs_per_request: tuple[int, float, int]
    identical_share: float
    one_length_share: float
    cv_p50: float
    cv_p90: float
    ratio_p50: float
    ratio_p90: float
    ratio_p99: float
    divergence_chars_p50: float
    divergence_share_p50: float
    num_divergences: int
    cut_share: float


@dataclass(frozen=True, slots=True, eq=False)
class RequestSpread:
    """Shortest, median and longest length (p,) of each repeated request."""

    shortest: IntArray
    median: FloatArray
    longest: IntArray


def measure_agreement(runs: Sequence[DecodeRun]) -> tuple[Agreement, RequestSpread]:
    """Measure the repeated requests of ``runs``; raises InvalidInput when none ran twice."""
    groups = [group for group in by_request(runs).values() if len(group) > 1]
    if not groups:
        raise InvalidInput(
            f"each request of these {len(runs)} runs ran once: agreement needs repeats; collect "
            "with --repeats 2 or more"
        )
    lengths = [np.array([run.output_tokens for run in group]) for group in groups]
    spread = RequestSpread(
        shortest=np.array([part.min() for part in lengths]),
        median=np.array([float(np.median(part)) for part in lengths]),
        longest=np.array([part.max() for part in lengths]),
    )
    cv = np.array([part.std(ddof=1) / part.mean() for part in lengths])
    ratio = spread.longest / spread.shortest
    splits = [split for group in groups if (split := _first_divergence(group)) is not None]
    counts = [len(group) for group in groups]
    nothing = float("nan")
    agreement = Agreement(
        num_runs=sum(counts),
        num_requests=len(groups),
        runs_per_request=(min(counts), float(np.median(counts)), max(counts)),
        identical_share=float(np.mean([_identical(group) for group in groups])),
        one_length_share=float(np.mean(spread.longest == spread.shortest)),
        cv_p50=float(np.median(cv)),
        cv_p90=float(np.quantile(cv, 0.9)),
        ratio_p50=float(np.median(ratio)),
        ratio_p90=float(np.quantile(ratio, 0.9)),
        ratio_p99=float(np.quantile(ratio, 0.99)),
        divergence_chars_p50=float(np.median([s[0] for s in splits])) if splits else nothing,
        divergence_share_p50=float(np.median([s[1] for s in splits])) if splits else nothing,
        num_divergences=len(splits),
        cut_share=float(np.mean([run.event_observed is not True for g in groups for run in g])),
    )
    return agreement, spread


def ceiling(runs: Sequence[DecodeRun], *, num_draws: int = 5, seed: int = 0) -> SignalQuality:
    """Return what the other runs of each request score for the one left out: the mean over
    ``num_draws`` choices of the run left out (no more than there are repeats)."""
    repeated = [run for group in by_request(runs).values() if len(group) > 1 for run in group]
    if not repeated:
        raise InvalidInput("each request ran once: a ceiling needs other runs of the same request")
    most = max(map(len, by_request(repeated).values()))
    scores = []
    for draw in range(min(num_draws, most)):
        truth, others = split_truth(repeated, draw)
        known = [run for run in truth if run.has_known_length]
        scores.append(score_signal(EmpiricalOracle(others), held_out(known, seed=seed + draw)))
    label = SAMPLED_LABEL if any(run.temperature > 0.0 for run in repeated) else ""
    return mean_quality(f"oracle-{most - 1}{label} (ceiling)", scores)


def write_agreement_figure(spread: RequestSpread, title: str, path: Path) -> Path:
    """Write the picture: shortest and longest run of every request, and how far apart they are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.vlines(spread.median, spread.shortest, spread.longest, color=_BAR, lw=0.8, alpha=0.5)
    left.plot(spread.median, spread.median, ".", ms=2.5, color=_DOT)
    left.set(xscale="log", yscale="log")
    left.set_xlabel("median length of a request, tokens")
    left.set_ylabel("shortest to longest run, tokens")
    left.set_title(title, fontsize=10)
    ratio = np.sort(spread.longest / spread.shortest)
    right.step(ratio, np.arange(1, len(ratio) + 1) / len(ratio), where="post", color=_BAR)
    right.axhline(float(np.mean(ratio == 1.0)), color=_DOT, lw=0.8, ls=":")
    right.set(xscale="log", ylim=(0, 1.02))
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick <= 1.2 * ratio[-1]]
    right.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    right.set_xticks([], minor=True)
    right.set_xlabel("longest / shortest run of a request")
    right.set_ylabel("share of requests")
    right.set_title(f"one single length: {np.mean(ratio == 1.0):.0%} of requests", fontsize=10)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path)


_BAR, _DOT = "#0072B2", "#D55E00"  # Okabe and Ito's palette, as in eval/figures.py


def _identical(group: Sequence[DecodeRun]) -> bool:
    return len({(run.output_tokens, run.text_sha256) for run in group}) == 1


def _first_divergence(group: Sequence[DecodeRun]) -> tuple[int, float] | None:
    """Return the first character at which two texts of a request differ, and its share of the
    shortest text; None without two different texts."""
    texts = sorted({run.text for run in group if run.text is not None})
    if len(texts) < 2:
        return None
    # in sorted order the shortest common prefix of any two is that of some neighbours
    first = min(_common(one, other) for one, other in pairwise(texts))
    return first, first / max(1, min(map(len, texts)))


def _common(one: str, other: str) -> int:
    """Return how many characters two texts share from their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
