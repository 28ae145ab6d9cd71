"""Length laws: what is drawn follows the law, the fit finds it again, the bundle is whole."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from contracts.errors import InvalidInput, PreemptBenchError
from traces.length_profiles import ENGINE, draw_runs, find_law, fit_law, length_laws

LAW = replace(find_law("GLM-Z1-32B", "LRMTokenEconomy"), cap_tokens=10**9)


def test_seven_families_on_two_benchmarks_are_bundled_with_their_sources() -> None:
    laws = length_laws()
    assert len(laws) == 14
    assert len({law.model_family for law in laws}) == 7
    assert all(" @ " in law.source for law in laws)
    with pytest.raises(PreemptBenchError, match="GLM-Z1-32B"):
        find_law("GLM-Z1-33B", "LRMTokenEconomy")


def test_the_fit_finds_the_law_it_was_drawn_from() -> None:
    runs = draw_runs(LAW, num_prompts=3000, repeats=5, seed=1)
    by_prompt: dict[str, list[int]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt_id].append(run.output_tokens)
    again = fit_law(
        by_prompt,
        [run.prompt_tokens for run in runs[::5]],
        model_family=LAW.model_family,
        benchmark=LAW.benchmark,
        cap_tokens=LAW.cap_tokens,
        source="drawn",
    )
    # 3,000 prompts: a scale is known to about 1 %, its spread (4 degrees a prompt) to about 5 %
    assert again.within == pytest.approx(LAW.within, rel=0.05)
    assert again.spread == pytest.approx(LAW.spread, abs=0.05)
    assert again.prompt_location == pytest.approx(LAW.prompt_location, abs=0.05)
    # inner quantiles of a mean of 5 runs; the ends are extremes of 3,000 against those of 19
    np.testing.assert_allclose(again.locations[2:-2], LAW.locations[2:-2], atol=0.25)


def test_draws_are_keyed_and_a_larger_k_only_adds() -> None:
    few = draw_runs(LAW, num_prompts=3, repeats=2, seed=7)
    many = draw_runs(LAW, num_prompts=5, repeats=4, seed=7)
    assert few == [run for run in many if run.repeat < 2][:6]
    assert few != draw_runs(LAW, num_prompts=3, repeats=2, seed=8)


def test_a_fresh_run_outlives_k_others_once_in_k_plus_one() -> None:
    runs = draw_runs(LAW, num_prompts=4000, repeats=5, seed=2)
    lengths = np.array([run.output_tokens for run in runs]).reshape(-1, 5)
    share = float((lengths[:, 0] > lengths[:, 1:].max(axis=1)).mean())
    assert share == pytest.approx(1 / 5, abs=0.02)  # 3 standard errors of 4,000 draws, and ties


def test_the_cap_censors_and_the_label_says_parametric() -> None:
    capped = draw_runs(replace(LAW, cap_tokens=500), num_prompts=50, repeats=1, seed=0)
    assert {run.engine for run in capped} == {ENGINE}
    assert max(run.output_tokens for run in capped) == 500
    for run in capped:
        assert run.event_observed == (run.finish_reason == "stop")
        assert run.finish_reason == "stop" or run.output_tokens == 500


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"within": -1.0}, "within"),
        ({"spread": float("nan")}, "spread"),
        ({"cap_tokens": 0}, "cap_tokens"),
        ({"locations": (2.0, 1.0)}, "never fall"),
    ],
)
def test_a_law_that_makes_no_sense_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        replace(LAW, **changes)  # type: ignore[arg-type]


def test_prompts_that_never_vary_cannot_be_fitted() -> None:
    with pytest.raises(InvalidInput, match="at least 2"):
        fit_law({"a": [5, 5], "b": [7]}, [10], model_family="m", benchmark="b", cap_tokens=9,
                source="s")  # fmt: skip
    with pytest.raises(InvalidInput, match="at least 1"):
        draw_runs(LAW, num_prompts=0, repeats=1, seed=0)
