"""Surrogates: by name wherever a signal is named, and as good as is said on the public texts."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fit_surrogate import KINDS, Target, of_surrogate
from benchmarks.predictors_real import landmark_rows
from contracts.errors import InvalidInput
from contracts.signals import signal_request
from eval.signal_sources import SignalSource
from eval.surrogates import LABEL, SURROGATES, surrogate_notes
from tests.synthetic_runs import synthetic_runs
from traces.public_texts import read_source

_ROOT = Path(__file__).parents[2]
_DATA = Path(os.environ.get("PREEMPTBENCH_DATA", _ROOT.parent / "shared" / "data"))
RUNS = synthetic_runs(num_prompts=40, repeats=1, seed=2, cap_tokens=400)


@pytest.mark.parametrize("name", list(SURROGATES))
def test_a_surrogate_is_its_chain_on_clairvoyant(name: str) -> None:
    signal = SignalSource.parse(name).build(RUNS, [], seed=3)
    chain = SignalSource.parse(f"clairvoyant | {SURROGATES[name].chain}").build(RUNS, [], seed=3)
    assert signal is not None and chain is not None
    requests, ages = [signal_request(run) for run in RUNS], np.zeros(len(RUNS), dtype=np.int64)
    answers = signal.remaining(requests, ages)
    assert np.array_equal(answers, chain.remaining(requests, ages))
    assert signal.clairvoyant  # it was made from the truth, so nobody may take it for a predictor
    worse = SignalSource.parse(f"{name} | bias(2)").build(RUNS, [], seed=3)
    assert worse is not None
    caps = np.array([request.max_tokens for request in requests])
    assert np.array_equal(worse.remaining(requests, ages), np.minimum(2 * answers, caps))


def test_its_name_is_reserved_and_its_note_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="signal name 'surrogate-gbm' is reserved"):
        SignalSource("surrogate-gbm", tmp_path)
    (note,) = surrogate_notes(("age-km", "surrogate-gbm", "surrogate-gbm | stale(64)"))
    assert LABEL in note
    assert SURROGATES["surrogate-gbm"].chain in note
    assert surrogate_notes(("oracle-4", "clairvoyant")) == []


@pytest.mark.skipif(
    not (_DATA / "reasoning_lengths").is_dir(), reason=f"no public texts in {_DATA}"
)
def test_it_is_as_good_as_is_said_on_the_texts_it_was_fitted_to() -> None:
    runs = read_source(_DATA, "ATTS-self", 5)
    rows = {kind: landmark_rows(runs, kind, 0) for kind in KINDS}
    target = Target(runs, [rows], [np.zeros(len(runs), dtype=np.int64)], [])
    surrogate = SURROGATES["surrogate-gbm-maths"]
    found = of_surrogate(target, surrogate.steps)
    said = [
        [float(number) for number in re.findall(r"\d*\.\d+", group)]
        for group in re.findall(r"\(surrogate ([^)]*)\)", surrogate.source)
    ]
    # one draw of noise and of sets; what is said is the mean of four
    for at, kind in enumerate(("geometric", "uniform", "same age")):
        assert found[kind][0] == pytest.approx(said[0][at], abs=0.05)
        assert found[kind][1] == pytest.approx(said[1][at], abs=0.03)
    plain = of_surrogate(target, [])
    assert plain["uniform"] == (0.0, 1.0)
