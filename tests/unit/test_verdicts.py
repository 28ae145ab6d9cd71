"""Verdict words, equivalence, detectable effects and intervals, against scipy and statsmodels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidInput
from eval.intervals import (
    across_grid,
    bootstrap_t_interval,
    look_alphas,
    t_interval,
    within_grid,
)
from eval.verdicts import (
    default_margin,
    judge,
    minimum_detectable_effect,
    two_one_sided_tests,
)

RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=12)
NOISE = (NOISE - NOISE.mean()) / NOISE.std(ddof=1)


@pytest.mark.parametrize(
    ("mean", "sd", "p", "word", "said"),
    [
        (-2.0, 1.0, 0.001, "better", "better"),
        (2.0, 1.0, 0.001, "worse", "worse"),
        (0.1, 0.3, 0.4, "equivalent", "equivalent within 1 pp"),
        (-0.3, 0.1, 0.001, "equivalent", "equivalent within 1 pp"),
        (0.5, 3.0, 0.4, "inconclusive", "inconclusive (MDE 2.7 pp)"),
    ],
)
def test_the_four_words(mean: float, sd: float, p: float, word: str, said: str) -> None:
    verdict = judge(mean + sd * NOISE, p, margin=1.0)
    assert verdict.word == word
    assert str(verdict) == said


def test_a_family_can_detect_less_than_one_test() -> None:
    d = 0.5 + NOISE
    alone, family = judge(d, 0.5, 1.0), judge(d, 0.5, 1.0, num_tests=11)
    assert family.mde == minimum_detectable_effect(1.0, 12, alpha=0.05 / 11) > alone.mde


def test_all_differences_zero_are_a_statement_not_a_nan() -> None:
    verdict = judge(np.zeros(8), 1.0, margin=1.0)
    assert str(verdict) == "equivalent within 1 pp"
    assert (verdict.mde, verdict.equivalence_p) == (0.0, 0.0)
    assert judge(np.full(8, 2.0), 0.01, margin=1.0).word == "worse"


def test_equivalence_equals_statsmodels() -> None:
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    x, y = RNG.normal(10, 1, 15), RNG.normal(10.1, 1, 15)
    expected = weightstats.ttost_paired(x, y, -0.8, 0.8)[0]
    assert two_one_sided_tests(x - y, 0.8) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("seeds", "in_sd"), [(5, 1.68), (10, 1.00), (20, 0.66), (50, 0.40)])
def test_detectable_effects_equal_statsmodels_and_the_published_table(
    seeds: int, in_sd: float
) -> None:
    power = pytest.importorskip("statsmodels.stats.power")
    ours = minimum_detectable_effect(1.0, seeds)
    reached = power.TTestPower().power(ours, seeds, 0.025, alternative="larger")
    assert reached == pytest.approx(0.8, abs=1e-9)
    # the table has two digits
    assert ours == pytest.approx(in_sd, abs=0.006)
    assert minimum_detectable_effect(2.5, seeds) == pytest.approx(2.5 * ours)


def test_a_margin_is_set_and_positive() -> None:
    with pytest.raises(InvalidInput, match="margin"):
        judge(NOISE, 0.5, margin=0.0)
    assert [default_margin(b) for b in (30.0, 5.0, 0.0)] == [1.0, 0.5, 0.1]


def test_bootstrap_t_is_close_to_t_on_normal_data_and_wider_to_the_skewed_side() -> None:
    t, boot = t_interval(NOISE), bootstrap_t_interval(NOISE)
    assert boot.method == "bootstrap-t"
    assert (boot.low, boot.high) == pytest.approx((t.low, t.high), abs=0.25)
    skewed = np.exp(1.5 * NOISE)
    t, boot = t_interval(skewed), bootstrap_t_interval(skewed)
    assert boot.high - boot.mean > t.high - t.mean
    assert boot.mean - boot.low < t.mean - t.low


@pytest.mark.parametrize("values", [[0.0] * 8, [0.0] * 7 + [1.0], [2.0, 2.0]])
def test_equal_values_never_give_a_nan(values: list[float]) -> None:
    interval = bootstrap_t_interval(values)
    assert interval.method == "t"
    assert np.isfinite([interval.low, interval.high]).all()
    assert interval.low <= interval.mean <= interval.high


def test_within_grid_counts_seeds_and_across_grid_counts_clusters() -> None:
    seed_noise = RNG.normal(size=10)
    cells = {f"{f}/{p}": (i + seed_noise).tolist() for i, f in enumerate("abc") for p in "xy"}
    inside = within_grid(cells)
    seeds = t_interval(1.0 + seed_noise)  # cells are fixed: their spread is no error
    assert (inside.low, inside.high) == pytest.approx((seeds.low, seeds.high))
    outside = across_grid(cells, {cell: cell[0] for cell in cells})
    assert outside.num_units == 3
    assert outside.mean == pytest.approx(inside.mean)
    assert outside.high - outside.low > inside.high - inside.low


def test_cells_with_other_seeds_are_refused() -> None:
    with pytest.raises(InvalidInput, match="same seeds"):
        within_grid({"a": [1.0, 2.0], "b": [1.0, 2.0, 3.0]})


@given(st.lists(st.integers(2, 200), min_size=1, max_size=6, unique=True))
def test_looks_spend_alpha_and_no_more(looks: list[int]) -> None:
    levels = look_alphas(sorted(looks))
    assert sum(levels) == pytest.approx(0.05)
    assert min(levels) > 0


def test_looks_must_rise() -> None:
    with pytest.raises(InvalidInput, match="rising"):
        look_alphas([16, 8])
