"""The verbs of ``preemptbench runs``: results on stdout, one JSON object with --json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput
from preemptbench.cli_runs import runs
from tests.unit.test_runlog import make_run, make_runs
from traces.runlog import read_runs, write_runs


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    path = tmp_path / "log.parquet"
    write_runs(make_runs(24), path)
    return path


def call(*words: object) -> str:
    """Run a verb and return its stdout; errors of the project come through as they are."""
    result = CliRunner().invoke(runs, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def call_json(*words: object) -> dict[str, Any]:
    answer = json.loads(call(*words, "--json"))
    assert isinstance(answer, dict)
    return answer


def test_check(log_path: Path) -> None:
    told = call_json("check", log_path)
    assert (told["ok"], told["rows"], told["num_requests"], told["ended"]) == (True, 24, 12, 24)
    text = call("check", log_path)
    assert "24 runs of 12 requests (12 prompts): 24 ended, 0 cut, 0 of unknown end" in text
    write_runs([make_run(0, finish_reason="length", event_observed=False)], log_path)
    with pytest.raises(InvalidInput, match=r"log\.parquet row 0: output_tokens is 20"):
        call("check", log_path)
    assert "note: 1 runs cut by length" in call("check", log_path, "--approximate-caps")


def test_describe(log_path: Path) -> None:
    assert call("describe", log_path).splitlines()[1].split()[:4] == ["bench", "all", "24", "12"]
    rows = call_json("describe", log_path, "--by-family")["rows"]
    assert [row["family"] for row in rows] == ["family-0", "family-1", "family-2"]
    assert {row["identical_share"] for row in rows} == {1.0}


def test_split(log_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "parts"
    told = call_json(
        "split", log_path, "--out", out, "--test-share", 0.25, "--holdout-family", "family-1"
    )
    train, test = read_runs(out / "train.parquet"), read_runs(out / "test.parquet")
    assert not set(train.strings("prompt_sha256")) & set(test.strings("prompt_sha256"))
    assert (told["train_runs"], told["test_runs"]) == (len(train), len(test)) == (12, 12)
    assert "family-1" not in set(train.strings("family"))
    manifest = json.loads((out / "test.manifest.json").read_text())
    assert (manifest["split"], manifest["holdout"], manifest["rows"]) == ("test", ["family-1"], 12)


def test_split_into_folds(log_path: Path, tmp_path: Path) -> None:
    told = call_json("split", log_path, "--out", tmp_path / "cv", "--folds", 3)
    folds = json.loads((tmp_path / "cv" / "folds.json").read_text())["fold_of"]
    assert told["prompts_per_fold"] == {"0": 4, "1": 4, "2": 4}
    assert set(folds) == set(read_runs(log_path).strings("prompt_id"))
    with pytest.raises(InvalidInput, match="exclude each other"):
        call("split", log_path, "--out", tmp_path, "--folds", 3, "--holdout-family", "family-1")


def test_import(tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("qid,tokens,cap\na,10,64\na,64,64\nb,12,64\n")
    out = tmp_path / "out.parquet"
    words = ["import", "csv", source, "--out", out]
    maps = [
        "--map",
        "prompt_id=qid",
        "--map",
        "output_tokens=tokens",
        "--map",
        "max_new_tokens=cap",
    ]
    sets = ["--set", "model=m", "--set", "prompt_tokens=5", "--set", "temperature=0"]
    told = call_json(*words, *maps, *sets)
    assert told["import"]["rows_kept"] == 3
    assert told["check"]["censored"] == 1
    assert [run.event_observed for run in read_runs(out)] == [True, False, True]
    manifest = json.loads(out.with_suffix(".manifest.json").read_text())
    assert manifest["import"]["set"] == {"model": "m", "prompt_tokens": "5", "temperature": "0"}
    assert "0.98" in manifest["import"]["rule"]
    assert "3 of 3 rows" in call(*words, *maps, *sets, "--where", "cap=64")
    with pytest.raises(InvalidInput, match="'prompt_id' is not of the form NAME=VALUE"):
        call(*words, "--map", "prompt_id")
    before = out.read_bytes()
    source.write_text("qid,tokens,cap\na,-10,64\n")
    with pytest.raises(InvalidInput, match="output_tokens is -10"):
        call(*words, *maps, *sets)
    assert out.read_bytes() == before
