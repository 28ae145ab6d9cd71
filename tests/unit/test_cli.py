"""The command line as a user meets it: help, one clear message for each wrong input, the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contracts.runs import DecodeRun
from tests.synthetic_runs import synthetic_runs
from traces.runlog import write_runs

ROOT = Path(__file__).parents[2]


def _cli(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "preemptbench", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=300,
    )


def _one_message(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """The command failed with one message that holds ``words``, and no traceback."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr


@pytest.fixture(scope="module")
def runs() -> list[DecodeRun]:
    return synthetic_runs(num_prompts=24, repeats=3, seed=11, cap_tokens=100)


@pytest.fixture(scope="module")
def run_log(runs: list[DecodeRun], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "runs.parquet"
    write_runs(runs, path, {})
    return path


def test_help_names_every_verb() -> None:
    out = _cli("--help").stdout
    for verb in ("demo", "collect", "runs", "oracle", "train", "score", "simulate", "env"):
        assert f"\n  {verb} " in out


def test_policies_lists_every_rule_and_says_which_read_a_signal() -> None:
    listed = json.loads(_cli("policies", "--json").stdout)
    assert {"lifo", "priority", "young(depth)", "longest-remaining"} <= set(listed)
    with_signal = {name for name, facts in listed.items() if facts["reads_signal"]}
    with_deadline = {name for name, facts in listed.items() if facts["reads_deadline"]}
    assert {"longest-remaining", "shortest-remaining", "remaining-per-sunk"} <= with_signal
    assert with_deadline == {
        "most-slack", "slack-per-sunk", "doomed-first", "doomed-then-slack", "goodspeed-bid",
    }  # fmt: skip
    assert not {"lifo", "random", "young(depth)", "bidkv"} & (with_signal | with_deadline)


def test_unknown_policy_offers_the_nearest(run_log: Path, tmp_path: Path) -> None:
    done = _cli("simulate", "--policy", "longest-remainin", "--runs", run_log, "--out", tmp_path)
    _one_message(done, "unknown policy 'longest-remainin'", "did you mean 'longest-remaining'?")


def test_a_policy_that_breaks_its_contract_is_named_before_anything_runs(
    run_log: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "from random import random\nprint('hello')\n\ndef pick(view):\n    return random()\n\n"
        "def fail(view):\n    return {}[view.priority]\n\ndef word(view):\n    return 'long'\n\n"
        "def two(view, more):\n    return 1.0\n"
    )
    done = _cli("simulate", "--policy", f"{file}:pick", "--runs", run_log, "--out", tmp_path)
    _one_message(done, "'pick'", "pure function", "view.draw")
    done = _cli("simulate", "--policy", f"{file}:pcik", "--runs", run_log, "--out", tmp_path)
    _one_message(done, "did you mean 'pick'?")
    for name, words in (("fail", "KeyError near line 8"), ("word", "ValueError"), ("two", "Type")):
        done = _cli("simulate", "--policy", f"{file}:{name}", "--runs", run_log, "--out", tmp_path)
        _one_message(done, words, "one float for every running request")
    done = _cli("simulate", "--policy", "absent.py:pick", "--runs", run_log, "--out", tmp_path)
    _one_message(done, "absent.py does not exist")


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("output_tokens", -3, ("output_tokens", "-3", "at least 1")),
        ("output_tokens", 2.5, ("output_tokens", "whole")),
        ("finish_reason", "bored", ("finish_reason", "bored")),
        ("event_observed", None, ("event_observed",)),
    ],
)
def test_a_bad_value_is_named_with_its_row(
    run_log: Path, tmp_path: Path, column: str, value: object, words: tuple[str, ...]
) -> None:
    table = pq.read_table(run_log)
    cells = table[column].to_pylist()
    cells[7] = value
    if isinstance(value, float):
        cells = [float(cell) for cell in cells]
    place = table.schema.get_field_index(column)
    bad = tmp_path / "bad.parquet"
    pq.write_table(table.set_column(place, column, pa.array(cells)), bad)
    _one_message(_cli("runs", "check", bad), "bad.parquet", *words)


def test_wrong_column_truncated_and_empty_logs(run_log: Path, tmp_path: Path) -> None:
    table = pq.read_table(run_log)
    renamed = tmp_path / "renamed.parquet"
    names = ["length" if name == "output_tokens" else name for name in table.column_names]
    pq.write_table(table.rename_columns(names), renamed)
    _one_message(_cli("runs", "describe", renamed), "output_tokens", "renamed.parquet")
    truncated = tmp_path / "truncated.parquet"
    truncated.write_bytes(run_log.read_bytes()[:-100])
    _one_message(_cli("runs", "describe", truncated), "truncated.parquet")
    empty = tmp_path / "empty.parquet"
    pq.write_table(table.slice(0, 0), empty)
    _one_message(_cli("train", "--family", "age-km", "--runs", empty), "empty.parquet")
    _one_message(_cli("demo", "--runs", tmp_path / "absent.parquet", "--out", tmp_path), "absent")


def test_a_checkpoint_with_one_byte_changed_is_refused(run_log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    done = _cli("train", "--family", "age-km", "--runs", run_log, "--out", folder)
    assert done.returncode == 0, done.stderr
    model = folder / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-5] ^= 1
    model.write_bytes(data)
    _one_message(_cli("score", "--checkpoint", folder, "--runs", run_log), "ckpt")
    _one_message(
        _cli("simulate", "--policy", "longest-remaining", "--signal", folder, "--runs", run_log,
             "--out", tmp_path / "sim", "--jobs", "1"),
        "ckpt",
    )  # fmt: skip


def test_a_predictor_that_saw_the_prompts_is_refused(run_log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    _cli("train", "--family", "age-km", "--runs", run_log, "--out", folder)
    done = _cli(
        "simulate", "--policy", "longest-remaining", "--signal", folder, "--runs", run_log,
        "--out", tmp_path / "sim", "--jobs", "1",
    )  # fmt: skip
    _one_message(done, "was trained on prompt", "--folds")


def test_a_request_larger_than_the_pool_is_refused_and_counted(
    runs: list[DecodeRun], tmp_path: Path
) -> None:
    """A pool one block short of the largest prompt + cap: some requests fit, some never will."""
    long = {"p1", "p4", "p9"}
    mixed = [replace(r, prompt_tokens=200) if r.prompt_id in long else r for r in runs]
    run_log = tmp_path / "mixed.parquet"
    write_runs(mixed, run_log, {})
    needs = {-(-(run.prompt_tokens + run.max_new_tokens) // 16) for run in mixed}
    assert len(needs) > 1
    done = _cli(
        "simulate", "--policy", "fifo", "--blocks", str(max(needs)), "--runs", run_log,
        "--seeds", "2", "--tagged", "20", "--rate", "1", "--out", tmp_path, "--jobs", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert all(row["rejected"] + row["accepted"] == 40 for row in rows)
    assert rows[0]["rejected"] == rows[1]["rejected"] > 0
    too_small = _cli(
        "simulate", "--policy", "fifo", "--blocks", "3", "--runs", run_log, "--seeds", "2",
        "--tagged", "20", "--out", tmp_path, "--jobs", "1",
    )  # fmt: skip
    _one_message(too_small, "none of 20 tagged requests was accepted", "enlarge the KV pool")


def test_one_run_a_request_has_no_oracle_and_every_verb_says_so(
    runs: list[DecodeRun], tmp_path: Path
) -> None:
    log = tmp_path / "k1.parquet"
    write_runs([run for run in runs if run.repeat == 1], log, {})
    _one_message(_cli("demo", "--runs", log, "--out", tmp_path / "d"), "collect with --repeats 2")
    done = _cli("oracle", "describe", "--runs", log)
    assert "every request ran once" in done.stdout


def test_outputs_that_cannot_be_written_are_refused_before_any_work(
    run_log: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for command in (
        ("demo", "--runs", run_log, "--out", file),
        ("demo", "--runs", run_log, "--out", file / "below"),
        ("simulate", "--policy", "fifo", "--runs", run_log, "--out", file),
        ("train", "--family", "age-km", "--runs", run_log, "--out", file),
        ("collect", "--out", file),
    ):
        _one_message(_cli(*command), "file")
    folder = tmp_path / "ckpt"
    assert _cli("train", "--family", "age-km", "--runs", run_log, "--out", folder).returncode == 0
    again = _cli("train", "--family", "age-km", "--folds", "2", "--runs", run_log, "--out", folder)
    _one_message(again, "is not empty")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("simulate", "--policy", "fifo", "--jobs", "0"), "0 processes"),
        (("simulate", "--policy", "longest-remaining", "--signal", "none"), "reads a signal"),
        (("simulate", "--policy", "fifo", "--runs", "absent.parquet"), "absent.parquet"),
        (("simulate", "--policy", "pol.py"), "pol.py:function"),
        (("oracle", "describe", "--ages", "a,b"), "whole numbers"),
        (("oracle", "describe", "--ages", "-5"), "whole numbers"),
        (("train", "--family", "gbm-hazard", "--set", "settings.features=[1,2]"), "like"),
        (("collect", "--model", "tests", "--out", "out/x"), "cannot be loaded"),
        (("collect", "--prompts", "tests", "--out", "out/x"), "is a folder"),
        (("score", "--checkpoint", "tests"), "config.json"),
    ],
)
def test_wrong_arguments_end_in_one_message(arguments: tuple[str, ...], word: str) -> None:
    _one_message(_cli(*arguments), word)


def test_json_is_strict(run_log: Path, tmp_path: Path) -> None:
    done = _cli(
        "simulate", "--policy", "fifo", "--blocks", "2001", "--runs", run_log, "--seeds", "2",
        "--tagged", "10", "--out", tmp_path, "--jobs", "1", "--json",
    )  # fmt: skip
    rows = json.loads(done.stdout, parse_constant=pytest.fail)["rows"]
    assert rows[1]["difference"]["correlation"] is None  # nothing varies without pressure


def test_score_takes_a_cross_fit_and_shows_the_floor(run_log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cf"
    done = _cli(
        "train", "--family", "countdown", "--folds", "2", "--runs", run_log, "--out", folder
    )
    assert done.returncode == 0, done.stderr
    assert "age-km" in done.stdout
    config = json.loads((folder / "fold-0" / "config.json").read_text())
    assert {"lifo", "age-km", "countdown"} <= {row["signal"] for row in config["metrics"]}
    done = _cli("score", "--checkpoint", folder, "--runs", run_log)
    assert done.returncode == 0, done.stderr
    assert "age-km" in done.stdout
    assert "countdown" in done.stdout


def test_k_of_one_runs_as_an_oracle_and_prompts_unseen_fall_back(
    runs: list[DecodeRun], tmp_path: Path
) -> None:
    log = tmp_path / "k2.parquet"
    kept = [run for run in runs if run.repeat == 0 or run.prompt_id != runs[0].prompt_id]
    write_runs([run for run in kept if run.repeat < 2], log, {})
    done = _cli("oracle", "describe", "--runs", log, "--json")
    assert done.returncode == 0, done.stderr
    at_zero = json.loads(done.stdout)["by_age"][0]
    assert at_zero["family"] > 0  # the prompt that ran once is unseen when it is the truth
    assert at_zero["prompt"] > 0


def test_demo_prints_one_table_and_writes_a_self_contained_report(
    run_log: Path, tmp_path: Path
) -> None:
    done = _cli("demo", "--runs", run_log, "--seeds", "2", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("Run log:", "gbm-hazard", "clairvoyant", "baseline", "report: out"):
        assert words in done.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "src=" not in page  # its few lines of script are inline
    for attribute in ('src="http', 'href="http'):
        assert attribute not in page
    assert len(pq.read_table(tmp_path / "out" / "cells.parquet")) == 17 * 3 * 2
