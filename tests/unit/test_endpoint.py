"""The endpoint backend against a real server in a thread: good answers, and every kind of bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from contracts.errors import CollectionStopped, InvalidInput
from oracles.backend import DecodeSettings, Generation, Refused
from oracles.collect import CollectConfig, collect_runs
from oracles.endpoint import Endpoint, key_headers
from oracles.http_json import JsonClient, check_url
from oracles.prompts import Prompt
from preemptbench.cli import cli
from tests.chat_server import MODEL, Answer, ChatServer, chat_server, completion
from traces.runlog import read_runs
from traces.tables import read_manifest
from traces.validate import validate_runs

PROMPTS = [Prompt(f"p{i}", "toy", "toy", f"say {i}") for i in range(12)]
CONFIG = CollectConfig(repeats=2, max_new_tokens=40, batch_sizes=(4, 2), seed=3)
SETTINGS = DecodeSettings(40, 0, seed=3)


def _good(body: dict[str, Any], _: int) -> Answer:
    number = int(body["messages"][0]["content"].split()[-1])
    tokens = 40 if number % 5 == 0 else 3 + number
    return completion(f"answer {number}", tokens, "length" if tokens == 40 else "stop")


def _client(**options: Any) -> JsonClient:
    return JsonClient(**{"timeout_s": 5.0, "attempts": 4, "sleep": lambda _: None, **options})


def _one(server: ChatServer, prompt: str = "say 1", **options: Any) -> Generation | Refused:
    ((_, outcome),) = Endpoint(server.url, MODEL, _client(**options)).run([prompt], 1, SETTINGS)
    return outcome


def test_a_collection_is_a_valid_run_log(tmp_path: Path) -> None:
    with chat_server(_good) as server:
        server.delay_s = 0.02
        backend = Endpoint(server.url, MODEL, _client(), batch_invariant=True, dtype="fp8")
        runs = collect_runs(backend, PROMPTS, tmp_path, CONFIG).runs
        assert server.most_at_once == 4
        for body in server.bodies:
            sent = (body["temperature"], body["seed"], body["max_tokens"])
            assert sent == (0, 3, 40)
    assert runs is not None
    validate_runs(tmp_path / "runs.parquet")
    assert {(r.prompt_id, r.repeat) for r in runs} == {
        (p.prompt_id, repeat) for p in PROMPTS for repeat in range(2)
    }
    first = next(run for run in runs if run.prompt_id == "p1")
    assert (first.engine, first.engine_version) == ("endpoint:vllm", "0.33.0")
    assert (first.batch_invariant, first.dtype, first.kernel) == (True, "fp8", "unknown")
    assert (first.output_tokens, first.finish_reason, first.event_observed) == (4, "stop", True)
    capped = next(run for run in runs if run.prompt_id == "p5")
    assert (capped.finish_reason, capped.event_observed) == ("length", False)
    assert first.progress is None
    for repeat, size in ((0, 4), (1, 2)):
        seen = {run.concurrency for run in runs if run.repeat == repeat}
        assert seen == set(range(1, size + 1)), "the pool fills up, then stays full"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_flaky_answers_are_asked_again(status: int) -> None:
    def flaky(body: dict[str, Any], number: int) -> Answer:
        return (status, b"busy", {}) if number < 3 else _good(body, number)

    with chat_server(flaky) as server:
        outcome = _one(server)
        assert isinstance(outcome, Generation)
        assert server.tries["say 1"] == 3


def test_pauses_grow_and_a_retry_after_is_kept() -> None:
    slept: list[float] = []

    def busy(body: dict[str, Any], number: int) -> Answer:
        return 503, b"busy", {"Retry-After": "7"} if number == 3 else {}

    told = r"no answer in 4 tries.*HTTP 503: busy"
    with chat_server(busy) as server, pytest.raises(CollectionStopped, match=told):
        _one(server, sleep=slept.append)
    assert len(slept) == 3
    assert 0.5 <= slept[0] <= 1.0 <= slept[1] <= 2.0
    assert slept[2] == 7.0


@pytest.mark.parametrize("raw", [b"{", b"[1, 2]", b"", b'{"choices": NaN}', b"\xff\xfe"])
def test_broken_json_is_asked_again_and_then_told(raw: bytes) -> None:
    with chat_server(lambda *_: (200, raw, {})) as server:
        with pytest.raises(CollectionStopped, match="4 tries"):
            _one(server)
        assert server.tries["say 1"] == 4


def test_a_slow_server_times_out_with_the_way_out() -> None:
    with chat_server(_good) as server:
        server.delay_s = 0.6
        with pytest.raises(CollectionStopped, match="raise --timeout"):
            _one(server, timeout_s=0.1, attempts=2)


def test_nobody_there() -> None:
    with chat_server(_good) as server:
        url = server.url
    with pytest.raises(CollectionStopped, match="start the server"):
        Endpoint(url, MODEL, _client(attempts=2))


def test_a_server_that_goes_down_loses_nothing_that_ended(tmp_path: Path) -> None:
    def dies(body: dict[str, Any], _: int) -> Answer:
        return _good(body, 1) if len(server.tries) <= 7 else (500, b"gone", {})

    with chat_server(dies) as server:
        backend = Endpoint(server.url, MODEL, _client(attempts=2))
        with pytest.raises(CollectionStopped, match="the same command"):
            collect_runs(backend, PROMPTS, tmp_path, CONFIG)
        held = (tmp_path / "shard-0.jsonl").read_text().count("\n")
        assert held >= 4, "at most the four requests in flight are lost"
        server.answer = _good
        asked = len(server.bodies)
        runs = collect_runs(backend, PROMPTS, tmp_path, CONFIG).runs
        assert runs is not None
        assert len(runs) == 24
        # only what is missing is asked; of the first start three requests may still be retrying
        assert 24 - held <= len(server.bodies) - asked <= 24 - held + 3


def test_without_usage_lengths_are_marked_as_estimates(tmp_path: Path) -> None:
    with chat_server(lambda *_: completion("x" * 400, 0, "length", usage=None)) as server:
        backend = Endpoint(server.url, MODEL, _client())
        runs = collect_runs(backend, PROMPTS[:3], tmp_path, CONFIG).runs
    assert runs is not None
    assert {run.output_tokens for run in runs} == {40}  # 100 by characters, never past the cap
    assert all(run.how_counted.startswith("chars/4") for run in runs)
    validate_runs(tmp_path / "runs.parquet")


@pytest.mark.parametrize(
    ("answer", "reason", "event"),
    [
        (completion("a", 5, "content_filter"), "abort", False),
        (completion("a", 5, "tool_calls"), "stop", True),
        (completion("a", 5, "what"), "unknown", None),
        (completion("a", 5, "length"), "abort", False),  # the server's context, not our cap
        (completion("go on " * 100, 40, "length"), "loop", False),
        (completion("", 0, "stop"), "stop", True),
    ],
)
def test_stop_reasons(answer: Answer, reason: str, event: bool | None, tmp_path: Path) -> None:
    with chat_server(lambda *_: answer) as server:
        backend = Endpoint(server.url, MODEL, _client())
        runs = collect_runs(backend, PROMPTS[:1], tmp_path, CONFIG).runs
    assert runs is not None
    assert {(run.finish_reason, run.event_observed) for run in runs} == {(reason, event)}
    assert min(run.output_tokens for run in runs) >= 1
    validate_runs(tmp_path / "runs.parquet")


def test_reasoning_is_kept_and_counted() -> None:
    message = {"content": "4", "reasoning_content": "2 and 2"}
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "completion_tokens_details": {"reasoning_tokens": 6},
    }
    choices = [{"message": message, "finish_reason": "stop"}]
    with chat_server(lambda *_: completion("", 9, choices=choices, usage=usage)) as server:
        outcome = _one(server)
    assert isinstance(outcome, Generation)
    assert (outcome.text, outcome.thinking_tokens, outcome.output_tokens) == ("2 and 2\n4", 6, 9)


def test_a_refused_prompt_is_left_out_and_named(tmp_path: Path) -> None:
    def picky(body: dict[str, Any], number: int) -> Answer:
        if body["messages"][0]["content"] == "say 3":
            return 400, b"maximum context length is 8 tokens", {}
        return _good(body, number)

    with chat_server(picky) as server:
        backend = Endpoint(server.url, MODEL, _client())
        collected = collect_runs(backend, PROMPTS, tmp_path, CONFIG)
        assert server.tries["say 3"] == 1, "a refusal is not asked again, in no repeat"
    assert set(collected.refused) == {"p3"}
    assert "maximum context length" in collected.refused["p3"]
    assert len(read_runs(tmp_path / "runs.parquet")) == 22
    manifest = read_manifest(tmp_path / "runs.parquet")
    assert manifest is not None
    assert "p3" in manifest["refused"]


def test_an_answer_past_the_cap_is_refused() -> None:
    with chat_server(lambda *_: completion("a", 41)) as server:
        outcome = _one(server)
    assert isinstance(outcome, Refused)
    assert "past max_tokens 40" in outcome.reason


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_address_stops_at_once(status: int) -> None:
    with chat_server(lambda *_: (status, b"no", {})) as server:
        with pytest.raises(InvalidInput, match=f"HTTP {status}: no"):
            _one(server)
        assert len(server.bodies) == 1


def test_a_redirect_is_not_followed() -> None:
    with chat_server(lambda *_: (307, b"", {"Location": "http://127.0.0.1:9/v1"})) as server:
        outcome = _one(server)
    assert isinstance(outcome, Refused)
    assert "HTTP 307" in outcome.reason


def test_another_model_is_refused_before_anything_is_asked() -> None:
    told = f"choose one of {MODEL}"
    with chat_server(_good) as server, pytest.raises(InvalidInput, match=told):
        Endpoint(server.url, "other", _client())


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "localhost:8000", "http://a:b@c/v1", "http://x:y"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidInput, match="no address of a server"):
        check_url(url)


def test_the_key_comes_from_the_environment_and_stays_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_KEY", " s3cret\n")
    assert key_headers("NOT_SET") == {}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        json.dumps({"prompt_id": "a", "benchmark": "b", "family": "f", "prompt": "say 1"}) + "\n"
    )
    with chat_server(_good) as server:
        done = CliRunner().invoke(cli, [
            "collect", "--endpoint", server.url, "--model", MODEL, "--api-key-env", "MY_KEY",
            "--prompts", str(prompts), "--repeats", "1", "--max-new-tokens", "40", "--json",
            "--out", str(tmp_path / "out"),
        ])  # fmt: skip
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["runs"] == 1
        assert server.keys == ["Bearer s3cret"]
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes()
    assert "s3cret" not in repr(_client(headers=key_headers("MY_KEY")))


def test_settings_an_endpoint_cannot_honour(tmp_path: Path) -> None:
    with chat_server(_good) as server:
        backend = Endpoint(server.url, MODEL, _client())
        for config in (CollectConfig(stop_loops=True), CollectConfig(hidden_layers=(1,))):
            with pytest.raises(InvalidInput, match="an endpoint shows no hidden states"):
                collect_runs(backend, PROMPTS, tmp_path, config)
    assert not (tmp_path / "collection.json").exists()
