"""The probe: bins, what a cut run says, the filter, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidInput, UnknownName
from contracts.runs import DecodeRun
from contracts.signals import HiddenTrack, signal_request
from predictors.age_km import AgeKmSettings
from predictors.probe import Probe, ProbeSettings, bin_targets, carried, log_masses
from predictors.torch_loop import LoopSettings
from tests.hidden_runs import LAYERS, WIDTH, with_hidden
from tests.synthetic_runs import STRIDE, synthetic_runs
from traces.runlog import read_runs, write_runs
from training.rows import read_run_log, training_set

RUNS = with_hidden(synthetic_runs(num_prompts=60))
TRAIN, TEST = RUNS[:120], RUNS[120:]
LOOP = LoopSettings(num_epochs=40, batch_rows=64, learning_rate=5e-3)


@pytest.fixture(scope="module", params=["bins", "hazard"])
def probe(request: pytest.FixtureRequest) -> Probe:
    return ProbeSettings(head=request.param, hidden=(16,), loop=LOOP).fit(training_set(TRAIN))


def _log_error(signal: object, runs: list[DecodeRun]) -> float:
    alive = [run for run in runs if run.output_tokens > 5 * STRIDE and run.event_observed]
    ages = np.array([run.output_tokens // 2 for run in alive])
    left = np.array([run.output_tokens for run in alive]) - ages
    said = signal.remaining([signal_request(run) for run in alive], ages)  # type: ignore[attr-defined]
    return float(np.abs(np.log1p(said) - np.log1p(left)).mean())


def test_a_state_that_tells_is_believed(probe: Probe) -> None:
    """The layer read is the last kept, 7, one direction of which is log remaining + noise of .3."""
    assert probe.layer == LAYERS[-1]
    assert _log_error(probe, TEST) < 0.6 * _log_error(
        AgeKmSettings().fit(training_set(TRAIN)), TEST
    )


def test_a_layer_that_knows_nothing_teaches_nothing() -> None:
    told, untold = (
        ProbeSettings(layer=layer, hidden=(16,), loop=LOOP).fit(training_set(TRAIN))
        for layer in LAYERS[::-1]
    )
    assert _log_error(told, TEST) < 0.7 * _log_error(untold, TEST)


def test_before_the_first_state_the_prior_answers(probe: Probe) -> None:
    request = signal_request(TEST[0])
    blind = replace(request, hidden=None)
    for age in (0, STRIDE - 1):
        at = np.array([age])
        assert probe.remaining([request], at) == probe.remaining([blind], at)
    at = np.array([STRIDE])
    assert probe.remaining([request], at) != probe.remaining([blind], at)


MASSES = st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5).map(
    lambda weights: np.array([weights]) / sum(weights)
)


@given(MASSES, st.integers(0, 3), st.integers(0, 3))
def test_carrying_on_twice_is_carrying_on_once(mass: np.ndarray, first: int, second: int) -> None:
    """Exact where whole bins of one width pass: no bin is cut and spread anew."""
    edges = np.array([8, 16, 24, 32])
    once = carried(mass, edges, np.array([8 * (first + second)]))
    twice = carried(carried(mass, edges, np.array([8 * first])), edges, np.array([8 * second]))
    np.testing.assert_allclose(once, twice, atol=1e-12)


@given(MASSES, st.integers(0, 500))
def test_carrying_on_keeps_a_distribution(mass: np.ndarray, tokens: int) -> None:
    edges = np.array([8, 16, 64, 200])
    after = carried(mass, edges, np.array([tokens]))
    assert after.sum() == pytest.approx(1.0, abs=1e-12)
    assert (after >= 0.0).all()
    assert after[0, -1] >= mass[0, -1] - 1e-12  # what lies beyond all edges only gains
    np.testing.assert_allclose(carried(mass, edges, np.array([0])), mass, atol=1e-12)


def test_carrying_on_by_hand() -> None:
    """Half ends within 10 tokens, half within the next 10; after 5 a quarter is gone: of the .75
    left, .25 and .25 end within 10, .25 in the 5 after."""
    mass = carried(np.array([[0.5, 0.5, 0.0]]), np.array([10, 20]), np.array([5]))
    np.testing.assert_allclose(mass, [[2 / 3, 1 / 3, 0.0]], atol=1e-12)


def test_heads_give_masses_that_add_up() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (50, 7))
    for head in ("bins", "hazard"):
        np.testing.assert_allclose(np.exp(log_masses(logits, head)).sum(axis=1), 1.0, atol=1e-12)


def test_a_cut_run_covers_what_lies_beyond() -> None:
    edges = np.array([10, 20])
    targets = bin_targets(np.array([5, 10, 15, 15, 30]), np.array([1, 1, 1, 0, 0], bool), edges)
    expected = [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0.5, 1], [0, 0, 1]]
    np.testing.assert_allclose(targets, expected)


def test_a_log_names_its_states_below_its_folder(tmp_path: Path) -> None:
    """Relative in the file, whole when read, and gone from a log that is written elsewhere."""
    here = with_hidden(synthetic_runs(num_prompts=3), tmp_path)
    write_runs(here, tmp_path / "runs.parquet")
    read = list(read_run_log(tmp_path / "runs.parquet"))
    assert [run.hidden_ref for run in read] == [run.hidden_ref for run in here]
    assert read_runs(tmp_path / "runs.parquet").table["hidden_ref"][0].as_py().startswith("hidden/")
    state = signal_request(read[0]).hidden
    assert state is not None and state.load().layers == LAYERS
    write_runs(read, tmp_path / "elsewhere" / "runs.parquet")
    assert {run.hidden_ref for run in read_runs(tmp_path / "elsewhere" / "runs.parquet")} == {None}


def test_a_log_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    run = replace(synthetic_runs(num_prompts=1)[0], hidden_ref="../../x.safetensors")
    write_runs([run], tmp_path / "runs.parquet")
    assert next(iter(read_runs(tmp_path / "runs.parquet"))).hidden_ref == "../../x.safetensors"
    with pytest.raises(InvalidInput, match="holds no hidden states"):
        HiddenTrack(str(tmp_path / "none.safetensors")).load()


def test_bad_input_says_what_to_do(probe: Probe, tmp_path: Path) -> None:
    quick = ProbeSettings(hidden=(4,), loop=LoopSettings(num_epochs=1))
    plain = [replace(run, hidden_ref=None) for run in TRAIN]
    with pytest.raises(InvalidInput, match="--hidden-layers"):
        quick.fit(training_set(plain))
    with pytest.raises(InvalidInput, match="the probe reads layer 5 of width 6"):
        replace(quick, layer=5).fit(training_set(TRAIN))
    with pytest.raises(UnknownName, match="did you mean 'bins'"):
        ProbeSettings(head="bin")
    wide = np.zeros((9, 2, WIDTH + 1), np.float16)
    from oracles.hidden import save_hidden

    ref = save_hidden(tmp_path, "wide", wide, LAYERS, STRIDE)
    asked = replace(signal_request(TEST[0]), hidden=HiddenTrack(str(tmp_path / ref)))
    with pytest.raises(InvalidInput, match=r"of width 7 .* the probe reads layer 7 of width 6"):
        probe.remaining([asked], np.array([STRIDE]))
