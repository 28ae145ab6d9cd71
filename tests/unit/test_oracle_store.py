"""An oracle written and read back is the same oracle; anything else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from contracts.errors import InvalidInput, LeakageError
from contracts.signals import build_grid, signal_request
from eval.signal_sources import SignalSource, check_pairing
from oracles.empirical import EmpiricalOracle
from oracles.run_table import read_run_table, run_table
from oracles.store import (
    ARRAY_FILE,
    MANIFEST_FILE,
    is_oracle_folder,
    load_oracle,
    save_oracle,
    sealed,
)
from tests.synthetic_runs import synthetic_runs
from traces.runlog import write_runs

RUNS = synthetic_runs(num_prompts=20, repeats=4, seed=2)
TRUTH = [run for run in RUNS if run.repeat == 0]
REQUESTS = [signal_request(run) for run in TRUTH]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = run_table(run for run in RUNS if run.repeat > 0)
    save_oracle(table, tmp_path / "oracle", mode="deployment", source={"log": "synthetic"})
    return tmp_path / "oracle"


def test_streaming_a_log_gives_the_table_of_its_runs(tmp_path: Path) -> None:
    runs = [replace(run, event_observed=None) if i % 7 == 0 else run for i, run in enumerate(RUNS)]
    write_runs(runs, tmp_path / "runs.parquet")
    streamed, direct = read_run_table(tmp_path / "runs.parquet"), run_table(runs)
    assert streamed.facts == direct.facts
    for name in ("keys", "prompt_hash", "request_of", "output_tokens", "run_hash", "text_hash"):
        np.testing.assert_array_equal(getattr(streamed, name), getattr(direct, name))
    # an unknown end counts as a cut
    assert streamed.event_observed.tolist() == [run.event_observed is True for run in runs]


def test_many_small_row_groups_read_as_one_log_in_order(tmp_path: Path) -> None:
    write_runs(RUNS, tmp_path / "one.parquet")
    pq.write_table(
        pq.read_table(tmp_path / "one.parquet"), tmp_path / "many.parquet", row_group_size=7
    )
    one, many = (read_run_table(tmp_path / f"{name}.parquet") for name in ("one", "many"))
    assert pq.ParquetFile(tmp_path / "many.parquet").num_row_groups == 12
    np.testing.assert_array_equal(one.run_hash, many.run_hash)
    np.testing.assert_array_equal(one.output_tokens, many.output_tokens)


def test_a_run_costs_29_bytes() -> None:
    """The bound behind ten million runs in 2 GB: five numbers and a flag, no objects."""
    table = run_table(RUNS)
    columns = ("request_of", "repeat", "output_tokens", "event_observed", "run_hash", "text_hash")
    assert sum(getattr(table, name).nbytes for name in columns) == 29 * len(RUNS)


def test_a_part_of_a_table_is_the_table_of_that_part() -> None:
    kept = [run for run in RUNS if run.repeat > 1]
    part = run_table(RUNS).take(np.array([run.repeat > 1 for run in RUNS]))
    ages = np.full(len(TRUTH), 20)
    np.testing.assert_array_equal(
        EmpiricalOracle(part).remaining(REQUESTS, ages),
        EmpiricalOracle(kept).remaining(REQUESTS, ages),
    )


def test_read_back_it_answers_the_same(folder: Path) -> None:
    fresh = EmpiricalOracle([run for run in RUNS if run.repeat > 0])
    again = load_oracle(folder)
    assert is_oracle_folder(folder)
    assert again.name == fresh.name == "oracle-3"
    for age in (0, 30, 90, 180):
        ages = np.full(len(TRUTH), age)
        mine, theirs = again.answer(REQUESTS, ages), fresh.answer(REQUESTS, ages)
        for name in ("remaining", "level", "effective_k", "exhausted", "lower_bound"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))


def test_a_saved_oracle_is_a_signal_and_its_own_runs_are_refused(folder: Path) -> None:
    source = SignalSource.parse(f"mine={folder}")
    signal = source.build(TRUTH, [])
    assert signal is not None and signal.name == "mine"
    check_pairing(REQUESTS, build_grid(signal, REQUESTS))
    used = [signal_request(run) for run in RUNS if run.repeat == 1]
    with pytest.raises(LeakageError, match="also the truth"):
        check_pairing(used, build_grid(signal, used))
    noisy = SignalSource.parse(f"mine={folder} | noise(0.5)").build(TRUTH, [])
    assert noisy is not None and noisy.name == "mine | noise(0.5)"


def test_the_label_of_sampled_runs_survives_a_folder_and_a_name(tmp_path: Path) -> None:
    hot = run_table(replace(run, temperature=0.6) for run in RUNS)
    told = save_oracle(hot, tmp_path, mode="deployment", source={})
    assert told["name"] == "oracle-4 (sampled)"
    assert load_oracle(tmp_path).name == "oracle-4 (sampled)"
    assert load_oracle(tmp_path, "mine").name == "mine (sampled)"


def test_a_log_that_breaks_its_mode_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="differ in length or text"):
        save_oracle(run_table(RUNS), tmp_path / "o", mode="exact", source={})
    assert not (tmp_path / "o").exists()


def test_every_damage_is_one_clear_error(folder: Path) -> None:
    blob = (folder / ARRAY_FILE).read_bytes()
    (folder / ARRAY_FILE).write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    with pytest.raises(InvalidInput, match="changed or damaged"):
        load_oracle(folder)
    (folder / ARRAY_FILE).unlink()
    with pytest.raises(InvalidInput, match="is missing"):
        load_oracle(folder)
    (folder / ARRAY_FILE).write_bytes(blob)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    for change, said in (
        ({"format": "oracle/9"}, "this version reads"),
        ({"set_up": 3}, "is not an oracle"),
        ({"set_up": {}}, "is not an oracle"),
        ({"mode": "both"}, "unknown oracle mode"),
        ({"mode": ["both"]}, "unknown oracle mode"),
    ):
        (folder / MANIFEST_FILE).write_text(json.dumps(sealed({**manifest, **change})))
        with pytest.raises(InvalidInput, match=said):
            load_oracle(folder)
    manifest["set_up"]["temperatures"] = [0.0, 1.0]
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(InvalidInput, match="SHA-256 of its content"):
        load_oracle(folder)
    (folder / MANIFEST_FILE).write_text("{")
    with pytest.raises(InvalidInput):
        load_oracle(folder)


def test_arrays_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    table = run_table(RUNS)
    short = replace(table, repeat=table.repeat[:-1])
    save_oracle(short, tmp_path / "a", mode="deployment", source={})
    with pytest.raises(InvalidInput, match=r"repeat is int32 of shape \(79,\)"):
        load_oracle(tmp_path / "a")
    none = replace(table, output_tokens=table.output_tokens.astype(np.int64))
    save_oracle(none, tmp_path / "b", mode="deployment", source={})
    with pytest.raises(InvalidInput, match="output_tokens is int64"):
        load_oracle(tmp_path / "b")
