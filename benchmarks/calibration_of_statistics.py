"""The tables of docs/statistics.md: do the verdicts hold their error rates where truth is known?

    python -m benchmarks.calibration_of_statistics [studies]

A study is drawn: breach of 200 requests by seed under policies that all have one law (A/A; only
their labels differ), with noise that a seed's policies share and an interaction of policy and seed.
An effect is a shift of every seed's difference, in percentage points.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from contracts.policy import FloatArray
from eval.clusters import model_confidence_set
from eval.intervals import bootstrap_t_interval, t_interval
from eval.multiplicity import max_t
from eval.rescoring import BreachCurve, difference_curve
from eval.verdicts import judge, minimum_detectable_effect, two_one_sided_tests

NUM_REQUESTS = 200
NUM_POLICIES = 11
LIFO_BREACH = 0.10
SHARED_SD, INTERACTION_SD = 0.5, 0.35  # logit
ALPHA = 0.05
MARGIN_PP = 1.0
WIDE_MARGIN_PP = 5.0  # one that these seeds can tell from 0, else the test is only cautious


def draw(rng: np.random.Generator, num_seeds: int) -> FloatArray:
    """Return the differences to the baseline in pp, (seeds, policies), of one A/A study.

    A seed's requests have the same difficulties under every policy (common random numbers).
    """
    shared = rng.normal(0, SHARED_SD, (num_seeds, 1))
    own = rng.normal(0, INTERACTION_SD, (num_seeds, NUM_POLICIES + 1))
    chance = 1 / (1 + np.exp(-(np.log(LIFO_BREACH / (1 - LIFO_BREACH)) + shared + own)))
    difficulty = rng.random((num_seeds, 1, NUM_REQUESTS))
    breach = 100 * (difficulty < chance[:, :, None]).mean(axis=2)
    return np.asarray(breach[:, 1:] - breach[:, :1])


def studies(count: int, num_seeds: int) -> Iterator[FloatArray]:
    """Yield ``count`` studies, the same in every call."""
    rng = np.random.default_rng([7, num_seeds])
    return (draw(rng, num_seeds) for _ in range(count))


def rate(hits: list[bool]) -> str:
    """Return a share with its 95 % binomial (normal) half-width."""
    share = float(np.mean(hits))
    return f"{share:.1%} ± {1.96 * np.sqrt(share * (1 - share) / len(hits)):.1%}"


def errors(count: int, num_seeds: int) -> str:
    """Return the row of what should be at most 5 %: family-wise error of the max-T test, of any
    verdict "better" or "worse", and of "equivalent" for a policy that lies on the margin."""
    family, words, naive, margins = [], [], [], []
    for d in studies(count, num_seeds):
        p = max_t(d)
        family.append(bool(p.min() <= ALPHA))
        said = {judge(d[:, k], p[k], MARGIN_PP).word for k in range(NUM_POLICIES)}
        words.append(bool(said & {"better", "worse"}))
        naive.append(any(max_t(d[:, [k]])[0] <= ALPHA for k in range(NUM_POLICIES)))
        margins.append(two_one_sided_tests(d[:, 0] + WIDE_MARGIN_PP, WIDE_MARGIN_PP) <= ALPHA)
    cells = " | ".join(map(rate, (family, words, naive, margins)))
    return f"| {num_seeds} | {cells} |"


def coverage(count: int, num_seeds: int) -> str:
    """Return the row of what should be 95 %: both intervals of one policy's difference, and the
    confidence set's keeping each policy (all are best here) at 5 %."""
    t, bootstrap, kept = [], [], []
    for at, d in enumerate(studies(count, num_seeds)):
        i, j = t_interval(d[:, 0]), bootstrap_t_interval(d[:, 0])
        t.append(i.low <= 0 <= i.high)
        bootstrap.append(j.low <= 0 <= j.high)
        if at < count // 4:  # slow
            names = [str(k) for k in range(NUM_POLICIES)]
            kept.append(min(model_confidence_set(names, d).values()) >= ALPHA)
    return f"| {num_seeds} | {rate(t)} | {rate(bootstrap)} | {rate(kept)} |"


def power(count: int, num_seeds: int) -> str:
    """Return the row of how often an effect as large as the predicted minimum detectable one is
    found (80 % is predicted): by one planned test, and by the max-T test of the family, whose
    prediction allows for the number of tests."""
    sd = float(np.std(np.concatenate([d[:, 0] for d in studies(count, num_seeds)]), ddof=1))
    effect = minimum_detectable_effect(sd, num_seeds)
    in_family = minimum_detectable_effect(sd, num_seeds, alpha=ALPHA / NUM_POLICIES)
    one, family = [], []
    for d in studies(count, num_seeds):
        shifted = d.copy()
        shifted[:, 0] += effect
        one.append(max_t(shifted[:, [0]])[0] <= ALPHA)
        shifted[:, 0] += in_family - effect
        family.append(max_t(shifted)[0] <= ALPHA)
    return f"| {num_seeds} | {effect:.1f} pp | {rate(one)} | {in_family:.1f} pp | {rate(family)} |"


def bands(count: int, num_seeds: int) -> str:
    """Return the row of how often the band of a difference over 21 deadlines holds all of its true
    values, 0, at once (95 % wanted), and how often intervals at each deadline do."""
    rng = np.random.default_rng([8, num_seeds])
    deadlines_s = np.linspace(600.0, 1800.0, 21)
    band, pointwise = [], []
    for _ in range(count):
        shared = rng.normal(0, SHARED_SD, (num_seeds, 1, 1))
        own = rng.normal(0, INTERACTION_SD, (num_seeds, 2, 1))
        log_s = rng.normal(np.log(450.0), 0.6, (num_seeds, 1, NUM_REQUESTS)) + 0.3 * (shared + own)
        late = (np.exp(log_s)[..., None] > deadlines_s).mean(axis=2)
        sides = [[BreachCurve(deadlines_s, c, 0 * c) for c in late[:, k]] for k in (0, 1)]
        curve = difference_curve(*sides)
        band.append(bool(np.all((curve.low <= 0) & (curve.high >= 0))))
        d = 100 * (late[:, 0] - late[:, 1])
        intervals = [t_interval(column) for column in d.T]
        pointwise.append(all(i.low <= 0 <= i.high for i in intervals))
    return f"| {num_seeds} | {rate(band)} | {rate(pointwise)} |"


TABLES = (
    ("seeds | any p <= .05 (max-T) | any better/worse | any p <= .05, unadjusted | "
     "equivalent on the margin", errors, (6, 10, 20), 1),
    ("seeds | t covers | bootstrap-t covers | set keeps all", coverage, (6, 10, 20), 1),
    ("seeds | MDE of one test | found by one test | MDE in a family of 11 | found in the family",
     power, (6, 10, 20), 1),
    ("seeds | band holds everywhere | pointwise intervals all hold", bands, (6, 10, 20), 4),
)  # fmt: skip


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("studies", nargs="?", type=int, default=2000, help="how many are drawn")
    count: int = parser.parse_args().studies
    for head, row, seeds, slower in TABLES:
        print(f"\n| {head} |\n|{' --- |' * (head.count('|') + 1)}")
        for num_seeds in seeds:
            print(row(count // slower, num_seeds), flush=True)


if __name__ == "__main__":
    main()
