"""Sweeps: the TOML file, the grid of engine settings, the one table, resume and failures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput, UnknownName
from eval.cells import Cell, read_cells
from eval.sweep import SweepResult, run_sweep, sweep_parts, sweep_status, sweep_table
from eval.tasks import Failure, failure_path
from preemptbench.cli import cli
from preemptbench.sweep_file import read_sweep
from tests.unit.test_study import source_in

SWEEP = """
policies = ["lifo", "fifo", "longest-remaining"]
signals = ["clairvoyant"]
pressures = [1.2]
num_seeds = 3
num_pilots = 2
deadline_s = 2.5
concurrency = 24.0
num_warmup = 20
num_tagged = 40
grid_stride = 16
profile = "rtx4090-llama-3.1-8b"
[engine]
max_num_seqs = 64
[grid]
reserve_full_isl = [true, false]
offload = [false, { bytes_per_s = 25e9 }]
[[setting]]
name = "faulty SGLang"
sglang = { schedule_conservativeness = 0.5 }
faults = { fault = [{ kind = "stall", at_s = 1.0, extra_s = 0.5 }] }
[[source]]
runs = "Tiny.parquet"
"""


def written(folder: Path, text: str = SWEEP) -> Path:
    if not (folder / "Tiny.parquet").exists():
        source_in(folder)
    path = folder / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepResult, Path]:
    folder = tmp_path_factory.mktemp("sweep")
    config = read_sweep(written(folder), folder / "out")
    return run_sweep(config, folder / "out", num_jobs=1), folder


def test_the_grid_and_the_named_settings_are_there(done: tuple[SweepResult, Path]) -> None:
    settings = done[0].config.settings
    assert [s.name for s in settings] == [
        "reserve_full_isl=on, offload=off",
        "reserve_full_isl=on, offload={bytes_per_s=25000000000.0}",
        "reserve_full_isl=off, offload=off",
        "reserve_full_isl=off, offload={bytes_per_s=25000000000.0}",
        "faulty SGLang",
    ]
    assert [s.engine.reserve_full_isl for s in settings] == [True, True, False, False, True]
    assert [s.engine.offload is not None for s in settings] == [False, True, False, True, False]
    assert settings[4].engine.sglang is not None and settings[4].faults is not None
    assert {s.engine.max_num_seqs for s in settings} == {64}


def test_a_row_is_the_paired_difference_to_lifo_of_its_setting(
    done: tuple[SweepResult, Path],
) -> None:
    result, folder = done
    parts = {part.setting: part for part in sweep_parts(result.config, folder / "out")}
    assert len(result.rows) == 5 * 3
    for row in result.rows:
        cells = [cell for path in parts[row.setting].paths() for cell in read_cells(path)]
        own, lifo = (
            np.array([c.score.breach for c in cells if c.policy == policy])
            for policy in (row.policy, "lifo")
        )
        assert row.breach == pytest.approx(own.mean())
        if row.difference is not None:
            assert row.difference.mean == pytest.approx(100 * (own - lifo).mean())
    assert {row.difference is None for row in result.rows if row.policy == "fifo"} == {False}
    assert {row.num_blocks for row in result.rows} == {result.rows[0].num_blocks}


def test_a_failed_seed_is_missing_in_its_setting_only(done: tuple[SweepResult, Path]) -> None:
    result, folder = done
    out = folder / "out"
    path = sweep_parts(result.config, out)[0].paths()[2]
    kept = path.read_bytes()
    path.unlink()
    failed = failure_path(path)
    failed.parent.mkdir()
    failure = Failure(task=path.name, seed=2, reason="timeout", detail="slow", seconds=1.0)
    failed.write_text(json.dumps({k: getattr(failure, k) for k in failure.__slots__}))
    hurt = run_sweep(result.config, out, num_jobs=1)
    assert [f.seed for f in hurt.failures] == [2]
    assert [(r.num_seeds, r.missing_seeds) for r in hurt.rows[:4]] == [(2, 1)] * 3 + [(3, 0)]
    assert hurt.rows[3:] == result.rows[3:]
    counts = sweep_status(result.config, out)
    assert [(c.done, c.failed) for c in counts.values()] == [(2, 1)] + [(3, 0)] * 4
    again = run_sweep(result.config, out, num_jobs=1, retry_failed=True)
    assert again == result and path.read_bytes() == kept


def test_lifo_is_its_own_baseline(done: tuple[SweepResult, Path]) -> None:
    nothing = [
        row for row in sweep_table(done[0]).rows if row[0] == "faulty SGLang" and row[3] == "lifo"
    ]
    assert nothing[0][8:12] == (None, None, None, None)


def test_the_verb_prints_and_keeps_one_table(done: tuple[SweepResult, Path]) -> None:
    _, folder = done
    arguments = ["sweep", str(folder / "tiny.toml"), "--out", str(folder / "out"), "--jobs", "1"]
    said = CliRunner().invoke(cli, arguments)
    assert said.exit_code == 0, said.output
    assert "faulty SGLang" in said.stdout and "vs LIFO, pp" in said.stdout
    table = pq.read_table(folder / "out" / "table.parquet")
    assert table.num_rows == 15
    assert (folder / "out" / "table.csv").is_file() and (folder / "out" / "report.md").is_file()
    status = CliRunner().invoke(cli, [*arguments, "--status", "--json"])
    assert {part["missing"] for part in json.loads(status.stdout)["parts"]} == {0}


def test_the_example_is_a_sweep_with_grid_setting_and_source(tmp_path: Path) -> None:
    config = read_sweep(Path(__file__).parents[2] / "examples" / "sweep.toml", tmp_path)
    assert len(config.settings) == 4 + 2
    assert config.settings[4].engine.sglang is not None
    assert config.settings[5].engine.offload is not None
    assert config.sources[0].runs.is_file()


def test_a_rule_that_accepted_other_requests_has_no_difference(
    done: tuple[SweepResult, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def parted(path: Path) -> list[Cell]:  # as many as LIFO accepted, but not the same
        return [
            replace(cell, accepted_digest="0" * 16) if cell.policy == "fifo" else cell
            for cell in read_cells(path)
        ]

    result, folder = done
    monkeypatch.setattr("eval.sweep.read_cells", parted)
    again = run_sweep(result.config, folder / "out", num_jobs=1)
    for before, row in zip(result.rows, again.rows, strict=True):
        assert row.breach == before.breach
        assert row.difference == (None if row.policy == "fifo" else before.difference)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("policies =", "polices =", "did you mean 'policies'"),
        ("max_num_seqs", "max_num_seq", "did you mean 'max_num_seqs'"),
        ("bytes_per_s", "bytes_per", "did you mean 'bytes_per_s'"),
        ("[true, false]", "true", "give a list"),
        ("[true, false]", '["yes"]', "must be a bool"),
        ('runs = "Tiny.parquet"', 'law = "GLM-Z1 on x"', "did you mean 'GLM-Z1"),
        ('runs = "Tiny.parquet"', "", "either law"),
        ('name = "faulty SGLang"', "", "give it one"),
        ("max_num_seqs = 64", "num_blocks = 64", "set by the pressures"),
        ('kind = "stall"', 'kind = "stal"', "did you mean 'stall'"),
    ],
)
def test_a_file_that_cannot_be_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in SWEEP
    with pytest.raises((InvalidInput, UnknownName), match=said.replace("[", r"\[")):
        read_sweep(written(tmp_path, SWEEP.replace(old, new, 1)), tmp_path / "out")
