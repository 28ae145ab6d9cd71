"""The study: pilots, resume, what is compared with what, and what is said when nothing can be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput
from eval.cells import read_cells
from eval.multiplicity import max_t
from eval.statistics import paired_difference
from eval.study import StudyResult, run_study, study_status
from eval.study_config import Source, StudyConfig
from eval.study_pilots import FIRST_PILOT_SEED, find_pilot
from eval.study_summary import cell_tables, compare_cells, contrast, dose_response, grid_rows
from predictors.age_km import AgeKmSettings
from preemptbench.cli import cli
from preemptbench.study_presets import PRESETS, own_source
from preemptbench.study_text import study_object, study_text
from serving_sim.config import EngineConfig
from traces.length_profiles import LengthLaw, draw_runs
from traces.runlog import write_runs
from training.rows import training_set

LAW = LengthLaw(
    model_family="Tiny",
    benchmark="Toy",
    locations=(3.0, 4.0, 5.5),
    within=0.3,
    spread=0.3,
    cap_tokens=600,
    prompt_location=3.0,
    prompt_scale=0.3,
    num_prompts=0,
    num_runs=0,
    source="made up",
)
CONFIG = StudyConfig(
    name="tiny",
    policies=("lifo", "fifo", "young(0.5)", "longest-remaining"),
    signals=("oracle-2", "clairvoyant"),
    pressures=(0.8, 1.2),
    num_seeds=3,
    num_pilots=2,
    deadline_s=2.5,
    observe_s=5.0,
    concurrency=24.0,
    num_warmup=20,
    num_tagged=40,
    grid_stride=16,
    engine=EngineConfig(num_blocks=2, max_num_seqs=64),
)


def source_in(folder: Path, law: LengthLaw = LAW, name: str = "Tiny") -> Source:
    runs = folder / f"{name}.parquet"
    write_runs(draw_runs(law, num_prompts=30, repeats=5, seed=0), runs)
    return Source(model_family=name, benchmark="Toy", runs=runs, kind="parametric")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    folder = tmp_path_factory.mktemp("study")
    other = replace(LAW, locations=(4.0, 4.5, 5.5))
    sources = [source_in(folder), source_in(folder, other, "Other")]
    return run_study(CONFIG, sources, folder / "out", num_jobs=1)


def test_pilots_place_the_pressures_round_the_boundary(study: StudyResult) -> None:
    for source in study.sources:
        low, high = source.pilot.lifo_breach
        assert low < CONFIG.boundary <= high
        assert source.pilot.in_regime(CONFIG.boundary) == (True, False)
        first, second = source.matrix.pressures
        assert first.num_blocks - 1 == pytest.approx(
            (source.pilot.boundary_blocks - 1) / 0.8, abs=1
        )
        assert second.num_blocks < source.pilot.boundary_blocks < first.num_blocks
        whole = 2 / second.num_blocks  # pools are whole numbers of blocks
        assert source.pilot.kv_ratio[1] == pytest.approx(1.5 * source.pilot.kv_ratio[0], rel=whole)
    assert {cell.seed for s in study.sources for cell in s.cells} == {0, 1, 2}
    assert max(config.num_seeds for config in PRESETS.values()) < FIRST_PILOT_SEED


def test_a_comparison_is_that_of_the_stored_cells(study: StudyResult) -> None:
    source = study.sources[0]
    pressure = source.matrix.pressures[1].name
    by_rule = {
        rule: [
            100 * c.score.breach
            for c in sorted(source.cells, key=lambda c: c.seed)
            if (c.pressure, c.policy, c.signal) == (pressure, *rule)
        ]
        for rule in {(c.policy, c.signal) for c in source.cells}
    }
    lifo = by_rule.pop(("lifo", "none"))
    rows = [
        row for row in compare_cells(study)
        if (row.source, row.pressure) == (source.source.name, pressure)
    ]  # fmt: skip
    assert {row.rule for row in rows} == set(by_rule)
    rules = [row.rule for row in rows]
    family = np.array([np.subtract(by_rule[rule], lifo) for rule in rules]).T
    assert [row.verdict.p_value for row in rows] == max_t(family).tolist()
    for row in rows:
        assert row.difference.mean == pytest.approx(paired_difference(by_rule[row.rule], lifo).mean)
        assert row.lifo_breach == pytest.approx(np.mean(lifo) / 100)


def test_grid_rows_average_the_cells_of_their_part(study: StudyResult) -> None:
    tables = [table for table in cell_tables(study) if not table.in_regime]
    rows = {row.rule: row for row in grid_rows(study, "beyond")}
    assert len(tables) == 2
    at = tables[0].rules.index(("fifo", "none"))
    lifo = tables[0].rules.index(("lifo", "none"))
    means = [(t.breach[:, at] - t.breach[:, lifo]).mean() for t in tables]
    row = rows["fifo", "none"]
    assert row.num_cells == 2
    assert row.within.mean == pytest.approx(np.mean(means))
    assert row.across is not None and row.across.num_units == 2
    assert row.wins + row.ties + row.losses == 2
    assert rows["lifo", "none"].within.mean == 0.0
    (dose,) = dose_response(study, "beyond")
    assert dose[0] == 0.5
    planned = contrast(study, "beyond", [("lifo", "none")], [("fifo", "none")])
    assert planned is not None
    assert planned.within.mean == pytest.approx(-row.within.mean)


def test_an_empty_part_is_said(study: StudyResult) -> None:
    hard = replace(study, config=replace(CONFIG, boundary=1e-9))
    assert grid_rows(hard, "low breach") == []
    assert "low breach: no cell on pilot seeds" in study_text(hard)
    assert contrast(hard, "low breach", [("lifo", "none")], [("fifo", "none")]) is None


def test_text_and_object_hold_the_verdict_words_and_no_nan(study: StudyResult) -> None:
    text = study_text(study)
    for word in ("2 sources", "baseline", "longest-remaining / oracle-2", "young-biased"):
        assert word in text
    assert "nan" not in text
    words = {cell["words"].split(" ")[0] for cell in study_object(study)["cells"]}
    assert words <= {"better", "worse", "equivalent", "inconclusive"}


def test_a_second_start_runs_nothing_and_finds_the_same(study: StudyResult) -> None:
    out = study.sources[0].out_dir.parents[1]
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    again = run_study(CONFIG, [s.source for s in study.sources], out, num_jobs=1)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == stamps
    assert [s.cells for s in again.sources] == [s.cells for s in study.sources]
    done = study_status(CONFIG, [s.source for s in study.sources], out)
    assert [row.seeds_done for row in done] == [3, 3]
    missing = study_status(replace(CONFIG, deadline_s=2.4), [study.sources[0].source], out)
    assert (
        str(missing[0])
        == "Tiny on Toy: pilots missing, 0 of 3 seeds done, 0 failed, 3 missing, 0 quarantined"
    )


KILLED = """
import sys
from pathlib import Path
from eval.study import run_study
from tests.unit.test_study import CONFIG, source_in
run_study(CONFIG, [source_in(Path(sys.argv[1]))], Path(sys.argv[1]) / "out", num_jobs=1)
"""


def test_kill_9_loses_nothing_and_the_final_bytes_are_equal(tmp_path: Path) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    run_study(CONFIG, [source_in(whole)], whole / "out", num_jobs=1)
    command = [sys.executable, "-c", KILLED, str(hurt)]
    for wait_s in (2.5, 3.5):
        process = subprocess.Popen(command, cwd=Path(__file__).parents[2], env=dict(os.environ))
        time.sleep(wait_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
    run_study(CONFIG, [source_in(hurt)], hurt / "out", num_jobs=1)

    def contents(folder: Path) -> dict[str, bytes]:
        files = (p for p in (folder / "out").rglob("*") if p.is_file() and p.name[0] != ".")
        return {str(p.relative_to(folder)): p.read_bytes() for p in files if ".tmp" not in p.name}

    expected, found = contents(whole), contents(hurt)
    assert expected == {name: found[name] for name in expected}


def test_a_study_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="add it"):
        replace(CONFIG, policies=("fifo",))
    with pytest.raises(InvalidInput, match="at least 2 seeds"):
        replace(CONFIG, num_seeds=1)
    with pytest.raises(InvalidInput, match="one source"):
        run_study(CONFIG, [], tmp_path)
    source = source_in(tmp_path)
    patient = replace(CONFIG, deadline_s=60.0, observe_s=60.0, concurrency=0.5)
    pilot = find_pilot(patient, source, tmp_path)  # never near the boundary: all in the regime
    assert pilot.in_regime(CONFIG.boundary) == (True, True)
    assert pilot.boundary_blocks - 1 >= 2 * 1.2 * LAW.cap_tokens / 16
    with pytest.raises(InvalidInput, match="longer deadline"):
        find_pilot(replace(CONFIG, deadline_s=0.5), source, tmp_path)
    once = tmp_path / "once.parquet"
    write_runs(draw_runs(LAW, num_prompts=5, repeats=1, seed=0), once)
    with pytest.raises(InvalidInput, match="--repeats 3"):
        own_source(once, replace(CONFIG, signals=("oracle-2",)), tmp_path)


def test_a_missing_seed_is_named(study: StudyResult) -> None:
    first = study.sources[0]
    hurt = replace(first, cells=[cell for cell in first.cells if cell.seed != 1])
    with pytest.raises(InvalidInput, match=r"seeds \[0, 2\]"):
        cell_tables(replace(study, sources=[hurt]))
    assert read_cells(next(first.out_dir.glob("cells/*.parquet")))


def test_the_verb_runs_on_a_run_log_of_ones_own(tmp_path: Path) -> None:
    runs = source_in(tmp_path).runs
    other = replace(LAW, model_family="Other")
    strangers = training_set(draw_runs(other, num_prompts=10, repeats=1, seed=1))
    AgeKmSettings().fit(strangers).save_pretrained(tmp_path / "strange")
    arguments = [
        "study", "--only-own", "--runs", str(runs), "--seeds", "2", "--deadline", "3",
        "--concurrency", "12", "--jobs", "1", "--out", str(tmp_path / "out"),
        "--profile", "rtx4090-llama-3.1-8b", "--checkpoint", f"other={tmp_path / 'strange'}",
    ]  # fmt: skip
    with pytest.raises(InvalidInput, match=r"'other' was trained on Other.*--allow-mismatch"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)
    of_preset = [part for part in arguments if part != "--only-own"]
    with pytest.raises(InvalidInput, match=r"on Misguided.*'other' was .*--only-own leaves"):
        CliRunner().invoke(cli, of_preset, catch_exceptions=False)
    assert not list((tmp_path / "out").rglob("pilot*"))
    arguments += ["--allow-mismatch", "--json"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert "other (trained on Other)" in {cell["signal"] for cell in found["cells"]}
    assert "other" not in {cell["signal"] for cell in found["cells"]}
    assert [source["name"] for source in found["sources"]] == ["Tiny on Tiny"]
    status = CliRunner().invoke(cli, [*arguments[:-1], "--status"])
    assert "2 of 2 seeds done" in status.stdout
    for bad, said in (
        (["--only-own"], "give --runs"),
        (["--preset", "real"], "PREEMPTBENCH_DATA"),
        (["--checkpoint", "x"], "name=FOLDER"),
        (["--address", "tcp://x"], "does not go with --backend loky"),
    ):
        refused = CliRunner().invoke(cli, ["study", *bad, "--out", str(tmp_path / "no")])
        assert refused.exit_code == 2
        assert said in refused.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signals": ("nosuch",)}, "'nosuch' is not built in .* give its checkpoint"),
        ({"signals": ("none | noise(1)",)}, "no signal to degrade"),
        ({"signals": ()}, "'longest-remaining' reads a signal"),
        ({"policies": ("lifo", "lifo")}, "stands twice"),
    ],
)
def test_wrong_settings_are_refused_before_any_pilot_runs(
    tmp_path: Path, changes: dict[str, tuple[str, ...]], message: str
) -> None:
    stages: list[str] = []
    with pytest.raises(InvalidInput, match=message):
        run_study(
            replace(CONFIG, **changes), [source_in(tmp_path)], tmp_path / "out", num_jobs=1,
            on_task=lambda stage, *_: stages.append(stage),
        )  # fmt: skip
    assert not stages and not list((tmp_path / "out").rglob("pilot*"))


def test_a_checkpoint_may_be_degraded(tmp_path: Path) -> None:
    source = source_in(tmp_path)
    training = draw_runs(LAW, num_prompts=20, repeats=2, seed=1)
    AgeKmSettings().fit(training_set(training)).save_pretrained(tmp_path / "km")
    source = replace(source, checkpoints=(("km", tmp_path / "km"),))
    config = replace(
        CONFIG, policies=("lifo", "longest-remaining"), signals=("km", "km | noise(2)"), num_seeds=2
    )
    found = run_study(config, [source], tmp_path / "out", num_jobs=1)
    by_signal = {cell.signal: cell for cell in found.sources[0].cells if cell.seed == 0}
    assert set(by_signal) == {"none", "km", "km | noise(2)"}
