"""Collections that meet trouble: killed anywhere, disk full, out of memory, several processes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from click.testing import CliRunner

from contracts.errors import CollectionStopped, InvalidInput
from contracts.runs import DecodeRun
from oracles.backend import DecodeSettings, EngineFacts, Generation, Refused
from oracles.collect import CollectConfig, collect_runs
from oracles.folder import Rank, keys_done, merge, merged_runs, rank_from_environment
from oracles.generate import StaticBatches
from oracles.models import LoadedModel, load_model, prompt_ids
from oracles.prompts import Prompt
from oracles.shards import read_shard
from preemptbench.cli import cli
from tests.tiny_model import save_tiny_model
from traces.runlog import read_runs
from traces.tables import read_manifest

PROMPTS = [Prompt(f"p{i}", "toy", "toy", "ab " * i) for i in range(1, 11)]
CONFIG = CollectConfig(repeats=3, max_new_tokens=24, batch_sizes=(4, 2, 1), progress_stride=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def lm(tiny: Path) -> LoadedModel:
    return load_model(str(tiny), dtype="float32", device="cpu")


def _essence(runs: Sequence[DecodeRun]) -> list[tuple[str, int, int, str | None]]:
    return sorted((run.prompt_id, run.repeat, run.output_tokens, run.text) for run in runs)


# --- kill -9 ------------------------------------------------------------------------------------

_PRELOAD = ["torch", "transformers.models.llama.modeling_llama", "transformers.generation.utils"]


def _collect_in_child(model: Path, out: Path, ready: Connection) -> None:
    backend = StaticBatches(load_model(str(model), dtype="float32", device="cpu"))
    ready.send("ready")
    collect_runs(backend, PROMPTS, out, CONFIG)


def test_kill_9_at_random_moments_ends_in_the_same_set(
    tiny: Path, lm: LoadedModel, tmp_path: Path
) -> None:
    """Kill real processes until one comes through; no start loses what an earlier one had."""
    whole = collect_runs(StaticBatches(lm), PROMPTS, tmp_path / "whole", CONFIG).runs
    assert whole is not None
    processes = multiprocessing.get_context("forkserver")  # one start of torch for all children
    processes.set_forkserver_preload(_PRELOAD)
    out, rng, kills, before = tmp_path / "killed", random.Random(5), 0, 0
    while not (out / "runs.parquet").exists():
        here, there = processes.Pipe(duplex=False)
        child = processes.Process(target=_collect_in_child, args=(tiny, out, there))
        child.start()
        assert here.recv() == "ready"
        child.join(timeout=rng.uniform(0.01, 0.12) * (1 + kills))
        kills += child.is_alive()
        child.kill()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        held = len(keys_done(out)) if out.exists() else 0
        assert held >= before
        before = held
    assert kills, "no process was killed: the test tested nothing"
    assert _essence(list(read_runs(out / "runs.parquet"))) == _essence(whole)


# --- disk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("room_bytes", [0, 1, 700, 5000])
def test_a_full_disk_stops_cleanly_and_goes_on_later(
    lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    """The disk takes some bytes, then none, as a full one does: half a line may get through."""
    real_write, left = os.write, room_bytes

    def write(descriptor: int, data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real_write(descriptor, bytes(data)[:left])
        left -= written
        return written

    with monkeypatch.context() as patched:
        patched.setattr("oracles.shards.os.write", write)
        with pytest.raises(CollectionStopped, match=r"No space left.*make room"):
            collect_runs(StaticBatches(lm), PROMPTS, tmp_path, CONFIG)
    shard = tmp_path / "shard-0.jsonl"
    assert shard.read_bytes() == b"" or shard.read_bytes().endswith(b"\n")
    held = len(list(read_shard(shard)))
    assert held % 4 == 0, "a batch is there as a whole, or not"
    runs = collect_runs(StaticBatches(lm), PROMPTS, tmp_path, CONFIG).runs
    assert runs is not None
    assert len(_essence(runs)) == 30


def test_a_full_disk_under_hidden_states(
    lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CollectConfig(
        repeats=1, max_new_tokens=24, batch_sizes=(4,), progress_stride=4, hidden_layers=(1,)
    )

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("contracts.files.os.replace", full)
        (tmp_path / "collection.json").unlink(missing_ok=True)
        patched.setattr("oracles.collect.claim_folder", lambda *_: tmp_path.mkdir(exist_ok=True))
        with pytest.raises(CollectionStopped, match=r"hidden.*No space left"):
            collect_runs(StaticBatches(lm), PROMPTS, tmp_path, config)
    assert not list(tmp_path.rglob("*.tmp"))
    runs = collect_runs(StaticBatches(lm), PROMPTS, tmp_path, config).runs
    assert runs is not None
    assert all(run.hidden_ref and (tmp_path / run.hidden_ref).is_file() for run in runs)


# --- memory -------------------------------------------------------------------------------------


def _out_of_memory() -> list[Exception]:
    import torch

    return [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"
        ),
        MemoryError(),
    ]


@pytest.mark.parametrize("which", range(3))
def test_out_of_memory_halves_the_batch_and_goes_on(
    lm: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: int
) -> None:
    import oracles.generate

    whole = collect_runs(StaticBatches(lm), PROMPTS, tmp_path / "whole", CONFIG).runs
    real, tried, said = oracles.generate.generate_batch, [], []

    def tight(
        model: LoadedModel, rows: Sequence[list[int]], settings: DecodeSettings
    ) -> list[Generation]:
        tried.append(len(rows))
        if len(rows) > 2:
            raise _out_of_memory()[which]
        return real(model, rows, settings)

    monkeypatch.setattr("oracles.generate.generate_batch", tight)
    backend = StaticBatches(lm, said.append)
    runs = collect_runs(backend, PROMPTS, tmp_path / "tight", CONFIG).runs
    assert runs is not None
    assert whole is not None
    assert _essence(runs) == _essence(whole)
    assert tried.count(4) == 1, "once is enough to learn it"
    assert said == ["out of memory with 4 rows: going on with 2"]
    first = [run for run in runs if run.repeat == 0]
    assert {(run.batch_size, run.concurrency) for run in first} == {(4, 2)}


def test_out_of_memory_with_one_row_is_the_end(
    lm: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(*_: object) -> list[Generation]:
        raise _out_of_memory()[0]

    monkeypatch.setattr("oracles.generate.generate_batch", none)
    with pytest.raises(CollectionStopped, match="out of memory with one prompt of"):
        collect_runs(StaticBatches(lm), PROMPTS, tmp_path, CONFIG)


def test_another_error_is_not_taken_for_memory(
    lm: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> list[Generation]:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("oracles.generate.generate_batch", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        collect_runs(StaticBatches(lm), PROMPTS, tmp_path, CONFIG)


# --- prompts and templates ----------------------------------------------------------------------


def test_prompts_beyond_the_context_are_left_out_and_named(lm: LoadedModel, tmp_path: Path) -> None:
    prompts = [*PROMPTS, Prompt("long", "toy", "toy", "x" * 600)]
    collected = collect_runs(StaticBatches(lm), prompts, tmp_path, CONFIG)
    assert "the context of" in collected.refused["long"]
    assert collected.runs is not None
    assert len(collected.runs) == 30
    manifest = read_manifest(tmp_path / "runs.parquet")
    assert manifest is not None
    assert list(manifest["refused"]) == ["long"]
    with pytest.raises(InvalidInput, match="holds no run to merge: prompt and cap need"):
        collect_runs(StaticBatches(lm), prompts[-1:], tmp_path / "only", CONFIG)


def test_a_tokenizer_without_a_template_sends_prompts_bare(tiny: Path, tmp_path: Path) -> None:
    lm = load_model(str(tiny), dtype="float32", device="cpu")
    lm.tokenizer.chat_template = None
    assert lm.tokenizer.decode(prompt_ids(lm, "ab ab")) == "ab ab"
    runs = collect_runs(StaticBatches(lm), PROMPTS, tmp_path, CONFIG).runs
    assert runs is not None
    lm.tokenizer.chat_template = "{{ raise_exception('only with a system message') }}"
    with pytest.raises(InvalidInput, match=r"refuses one user message \(only with a system"):
        prompt_ids(lm, "ab")


def test_hidden_states_above_the_limit_need_a_word(tiny: Path, tmp_path: Path) -> None:
    command = [
        "collect", "--model", str(tiny), "--dtype", "float32", "--device", "cpu", "--limit", "3",
        "--repeats", "1", "--max-new-tokens", "16", "--hidden-layers", "1,-1", "--out",
        str(tmp_path / "out"), "--json",
    ]  # fmt: skip
    refused = CliRunner().invoke(cli, [*command, "--hidden-max-gb", "1e-9"])
    assert isinstance(refused.exception, InvalidInput)
    assert "raise --hidden-max-gb" in str(refused.exception)
    assert "hidden states: at most 7.68e-07 GB" in refused.stderr  # 3 x 2 x 2 x 32 x 2 bytes
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["runs"] == 3


# --- repeats and ranks --------------------------------------------------------------------------


class _Echo:
    """A backend that answers with the length of the prompt, and counts what it was asked."""

    flows = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.facts = EngineFacts("m", "r", "t", "c", "echo", "1", "k", True, "d", "here")

    def check(self, settings: DecodeSettings) -> None:
        pass

    def refuses(self, prompt: str, max_new_tokens: int) -> str | None:
        return None

    def run(
        self, prompts: Sequence[str], size: int, settings: DecodeSettings
    ) -> Iterator[tuple[int, Generation | Refused]]:
        for index, prompt in enumerate(prompts):
            self.asked.append(prompt)
            yield index, Generation(1, len(prompt), None, "stop", prompt, 0.1, 1)


MANY = [Prompt(f"q{i:03d}", "toy", "toy", "z" * (i + 1)) for i in range(40)]
ECHO = CollectConfig(repeats=2, max_new_tokens=50, batch_sizes=(4,), progress_stride=0)


def test_more_repeats_extend_and_fewer_are_refused(tmp_path: Path) -> None:
    collect_runs(_Echo(), MANY, tmp_path, ECHO)
    more = CollectConfig(repeats=3, max_new_tokens=50, batch_sizes=(4,), progress_stride=0)
    echo = _Echo()
    runs = collect_runs(echo, MANY, tmp_path, more).runs
    assert runs is not None
    assert (len(runs), len(echo.asked)) == (120, 40)
    with pytest.raises(InvalidInput, match="repeats = 3; this one has 2"):
        collect_runs(_Echo(), MANY, tmp_path, ECHO)


def test_ranks_share_by_hash_and_the_last_one_merges(tmp_path: Path) -> None:
    whole = collect_runs(_Echo(), MANY, tmp_path / "one", ECHO).runs
    shares = []
    for rank in (2, 0, 1):
        echo = _Echo()
        collected = collect_runs(echo, MANY, tmp_path / "three", ECHO, rank=Rank(rank, 3))
        shares.append(set(echo.asked))
        assert (collected.runs is None) == (rank != 1)
    assert collected.runs == whole, "the merged order does not depend on the ranks"
    assert sum(map(len, shares)) == len(set().union(*shares)) == 40
    assert all(share for share in shares)
    one, three = (tmp_path / name / "runs.parquet" for name in ("one", "three"))
    assert one.read_bytes() == three.read_bytes()


def test_another_number_of_ranks_takes_over_what_is_there(tmp_path: Path) -> None:
    collect_runs(_Echo(), MANY, tmp_path, ECHO, rank=Rank(0, 3))  # ranks 1 and 2 never ran
    shard = tmp_path / "shard-0.jsonl"
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])  # and rank 0 was killed in a write
    held = len(keys_done(tmp_path))
    echoes = [_Echo(), _Echo()]
    for rank, echo in enumerate(echoes):
        collected = collect_runs(echo, MANY, tmp_path, ECHO, rank=Rank(rank, 2))
    assert collected.runs is not None
    assert len(collected.runs) == 80
    assert sum(len(echo.asked) for echo in echoes) == 80 - held


def test_ranks_that_finish_at_once_merge_at_least_once(tmp_path: Path) -> None:
    merged: list[bool] = []

    def work(rank: int) -> None:
        done = collect_runs(_Echo(), MANY, tmp_path, ECHO, rank=Rank(rank, 4))
        merged.append(done.runs is not None)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(merged) == [False, False, False, True]
    assert len(read_runs(tmp_path / "runs.parquet")) == 80


def test_merge_by_hand(tmp_path: Path) -> None:
    collect_runs(_Echo(), MANY, tmp_path / "out", ECHO, rank=Rank(0, 2))
    runs = merge(tmp_path / "out")
    assert runs == merged_runs(tmp_path / "out")
    assert 0 < len(runs) < 80
    done = CliRunner().invoke(cli, ["collect", "--merge", "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["runs"] == len(runs)
    with pytest.raises(InvalidInput, match="holds no run to merge"):
        merge(tmp_path)


@pytest.mark.parametrize("words", [("2", "2"), ("-1", "2"), ("a", "2"), ("0", "")])
def test_ranks_that_make_no_sense(words: tuple[str, str]) -> None:
    with pytest.raises(InvalidInput, match=r"rank|RANK"):
        rank_from_environment({"RANK": words[0], "WORLD_SIZE": words[1]})
    assert rank_from_environment({}) == Rank(0, 1)


@pytest.mark.parametrize("launcher", ["torch.distributed.run", "accelerate.commands.launch"])
def test_two_processes_of_a_launcher(tiny: Path, tmp_path: Path, launcher: str) -> None:
    """torchrun and accelerate launch, two real CPU processes, one merged log."""
    pytest.importorskip("accelerate", reason="the extra 'collect' is not installed")
    how = {
        "torch.distributed.run": ["--standalone", "--nproc-per-node", "2"],
        "accelerate.commands.launch": [
            "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
            "--dynamo_backend", "no", "--main_process_port", "0",
        ],
    }[launcher]  # fmt: skip
    done = subprocess.run(
        [
            sys.executable, "-m", launcher, *how, "-m", "preemptbench", "collect", "--model",
            str(tiny), "--dtype", "float32", "--limit", "12", "--repeats", "2",
            "--max-new-tokens", "16", "--batch-sizes", "4,2", "--out", str(tmp_path), "--json",
        ],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "shard-1.jsonl").exists(), "one process only"
    assert len(read_runs(tmp_path / "runs.parquet")) == 24
    facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [fact["runs"] for fact in facts] == [24]
    assert "the last rank to finish merges" in done.stderr
