"""Importers: formats as the tools write them, the stop rule, settled caps, hostile input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contracts.errors import InvalidInput, UnknownName
from contracts.runs import DecodeRun, sha256_text
from traces.describe import describe_runs
from traces.import_rules import CHARS_PER_4, TokenCounter
from traces.importers import import_runs, tokenizer_counter
from traces.runlog import RunLog, read_runs, write_runs
from traces.validate import validate_runs

SET = {"model": "m", "prompt_tokens": "7", "temperature": "0"}


def jsonl(path: Path, *rows: dict[str, Any] | str) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_rows(tmp_path: Path, *rows: dict[str, Any] | str, **options: Any) -> Any:
    """Import rows as JSONL with a prompt each unless they name one."""
    options = {"constants": SET, **options}
    return import_runs("jsonl", [jsonl(tmp_path / "rows.jsonl", *rows)], **options)


def ends(runs: list[DecodeRun]) -> list[tuple[str, bool | None]]:
    return [(run.finish_reason, run.event_observed) for run in runs]


# --- tables ------------------------------------------------------------------------------------

ROWS = [
    {"id": "a", "len": 10, "cap": 100, "question": "Why?", "set": "x"},
    {"id": "b", "len": 20, "cap": 100, "question": "How?", "set": "x"},
    {"id": "c", "len": 30, "cap": 100, "question": "Why?", "set": "y"},
]
MAP = {"run_id": "id", "output_tokens": "len", "max_new_tokens": "cap", "prompt": "question"}


def as_file(kind: str, tmp_path: Path) -> Path:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        jsonl(path, *ROWS)
    elif kind == "csv":
        cells = [",".join(map(str, row.values())) for row in ROWS]
        path.write_text("\n".join([",".join(ROWS[0]), *cells]) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_the_same_table_in_every_format(kind: str, tmp_path: Path) -> None:
    path = as_file(kind, tmp_path)
    runs, report = import_runs(kind, [path], column_map=MAP, constants=SET)
    assert [run.run_id for run in runs] == ["a", "b", "c"]
    assert [run.output_tokens for run in runs] == [10, 20, 30]
    assert [run.repeat for run in runs] == [0, 0, 1]
    assert runs[0].request_key == runs[2].request_key != runs[1].request_key
    assert runs[0].prompt_sha256 == sha256_text("Why?")
    assert (runs[0].model, runs[0].prompt_tokens, runs[0].temperature) == ("m", 7, 0.0)
    assert (report.rows_read, report.rows_kept, report.skipped) == (3, 3, {})
    write_runs(runs, tmp_path / "out.parquet")
    assert list(read_runs(tmp_path / "out.parquet")) == runs
    assert validate_runs(runs).rows == 3
    picked, report = import_runs(kind, [path], column_map=MAP, constants=SET, where={"set": "y"})
    assert [run.run_id for run in picked] == ["c"]
    assert report.skipped == {"left out by --where": 2}
    with pytest.raises(UnknownName, match="'length': did you mean 'len'"):
        import_runs(kind, [path], column_map={**MAP, "output_tokens": "length"}, constants=SET)
    with pytest.raises(InvalidInput, match="does not exist"):
        import_runs(kind, [path.with_name("no")], column_map=MAP)


def test_names_are_checked(tmp_path: Path) -> None:
    path = as_file("jsonl", tmp_path)
    with pytest.raises(UnknownName, match="'output_token': did you mean 'output_tokens'"):
        import_runs("jsonl", [path], column_map={"output_token": "len"})
    with pytest.raises(UnknownName, match="'modell': did you mean 'model'"):
        import_runs("jsonl", [path], column_map=MAP, constants={"modell": "m"})
    with pytest.raises(UnknownName, match="did you mean 'jsonl'"):
        import_runs("json", [path])
    with pytest.raises(InvalidInput, match="fixed columns"):
        import_runs("openai", [path], column_map=MAP)
    with pytest.raises(InvalidInput, match="at least one file"):
        import_runs("jsonl", [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_tokens": -3}, "output_tokens is -3; it must be at least 1"),
        ({"output_tokens": 2.5}, r"output_tokens is 2\.5; it must be a whole number"),
        ({"output_tokens": "many"}, "output_tokens is 'many'; it must be a number"),
        ({"output_tokens": True}, "output_tokens is True; it must be a number"),
        ({"output_tokens": 1 << 40}, r"output_tokens is 1099511627776; .* below 2\*\*31"),
        ({"truncated": "maybe"}, "truncated is 'maybe'; it must be true or false"),
        ({"prompt_id": None}, "names no prompt"),
        ({"model": None}, "model is absent; map a column with --map model=COLUMN, or .* --set"),
        ({"prompt_tokens": None}, "prompt_tokens is absent"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    row = {"prompt_id": "p", "output_tokens": 5, "prompt_tokens": 5, "model": "m", "temperature": 0}
    with pytest.raises(InvalidInput, match=rf"rows\.jsonl row 2.*{message}"):
        read_rows(tmp_path, row, {**row, **change}, constants={})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_id": "p", "output_tokens": NaN}', "line 2 is not valid JSON: NaN"),
        ('{"prompt_id": "p", "prompt_id": "q"}', "'prompt_id' stands twice"),
        ("[1, 2]", "line 2 is a list"),
        ("{", "line 2 is not valid JSON"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "deeper than 32"),
        ('{"a": "' + "x" * 1_000_000 + '"}', "longer than 1000000 bytes"),
    ],
)
def test_hostile_jsonl(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_rows(tmp_path, {"prompt_id": "p", "output_tokens": 5}, line)


def test_hostile_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for text, message in [
        ("prompt_id,prompt_id\n1,2\n", "stands twice"),
        ("prompt_id,output_tokens\n1\n", "row 1 has 1 cells; the header has 2"),
        ('prompt_id,output_tokens\n"1,2\n', "near line"),
    ]:
        path.write_text(text)
        with pytest.raises(InvalidInput, match=message):
            import_runs("csv", [path], constants=SET)
    path.write_bytes(b"prompt_id,output_tokens\n\xff,2\n")
    with pytest.raises(InvalidInput, match="near line"):
        import_runs("csv", [path], constants=SET)


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no run could be read .*'no output tokens': 2"):
        read_rows(tmp_path, {"prompt_id": "p", "output_tokens": 0}, {"prompt_id": "q"})


# --- the stop rule -----------------------------------------------------------------------------


def test_recorded_ends_decide(tmp_path: Path) -> None:
    base = {"prompt_id": "p", "max_new_tokens": 100}
    rows = [
        {"output_tokens": 100, "finish_reason": "stop"},
        {"output_tokens": 100, "finish_reason": "MAX_TOKENS"},
        {"output_tokens": 60, "finish_reason": "length"},
        {"output_tokens": 90, "finish_reason": "length", "how_counted": "chars/4"},
        {"output_tokens": 99, "truncated": False},
        {"output_tokens": 100, "truncated": True},
        {"output_tokens": 50, "finish_reason": "content_filter"},
        {"output_tokens": 50, "finish_reason": "error"},
        {"output_tokens": 50, "finish_reason": "unknown", "event_observed": False},
    ]
    runs, report = read_rows(tmp_path, *({**base, **row} for row in rows))
    assert ends(runs) == [
        ("stop", True),
        ("length", False),
        ("abort", False),
        ("length", False),
        ("unknown", True),
        ("length", False),
        ("abort", False),
        ("error", False),
        ("unknown", False),
    ]
    assert report.decided["cut, but not at its cap: read as abort"] == 1
    assert report.decided["unknown stop read as ended: not truncated"] == 1
    assert validate_runs(runs).rows == len(rows)


def test_unknown_stops_are_read_by_the_cap(tmp_path: Path) -> None:
    rows = [{"prompt_id": "p", "max_new_tokens": 100, "output_tokens": n} for n in (97, 98, 100)]
    runs, report = read_rows(tmp_path, *rows, {**rows[0], "finish_reason": "??"})
    assert ends(runs) == [
        ("unknown", True),
        ("unknown", False),
        ("unknown", False),
        ("unknown", True),
    ]
    assert report.decided["unknown stop read as ended: below 0.98 of the cap"] == 2
    assert report.decided["unknown stop read as cut: at or above 0.98 of the cap"] == 2
    assert report.decided["stop reason not understood, read as unknown"] == 1
    assert "0.98" in report.rule


def test_a_contradicted_cap_is_unknown(tmp_path: Path) -> None:
    rows = [
        {"prompt_id": "p", "max_new_tokens": 100, "output_tokens": 40},
        {"prompt_id": "q", "max_new_tokens": 100, "output_tokens": 120},
        {"prompt_id": "q", "max_new_tokens": 100, "output_tokens": 100, "finish_reason": "length"},
        {"prompt_id": "r", "max_new_tokens": 300, "output_tokens": 40},
        {"prompt_id": "s", "output_tokens": 70},
        {"prompt_id": "s", "output_tokens": 50, "finish_reason": "stop"},
    ]
    runs, report = read_rows(tmp_path, *rows)
    assert ends(runs) == [
        ("unknown", None),
        ("unknown", None),
        ("abort", False),
        ("unknown", True),
        ("unknown", None),
        ("stop", True),
    ]
    assert [run.max_new_tokens for run in runs] == [120, 120, 120, 300, 70, 70]
    assert report.decided["cap contradicted by a longer run"] == 3
    assert report.decided["cap absent"] == 2
    assert report.decided["unknown stop, cap unknown: end unknown"] == 3
    checked = validate_runs(runs)
    assert (checked.ended, checked.censored, checked.unknown_end) == (2, 1, 3)


def test_thinking_longer_than_the_output_is_dropped(tmp_path: Path) -> None:
    row = {"prompt_id": "p", "output_tokens": 5, "thinking_tokens": 6, "prompt": ""}
    (run,), report = read_rows(tmp_path, row)
    assert run.thinking_tokens is None
    assert report.decided["thinking_tokens above output_tokens: left empty"] == 1
    assert report.decided["prompt text absent: prompt_sha256 is a hash of benchmark and id"] == 1


# --- logs of other tools -----------------------------------------------------------------------


def openai_reply(tokens: int | None, reason: str = "stop", **usage: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 0, **usage}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "gpt-x",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "yes" * 8},
                "finish_reason": reason,
            }
        ],
        "usage": usage,
    }


def test_openai_logs(tmp_path: Path) -> None:
    request = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 50,
        "temperature": 0,
        "seed": 1 << 40,
    }
    details = {"completion_tokens_details": {"reasoning_tokens": 12}}
    batch = {"custom_id": "q1", "response": {"status_code": 200, "body": openai_reply(30)}}
    several = {**openai_reply(5), "choices": openai_reply(5)["choices"] * 2}
    path = jsonl(
        tmp_path / "log.jsonl",
        {"request": request, "response": openai_reply(20, **details)},
        {"request": request, "response": openai_reply(50, "length")},
        {**batch, "error": None},
        {"custom_id": "q2", "response": None, "error": {"message": "rate limit"}},
        several,
        {"custom_id": "q3", **openai_reply(None)},
    )
    runs, report = import_runs("openai", [path], constants={"temperature": 0})
    assert [run.output_tokens for run in runs] == [20, 50, 30, 6]
    assert [run.thinking_tokens for run in runs] == [12, None, None, None]
    assert ends(runs) == [("stop", True), ("length", False), ("stop", True), ("stop", True)]
    assert runs[0].request_key == runs[1].request_key and runs[1].repeat == 1
    assert (runs[0].prompt, runs[0].seed, runs[0].max_new_tokens) == ("Hi", 1 << 40, 50)
    assert (runs[2].prompt_id, runs[2].model, runs[2].prompt_tokens) == ("q1", "gpt-x", 9)
    assert [run.how_counted for run in runs] == ["reported"] * 3 + ["chars/4"]
    assert report.skipped == {"an error, or no choices": 1, "several choices share one usage": 1}
    assert report.rows_read == 6
    assert validate_runs(runs).censored == 1


def test_lm_eval_samples(tmp_path: Path) -> None:
    settings = {"until": ["\n\n"], "max_gen_toks": 256, "do_sample": False, "temperature": 0.0}
    old_form = [["Question: 1 + 1?", settings]]
    new_form = {"gen_args_0": {"arg_0": "Question: 2 + 2?", "arg_1": settings}}
    chat = {"gen_args_0": {"arg_0": ['[{"role": "user", "content": "Hi"}]'], "arg_1": settings}}
    sample = {"doc": {"q": 1}, "target": "2", "filter": "strict-match", "exact_match": 1.0}
    text = "a" * 80
    path = jsonl(
        tmp_path / "samples_gsm8k_cot_2026-01-02T03-04-05.678901.jsonl",
        {**sample, "doc_id": 0, "arguments": old_form, "resps": [[text, text + text]]},
        {**sample, "doc_id": 0, "arguments": old_form, "resps": [[text]], "filter": "flexible"},
        {**sample, "doc_id": 1, "arguments": new_form, "resps": [["b" * 4096]]},
        {**sample, "doc_id": 2, "arguments": chat, "resps": [[""]]},
        {**sample, "doc_id": 3, "arguments": [["ctx", " yes"]], "resps": [[[-3.0, False]]]},
    )
    runs, report = import_runs("lm-eval", [path], constants={"model": "m"})
    assert {run.benchmark for run in runs} == {"gsm8k_cot"}
    assert [(run.prompt_id, run.repeat) for run in runs] == [("0", 0), ("0", 1), ("1", 0)]
    assert [run.output_tokens for run in runs] == [20, 40, 1024]
    assert {run.how_counted for run in runs} == {"chars/4"}
    assert [run.prompt for run in runs[1:]] == ["Question: 1 + 1?", "Question: 2 + 2?"]
    assert ends(runs) == [("unknown", None)] * 3  # an estimate above the cap makes the cap unknown
    assert report.skipped == {
        "no output tokens": 1,
        "not generated text (log-likelihoods)": 1,
        "the same document under another filter": 1,
    }
    counter = TokenCounter(lambda text: len(text) // 16, "retokenised:own")
    runs, _ = import_runs("lm-eval", [path], constants={"model": "m"}, counter=counter)
    assert [run.output_tokens for run in runs] == [5, 10, 256]
    assert ends(runs) == [("unknown", True), ("unknown", True), ("unknown", False)]
    assert {run.how_counted for run in runs} == {"retokenised:own"}


def vllm_bench(**changes: Any) -> dict[str, Any]:
    return {
        "date": "20260101-000000",
        "backend": "vllm",
        "model_id": "org/model",
        "tokenizer_id": "org/model",
        "num_prompts": 3,
        "request_rate": "inf",
        "max_concurrency": 4,
        "completed": 2,
        "input_lens": [11, 12, 13],
        "output_lens": [3, 5, 0],
        "ttfts": [0.5, 0.25, 0.0],
        "itls": [[0.1, 0.1], [0.25, 0.25, 0.25, 0.25], []],
        "generated_texts": ["a b c", "d", ""],
        "errors": ["", "", "Connection reset"],
        **changes,
    }


def test_vllm_bench(tmp_path: Path) -> None:
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    paths[0].write_text(json.dumps(vllm_bench()))
    paths[1].write_text(json.dumps(vllm_bench(output_lens=[4, 5, 16], errors=["", "", ""])))
    constants = {"temperature": 0, "max_new_tokens": 16, "benchmark": "sharegpt"}
    runs, report = import_runs("vllm-bench", paths, constants=constants)
    assert [(run.prompt_id, run.repeat) for run in runs] == [
        ("0", 0), ("1", 0), ("0", 1), ("1", 1), ("2", 0),
    ]  # fmt: skip
    assert [run.output_tokens for run in runs] == [3, 5, 4, 5, 16]
    assert runs[0].wall_s == pytest.approx(0.7)
    assert (runs[0].model, runs[0].prompt_tokens, runs[0].concurrency) == ("org/model", 11, 4)
    assert [run.event_observed for run in runs] == [True, True, True, True, False]
    assert report.skipped == {"the request failed": 1}
    assert validate_runs(runs).num_requests == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_lens": None}, "no list 'output_lens': run the bench with --save-detailed"),
        ({"input_lens": [1]}, "input_lens is not a list of 3 entries"),
        ({"output_lens": [3, -5, 0]}, r"request 1: output_tokens is -5"),
        ({"output_lens": [3, 5.5, 0]}, r"request 1: output_tokens is 5\.5"),
    ],
)
def test_bad_vllm_bench(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(vllm_bench(**changes)))
    with pytest.raises(InvalidInput, match=message):
        import_runs("vllm-bench", [path], constants={"temperature": 0})


# --- counting, public data ---------------------------------------------------------------------


def test_counters(tmp_path: Path) -> None:
    assert [CHARS_PER_4.count(text) for text in ("", "a", "a" * 10)] == [0, 1, 2]
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "yes": 1, "no": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}'
    )
    counter = tokenizer_counter(str(tmp_path))
    assert counter.count("yes no yes maybe") == 4
    assert counter.label == f"retokenised:{tmp_path}"
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="could not be loaded"):
        tokenizer_counter(str(tmp_path / "empty"))


@pytest.mark.data
def test_public_temperature_zero_runs(public_data: Path) -> None:
    """Figures stated by the data set's own card: 2,075 prompts, median 99 runs, 44 % identical."""
    path = public_data / "reasoning_lengths" / "lengths.parquet"
    runs, report = import_runs(
        "parquet",
        [path],
        column_map={"request_key": "group_id", "max_new_tokens": "max_tokens"},
        constants={"prompt_tokens": 200},
        where={"source": "vllm-ltr-temp0"},
    )
    assert (report.rows_read, report.rows_kept) == (403_557, 208_408)
    assert report.decided["unknown stop read as ended: not truncated"] == 208_408
    log = RunLog.from_runs(runs)
    assert validate_runs(log).num_requests == 2_075
    (row,) = describe_runs(log)
    assert row.repeats_median == 99
    assert row.identical_share == pytest.approx(0.44, abs=0.005)
    assert row.median_spread == pytest.approx(1.02, abs=0.005)
