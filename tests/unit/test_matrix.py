"""The matrix: what is crossed, what is shared, what resumes, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import InvalidInput, LeakageError, UnknownName
from eval.cells import read_cells
from eval.matrix import MatrixConfig, Pressure, prepare_seed, run_matrix, run_seed, task_key
from eval.signal_sources import SignalSource
from eval.summary import format_table, summarise
from preemptbench.demo import demo_matrix
from tests.synthetic_runs import synthetic_runs
from traces.runlog import read_runs, write_runs


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MatrixConfig:
    runs = tmp_path_factory.mktemp("runs") / "runs.parquet"
    write_runs(synthetic_runs(num_prompts=20, repeats=3, seed=2, cap_tokens=120), runs, {})
    config = demo_matrix(
        runs,
        {},
        num_seeds=3,
        policies=("lifo", "longest-remaining"),
        pressures=(Pressure("tight", 41), Pressure("ample", 4001)),
    )
    return replace(config, num_warmup=4, num_tagged=20, num_filler=20, rate_per_s=6.0)


def test_signals_meet_only_policies_that_read_them(config: MatrixConfig) -> None:
    pairs = [(policy, signal.name) for policy, signal in config.crossings()]
    assert pairs == [
        ("lifo", "none"),
        ("longest-remaining", "oracle"),
        ("longest-remaining", "clairvoyant"),
    ]


def test_matrix_scores_every_cell_and_resumes_to_the_same_bytes(
    config: MatrixConfig, tmp_path: Path
) -> None:
    cells = run_matrix(config, tmp_path / "a", num_jobs=1)
    assert len(cells) == 3 * 2 * 3
    for cell in cells:
        s = cell.score
        assert s.met + s.late + s.failed + s.unfinished + s.withdrawn == s.accepted == 20
        assert math.isfinite(s.breach)
        assert s.breach >= s.floor
    ample = [cell for cell in cells if cell.pressure == "ample"]
    assert all(cell.num_preemptions == 0 for cell in ample)
    assert any(cell.num_preemptions > 0 for cell in cells)
    for seed in range(3):  # without pressure there is nothing to choose: all policies are equal
        assert len({cell.score.breach for cell in ample if cell.seed == seed}) == 1
    run_seed(config, 0, tmp_path / "b")
    again = run_matrix(config, tmp_path / "b", num_jobs=2)
    assert again == cells
    for folder in ("cells", "records"):
        for file in sorted((tmp_path / "a" / folder).iterdir()):
            assert file.read_bytes() == (tmp_path / "b" / folder / file.name).read_bytes()


def test_summary_pairs_with_lifo(config: MatrixConfig, tmp_path: Path) -> None:
    cells = run_matrix(config, tmp_path, num_jobs=1)
    rows = summarise(cells)
    assert [row.label for row in rows[:3]] == [
        "lifo", "longest-remaining / oracle", "longest-remaining / clairvoyant",
    ]  # fmt: skip
    for row in rows:
        if row.difference is not None:
            lifo = next(r for r in rows if r.pressure == row.pressure and r.policy == "lifo")
            expected = 100 * (row.breach - lifo.breach)
            assert row.difference.mean == pytest.approx(expected, abs=1e-9)
    assert "baseline" in format_table(rows)
    with pytest.raises(InvalidInput, match="no 'lifo' cells"):
        summarise([cell for cell in cells if cell.policy != "lifo"])


def test_task_key_changes_with_what_matters_only(config: MatrixConfig) -> None:
    key = task_key(config, 1)
    assert task_key(replace(config, num_seeds=50), 1) == key
    assert task_key(config, 2) != key
    for other in (
        replace(config, deadline_s=3.0),
        replace(config, policies=("lifo",)),
        replace(config, pressures=(Pressure("tight", 42),)),
        replace(config, engine=replace(config.engine, watermark=0.01)),
    ):
        assert task_key(other, 1) != key


def test_truth_and_oracle_never_share_a_run(
    config: MatrixConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = list(read_runs(config.runs))
    for seed in range(4):
        inputs = prepare_seed(config, runs, seed)
        truth = set(inputs.workload.run_ids or ())
        grid = inputs.grids["oracle"]
        assert grid is not None
        assert not truth & grid.sources[0]
    monkeypatch.setattr(SignalSource, "build", lambda self, truth, others: _cheat(truth))
    with pytest.raises(LeakageError, match="leave one repeat out"):
        prepare_seed(config, runs, 0)


def _cheat(truth: object) -> object:
    from oracles.empirical import EmpiricalOracle

    return EmpiricalOracle(list(truth))  # type: ignore[call-overload]


def test_one_repeat_has_no_oracle_and_says_what_to_do(config: MatrixConfig, tmp_path: Path) -> None:
    path = tmp_path / "single.parquet"
    write_runs([run for run in read_runs(config.runs) if run.repeat == 0], path, {})
    with pytest.raises(InvalidInput, match="collect with --repeats 2"):
        run_seed(replace(config, runs=path), 0, tmp_path)


def test_bad_names_and_damaged_results_are_one_message(
    config: MatrixConfig, tmp_path: Path
) -> None:
    with pytest.raises(UnknownName, match="did you mean 'longest-remaining'"):
        replace(config, policies=("longest-remainin",))
    with pytest.raises(InvalidInput, match="neither none, oracle"):
        SignalSource.parse("orcale")
    runs = list(read_runs(config.runs))
    truth = [run for run in runs if run.repeat == 1]
    others = [run for run in runs if run.repeat != 1]
    one = SignalSource.parse("oracle-1").build(truth, others)
    assert one is not None
    assert one.source_run_ids == {run.run_id for run in runs if run.repeat == 2}
    with pytest.raises(InvalidInput, match="collect with --repeats 4"):
        SignalSource.parse("oracle-3").build(truth, others)
    path = run_seed(config, 0, tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidInput, match="delete it"):
        read_cells(path)
