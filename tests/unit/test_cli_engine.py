"""``simulate`` with an engine of the user's choice: SGLang's scheduler, a settings file, --set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from preemptbench.cli import cli
from preemptbench.engine_options import Settings, chosen_engine
from serving_sim.config import EngineConfig, SglangSettings
from tests.unit.test_bad_input import ROW, driver

BASE = EngineConfig(num_blocks=2, max_num_seqs=64)


def test_without_options_nothing_changes() -> None:
    assert chosen_engine(BASE, None, None, ()) == chosen_engine(BASE, "vllm", None, ()) == BASE


def test_the_switch_the_file_and_set_in_that_order(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text(
        "[engine]\nmax_num_seqs = 8\n[engine.sglang]\nschedule_conservativeness = 0.3\n"
        "max_queued_requests = 7\n",
        encoding="utf-8",
    )
    wanted = SglangSettings(schedule_conservativeness=0.3, max_queued_requests=7)
    for scheduler in ("sglang", None):
        engine = chosen_engine(BASE, scheduler, path, ())
        assert (engine.max_num_seqs, engine.sglang) == (8, wanted)
    sets = ("engine.max_num_seqs=9", "engine.sglang.schedule_conservativeness=1")
    engine = chosen_engine(BASE, None, path, sets)
    assert (engine.max_num_seqs, engine.sglang) == (9, SglangSettings(max_queued_requests=7))


def test_an_unset_number_can_be_set() -> None:
    assert chosen_engine(BASE, None, None, ("engine.max_model_len=99",)).max_model_len == 99


def test_a_matrix_table_reads_the_same() -> None:
    """What a TOML of a matrix holds under [engine] goes through the same function."""
    from contracts.settings import updated

    table = {"engine": {"sglang": {"retract_decode_steps": 3}}}
    engine = updated(Settings(BASE), table, "matrix").engine
    assert engine.sglang == SglangSettings(retract_decode_steps=3)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, arguments)])


def rows(out: Path, *options: object) -> list[dict[str, object]]:
    shape = ("--policy", "sglang-retract", "--blocks", 141, "--tagged", 40, "--seeds", 2)
    done = run(*shape, "--jobs", 1, "--json", "--out", out, *options)
    assert done.exit_code == 0, done.output
    found: list[dict[str, object]] = json.loads(done.stdout)["rows"]
    return found


def test_sglang_mode_changes_the_results_and_its_cells_are_its_own(tmp_path: Path) -> None:
    """Both runs share a folder: a cell of one engine must not be taken for the other's."""
    vllm = rows(tmp_path)
    sglang = rows(tmp_path, "--engine", "sglang", "--timeline", tmp_path / "t.json")
    eager = rows(tmp_path, "--set", "engine.sglang.schedule_conservativeness=0.2")
    assert vllm != sglang != eager != vllm
    assert rows(tmp_path) == vllm
    data = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert "SGLang's scheduler" in data["otherData"]["title"]
    evictions = [e for e in data["traceEvents"] if e["name"] == "evicted"]
    # nobody asked: the decode step as a whole did not fit
    assert {e["args"]["asked_by"] for e in evictions} == {"the decode step"}


@pytest.mark.parametrize("option", ["--engine", "--set", "--config"])
def test_a_workload_file_names_its_own_engine(tmp_path: Path, option: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(driver(ROW), encoding="utf-8")
    value = {"--engine": "sglang", "--set": "engine.max_num_seqs=1", "--config": "x.toml"}[option]
    done = run("--workload", path, option, value)
    assert done.exit_code == 2
    assert f"{option} does not go with --workload" in done.output
