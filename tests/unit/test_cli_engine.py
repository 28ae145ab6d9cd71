"""``simulate`` with an engine of the user's choice: SGLang's scheduler, a settings file, --set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from contracts.errors import InvalidInput
from preemptbench.cli import cli
from preemptbench.engine_options import Settings, chosen_engine
from serving_sim.config import EngineConfig, SglangSettings
from serving_sim.decisions import driver_config
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


@pytest.mark.parametrize(
    ("option", "value"), [("--set", "engine.max_num_seqs=1"), ("--config", "x")]
)
def test_a_workload_file_holds_its_own_settings(tmp_path: Path, option: str, value: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(driver(ROW), encoding="utf-8")
    done = run("--workload", path, option, value)
    assert done.exit_code == 2
    assert f"{option} does not go with --workload" in done.output


def test_a_workload_file_in_sglang_mode(tmp_path: Path) -> None:
    """By the switch, or by a table in the file; the decision log keeps it."""
    more = {"output": 50, "max_tokens": 60}
    jobs = [ROW | more | {"id": f"r{i}", "arrival": i / 50} for i in range(8)]
    plain, table, log = tmp_path / "plain.json", tmp_path / "table.json", tmp_path / "log.jsonl"
    pool = {"num_blocks": 22, "block_size": 8, "enable_prefix_caching": True}
    plain.write_text(driver(*jobs, **pool), encoding="utf-8")
    eager = {"schedule_conservativeness": 0.2}
    table.write_text(driver(*jobs, **pool, sglang=eager), encoding="utf-8")
    vllm = run("--workload", plain, "--json").stdout
    switched = run("--workload", plain, "--engine", "sglang", "--decisions", log, "--json").stdout
    tabled = run("--workload", table, "--json").stdout
    assert len({vllm, switched, tabled}) == 3
    assert json.loads(tabled)["preemptions"] > 0
    assert run("--workload", log, "--json").stdout == switched
    both = run("--workload", table, "--engine", "vllm")
    assert "asks for sglang: drop one" in both.output


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (3, "'sglang' is 3; it must be an object"),
        ({"conservativeness": 1.0}, "did you mean 'schedule_conservativeness'"),
        ({"retract_decode_steps": "x"}, "retract_decode_steps is 'x'; it must be a int"),
        ({"max_queued_requests": 0}, "max_queued_requests is 0: give a whole number >= 1"),
    ],
)
def test_a_bad_sglang_table_in_a_workload_file(table: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        driver_config({"sglang": table})
