"""The ladder of oracle-K: each rung, each flag, and every kind of bad or awkward log."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from contracts.conformance import check_signal
from contracts.errors import InvalidInput, UnknownName
from contracts.runs import DecodeRun
from contracts.signals import SignalRequest, signal_request
from eval.signal_sources import SignalSource
from oracles.empirical import LEVELS, EmpiricalOracle, OracleAnswer, leave_one_out
from oracles.ladder import FOREVER
from oracles.run_table import normalised_prompt, run_table
from oracles.tails import fit_tails
from tests.synthetic_runs import make_run, synthetic_runs

RUNS = synthetic_runs(num_prompts=24, repeats=5, seed=1)


def _prompt(
    prompt: str, lengths: list[int], *, cap_tokens: int = 4000, family: str = "story"
) -> list[DecodeRun]:
    return [
        make_run(
            prompt=prompt,
            prompt_id=prompt,
            natural_tokens=tokens,
            repeat=repeat,
            cap_tokens=cap_tokens,
            family=family,
        )
        for repeat, tokens in enumerate(lengths)
    ]


def _ask(oracle: EmpiricalOracle, run: DecodeRun, age: int, **how: bool) -> OracleAnswer:
    return oracle.answer([signal_request(run)], np.array([age]), **how)


def _level(answer: OracleAnswer) -> str:
    return LEVELS[answer.level[0]]


def test_near_duplicates_answer_for_each_other_and_digits_tell_prompts_apart() -> None:
    assert normalised_prompt("  Count TO\n“50”, please!") == normalised_prompt("count to 50 please")
    assert normalised_prompt("Count to 50") != normalised_prompt("Count to 500")
    assert normalised_prompt("2+3") != normalised_prompt("2-3")
    oracle = EmpiricalOracle(_prompt("Tell me a story.", [30, 40, 50]))
    twin = _prompt("tell me  a STORY", [9])[0]
    answer = _ask(oracle, twin, 35)
    assert _level(answer) == "near-duplicate"
    assert answer.remaining[0] == pytest.approx(10.0)
    assert (answer.num_runs[0], answer.effective_k[0]) == (3, 2)
    assert not answer.exhausted[0]
    stranger = _prompt("Something else", [9])[0]
    assert _level(_ask(oracle, stranger, 35)) == "family"


def test_an_exhausted_prompt_is_answered_by_its_own_heavy_tail() -> None:
    runs = _prompt("short", [100, 110, 120]) + _prompt("long", [900, 1000, 1100])
    oracle = EmpiricalOracle(runs)
    answer = _ask(oracle, runs[0], 130)
    assert _level(answer) == "log-t"
    assert answer.exhausted[0]
    # near its own lengths, far from the family's 870 and from nothing
    assert 5 < answer.remaining[0] < 100
    # a heavy tail: the longer it lives beyond its samples, the longer it will
    later = _ask(oracle, runs[0], 300).remaining[0]
    assert later > answer.remaining[0]
    without = EmpiricalOracle(runs, levels=("prompt", "family", "model"))
    assert _level(_ask(without, runs[0], 130)) == "family"
    with pytest.raises(UnknownName, match="oracle level"):
        EmpiricalOracle(runs, levels=("promt",))


def test_spread_is_shrunk_toward_the_family() -> None:
    same = [(f"same {i}", [100, 100, 100]) for i in range(6)]
    wide = [(f"wide {i}", [50, 100, 200]) for i in range(6)]
    calm = [run for prompt, lengths in same for run in _prompt(prompt, lengths, family="calm")]
    wild = [run for prompt, lengths in wide for run in _prompt(prompt, lengths, family="wild")]
    odd = _prompt("odd", [100, 100, 100], family="wild")
    table = run_table([*calm, *wild, *odd])
    scale = fit_tails(table).scale
    assert scale[0] < scale[-1] < scale[6]


def test_a_cut_run_pulls_the_tail_up_and_not_to_the_cap() -> None:
    """Of lengths 80, 90 and one cut at 100 the location lies above that of 80, 90, 100 ended."""
    others = [run for i in range(4) for run in _prompt(f"other {i}", [60, 80, 100])]
    cut = _prompt("cut", [80, 90], cap_tokens=100) + _prompt("cut", [1, 1, 150], cap_tokens=100)[2:]
    ended = [replace(run, event_observed=True) for run in cut]
    with_cut = fit_tails(run_table([*others, *cut])).location[-1]
    as_ended = fit_tails(run_table([*others, *ended])).location[-1]
    assert as_ended < with_cut < as_ended + 0.5


def test_all_runs_cut_give_a_flagged_lower_bound() -> None:
    runs = _prompt("endless", [999, 999, 999], cap_tokens=200)
    oracle = EmpiricalOracle(runs)
    answer = _ask(oracle, runs[0], 50)
    assert answer.remaining[0] == 150.0
    assert answer.lower_bound[0]
    assert not answer.extrapolated[0]
    # a serving cap beyond what was observed: still only "at least 150 more"
    wider = replace(signal_request(runs[0]), max_tokens=1000)
    answer = oracle.answer([wider], np.array([50]))
    assert answer.remaining[0] == 150.0
    assert answer.lower_bound[0]
    assert answer.extrapolated[0]
    # beyond every cut run nobody knows: the bound itself
    beyond = oracle.answer([wider], np.array([200]))
    assert _level(beyond) == "cap"
    assert beyond.remaining[0] == 800.0


def test_a_serving_cap_beyond_the_oracles_is_marked_extrapolated() -> None:
    runs = _prompt("mixed", [100, 150, 999], cap_tokens=200)
    oracle = EmpiricalOracle(runs)
    wider = replace(signal_request(runs[0]), max_tokens=1000)
    assert oracle.answer([wider], np.array([0])).extrapolated[0]
    assert not _ask(oracle, runs[0], 0).extrapolated[0]
    closed = EmpiricalOracle(_prompt("mixed", [100, 150, 180], cap_tokens=200))
    assert not closed.answer([wider], np.array([0])).extrapolated[0]


def test_natural_and_served_are_two_targets() -> None:
    runs = _prompt("open", [100, 150, 999, 999], cap_tokens=200)
    oracle = EmpiricalOracle(runs)
    request = [replace(signal_request(runs[0]), max_tokens=120)]
    age = np.array([0])
    served = oracle.answer(request, age)
    natural = oracle.answer(request, age, natural=True)
    assert served.remaining[0] == pytest.approx((100 + 3 * 120) / 4)
    assert not served.lower_bound[0]
    assert natural.remaining[0] == pytest.approx((100 + 150 + 200 + 200) / 4)
    assert natural.lower_bound[0]
    assert oracle.quantile(request, age, 0.9)[0] == 120.0
    assert oracle.quantile(request, age, 0.9, natural=True)[0] == np.inf
    assert oracle.median(request, age)[0] == 120.0
    assert oracle.quantile(request, age, 0.5, natural=True)[0] == 150.0
    assert oracle.reach_cap(request, age)[0] == pytest.approx(0.75)


def test_answers_of_every_rung_obey_the_law_of_signals() -> None:
    check_signal(leave_one_out(RUNS, 0), [run for run in RUNS if run.repeat == 0])
    strangers = [
        replace(run, request_key=f"new {i}", prompt=f"new {i}") for i, run in enumerate(RUNS[::5])
    ]
    check_signal(EmpiricalOracle(RUNS), strangers)
    unknown = [replace(run, model="another model") for run in strangers]
    check_signal(EmpiricalOracle(RUNS), unknown)


def test_survival_is_the_distribution_behind_the_mean() -> None:
    """Sum of P(remaining > h) over h is the mean, at the prompt's rung and beyond it."""
    oracle = leave_one_out(RUNS, 0)
    truth = [run for run in RUNS if run.repeat == 0]
    for age in (0, 20, 60):
        requests = [signal_request(run) for run in truth]
        ages = np.full(len(truth), age)
        room = truth[0].max_new_tokens - age
        total = sum(
            oracle.survival(requests, ages, np.full(len(truth), float(h))) for h in range(room)
        )
        answer = oracle.answer(requests, ages)
        curves = np.array([LEVELS[i] != "log-t" for i in answer.level])
        np.testing.assert_allclose(np.asarray(total)[curves], answer.remaining[curves], rtol=1e-9)
        # the tail's mean is a trapezoid, not the sum itself (tests/unit/test_log_t.py)
        np.testing.assert_allclose(total, answer.remaining, atol=0.05)


def test_two_models_in_one_log_stay_apart() -> None:
    ours = _prompt("p", [10, 12])
    theirs = [
        replace(run, model="other/model", request_key="k2", run_id=f"m2-{i}", output_tokens=500)
        for i, run in enumerate(_prompt("p", [500, 500]))
    ]
    oracle = EmpiricalOracle([*ours, *theirs])
    assert _ask(oracle, ours[0], 0).remaining[0] == pytest.approx(11.0)
    assert _ask(oracle, theirs[0], 0).remaining[0] == pytest.approx(500.0)
    stranger = replace(ours[0], request_key="new", prompt="new", family="new")
    assert _ask(oracle, stranger, 0).remaining[0] == pytest.approx(11.0)
    assert sorted(oracle.facts.caps) == ["other/model", ours[0].model]


def test_two_tokenizers_under_one_model_are_refused() -> None:
    runs = _prompt("p", [10, 12])
    with pytest.raises(InvalidInput, match="2 tokenizers"):
        EmpiricalOracle([runs[0], replace(runs[1], tokenizer_sha256="another")])


def test_two_caps_under_one_model_are_each_censored_at_their_own() -> None:
    """The family's curve holds runs cut at 50 and runs that may go on to 400."""
    runs = _prompt("a", [999, 30], cap_tokens=50) + _prompt("b", [100, 300], cap_tokens=400)
    oracle = EmpiricalOracle(runs)
    assert oracle.facts.caps[runs[0].model] == (50, 400)
    stranger = replace(runs[2], request_key="new", prompt="new")
    answer = _ask(oracle, stranger, 0)
    # 30 ended of 4, 50 was cut of 3, then 100 and 300 of the two left
    assert answer.remaining[0] == pytest.approx(30 + 0.75 * 70 + 0.375 * 200)
    assert not answer.extrapolated[0]


def test_sampled_runs_are_labelled_and_the_label_stays() -> None:
    hot = [replace(run, temperature=0.7) for run in RUNS]
    assert EmpiricalOracle(hot).name == "oracle-5 (sampled)"
    assert EmpiricalOracle(hot, "oracle-4").name == "oracle-4 (sampled)"
    assert EmpiricalOracle([*RUNS, *hot[:1]]).name.endswith("(sampled)")
    assert EmpiricalOracle(RUNS).name == "oracle-5"


def test_exact_mode_verifies_what_it_claims() -> None:
    alike = _prompt("p", [10, 10]) + _prompt("q", [20, 20, 20])
    assert EmpiricalOracle(alike, mode="exact").mode == "exact"
    with pytest.raises(InvalidInput, match="1 of 2 requests differ"):
        EmpiricalOracle(_prompt("p", [10, 11]) + _prompt("q", [20, 20]), mode="exact")
    texts = [replace(run, text_sha256=f"text {run.repeat}") for run in _prompt("p", [10, 10])]
    with pytest.raises(InvalidInput, match="differ in length or text"):
        EmpiricalOracle(texts, mode="exact")
    with pytest.raises(InvalidInput, match="ran once"):
        EmpiricalOracle([*alike, *_prompt("r", [5])], mode="exact")
    with pytest.raises(InvalidInput, match="batch-dependent"):
        EmpiricalOracle([replace(run, batch_invariant=False) for run in alike], mode="exact")
    with pytest.raises(InvalidInput, match="were sampled"):
        EmpiricalOracle([replace(run, temperature=1.0) for run in alike], mode="exact")
    with pytest.raises(UnknownName, match="oracle mode"):
        EmpiricalOracle(alike, mode="exactly")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["exact", "deployment"])
def test_modes_are_never_mixed(mode: str) -> None:
    runs = _prompt("p", [10, 10])
    mixed = [runs[0], replace(runs[1], batch_invariant=False)]
    with pytest.raises(InvalidInput, match="mixes runs of batch-invariant"):
        EmpiricalOracle(mixed, mode=mode)  # type: ignore[arg-type]


def test_ages_below_zero_are_refused_and_ages_beyond_the_cap_answer_one() -> None:
    oracle = EmpiricalOracle(RUNS)
    request: list[SignalRequest] = [signal_request(RUNS[0])]
    with pytest.raises(InvalidInput, match="an age is -1"):
        oracle.remaining(request, np.array([-1]))
    at_cap = np.array([request[0].max_tokens + 7])
    assert oracle.remaining(request, at_cap).tolist() == [1.0]
    assert oracle.quantile(request, at_cap, 0.9).tolist() == [1.0]
    assert oracle.survival(request, at_cap, np.array([1.0])).tolist() == [0.0]
    with pytest.raises(InvalidInput, match="quantile level is 1"):
        oracle.quantile(request, np.array([0]), 1.0)


def test_an_oracle_of_no_runs_does_not_exist() -> None:
    with pytest.raises(InvalidInput, match="run log is empty"):
        EmpiricalOracle([])
    with pytest.raises(InvalidInput, match=r"neither built in \(none, oracle, oracle-K"):
        SignalSource.parse("oracle-0")


def test_the_guard_against_leakage_knows_runs_and_prompts() -> None:
    oracle = EmpiricalOracle(RUNS)
    assert RUNS[3].run_id in oracle.source_run_ids
    assert "no such run" not in oracle.source_run_ids
    assert len(oracle.source_run_ids) == len(RUNS)
    assert oracle.knows_prompt(RUNS[3].prompt_sha256)
    assert not oracle.knows_prompt("0" * 64)


def test_natural_answers_on_the_tail_stop_at_what_the_model_was_seen_to_write() -> None:
    runs = _prompt("short", [100, 110]) + _prompt("long", [900, 1000])
    answer = _ask(EmpiricalOracle(runs), runs[0], 150, natural=True)
    assert _level(answer) == "log-t"
    assert answer.lower_bound[0]
    assert answer.remaining[0] < 850 < FOREVER
