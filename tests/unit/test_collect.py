"""Collection: the real decoding code on a tiny model, killed, resumed, interrupted and refused."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput
from contracts.runs import DecodeRun
from oracles.backend import DecodeSettings, Generation
from oracles.collect import CollectConfig, collect_runs, plan_batches
from oracles.generate import StaticBatches, generate_batch, greedy
from oracles.models import LoadedModel, load_model, prompt_ids, render_chat
from oracles.prompts import Prompt, read_prompts
from oracles.shards import RunShard, read_shard, run_from_json, run_to_json
from preemptbench.cli import cli
from tests.tiny_model import save_tiny_model
from traces.bundled import bundled_prompts
from traces.runlog import read_runs

PROMPTS = [Prompt(f"p{i}", "toy", "even" if i % 2 == 0 else "odd", "ab " * i) for i in range(1, 8)]
CONFIG = CollectConfig(repeats=3, max_new_tokens=40, batch_sizes=(4, 2, 1), progress_stride=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def lm(tiny: Path) -> LoadedModel:
    return load_model(str(tiny), dtype="float32", device="cpu")


def _generate(lm: LoadedModel, texts: list[str], cap: int) -> list[Generation]:
    return generate_batch(lm, [prompt_ids(lm, text) for text in texts], DecodeSettings(cap, 4))


def _collect(
    lm: LoadedModel, prompts: list[Prompt], out: Path, config: CollectConfig
) -> list[DecodeRun]:
    runs = collect_runs(StaticBatches(lm), prompts, out, config).runs
    assert runs is not None
    return runs


def _reference_ids(lm: LoadedModel, prompt: str, cap: int) -> list[int]:
    """The slow twin: one prompt alone, no cache, no padding."""
    import torch

    ids = lm.tokenizer(render_chat(lm, prompt), add_special_tokens=False)["input_ids"]
    start = len(ids)
    with torch.inference_mode():
        while len(ids) - start < cap and (len(ids) == start or ids[-1] not in lm.eos_ids):
            logits = lm.model(input_ids=torch.tensor([ids])).logits[0, -1]
            ids = [*ids, int(logits.argmax())]
    return ids[start:]


def test_batched_decoding_equals_one_prompt_at_a_time(lm: LoadedModel) -> None:
    """Left padding, leaving rows and the cache change nothing in float32."""
    texts = [prompt.prompt for prompt in PROMPTS]
    outputs = _generate(lm, texts, 40)
    lengths = set()
    for text, output in zip(texts, outputs, strict=True):
        ids = _reference_ids(lm, text, 40)
        assert output.output_tokens == len(ids)
        assert output.text == lm.tokenizer.decode(ids, skip_special_tokens=True)
        assert output.finish_reason == ("stop" if ids[-1] in lm.eos_ids else "length")
        assert len(output.progress) == len(ids) // 4
        lengths.add(len(ids))
    assert len(lengths) > 1, "a model whose rows all end together tests nothing"


def test_progress_describes_the_distribution_drawn_from(lm: LoadedModel) -> None:
    output = _generate(lm, ["ab"], 16)[0]
    for record in output.progress:
        assert 0 <= record.mean_entropy <= 6  # log of 260 tokens is 5.56 nats
        assert -record.mean_logprob <= record.mean_entropy + 3
        assert 0 <= record.repetition <= 1


def test_a_ruled_out_token_leaves_the_entropy_a_number() -> None:
    import torch

    logits = torch.tensor([[0.0, 0.0, -torch.inf], [5.0, -torch.inf, -torch.inf]])
    _, entropy, logprob = greedy(logits)
    assert entropy.tolist() == pytest.approx([math.log(2), 0.0], abs=1e-6)
    assert logprob.tolist() == pytest.approx([-math.log(2), 0.0], abs=1e-6)


def test_a_template_that_opens_the_thinking_mark_is_noticed(tiny: Path) -> None:
    lm = load_model(str(tiny), dtype="float32", device="cpu")
    assert _generate(lm, ["ab"], 8)[0].progress[0].in_thinking == 0.0
    lm.tokenizer.chat_template += "<think>"
    output = _generate(lm, ["ab"], 8)[0]
    assert output.progress[0].in_thinking == 1.0
    assert output.thinking_tokens == output.output_tokens  # the mark never closes


def test_plan_covers_each_prompt_once_a_repeat_in_other_batches() -> None:
    batches = plan_batches(PROMPTS, CONFIG)
    for repeat in range(CONFIG.repeats):
        members = [p.prompt_id for b in batches if b.repeat == repeat for p in b.prompts]
        assert sorted(members) == sorted(p.prompt_id for p in PROMPTS)
    orders = [[p.prompt_id for b in batches if b.repeat == r for p in b.prompts] for r in range(3)]
    assert orders[0] != orders[1]
    assert plan_batches(PROMPTS, CONFIG) == batches


def _key(run: DecodeRun) -> tuple[str, int]:
    return run.prompt_id, run.repeat


def _keys(runs: Sequence[DecodeRun]) -> list[tuple[str, int]]:
    return sorted((run.prompt_id, run.repeat) for run in runs)


def test_a_torn_shard_is_completed_to_the_same_set(lm: LoadedModel, tmp_path: Path) -> None:
    """Cut the shard at every kind of place a crash can leave it; a second start mends it."""
    whole = _collect(lm, PROMPTS, tmp_path / "whole", CONFIG)
    assert len(whole) == 21
    data = (tmp_path / "whole" / "shard-0.jsonl").read_bytes()
    for cut in (0, 10, len(data) // 3, len(data) // 2, len(data) - 1):
        folder = tmp_path / f"cut-{cut}"
        folder.mkdir()
        (folder / "shard-0.jsonl").write_bytes(data[:cut])
        again = _collect(lm, PROMPTS, folder, CONFIG)
        assert _keys(again) == _keys(whole)
        lengths = {(r.prompt_id, r.repeat): r.output_tokens for r in whole}
        assert all(lengths[r.prompt_id, r.repeat] == r.output_tokens for r in again)


def test_another_configuration_is_refused_not_mixed(lm: LoadedModel, tmp_path: Path) -> None:
    _collect(lm, PROMPTS[:2], tmp_path, CONFIG)
    before = (tmp_path / "shard-0.jsonl").read_bytes()
    other = CollectConfig(repeats=3, max_new_tokens=41, batch_sizes=(4, 2, 1), progress_stride=4)
    with pytest.raises(InvalidInput, match="max_new_tokens = 40"):
        _collect(lm, PROMPTS[:2], tmp_path, other)
    assert (tmp_path / "shard-0.jsonl").read_bytes() == before


def test_prompt_longer_than_the_context_is_refused(lm: LoadedModel) -> None:
    with pytest.raises(InvalidInput, match="context of"):
        _generate(lm, ["x" * 600], 40)


def test_shard_round_trip(lm: LoadedModel, tmp_path: Path) -> None:
    runs = _collect(lm, PROMPTS[:2], tmp_path, CONFIG)
    assert [run_from_json(run_to_json(run), "here") for run in runs] == runs
    with RunShard(tmp_path / "shard-0.jsonl") as shard:
        with pytest.raises(InvalidInput, match="being written by another process"):
            RunShard(shard.path)
        shard.append(runs)  # known keys are skipped
    assert sorted(read_shard(shard.path), key=_key) == sorted(runs, key=_key)
    with pytest.raises(InvalidInput, match="not a decode run"):
        run_from_json('{"run_id": 1}', "shard line 1")


def _collect_command(model: Path, out: Path) -> list[str]:
    return [
        sys.executable, "-m", "preemptbench", "collect", "--model", str(model), "--dtype",
        "float32", "--limit", "12", "--repeats", "3", "--max-new-tokens", "64",
        "--batch-sizes", "2,1", "--out", str(out),
    ]  # fmt: skip


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_command_loses_nothing_and_goes_on(tiny: Path, tmp_path: Path, how: int) -> None:
    """Kill the real command in the middle (Ctrl-C, kill -9), start it again, get every run once."""
    command, shard = _collect_command(tiny, tmp_path), tmp_path / "shard-0.jsonl"
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # a shell that runs the suite in the background ignores SIGINT, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    limit = time.monotonic() + 120
    while not (shard.exists() and shard.stat().st_size) and process.poll() is None:
        assert time.monotonic() < limit, "the first batch never came"
        time.sleep(0.01)
    process.send_signal(how)
    _, talk = process.communicate(timeout=60)
    survived = len(list(read_shard(shard)))
    assert 0 < survived < 36
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "run the same command again to go on" in talk
        assert "Traceback" not in talk
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    runs = list(read_runs(tmp_path / "runs.parquet"))
    assert len(_keys(runs)) == len(set(_keys(runs))) == 36
    assert json.loads((tmp_path / "collection.json").read_text())["repeats"] == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ('{"prompt_id": "a"}', "field 'benchmark' is None"),
        ('{"prompt_id": "a", "benchmark": "b", "family": "f", "prompt": " "}', "field 'prompt'"),
        ("", "holds no prompt"),
    ],
)
def test_bad_prompt_sets_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InvalidInput, match=message):
        read_prompts(path)


def test_bundled_prompts_are_many_and_in_many_families() -> None:
    prompts = read_prompts(bundled_prompts())
    assert len(prompts) >= 100
    assert len({prompt.family for prompt in prompts}) >= 10
    assert len({prompt.prompt for prompt in prompts}) == len(prompts)


def test_wrong_options_are_one_message(tiny: Path, tmp_path: Path) -> None:
    for options in (["--batch-sizes", "a"], ["--repeats", "0"], ["--dtype", "int3"]):
        done = CliRunner().invoke(
            cli, ["collect", "--model", str(tiny), "--out", str(tmp_path), *options]
        )
        assert done.exit_code != 0
        assert options[1] in f"{done.output} {done.exception}"


@pytest.mark.model
def test_smollm2_loads_from_its_package_and_answers() -> None:
    lm = load_model("bundled:smollm2-135m-instruct", dtype="bfloat16", device="cpu")
    outputs = _generate(lm, ["What is 2 + 2? Answer with the number only."], 24)
    assert outputs[0].finish_reason in ("stop", "length")
    assert any(ch.isdigit() for ch in outputs[0].text)
