"""Metrics against exact fractions, plain loops, scikit-learn and scipy."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest, signal_request
from eval.calibration_metrics import coverage, d_calibration, randomised_pit
from eval.set_metrics import (
    concordance,
    draw_meetings,
    draw_sets,
    early_kills,
    ndcg,
    pick_share,
    regret,
    top_1,
)
from eval.survival_metrics import (
    LEAST_PROBABILITY,
    brier_score,
    censoring_survival,
    crps,
    harrell_c,
    integrated_brier_score,
    log_likelihood,
    uno_c,
)
from tests.synthetic_runs import make_run

# tie-heavy: equal times of ended and cut runs, equal estimates
TIMES = np.array([2, 2, 3, 3, 3, 5, 5, 7, 8, 8, 9, 9])
EVENT = np.array([1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0], dtype=bool)
GUESS = np.array([1.0, 3, 3, 2, 2, 5, 4, 4, 9, 6, 6, 8])


def _staying(t: int) -> Fraction:
    """G(t) in exact arithmetic."""
    out = Fraction(1)
    for cut in sorted({int(x) for x, e in zip(TIMES, EVENT, strict=True) if not e}):
        if cut <= t:
            cuts = sum(1 for x, e in zip(TIMES, EVENT, strict=True) if x == cut and not e)
            alive = sum(
                1 for x, e in zip(TIMES, EVENT, strict=True) if x > cut or (x == cut and not e)
            )
            out *= 1 - Fraction(cuts, alive)
    return out  # fmt: skip


def _exact_c(weight: bool, tau: float) -> Fraction:
    right = total = Fraction(0)
    for i, j in product(range(len(TIMES)), repeat=2):
        comparable = TIMES[i] < TIMES[j] or (TIMES[i] == TIMES[j] and not EVENT[j])
        if i == j or not EVENT[i] or not comparable or TIMES[i] >= tau:
            continue
        worth = 1 / _staying(int(TIMES[i])) ** 2 if weight else Fraction(1)
        total += worth
        right += worth * (Fraction(1, 2) if GUESS[i] == GUESS[j] else int(GUESS[i] < GUESS[j]))
    return right / total


def test_concordance_indices_are_exact() -> None:
    """Definitions of scikit-survival's concordance_index_censored and _ipcw, in exact fractions."""
    assert harrell_c(TIMES, EVENT, GUESS) == pytest.approx(
        float(_exact_c(False, np.inf)), rel=1e-12
    )
    for tau in (None, 8.0, 5.0):
        bound = float(TIMES.max()) if tau is None else tau
        exact = float(_exact_c(True, bound))
        assert uno_c(TIMES, EVENT, GUESS, tau) == pytest.approx(exact, rel=1e-12)
    at = np.arange(11)
    expected = [float(_staying(int(t))) for t in at]
    np.testing.assert_allclose(censoring_survival(TIMES, EVENT)(at), expected, rtol=1e-12)


def test_concordance_without_censoring_is_kendalls() -> None:
    """No ties in time, nobody cut: C = (tau-a + 1) / 2; and a row twice is a row of weight two."""
    from scipy.stats import kendalltau

    rng = np.random.default_rng(0)
    times, guess = rng.permutation(60), rng.normal(size=60)
    everyone = np.ones(60, dtype=bool)
    tau = kendalltau(times, guess).statistic
    assert harrell_c(times, everyone, guess) == pytest.approx((tau + 1) / 2)
    assert uno_c(times, everyone, guess) == pytest.approx((tau + 1) / 2)
    weight = rng.integers(0, 3, 60)
    again = np.repeat(np.arange(60), weight)
    twice = harrell_c(times[again], everyone[again], guess[again])
    assert harrell_c(times, everyone, guess, weight.astype(float)) == pytest.approx(twice)


def test_brier_scores() -> None:
    """Uncensored: scikit-learn's; censored: Graf's formula in exact arithmetic."""
    from sklearn.metrics import brier_score_loss

    rng = np.random.default_rng(1)
    times, alive = rng.integers(1, 50, 80), rng.random(80)
    everyone = np.ones(80, dtype=bool)
    ours = brier_score(times, everyone, alive, 20)
    assert ours == pytest.approx(brier_score_loss(times > 20, alive), rel=1e-12)
    exact = Fraction(0)
    for t, e in zip(TIMES.tolist(), EVENT.tolist(), strict=True):
        if t <= 5 and e:
            exact += Fraction(1, 4) ** 2 / _staying(t)
        elif t > 5:
            exact += Fraction(3, 4) ** 2 / _staying(5)
    quarter = np.full(len(TIMES), 0.25)
    assert brier_score(TIMES, EVENT, quarter, 5) == pytest.approx(float(exact / len(TIMES)))
    grid = np.array([10, 20, 40])
    predicted = rng.random((80, 3))
    by_hand = np.trapezoid([brier_score(times, everyone, predicted[:, j], h)
                            for j, h in enumerate(grid)], grid) / 30  # fmt: skip
    assert integrated_brier_score(times, everyone, predicted, grid) == pytest.approx(by_hand)


class _Discrete:
    """The same distribution for everyone: P(R = r) = ``mass[r - 1]``."""

    name, source_run_ids, clairvoyant = "discrete", frozenset[str](), False

    def __init__(self, mass: Sequence[float]) -> None:
        self.mass = np.array(mass)

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        return np.full(len(requests), float((self.mass * (np.arange(len(self.mass)) + 1)).sum()))

    def survival(
        self, requests: Sequence[SignalRequest], ages: IntArray, horizon: FloatArray
    ) -> FloatArray:
        ended = np.concatenate([[0.0], np.cumsum(self.mass)])
        return 1.0 - ended[np.clip(np.floor(horizon).astype(int), 0, len(self.mass))]

    def quantile(
        self, requests: Sequence[SignalRequest], ages: IntArray, level: float
    ) -> FloatArray:
        slot = np.searchsorted(np.cumsum(self.mass), level - 1e-12)
        return np.full(len(requests), float(slot + 1))


MASS = (0.1, 0.0, 0.25, 0.3, 0.15, 0.05, 0.1, 0.05)


def _request(cap: int) -> SignalRequest:
    return signal_request(make_run(prompt="q", prompt_id="q", natural_tokens=1, cap_tokens=cap))


@pytest.mark.parametrize("cap", [8, 2000])
def test_crps_is_the_ensemble_formula(cap: int) -> None:
    """E|X - y| - E|X - X'| / 2 (scoringrules' crps_ensemble, 'eq:CRPS-E'), and the same on log1p.

    With a cap of 8 every token is summed; with 2,000 the grid is, which here holds 1 to 8 too.
    """
    signal, r = _Discrete(MASS), np.arange(1, 9)
    left = np.array([1, 3, 8])
    tokens, logs = crps(signal, [_request(cap)] * 3, np.zeros(3, np.int64), left)
    for scale, ours in ((r.astype(float), tokens), (np.log1p(r), logs)):
        spread = (np.outer(MASS, MASS) * np.abs(scale[:, None] - scale)).sum() / 2
        for y, value in zip(left, ours, strict=True):
            exact = (np.array(MASS) * np.abs(scale - scale[y - 1])).sum() - spread
            assert value == pytest.approx(exact, rel=1e-9)


def test_log_likelihood_by_hand() -> None:
    left, known = np.array([4, 4, 2, 8]), np.array([True, False, True, False])
    ours = log_likelihood(_Discrete(MASS), [_request(8)] * 4, np.zeros(4, np.int64), left, known)
    expected = np.log([0.3, 0.35, LEAST_PROBABILITY, LEAST_PROBABILITY])
    np.testing.assert_allclose(ours, expected, rtol=1e-9)


def test_the_pit_of_the_truth_is_even_and_of_a_wrong_model_is_not() -> None:
    from scipy.stats import chisquare

    rng = np.random.default_rng(3)
    left = rng.choice(np.arange(1, 9), 2000, p=MASS)
    asked = ([_request(8)] * 2000, np.zeros(2000, np.int64), left, rng.random(2000))
    everyone = np.ones(2000, dtype=bool)
    pit, reached = randomised_pit(_Discrete(MASS), *asked)
    good = d_calibration(pit, reached, everyone)
    counts = np.histogram(pit, np.linspace(0, 1, 11))[0]
    assert good.chi_square == pytest.approx(chisquare(counts).statistic)
    assert good.p_value == pytest.approx(chisquare(counts).pvalue) and good.p_value > 0.01
    wrong = d_calibration(*randomised_pit(_Discrete(np.full(8, 0.125)), *asked), everyone)
    assert wrong.p_value < 1e-6
    # a cut run is known to be longer than the cut, and no more: its mass is spread beyond
    cut = rng.integers(0, 9, 2000)
    known = left <= cut
    pit, reached = randomised_pit(
        _Discrete(MASS), asked[0], asked[1], np.where(known, left, cut), asked[3]
    )
    assert 0.3 < known.mean() < 0.7 and d_calibration(pit, reached, known).p_value > 0.01
    assert d_calibration(pit, reached, everyone).p_value < 1e-6  # reading a cut as an end


def test_coverage_by_hand() -> None:
    ages, left = np.arange(100), np.full(100, 10)
    low, high = np.full(100, 1.0), np.where(ages < 50, 9.0, 12.0)
    cover = coverage("x", low, high, ages, left, np.full(100, 1000), num_groups=2)
    assert (cover.overall, cover.by_age, cover.ages) == (0.5, (0.0, 1.0), (0, 50))
    assert (cover.at_cap, cover.width, cover.waste) == (0.0, 9.5, 2.0)


def test_set_metrics() -> None:
    """NDCG is scikit-learn's (ties shared), the rest plain loops."""
    from sklearn.metrics import ndcg_score

    rng = np.random.default_rng(4)
    scores, left = rng.integers(0, 4, (40, 6)).astype(float), rng.integers(1, 9, (40, 6))
    assert ndcg(scores, left).mean() == pytest.approx(ndcg_score(left, scores), rel=1e-12)
    cost = rng.random((40, 6))
    for s, c, paid in zip(scores, cost, regret(scores, cost), strict=True):
        best = [i for i in range(6) if s[i] == s.max()]
        assert paid == pytest.approx((np.mean(c[best]) - c.min()) / c.max())
    np.testing.assert_allclose(pick_share(scores).sum(axis=1), 1.0)
    assert top_1(left.astype(float), left).min() == concordance(left + 0.0, left).min() == 1.0
    assert early_kills(left.astype(float), left).max() == 0.0


def test_sets_are_length_biased_and_follow_the_weights() -> None:
    lengths = np.array([10, 30, 60, 100])
    meetings = draw_meetings(lengths, 16, np.random.default_rng(0))
    assert (meetings.age + meetings.remaining == lengths[meetings.run]).all()
    sets = draw_sets(meetings, lengths.astype(float), 4000, 1, np.random.default_rng(1))
    shares = np.bincount(meetings.run[sets].ravel(), minlength=4) / 4000
    np.testing.assert_allclose(shares, lengths / lengths.sum(), atol=0.03)  # four standard errors
    weight = lengths * np.array([0.0, 1.0, 2.0, 1.0])
    without = draw_sets(meetings, weight, 500, 3, np.random.default_rng(2))
    assert not (meetings.run[without] == 0).any()
