"""The matrix: what is crossed, what is shared, what resumes, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidInput, LeakageError, UnknownName
from contracts.runs import sha256_text
from contracts.signals import build_grid, signal_request
from eval.cells import read_cells
from eval.matrix import prepare_seed, run_matrix, run_seed, task_key
from eval.matrix_config import MatrixConfig, Pressure
from eval.outcomes import accepted_digest
from eval.signal_sources import SignalSource, load_signal, split_truth
from eval.summary import format_table, summarise
from oracles.empirical import Clairvoyant
from predictors.age_km import AgeKmSettings
from preemptbench.demo import demo_matrix
from serving_sim.config import OffloadSettings
from serving_sim.fault_rates import FaultRate, FaultSource
from serving_sim.faults import Disconnect, Failure
from tests.synthetic_runs import synthetic_runs
from tests.unit.test_outcomes import record
from traces.runlog import read_runs, write_runs
from training.rows import training_set

RUN = synthetic_runs(num_prompts=1, repeats=1, seed=0)[0]


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
    return replace(config, num_warmup=4, num_tagged=20, rate_per_s=6.0)


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
    with pytest.raises(InvalidInput, match="holds a seed twice"):
        summarise([*cells, *cells])
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
        replace(config, engine=replace(config.engine, offload=OffloadSettings(bytes_per_s=1.0))),
        replace(config, faults=FaultSource()),
    ):
        assert task_key(other, 1) != key


def test_task_key_tells_kinds_of_faults_with_equal_fields_apart(config: MatrixConfig) -> None:
    keys = {
        task_key(replace(config, faults=FaultSource((kind(at_s=1.0, request_id="r7"),))), 1)
        for kind in (Failure, Disconnect)
    }
    assert len(keys) == 2


def test_faults_hit_all_cells_of_a_seed_alike_and_are_scored(
    config: MatrixConfig, tmp_path: Path
) -> None:
    rate = FaultRate(kind="failure", probability=0.3, mean_after_s=0.01)
    faulty = replace(config, faults=FaultSource(rates=(rate,)))
    cells = run_matrix(faulty, tmp_path, num_jobs=1)
    for seed in range(3):
        (failed,) = {cell.score.failed for cell in cells if cell.seed == seed}
        assert failed > 0
    for cell in cells:
        assert cell.score.breach >= cell.score.failed / cell.score.accepted


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
    monkeypatch.setattr(SignalSource, "build", lambda self, truth, others, seed: _cheat(truth))
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ("lifo", "lifo")}, "a policy stands twice"),
        ({"signals": (SignalSource("none"), SignalSource("none"))}, "a signal stands twice"),
        ({"pressures": (Pressure("a", 41), Pressure("a", 42))}, "a pressure stands twice"),
        ({"signals": (SignalSource("none"),)}, "'longest-remaining' reads a signal"),
        ({"signals": (SignalSource("oracle"),)}, "'lifo' reads no signal"),
        ({"runs": Path("absent.parquet")}, "does not exist"),
    ],
)
def test_a_matrix_that_would_count_twice_or_drop_a_policy_is_refused(
    config: MatrixConfig, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(config, **change)


def test_a_trace_is_replayed_gap_by_gap_and_takes_no_signal(
    config: MatrixConfig, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    rows = zip(np.cumsum(rng.exponential(0.2, 300)), rng.integers(1, 90, 300), strict=True)
    trace = tmp_path / "trace.csv"
    lines = [f"{at},{prompt},{1 + i % 70}" for i, (at, prompt) in enumerate(rows)]
    trace.write_text("arrival_s,context_tokens,generated_tokens\n" + "\n".join(lines))
    with pytest.raises(InvalidInput, match="no signal can answer"):
        replace(config, trace=trace)
    with pytest.raises(InvalidInput, match="none can answer for a trace"):
        replace(config, trace=trace, signals=(SignalSource("none"),))
    plain = replace(config, trace=trace, policies=("lifo", "fifo"), signals=(SignalSource("none"),))
    inputs = prepare_seed(plain, [], 1)
    start = inputs.workload.manifest["trace_start_row"]
    asked = [float(line.split(",")[0]) for line in lines[start : start + len(inputs.workload)]]
    np.testing.assert_allclose(inputs.workload.arrival_s, np.array(asked) - asked[0])
    cells = run_matrix(plain, tmp_path / "out", num_jobs=1)
    assert len(cells) == 3 * 2 * 2
    assert {cell.score.accepted for cell in cells} == {20}
    key = task_key(plain, 0)
    trace.write_text(trace.read_text().replace(lines[5], lines[5][:-1] + "9"))
    assert task_key(plain, 0) != key


@pytest.mark.parametrize("name", ["clairvoyant", "none", "oracle", "oracle-4"])
def test_a_predictor_cannot_carry_the_name_of_a_bound(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is reserved"):
        SignalSource.parse(f"{name}={tmp_path}")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=8))
def test_truth_is_one_run_a_request_however_repeats_are_numbered(
    shape: list[tuple[int, int]],
) -> None:
    """Any K a request, numbered from anywhere, with gaps: nothing is dropped, nothing shared."""
    runs = [
        replace(RUN, request_key=f"q{i}", run_id=f"q{i}-{k}", repeat=first + 2 * k)
        for i, (first, num_runs) in enumerate(shape)
        for k in range(num_runs)
    ]
    for seed in (0, 1, 7):
        truth, others = split_truth(runs, seed)
        assert sorted(run.request_key for run in truth) == sorted(
            f"q{i}" for i in range(len(shape))
        )
        assert {r.run_id for r in truth} | {r.run_id for r in others} == {r.run_id for r in runs}
        assert len(truth) + len(others) == len(runs)


def test_equal_prompt_ids_of_two_benchmarks_do_not_hide_a_leak(tmp_path: Path) -> None:
    ours = synthetic_runs(num_prompts=8, repeats=2, seed=1)
    theirs = [
        replace(r, benchmark="other", prompt_sha256=sha256_text(r.prompt_id), run_id=f"x{r.run_id}")
        for r in ours
    ]
    AgeKmSettings().fit(training_set(ours)).save_pretrained(tmp_path)
    load_signal("age-km", tmp_path, theirs)
    for runs in (ours, [*ours, *theirs], [*theirs, *ours]):
        with pytest.raises(LeakageError, match="was trained on prompt"):
            load_signal("age-km", tmp_path, runs)


def test_a_checkpoint_of_another_model_is_refused_or_its_cells_say_so(
    config: MatrixConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "ck"
    runs = synthetic_runs(num_prompts=8, repeats=2, seed=9)
    runs = [
        replace(r, model="else/model", prompt_sha256=sha256_text(f"p{r.prompt_id}")) for r in runs
    ]
    AgeKmSettings().fit(training_set(runs)).save_pretrained(folder)
    one = replace(config, num_seeds=2, pressures=config.pressures[:1])

    def with_checkpoint(*, allow_mismatch: bool, degraded: str = "") -> MatrixConfig:
        text = f"mine={folder}{degraded}"
        signals = (SignalSource("none"), SignalSource.parse(text, allow_mismatch=allow_mismatch))
        return replace(one, signals=signals)

    with pytest.raises(InvalidInput, match=r"'mine' was trained on else/model.*--allow-mismatch"):
        run_matrix(with_checkpoint(allow_mismatch=False), tmp_path, num_jobs=1)
    cells = run_matrix(with_checkpoint(allow_mismatch=True), tmp_path, num_jobs=1)
    assert [c.signal for c in cells] == ["none"] * 2 + ["mine (trained on else/model)"] * 2
    assert [c.seed for c in cells] == [0, 1, 0, 1]
    worse = with_checkpoint(allow_mismatch=True, degraded=" | stale(8)")
    worse_cell = run_matrix(worse, tmp_path, num_jobs=1)[-1]
    assert worse_cell.signal == "mine (trained on else/model) | stale(8)"
    # what was stored with leave is not found without
    assert task_key(with_checkpoint(allow_mismatch=False), 0) != task_key(
        with_checkpoint(allow_mismatch=True), 0
    )


def test_a_policy_file_and_what_it_imports_are_part_of_the_key(
    config: MatrixConfig, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def pick(view):\n    return view.kv_blocks\n")
    mine = replace(config, policies=("lifo", f"{tmp_path / 'mine.py'}:pick"))
    key = task_key(mine, 0)
    assert task_key(mine, 0) == key
    (tmp_path / "helper.py").write_text("W = 1\n")
    assert task_key(mine, 0) != key


def test_a_grid_of_another_workload_is_an_error_not_a_neighbours_answer() -> None:
    requests = [signal_request(run) for run in synthetic_runs(num_prompts=3, repeats=1, seed=1)]
    grid = build_grid(Clairvoyant(synthetic_runs(num_prompts=3, repeats=1, seed=1)), requests,
                      horizons=np.array([7, 7, 7]))  # fmt: skip
    grid.read(0, 7)
    with pytest.raises(InvalidInput, match="built for another workload or a shorter horizon"):
        grid.read(0, 8)


def test_bad_names_and_damaged_results_are_one_message(
    config: MatrixConfig, tmp_path: Path
) -> None:
    with pytest.raises(UnknownName, match="did you mean 'longest-remaining'"):
        replace(config, policies=("longest-remainin",))
    with pytest.raises(InvalidInput, match=r"neither built in \(none, oracle"):
        SignalSource.parse("orcale")
    runs = list(read_runs(config.runs))
    truth, others = split_truth(runs, 1)
    one = SignalSource.parse("oracle-1").build(truth, others)
    assert one is not None
    assert one.source_run_ids == {run.run_id for run in runs if run.repeat == 2}
    with pytest.raises(InvalidInput, match="collect with --repeats 4"):
        SignalSource.parse("oracle-3").build(truth, others)
    path = run_seed(config, 0, tmp_path)
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(path).drop_columns(["breach"]), tmp_path / "old.parquet")
    with pytest.raises(InvalidInput, match="delete it"):
        read_cells(tmp_path / "old.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidInput, match="delete it"):
        read_cells(path)


def test_the_digest_of_a_cell_is_that_of_its_records(config: MatrixConfig, tmp_path: Path) -> None:
    path = run_seed(config, 0, tmp_path)
    records = pq.read_table(tmp_path / "records" / path.name).to_pylist()
    cells = read_cells(path)
    for cell in cells:
        rule = {"pressure": cell.pressure, "policy": cell.policy, "signal": cell.signal}
        lives = [SimpleNamespace(**row) for row in records if rule.items() <= row.items()]
        assert len(lives) == cell.score.accepted + cell.score.rejected
        assert cell.accepted_digest == accepted_digest(lives)  # type: ignore[arg-type]


def test_as_many_requests_but_other_ones_do_not_compare(
    config: MatrixConfig, tmp_path: Path
) -> None:
    """Every rule refuses one request of two, LIFO another than the rest."""
    cells = [cell for seed in (0, 1) for cell in read_cells(run_seed(config, seed, tmp_path))]
    assert all(row.comparable for row in summarise(cells))
    lives = [replace(record(), request_id=name) for name in ("a", "b")]
    without_a, without_b = (
        accepted_digest(
            [replace(life, state="rejected") if life is gone else life for life in lives]
        )
        for gone in lives
    )
    parted = [
        replace(cell, accepted_digest=without_a if cell.policy == "lifo" else without_b)
        for cell in cells
    ]
    rows = summarise(parted)
    assert [row.comparable for row in rows] == [row.policy == "lifo" for row in rows]
    assert "not comparable" in format_table(rows)
