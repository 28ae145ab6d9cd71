"""Bad input: one clear error each, at the API and on the command line; and what only looks bad."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contracts.errors import InvalidInput, UnknownName
from eval.matrix_config import MatrixConfig
from preemptbench.cli import main
from preemptbench.demo import demo_matrix
from serving_sim.config import EngineConfig, SglangSettings
from serving_sim.decisions import read_driver_file, simulate_driver
from serving_sim.engine import simulate
from serving_sim.profile import AffineProfile
from tests.by_hand import workload
from traces.bundled import bundled_runs
from traces.tables import write_manifest
from traces.workload_io import SCHEMA_VERSION, read_workload, write_workload

NAN = float("nan")
SECOND = AffineProfile("one second a step", 1.0, 0.0, 0.0)
PAIR = workload([8, 8], [4, 4])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("arrival_s", np.array([0.0, -1.0]), r"'b': arrival_s is -1\.0; .*sort the requests"),
        ("arrival_s", np.array([-1.0, 0.0]), r"'a': arrival_s is -1\.0; .*at least 0 s"),
        ("arrival_s", np.array([0.0, NAN]), r"'b': arrival_s is nan; it must be finite"),
        ("arrival_s", np.array([0.0, np.inf]), r"'b': arrival_s is inf; it must be finite"),
        ("arrival_s", [0.0, 1.0], r"arrival_s is \[0\.0, 1\.0\]; .*numpy array of seconds"),
        ("arrival_s", np.array(["0", "1"]), "must be a numpy array of seconds"),
        ("prompt_tokens", np.array([0, 8]), "'a': prompt_tokens is 0; it must be at least 1"),
        ("prompt_tokens", np.array([1.5, 8]), "must be a numpy array of whole numbers"),
        ("prompt_tokens", np.array([True, True]), "must be a numpy array of whole numbers"),
        ("prompt_tokens", np.array([8]), r"shape \(1,\), but there are 2 requests"),
        ("output_tokens", np.array([4, 0]), "'b': output_tokens is 0; it must be at least 1"),
        ("output_tokens", np.array([4, 99]), "output_tokens is 99; it must not pass max_tokens"),
        ("max_tokens", np.array([9.0, NAN]), "must be a numpy array of whole numbers"),
        ("priority", None, "priority is None; it must be a numpy array of whole numbers"),
        ("priority", np.array([None, 1]), "must be a numpy array of whole numbers"),
        ("priority", np.array([0.0, NAN]), "must be a numpy array of whole numbers"),
        ("deadline_s", np.array([-1.0, 2.0]), "deadline_s is -1.0; it must be above 0 s"),
        ("cohort", np.array([1, 3]), "cohort is 3; it must be 0, 1 or 2"),
        ("capped", np.array([0, 1]), "must be a numpy array of booleans"),
        ("request_ids", ("a", "a"), "request id 'a' stands twice, again in row 1.*rename"),
        ("request_ids", ("a", 3), "the request id of row 1 is 3; it must be a string"),
        ("request_ids", (), "holds no request"),
        ("run_ids", ("x",), "1 run_ids for 2 requests"),
    ],
)
def test_a_bad_workload(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(PAIR, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 1}, "num_blocks is 1: give a whole number >= 2"),
        ({"num_blocks": None}, "num_blocks is None: give a whole number >= 2"),
        ({"num_blocks": "64"}, "num_blocks is '64': give a whole number >= 2"),
        ({"num_blocks": NAN}, "num_blocks is nan: give a whole number >= 2"),
        ({"block_size": 0}, "block_size is 0: give a whole number >= 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: give a whole number >= 1"),
        ({"max_num_seqs": True}, "max_num_seqs is True: give a whole number >= 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0: give a whole number >= 1"),
        ({"max_model_len": 1}, "max_model_len is 1: give a whole number >= 2"),
        ({"max_idle_steps": None}, "max_idle_steps is None: give a whole number >= 1"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching is 'no': .* true or false"),
        ({"async_scheduling": 1}, "async_scheduling is 1: it must be true or false"),
        ({"watermark": "0.1"}, "watermark is '0.1': it must be a number"),
        ({"watermark": NAN}, r"watermark is nan: .* in \[0, 1\)"),
        ({"drain_s": "x"}, "drain_s is 'x': it must be a number"),
        ({"drain_s": NAN}, "drain_s is nan: it must be at least 0 s"),
        ({"sglang": {}}, "sglang is {}: give SglangSettings, or None"),
        ({"scheduling": "prio"}, "scheduling 'prio': did you mean 'priority'"),
    ],
)
def test_a_bad_engine(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        EngineConfig(**{"num_blocks": 64, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule_conservativeness": "x"}, "is 'x': it must be a number"),
        ({"schedule_conservativeness": NAN}, "is nan: give a finite number above 0"),
        ({"init_new_token_ratio": None}, "is None: it must be a number"),
        ({"retract_decode_steps": -1}, "retract_decode_steps is -1: give a whole number >= 0"),
        ({"max_prefill_tokens": None}, "max_prefill_tokens is None: give a whole number >= 1"),
        ({"max_queued_requests": 0}, "max_queued_requests is 0: give a whole number >= 1"),
    ],
)
def test_a_bad_sglang_engine(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SglangSettings(**settings)


Leave = Callable[..., str]


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Leave:
    """Run the command line with bad input: it must say one line on stderr and exit with 2."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["preemptbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        assert (caught.value.code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return run


ROW = {"id": "a", "prompt": 8, "output": 4}


def driver(*rows: object, **engine: object) -> str:
    return json.dumps({"engine": engine, "requests": rows})


DRIVER_FILES = {
    "negative-gap": (driver(ROW | {"arrival": -1}), "arrival_s is -1.0; it must be finite, at"),
    "nan-time": (driver(ROW | {"arrival": NAN}), "request 0: arrival is nan; it must be finite"),
    "inf-time": (driver(ROW | {"arrival": np.inf}), "request 0: arrival is inf; it must be fin"),
    "no-time": (driver(ROW | {"arrival": None}), "arrival is None; it must be finite seconds"),
    "text-time": (driver(ROW | {"arrival": "x"}), "request 0: arrival is 'x'"),
    "zero-prompt": (driver(ROW | {"prompt": 0}), "prompt_tokens is 0; it must be at least 1"),
    "text-prompt": (driver(ROW | {"prompt": "8"}), "prompt is '8'; it must be a whole number"),
    "half-prompt": (driver(ROW | {"prompt": 8.5}), "prompt is 8.5; it must be a whole number"),
    "true-prompt": (driver(ROW | {"prompt": True}), "prompt is True; it must be a whole number"),
    "huge-prompt": (driver(ROW | {"prompt": 2**70}), "a whole number of tokens from 1 to 2**53"),
    "zero-output": (driver(ROW | {"output": 0}), "output_tokens is 0; it must be at least 1"),
    "past-cap": (driver(ROW | {"max_tokens": 2}), "output_tokens is 4; it must not pass max_tok"),
    "no-id": (driver({"prompt": 8, "output": 4}), "request 0 has no 'id'"),
    "number-id": (driver(ROW | {"id": 3}), "request 0: id is 3; it must be a string"),
    "list-id": (driver(ROW | {"id": ["a"]}), "request 0: id is ['a']; it must be a string"),
    "same-id": (driver(ROW, ROW), "request id 'a' stands twice"),
    "text-row": (driver("a"), "request 0 has no 'id': 'a'"),
    "unknown-row-key": (driver(ROW | {"priorty": 1}), "'priorty': did you mean 'priority'?"),
    "unknown-engine-key": (driver(ROW, num_block=3), "'num_block': did you mean 'num_blocks'?"),
    "unknown-header-key": (json.dumps({"request": [ROW]}), "'request': did you mean 'requests'?"),
    "one-block": (driver(ROW, num_blocks=1), "num_blocks is 1: give a whole number >= 2"),
    "no-seats": (driver(ROW, max_num_seqs=0), "max_num_seqs is 0: give a whole number >= 1"),
    "no-budget": (driver(ROW, max_num_batched_tokens=0), "max_num_batched_tokens is 0: give"),
    "text-switch": (driver(ROW, enable_prefix_caching="no"), "is 'no': it must be true or false"),
    "no-priorities": (driver(ROW, policy="priority"), "none of the 1 requests has a 'priority'"),
    "null-priority": (driver(ROW | {"priority": None}), "priority is None; it must be a whole"),
    "text-priority": (driver(ROW | {"priority": "high"}), "priority is 'high'; it must be a whole"),
    "queue-order": (driver(ROW, policy="prio"), "'prio': did you mean 'priority'?"),
    "text-clock": (driver(ROW, t_fixed="x"), "fixed_s is 'x'; give seconds >= 0, finite"),
    "nan-clock": (driver(ROW, t_fixed=NAN), "fixed_s is nan; give seconds >= 0, finite"),
    "text-group": (driver(ROW | {"prefix_group": "x"}), "prefix_group is 'x'; it must be a whole"),
    "no-requests": (driver(), "field 'requests' is []; it must be a non-empty list"),
    "request-table": ('{"requests": {}}', "field 'requests' is {}; it must be a non-empty list"),
    "text-engine": (json.dumps({"engine": "x", "requests": [ROW]}), "'engine' is 'x'; it must be"),
    "list-totals": (json.dumps({"totals": [], "requests": [ROW]}), "'totals' is []; it must be"),
    "empty": ("", "is empty"),
    "list": ("[]", "is a list: it must be a JSON object"),
    "cut": ('{"requests": [', "is not JSON"),
    "deep": ("[" * 100_000, "is not JSON"),
    "not-text": (b"\xff\xfe", "cannot be read"),
}


@pytest.mark.parametrize("case", DRIVER_FILES)
def test_a_bad_driver_file(case: str, tmp_path: Path, leave: Leave) -> None:
    text, message = DRIVER_FILES[case]
    path = tmp_path / "w.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in leave("simulate", "--workload", path)
    with pytest.raises(InvalidInput) as caught:
        simulate_driver(read_driver_file(path))
    assert message in str(caught.value)


LOG = (driver(ROW) + "\n" + '{"step": 1, "t": 0.25}\n' * 5000).encode()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("w.jsonl.gz", gzip.compress(LOG, mtime=0)[:20], "it may be truncated or damaged; fetch"),
        ("w.jsonl.gz", gzip.compress(LOG, mtime=0)[:-20], "it may be truncated or damaged; fetch"),
        ("w.jsonl.gz", b"\x1f\x8b" + bytes(40), "it may be truncated or damaged; fetch"),
        ("w.jsonl.gz", b"", "is empty"),
        ("w.jsonl.gz", b"plain", "Not a gzipped file"),
        ("w.jsonl", LOG[:-5], "line 5001 is not JSON"),
        ("w.jsonl", LOG + b"\xff\n", "it may be truncated or damaged; fetch"),
        ("w.jsonl", b"", "is empty"),
    ],
)
def test_a_bad_decision_log(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InvalidInput) as caught:
        list(read_driver_file(path).steps())
    assert message in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"), [("none.json", "does not exist: give"), (".", "is a folder: give")]
)
def test_no_file_at_all(tmp_path: Path, leave: Leave, name: str, message: str) -> None:
    assert message in leave("simulate", "--workload", tmp_path / name)


def test_a_truncated_log_on_the_command_line(tmp_path: Path, leave: Leave) -> None:
    path = tmp_path / "w.jsonl.gz"
    path.write_bytes(gzip.compress(LOG, mtime=0)[:20])
    assert "may be truncated" in leave("simulate", "--workload", path)


def column(table: pa.Table, name: str, values: list[object], kind: pa.DataType) -> pa.Table:
    place = table.column_names.index(name)
    return table.set_column(place, name, pa.array(values, kind))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["priority"]), "column 'priority' is missing"),
        (
            lambda t: column(t, "priority", [0, None], pa.int64()),
            r"columns \['priority'\] hold nulls \(the first in row 1\).*give every request a value",
        ),
        (lambda t: column(t, "priority", ["0", "1"], pa.string()), "priority is string, not int64"),
        (lambda t: t.append_column("prio", t["priority"]), "column 'prio' is unknown"),
        (lambda t: t.select(t.column_names[::-1]), "its columns stand in another order"),
        (lambda t: column(t, "arrival_s", [0.0, NAN], pa.float64()), "arrival_s is nan; it must"),
        (lambda t: column(t, "arrival_s", [2.0, 1.0], pa.float64()), r"arrival_s is 1\.0; it must"),
        (lambda t: column(t, "prompt_tokens", [0, 1], pa.int64()), "prompt_tokens is 0; it must"),
        (lambda t: column(t, "request_id", ["a", "a"], pa.string()), "'a' stands twice"),
        (lambda t: t.slice(0, 0), "holds 0 rows"),
    ],
)
def test_a_bad_workload_table(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    path = tmp_path / "w.parquet"
    write_workload(PAIR, path)
    table = change(pq.read_table(path))
    pq.write_table(table, path)
    write_manifest(path, {"name": "w", "workload": {}}, SCHEMA_VERSION, len(table))
    with pytest.raises(InvalidInput, match=message):
        read_workload(path)


@pytest.mark.parametrize("keep", [0, 10, 500])
def test_a_cut_workload_table(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "w.parquet"
    write_workload(PAIR, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InvalidInput, match=r"not a readable Parquet file.*fetch or write it again"):
        read_workload(path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("-1,8,4", "arrival_s is -1.0; it must be finite and at least 0 s"),
        ("nan,8,4", "arrival_s is nan; it must be finite and at least 0 s"),
        ("0,0,4", "context_tokens is 0.0; it must be a whole number of at least 1 token"),
        ("0,8,1.5", "generated_tokens is 1.5; it must be a whole number of at least 1 token"),
        ("0,8", "write three numbers a row"),
        ("", "holds 0 requests"),
    ],
)
def test_a_bad_trace(tmp_path: Path, leave: Leave, rows: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"arrival_s,context_tokens,generated_tokens\n{rows}\n", encoding="utf-8")
    said = leave("simulate", "--policy", "fifo", "--trace", path, "--out", tmp_path / "out")
    assert message in said


SETTINGS_FILES = {
    "not-toml": ("engine = [", "is not TOML"),
    "unknown-table": ("[engne]\nmax_num_seqs = 3", "'engne': did you mean 'engine'?"),
    "unknown-key": ("[engine]\nmax_seqs = 3", "'max_seqs': did you mean 'max_num_seqs'?"),
    "unknown-sglang-key": (
        "[engine.sglang]\nconservativeness = 0.3",
        "'conservativeness': did you mean 'schedule_conservativeness'?",
    ),
    "no-table": ("engine = 3", "engine is 3; it must be a table of settings"),
    "no-seats": ("[engine]\nmax_num_seqs = 0", "max_num_seqs is 0: give a whole number >= 1"),
    "text-seats": ('[engine]\nmax_num_seqs = "8"', "max_num_seqs is '8'; it must be a int"),
    "nan": ("[engine]\nwatermark = nan", "watermark is nan: it must be a share of blocks"),
    "pool": ("[engine]\nnum_blocks = 9", "engine.num_blocks is 9, but each cell sets it: use --bl"),
    "priorities": ('[engine]\nscheduling = "priority"', "have no priorities: use 'fcfs'"),
    "both": ("[engine]\nwatermark = 0.1\n[engine.sglang]\n", "which SGLang's scheduler does not"),
}


@pytest.mark.parametrize("case", SETTINGS_FILES)
def test_bad_settings(case: str, tmp_path: Path, leave: Leave) -> None:
    text, message = SETTINGS_FILES[case]
    path = tmp_path / "engine.toml"
    path.write_text(text, encoding="utf-8")
    said = leave("simulate", "--policy", "fifo", "--config", path, "--out", tmp_path / "out")
    assert message in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "engine.max_num_seqs"), "write key=value, the value as in TOML"),
        (("--set", "engine.max_num_seqs=many"), "write key=value, the value as in TOML"),
        (("--set", "engine.max_seqs=3"), "'max_seqs': did you mean 'max_num_seqs'?"),
        (("--set", "engine.max_model_len=1.5"), "max_model_len is 1.5; it must be a int"),
        (("--engine", "sglang", "--set", "engine.watermark=0.5"), "or drop sglang="),
        (("--engine", "vllm", "--set", "engine.sglang.retract_decode_steps=3"), "drop one"),
        (("--config", "none.toml"), "none.toml cannot be read: No such file"),
    ],
)
def test_bad_options(tmp_path: Path, leave: Leave, options: tuple[str, ...], message: str) -> None:
    said = leave("simulate", "--policy", "fifo", "--out", tmp_path / "out", *options)
    assert message in said


def test_a_matrix_has_no_priorities_to_schedule_by() -> None:
    config: MatrixConfig = demo_matrix(bundled_runs(), {})
    with pytest.raises(InvalidInput, match=r"scheduling is 'priority', .* have no priorities"):
        replace(config, engine=replace(config.engine, scheduling="priority"))


def test_an_unknown_name_is_its_own_kind_of_error(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(driver(ROW | {"promt": 1}), encoding="utf-8")
    with pytest.raises(UnknownName, match="'promt': did you mean 'prompt'"):
        read_driver_file(path)


# What looks bad and is legal in vLLM.


def test_a_budget_smaller_than_a_block_is_legal() -> None:
    """Chunks of 4 tokens fill blocks of 16: vLLM accepts it (tests/differential/vllm_logs holds
    two such logs of vLLM 0.33.0, budget-0000 and budget-0001)."""
    config = EngineConfig(num_blocks=5, block_size=16, max_num_batched_tokens=4)
    (record,) = simulate(workload([10], [3], cap=3), config, SECOND).records
    # 4 + 4 + 2 tokens of prompt, then a token a step
    assert (record.first_token_s, record.end_s, record.state) == (3.0, 5.0, "completed")


def test_a_request_without_a_priority_has_0(tmp_path: Path) -> None:
    """As in vLLM, once any request of the file has one: here "b" is the less urgent."""
    path = tmp_path / "w.json"
    rows = [ROW, ROW | {"id": "b", "priority": 1}]
    path.write_text(driver(*rows, policy="priority"), encoding="utf-8")
    assert read_driver_file(path).workload.priority.tolist() == [0, 1]


def test_a_prompt_past_the_model_length_is_refused_alone(tmp_path: Path) -> None:
    """vLLM refuses such a request and serves the others; so does a run here."""
    path = tmp_path / "w.json"
    path.write_text(
        driver(ROW, ROW | {"id": "b", "prompt": 20_000}, max_model_len=16_384), encoding="utf-8"
    )
    states = [(r.state, r.end_reason) for r in simulate_driver(read_driver_file(path)).records]
    assert states == [("completed", "stop"), ("rejected", "exceeds_max_model_len")]
