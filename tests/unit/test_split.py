"""Splits: no prompt crosses, row order is irrelevant, near-copies stay together."""

from __future__ import annotations

import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidInput, LeakageError, UnknownName
from contracts.runs import DecodeRun
from tests.unit.test_runlog import make_run
from traces.runlog import RunLog
from traces.split import (
    assert_no_leak,
    crossfit_folds,
    normalise_prompt,
    split_runs,
)


def prompt_runs(count: int, families: int = 3, repeats: int = 2) -> list[DecodeRun]:
    return [
        make_run(
            0,
            run_id=f"{i}-{r}",
            request_key=f"k{i}",
            repeat=r,
            prompt_id=f"p{i}",
            prompt_sha256=f"{i:064x}",
            family=f"family-{i % families}",
            prompt=f"Question number {i}",
        )
        for i in range(count)
        for r in range(repeats)
    ]


def hashes(log: RunLog) -> set[str]:
    return set(log.strings("prompt_sha256"))


@settings(max_examples=40)
@given(st.integers(3, 60), st.integers(1, 5), st.integers(0, 9), st.floats(0.1, 0.7))
def test_no_prompt_crosses_and_shares_hold(n: int, families: int, seed: int, share: float) -> None:
    log = RunLog.from_runs(prompt_runs(n, families))
    expected = n * share
    if expected < 1 or n - expected < 1:
        return
    train, test = split_runs(log, test_share=share, seed=seed)
    assert not hashes(train) & hashes(test)
    assert len(train) + len(test) == len(log)
    assert abs(len(hashes(test)) - expected) <= 1
    for family in {run.family for run in log}:
        size = len({r.prompt_sha256 for r in log if r.family == family})
        inside = len({r.prompt_sha256 for r in test if r.family == family})
        assert abs(inside - size * share) < 2  # within one group of its share at either edge


def test_row_order_is_irrelevant_and_the_seed_is_not() -> None:
    runs = prompt_runs(40)
    shuffled = runs.copy()
    random.Random(3).shuffle(shuffled)
    sides = [
        hashes(split_runs(RunLog.from_runs(some), seed=seed).test)
        for some, seed in ((runs, 0), (shuffled, 0), (runs, 1))
    ]
    assert sides[0] == sides[1] != sides[2]
    folds = crossfit_folds(runs, num_folds=4)
    assert crossfit_folds(RunLog.from_runs(shuffled), num_folds=4) == folds
    assert crossfit_folds(runs, num_folds=4, seed=1) != folds


def test_families_are_held_out_by_name() -> None:
    log = RunLog.from_runs(prompt_runs(30))
    train, test = split_runs(log, test_share=0.2, holdout_families=["family-1"])
    assert "family-1" not in set(train.strings("family"))
    assert len([f for f in test.strings("family") if f == "family-1"]) == 20
    assert len(hashes(test)) == 10 + 4
    only = split_runs(log, test_share=0.0, holdout_families=["family-1"]).test
    assert set(only.strings("family")) == {"family-1"}
    with pytest.raises(UnknownName, match="did you mean 'family-1'"):
        split_runs(log, holdout_families=["famly-1"])


def test_near_copies_go_together_through_any_chain() -> None:
    runs = prompt_runs(20, repeats=1)
    # 0 and 1 differ in case and punctuation; 1 and 2 share an id in one benchmark
    texts = {0: "What is  2 plus 2?", 1: "what is 2 plus 2", 2: "Something else entirely"}
    for i, text in texts.items():
        runs[i] = make_run(
            0,
            run_id=f"near-{i}",
            request_key=f"near-{i}",
            prompt_id="same" if i else "p0",
            prompt_sha256=f"{i:064x}",
            family=f"family-{i}",
            prompt=text,
        )
    for seed in range(12):
        train, test = split_runs(RunLog.from_runs(runs), test_share=0.4, seed=seed)
        near = {f"{i:064x}" for i in texts}
        assert near <= hashes(train) or near <= hashes(test)
        fold_of = crossfit_folds(runs, num_folds=5, seed=seed)
        assert fold_of["p0"] == fold_of["same"]


def test_normalisation() -> None:
    assert normalise_prompt("  Hello,\n WORLD! ") == normalise_prompt("hello world")
    assert normalise_prompt("ﬁne—Straße") == "fine strasse"
    assert normalise_prompt("a b") != normalise_prompt("ab")
    # nothing but symbols has no normal form, so such prompts are not joined by it
    runs = [
        make_run(
            0, run_id=f"{i}", request_key=f"{i}", prompt_id=f"{i}", prompt_sha256=f"{i}", prompt=p
        )
        for i, p in enumerate(["???", "!!!"])
    ]
    assert set(crossfit_folds(runs, num_folds=2).values()) == {0, 1}


@settings(max_examples=30)
@given(st.integers(2, 60), st.integers(2, 7), st.integers(0, 5))
def test_folds_are_even(n: int, num_folds: int, seed: int) -> None:
    runs = prompt_runs(n, families=4, repeats=1)
    if num_folds > n:
        with pytest.raises(InvalidInput, match=f"num_folds is {num_folds}.* at most {n}"):
            crossfit_folds(runs, num_folds=num_folds, seed=seed)
        return
    folds = crossfit_folds(runs, num_folds=num_folds, seed=seed)
    assert set(folds) == {run.prompt_id for run in runs}
    sizes = collections.Counter(folds.values())
    assert max(sizes.values()) - min(sizes.values()) <= 1
    for family in {run.family for run in runs}:
        inside = collections.Counter(folds[r.prompt_id] for r in runs if r.family == family)
        counts = [inside[fold] for fold in range(num_folds)]
        assert max(counts) - min(counts) <= 1


def test_leaks_are_named() -> None:
    runs = prompt_runs(6)
    with pytest.raises(LeakageError, match=r"'p1' .*with the same prompt_sha256 is in train"):
        assert_no_leak(runs[:3], runs[3:])
    copy = make_run(0, prompt_id="copy", prompt_sha256="other", prompt="question NUMBER 0.")
    with pytest.raises(LeakageError, match=r"'copy'.*'p0' with the same normalised prompt"):
        assert_no_leak(runs, [copy])
    assert_no_leak(runs[:2], RunLog.from_runs(runs[2:]))


def test_a_side_may_not_be_empty() -> None:
    log = RunLog.from_runs(prompt_runs(1))
    with pytest.raises(InvalidInput, match="side of the split is empty"):
        split_runs(log)
    with pytest.raises(InvalidInput, match=r"test_share is 1\.0"):
        split_runs(log, test_share=1.0)
