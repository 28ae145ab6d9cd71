"""Sign-flip max-T, Holm, BY, letters and the confidence set: against scipy, statsmodels and arch,
and against what must hold by definition."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from contracts.errors import InvalidInput
from contracts.policy import FloatArray
from eval.clusters import compact_letters, model_confidence_set, pairwise_p
from eval.multiplicity import benjamini_yekutieli, holm, max_t, sign_flips

P_VALUES = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=8)
WHOLE = st.integers(-4, 4).map(float)  # small whole numbers tie often


@given(arrays(np.float64, (7,), elements=WHOLE))
def test_one_policy_equals_scipys_exact_permutation_test(d: FloatArray) -> None:
    expected = stats.permutation_test(
        (d,), np.mean, permutation_type="samples", n_resamples=np.inf
    ).pvalue
    # scipy doubles the smaller tail; by symmetry that is the two-sided share, capped at 1
    assert max_t(d[:, None])[0] == pytest.approx(min(1.0, expected), abs=1e-12)


@given(arrays(np.float64, (6, 3), elements=WHOLE))
def test_max_t_equals_its_definition_flip_by_flip(d: FloatArray) -> None:
    def t(x: FloatArray) -> FloatArray:
        size = np.sqrt((x * x).sum(axis=0))
        return np.abs(x.sum(axis=0)) / np.where(size > 0, size, 1.0)

    highest = [t(np.array(signs)[:, None] * d).max() for signs in product((1, -1), repeat=6)]
    expected = [np.mean([h >= value - 1e-9 for h in highest]) for value in t(d)]
    np.testing.assert_allclose(max_t(d), expected, atol=1e-12)


def test_ordering_flips_by_sum_over_size_is_ordering_them_by_t() -> None:
    d = np.random.default_rng(0).normal(size=9)
    flipped = sign_flips(9) * d
    by_t = np.abs(stats.ttest_1samp(flipped, 0.0, axis=1).statistic)
    ours = np.abs(flipped.sum(axis=1)) / np.sqrt((d * d).sum())
    assert np.array_equal(by_t >= by_t[0] - 1e-9, ours >= ours[0] - 1e-9)


def test_five_seeds_cannot_reach_one_in_twenty_and_zeros_give_one() -> None:
    assert max_t(np.ones((5, 1)))[0] == 2 / 32
    assert max_t(np.zeros((8, 2))).tolist() == [1.0, 1.0]


def test_a_family_never_lowers_a_p() -> None:
    d = np.random.default_rng(1).normal(0.5, 1, size=(10, 6))
    together = max_t(d)
    alone = [max_t(d[:, [i]])[0] for i in range(6)]
    assert np.all(together >= np.array(alone) - 1e-12)


def test_more_than_sixteen_seeds_are_sampled_and_agree_with_the_t_test() -> None:
    d = np.random.default_rng(2).normal(0.4, 1, size=20)
    # 20,000 flips: a p near .1 is known to 4 standard errors of .002
    assert max_t(d[:, None])[0] == pytest.approx(stats.ttest_1samp(d, 0).pvalue, abs=0.02)
    assert max_t(d[:, None])[0] == max_t(d[:, None])[0]


@pytest.mark.parametrize("bad", [np.ones(4), np.ones((1, 2)), np.ones((4, 0))])
def test_shapes_that_cannot_be_tested_are_refused(bad: FloatArray) -> None:
    with pytest.raises(InvalidInput, match="at least 2 seeds"):
        max_t(bad)


def test_an_undetermined_breach_is_refused() -> None:
    with pytest.raises(InvalidInput, match="drain"):
        max_t(np.array([[1.0], [np.nan]]))


@given(P_VALUES)
def test_adjustments_equal_statsmodels(p: list[float]) -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    ours = (holm(np.array(p)), benjamini_yekutieli(np.array(p)))
    for method, adjusted in zip(("holm", "fdr_by"), ours, strict=True):
        np.testing.assert_allclose(adjusted, multitest.multipletests(p, method=method)[1])


@given(st.data(), st.integers(2, 7))
def test_two_share_a_letter_exactly_when_they_do_not_differ(data: st.DataObject, n: int) -> None:
    p = np.ones((n, n))
    for i in range(n):
        for j in range(i):
            p[i, j] = p[j, i] = data.draw(st.sampled_from([0.01, 0.5]))
    names = [f"p{i}" for i in range(n)]
    letters = compact_letters(names, p, list(range(n)))
    for i in range(n):
        assert letters[names[i]]
        for j in range(i):
            shared = set(letters[names[i]]) & set(letters[names[j]])
            assert bool(shared) == (p[i, j] > 0.05)


def test_letters_overlap_where_differences_do_not_chain() -> None:
    p = np.ones((3, 3))
    p[0, 2] = p[2, 0] = 0.01
    assert compact_letters("xyz", p, [1, 2, 3]) == {"x": "a", "y": "ab", "z": "b"}


def losses(effects: list[float], seeds: int = 30) -> FloatArray:
    rng = np.random.default_rng(3)
    shared = rng.normal(10, 3, size=(seeds, 1))
    return np.asarray(shared + np.array(effects) + rng.normal(0, 1, size=(seeds, len(effects))))


def test_the_confidence_set_equals_archs() -> None:
    bootstrap = pytest.importorskip("arch.bootstrap")
    pd = pytest.importorskip("pandas")
    table = losses([0.0, 0.2, 0.5, 1.5], seeds=80)  # sign flips and bootstrap agree with many
    mcs = bootstrap.MCS(
        pd.DataFrame(table), size=0.1, reps=4000, block_size=1, method="R",
        bootstrap="circular", seed=1,
    )  # fmt: skip
    mcs.compute()
    ours = model_confidence_set("abcd", table)
    theirs = mcs.pvalues["Pvalue"]
    for i, name in enumerate("abcd"):
        # 4,000 resamples know a p to about .015; flips and resamples differ by about .01
        assert ours[name] == pytest.approx(theirs.loc[i], abs=0.04)


def test_the_confidence_set_keeps_the_best_and_its_twin_and_drops_the_worst() -> None:
    table = losses([0.0, 3.0])
    ours = model_confidence_set(["best", "worst", "twin"], table[:, [0, 1, 0]])
    assert ours["best"] == ours["twin"] == 1.0
    assert ours["worst"] < 0.01


def test_the_confidence_set_keeps_equal_policies_even_with_six_seeds() -> None:
    rng = np.random.default_rng(5)
    studies = [rng.normal(size=(6, 1)) + rng.normal(size=(6, 6)) for _ in range(300)]
    kept = [min(model_confidence_set("abcdef", table).values()) >= 0.05 for table in studies]
    assert np.mean(kept) > 0.91  # 95 % less three standard errors of 300


def test_pairs_are_one_family() -> None:
    p = pairwise_p(losses([0.0, 0.0, 2.0], seeds=12))
    assert np.array_equal(p, p.T)
    assert p[0, 2] < 0.01 < p[0, 1]
