"""Run logs: round trips, hardened reading, the rules of validation, and descriptions."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidInput
from contracts.runs import FINISH_REASONS, DecodeRun, ProgressRecord
from traces import tables
from traces.describe import describe_runs, format_summaries
from traces.run_columns import SCHEMA
from traces.runlog import RunLog, iter_runs, read_runs, write_runs
from traces.validate import validate_runs


def make_run(index: int = 0, **changes: object) -> DecodeRun:
    """A valid run: request index // 2, repeat index % 2, 20 tokens, two progress records."""
    record = ProgressRecord(0.5, -0.25, 0.125, 0.0, 0.25, 1.0)
    run = DecodeRun(
        run_id=f"run-{index}",
        request_key=f"key-{index // 2}",
        repeat=index % 2,
        prompt_id=f"p{index // 2}",
        prompt_sha256=f"{index // 2:064x}",
        benchmark="bench",
        family=f"family-{index // 2 % 3}",
        model="model",
        model_revision="r1",
        tokenizer_sha256="t",
        chat_template_sha256="c",
        engine="engine",
        engine_version="1",
        kernel="sdpa",
        batch_invariant=False,
        dtype="bfloat16",
        device="cpu",
        batch_size=2,
        concurrency=2,
        temperature=0.0,
        seed=0,
        max_new_tokens=32,
        prompt_tokens=5,
        output_tokens=20,
        how_counted="reported",
        finish_reason="stop",
        event_observed=True,
        licence="Apache-2.0",
        thinking_tokens=3,
        wall_s=1.5,
        prompt=f"Question {index // 2}?",
        text="answer",
        text_sha256="x",
        progress_stride=8,
        progress=(record, record),
    )
    return replace(run, **changes)  # type: ignore[arg-type]


def make_runs(count: int) -> list[DecodeRun]:
    return [make_run(i) for i in range(count)]


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    path = tmp_path / "log.parquet"
    write_runs(make_runs(8), path, {"licence": "Apache-2.0"})
    return path


def rewrite(path: Path, **columns: pa.Array | None) -> None:
    """Replace columns of a Parquet file (None drops one), keeping the rest as it is."""
    table = pq.read_table(path)
    for name, column in columns.items():
        if name in table.column_names:
            table = table.drop_columns([name])
        if column is not None:
            table = table.append_column(name, column)
    pq.write_table(table, path)


# --- round trip --------------------------------------------------------------------------------

_small = st.integers(0, 2**31 - 1)
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_f32 = st.floats(width=32, allow_nan=False)
_records = st.lists(st.builds(ProgressRecord, *[_f32] * 6), max_size=4).map(tuple)
_by_type = {
    "str": _text,
    "int": _small,
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "bool | None": st.none() | st.booleans(),
    "int | None": st.none() | _small,
    "float | None": st.none() | st.floats(allow_nan=False),
    "str | None": st.none() | _text,
    "FinishReason": st.sampled_from(FINISH_REASONS),
    "tuple[ProgressRecord, ...] | None": st.none() | _records,
}
_runs = st.builds(DecodeRun, **{f.name: _by_type[str(f.type)] for f in fields(DecodeRun)})


@settings(max_examples=60, deadline=None)
@given(st.lists(_runs, min_size=1, max_size=6))
def test_any_runs_survive_parquet(tmp_path_factory: pytest.TempPathFactory, runs: list) -> None:
    path = tmp_path_factory.mktemp("round") / "log.parquet"
    write_runs(runs, path)
    assert list(read_runs(path)) == runs
    assert list(iter_runs(path)) == runs
    assert list(RunLog.from_runs(runs)) == runs


def test_schema_is_the_contract_in_its_order() -> None:
    assert SCHEMA.names == [field.name for field in fields(DecodeRun)]


def test_columns_and_filter(log_path: Path) -> None:
    runs = make_runs(8)
    runs[3] = make_run(3, event_observed=None, finish_reason="unknown", prompt=None)
    runs[4] = make_run(4, event_observed=False, finish_reason="length", output_tokens=32)
    log = RunLog.from_runs(runs)
    assert log.output_tokens.tolist() == [20, 20, 20, 20, 32, 20, 20, 20]
    assert log.event_observed.tolist() == [True, True, True, False, False, True, True, True]
    assert log.event_known.tolist() == [True, True, True, False, True, True, True, True]
    assert log.repeat.tolist() == [0, 1] * 4
    assert log.strings("run_id") == [run.run_id for run in runs]
    picked = log.filter(log.output_tokens > 20)
    assert list(picked) == [runs[4]]
    assert [row.prompt for row in log.filter(log.repeat == 1).prompts()][1] is None
    assert [row.prompt_id for row in picked.prompts()] == ["p2"]


def test_a_log_spans_files_and_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traces.runlog.BATCH_ROWS", 3)
    runs = make_runs(10)
    write_runs(runs[:7], tmp_path / "a.parquet")
    write_runs(iter(runs[7:]), tmp_path / "b.parquet")
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3
    assert list(read_runs(tmp_path)) == runs
    assert list(iter_runs(tmp_path)) == runs
    assert validate_runs(tmp_path).rows == 10
    broken = [*runs[7:9], replace(runs[9], run_id="run-0")]
    write_runs(broken, tmp_path / "b.parquet")
    with pytest.raises(
        InvalidInput, match=r"b\.parquet row 2: run_id is 'run-0', .*a\.parquet row 0"
    ):
        validate_runs(tmp_path)


def test_manifest_names_the_file(log_path: Path) -> None:
    manifest = json.loads(log_path.with_suffix(".manifest.json").read_text())
    assert manifest["rows"] == 8
    assert manifest["sha256"] == tables.file_sha256(log_path)
    assert manifest["licence"] == "Apache-2.0"
    assert set(manifest["software"]) == {"preemptbench", "python", "pyarrow", "numpy"}
    assert validate_runs(log_path).rows == 8
    write_runs(make_runs(4), log_path.with_name("other.parquet"))
    os.replace(log_path.with_name("other.parquet"), log_path)
    with pytest.raises(InvalidInput, match=r"has sha256 .* but .*manifest\.json names"):
        validate_runs(log_path)


def test_a_failed_write_leaves_the_old_log(log_path: Path) -> None:
    before = log_path.read_bytes()

    def runs():  # type: ignore[no-untyped-def]
        yield make_run(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_runs(runs(), log_path)
    assert log_path.read_bytes() == before
    assert sorted(p.name for p in log_path.parent.iterdir()) == ["log.manifest.json", "log.parquet"]


def test_datasets_loads_a_log(
    log_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import datasets

    loaded = datasets.load_dataset(
        "parquet", data_files=str(log_path), cache_dir=str(tmp_path / "cache"), split="train"
    )
    assert loaded.num_rows == 8
    assert loaded[3]["run_id"] == "run-3"
    assert loaded[3]["progress"][1]["mean_logprob"] == -0.25


# --- bad files ---------------------------------------------------------------------------------


def test_missing_and_unknown_column(log_path: Path) -> None:
    rewrite(log_path, output_tokens=None, completion_len=pa.array([20] * 8))
    with pytest.raises(
        InvalidInput, match=r"log\.parquet .*lacks \['output_tokens'\].*completion_len.*--map"
    ):
        read_runs(log_path)


def test_fractional_lengths_are_refused(log_path: Path) -> None:
    rewrite(log_path, output_tokens=pa.array([20.5] * 8))
    with pytest.raises(InvalidInput, match=r"column 'output_tokens' is double, it must be int32"):
        read_runs(log_path)


def test_null_where_a_value_must_be(log_path: Path) -> None:
    rewrite(log_path, model=pa.array(["m"] * 5 + [None] + ["m"] * 2))
    with pytest.raises(InvalidInput, match=r"log\.parquet row 5: model is null"):
        read_runs(log_path)


def test_too_wide_a_number(log_path: Path) -> None:
    rewrite(log_path, output_tokens=pa.array([1 << 40] * 8))
    with pytest.raises(InvalidInput, match="column 'output_tokens' does not fit int32"):
        read_runs(log_path)


def test_other_writers_widths_are_read(log_path: Path) -> None:
    rewrite(
        log_path,
        output_tokens=pa.array([20] * 8, pa.int64()),
        model=pa.array(["model"] * 8, pa.large_string()),
        family=pa.array([run.family for run in make_runs(8)]).dictionary_encode(),
        temperature=pa.array([0] * 8),
        hidden_ref=pa.nulls(8),
    )
    assert list(read_runs(log_path)) == make_runs(8)


def test_other_schema_version(log_path: Path) -> None:
    table = pq.read_table(log_path)
    pq.write_table(table.replace_schema_metadata({"preemptbench.schema": "decode-run/9"}), log_path)
    with pytest.raises(InvalidInput, match="schema 'decode-run/9'"):
        read_runs(log_path)


@pytest.mark.parametrize("keep", [0, 3, 100, 2000, -1])
def test_truncated_parquet(log_path: Path, keep: int) -> None:
    log_path.write_bytes(log_path.read_bytes()[:keep])
    with pytest.raises(InvalidInput, match=r"log\.parquet is not a readable Parquet file"):
        read_runs(log_path)


def test_empty_log_and_absent_log(log_path: Path, tmp_path: Path) -> None:
    pq.write_table(pq.read_table(log_path).slice(0, 0), log_path)
    with pytest.raises(InvalidInput, match=r"log\.parquet holds 0 rows"):
        read_runs(log_path)
    with pytest.raises(InvalidInput, match="does not exist"):
        read_runs(tmp_path / "no.parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidInput, match=r"holds no \*\.parquet"):
        read_runs(tmp_path / "folder")
    with pytest.raises(InvalidInput, match="0 rows"):
        write_runs([], tmp_path / "empty.parquet")
    assert not (tmp_path / "empty.parquet").exists()
    with pytest.raises(InvalidInput, match="at least one run"):
        RunLog.from_runs([])


def test_row_cap(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_ROWS", 7)
    with pytest.raises(InvalidInput, match="claims 8 rows"):
        read_runs(log_path)


def test_a_repeated_string_stays_small(log_path: Path) -> None:
    rewrite(log_path, text=pa.array(["x" * 1_000_000] * 8))
    log = read_runs(log_path)
    assert log.table["text"].nbytes < 2_000_000
    first, *others = (run.text for run in log)
    assert all(other is first for other in others)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_tokens": 3.5}, r"row 1: output_tokens is 3\.5; it must be a whole number"),
        ({"output_tokens": 1 << 40}, r"row 1: output_tokens is 1099511627776"),
        ({"model": None}, "row 1: model is None"),
        ({"model": 7}, "row 1: model is 7; it must be a string"),
        ({"progress": ((1.0, 2.0),)}, "row 1: progress is"),
    ],
)
def test_a_run_that_no_column_holds(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        write_runs([make_run(0), make_run(1, **changes)], tmp_path / "log.parquet")


# --- rules -------------------------------------------------------------------------------------

_NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_tokens": 0}, "output_tokens is 0; it must be at least 1"),
        ({"output_tokens": -5}, "output_tokens is -5; it must be at least 1"),
        ({"output_tokens": 40}, "output_tokens is 40; it must not pass max_new_tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0; it must be at least 1"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"repeat": -1}, "repeat is -1"),
        ({"temperature": -0.1}, r"temperature is -0\.1; it must be finite and at least 0"),
        ({"temperature": _NAN}, "temperature is nan"),
        ({"wall_s": math.inf}, "wall_s is inf"),
        ({"wall_s": _NAN}, "wall_s is nan"),
        ({"thinking_tokens": 21}, "thinking_tokens is 21; it must not pass output_tokens"),
        ({"finish_reason": "eos"}, "finish_reason is 'eos'; it must be one of stop, length"),
        ({"event_observed": False}, "must be true when finish_reason is stop"),
        ({"event_observed": None}, "must be true when finish_reason is stop"),
        (
            {"finish_reason": "length", "output_tokens": 32, "progress": None},
            "event_observed is True; it must be false when finish_reason is length",
        ),
        (
            {"finish_reason": "length", "event_observed": False},
            "output_tokens is 20; it must equal max_new_tokens when finish_reason is length",
        ),
        ({"finish_reason": "loop"}, "must not be true when finish_reason is loop"),
        ({"finish_reason": "abort"}, "must not be true when finish_reason is loop"),
        ({"finish_reason": "error"}, "must not be true when finish_reason is loop"),
        ({"progress": ()}, r"progress is \[\]; it must hold output_tokens // stride records"),
        ({"progress_stride": None}, "progress_stride is None; it must be given"),
        ({"progress_stride": 0}, "progress_stride is 0; it must be at least 1"),
        ({"prompt_id": ""}, "prompt_id is ''; it must not be empty"),
        ({"prompt_sha256": "other"}, "prompt_sha256 is 'other', but request_key 'key-1' has"),
        ({"model": "other"}, "model is 'other', but request_key 'key-1'"),
        ({"max_new_tokens": 64}, "max_new_tokens is 64, but request_key 'key-1' has 32"),
        ({"run_id": "run-0"}, "run_id is 'run-0', as in the runs row 0"),
        ({"repeat": 0}, "repeat is 0 of request_key 'key-1', as in the runs row 2"),
    ],
)
def test_each_rule_names_row_field_value_and_bound(changes: dict, message: str) -> None:
    runs = make_runs(6)
    runs[3] = make_run(3, **changes)
    with pytest.raises(InvalidInput, match=rf"the runs row 3: .*{message}"):
        validate_runs(runs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean_entropy", -0.1),
        ("mean_logprob", 0.1),
        ("newline_rate", 1.5),
        ("hesitation_rate", -0.5),
        ("repetition", _NAN),
        ("in_thinking", math.inf),
    ],
)
def test_each_progress_signal_has_its_range(name: str, value: float) -> None:
    good = make_run().progress
    assert good is not None
    bad = make_run(3, progress=(good[0], good[1]._replace(**{name: value})))
    with pytest.raises(InvalidInput, match=f"row 3: progress .*must have {name} finite"):
        validate_runs([*make_runs(3), bad])


def test_allowed_ends_are_counted() -> None:
    plain = {"progress": None, "progress_stride": None}
    ends = [
        {"finish_reason": "length", "event_observed": False, "output_tokens": 32, **plain},
        {"finish_reason": "loop", "event_observed": False},
        {"finish_reason": "abort", "event_observed": None},
        {"finish_reason": "unknown", "event_observed": True},
        {"finish_reason": "unknown", "event_observed": None, "output_tokens": 40, **plain},
    ]
    report = validate_runs([make_run(i, **end) for i, end in enumerate(ends)])
    assert (report.ended, report.censored, report.unknown_end) == (1, 2, 2)
    assert report.finish_reasons == {"abort": 1, "length": 1, "loop": 1, "unknown": 2}
    assert report.warnings == {"longer than its cap, end unknown": 1, "finish_reason unknown": 2}
    assert (report.num_requests, report.num_prompts) == (3, 3)


def test_estimated_counts_may_miss_the_cap() -> None:
    cut = {"finish_reason": "length", "event_observed": False}
    estimated = validate_runs([make_run(0, **cut, how_counted="chars/4")])
    assert estimated.warnings == {"cut by length, but not at its cap": 1}
    assert validate_runs([make_run(0, **cut)], exact_caps=False).censored == 1


def test_many_repeats_of_one_request() -> None:
    table = pa.concat_tables([RunLog.from_runs(make_runs(2)).table.slice(0, 1)] * 100_000)
    names = pa.array([f"r{i}" for i in range(100_000)]).dictionary_encode()
    table = table.combine_chunks().set_column(0, "run_id", names)
    table = table.set_column(2, "repeat", pa.array(range(100_000), pa.int32()))
    report = validate_runs(RunLog(table))
    assert (report.rows, report.num_requests) == (100_000, 1)


# --- describe ----------------------------------------------------------------------------------


def test_describe_by_hand() -> None:
    lengths = [10, 10, 20, 30, 32, 32]
    runs = [
        make_run(i, output_tokens=length, progress=None)
        if length < 32
        else make_run(
            i, output_tokens=32, progress=None, finish_reason="length", event_observed=False
        )
        for i, length in enumerate(lengths)
    ]
    (row,) = describe_runs(RunLog.from_runs(runs[::-1]))
    assert (row.num_runs, row.num_prompts, row.num_requests) == (6, 3, 3)
    assert (row.repeats_min, row.repeats_median, row.repeats_max) == (2, 2.0, 2)
    assert row.length_p50 == np.median(lengths)
    assert row.length_mean == np.mean(lengths)
    assert row.capped_share == pytest.approx(2 / 6)
    assert row.identical_share == pytest.approx(2 / 3)
    assert row.identical_ended_share == pytest.approx(1 / 2)
    assert row.median_spread == 1.0
    assert row.median_cv == 0.0
    families = describe_runs(RunLog.from_runs(runs), by_family=True)
    assert [r.family for r in families] == ["family-0", "family-1", "family-2"]
    assert families[1].median_spread == 1.5
    assert families[1].median_cv == pytest.approx(np.std([20, 30], ddof=1) / 25)
    assert families[2].identical_ended_share is None
    text = format_summaries(families)
    assert len(text.splitlines()) == 4 and "66.7%" not in text and "1.50" in text
