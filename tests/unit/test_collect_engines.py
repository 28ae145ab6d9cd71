"""Engines agree: continuous batching, static batches and what each keeps beside the lengths."""

from __future__ import annotations

import sys
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.errors import CollectionStopped, InvalidInput, MissingDependency
from oracles.backend import DecodeSettings, Generation
from oracles.backends import EngineChoice, open_backend
from oracles.collect import CollectConfig, collect_runs
from oracles.continuous import ContinuousBatches, logits_tap, read_back, why_not_continuous
from oracles.generate import StaticBatches, generate_batch
from oracles.hidden import hidden_bytes_at_most, read_hidden
from oracles.models import LoadedModel, check_layers, load_model, prompt_ids
from oracles.offline_vllm import OfflineVllm
from oracles.prompts import Prompt
from tests.tiny_model import save_tiny_model
from traces.validate import validate_runs

TEXTS = ["ab " * i for i in range(1, 8)]
PROMPTS = [Prompt(f"p{i}", "toy", "toy", text) for i, text in enumerate(TEXTS)]
SETTINGS = DecodeSettings(40, 4, hidden_layers=(0, 2))
KV_BLOCKS = 64  # without a bound, continuous batching fills the memory of the machine


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    return load_model(str(folder), dtype="float32", device="cpu")


def _run(backend: Any, settings: DecodeSettings = SETTINGS, size: int = 4) -> list[Generation]:
    outcomes = dict(backend.run(TEXTS, size, settings))
    assert sorted(outcomes) == list(range(len(TEXTS)))
    return [outcomes[i] for i in range(len(TEXTS))]


def test_continuous_batching_equals_static_batches(lm: LoadedModel) -> None:
    """In float32 the tokens are the same; signals read back in one pass differ by the order of
    additions only (float32 rounding, and float16 storage for states of size up to 4)."""
    assert why_not_continuous(lm) is None
    static, flowing = _run(StaticBatches(lm)), _run(ContinuousBatches(lm, KV_BLOCKS))
    for one, other in zip(static, flowing, strict=True):
        assert (one.text, one.output_tokens) == (other.text, other.output_tokens)
        assert (one.finish_reason, one.prompt_tokens) == (other.finish_reason, other.prompt_tokens)
        assert one.progress is not None
        assert other.progress is not None
        assert np.allclose(np.array(one.progress), np.array(other.progress), rtol=0, atol=1e-4)
        assert one.hidden is not None
        assert other.hidden is not None
        assert one.hidden.shape == (one.output_tokens // 4, 2, lm.hidden_size)
        assert np.allclose(one.hidden, other.hidden, rtol=0, atol=5e-3)
    assert {run.concurrency for run in static} == {3, 4}
    assert [run.concurrency for run in flowing] == [1, 2, 3, 4, 4, 4, 4]


def test_signals_are_taken_from_the_batch_itself(
    lm: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hidden states nothing is read twice. The numbers are float32's of both engines, which
    add in another order (1e-4); rows join and leave, so each must be told from its neighbours."""

    def never(*_: object) -> None:
        raise AssertionError("read back, although the batch had been watched")

    monkeypatch.setattr("oracles.continuous.read_back", never)
    settings = DecodeSettings(40, 4)
    static = _run(StaticBatches(lm), settings)
    for size in (1, 3, 7):
        for one, other in zip(
            static, _run(ContinuousBatches(lm, KV_BLOCKS), settings, size), strict=True
        ):
            assert one.text == other.text
            assert one.progress is not None
            assert other.progress is not None
            assert np.allclose(np.array(one.progress), np.array(other.progress), rtol=0, atol=1e-4)
    assert len({np.array(run.progress).tobytes() for run in static}) == len(TEXTS)


def test_a_tap_that_missed_a_token_has_the_run_read_back(
    lm: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = _run(ContinuousBatches(lm, KV_BLOCKS), DecodeSettings(40, 4))

    def forgetful(size: int, device: Any) -> Any:
        tap = logits_tap(size, device)
        whole = tap.take
        tap.take = lambda name: tuple(part[:-1] for part in whole(name))
        return tap

    monkeypatch.setattr("oracles.continuous.logits_tap", forgetful)
    again = _run(ContinuousBatches(lm, KV_BLOCKS), DecodeSettings(40, 4))
    for one, other in zip(watched, again, strict=True):
        assert np.allclose(np.array(one.progress), np.array(other.progress), rtol=0, atol=1e-4)


def test_hidden_states_have_read_what_came_before_and_no_more(lm: LoadedModel) -> None:
    """Row j equals the state of a plain forward pass that ends before token (j + 1) * stride."""
    import torch

    prompt = prompt_ids(lm, TEXTS[0])
    watched = generate_batch(lm, [prompt], SETTINGS)[0]
    tokens: list[int] = []
    with torch.inference_mode():
        for count in range(1, watched.output_tokens + 1):
            ids = torch.tensor([prompt + tokens])
            out = lm.model(input_ids=ids, output_hidden_states=True)
            if count % 4 == 0:
                for place, layer in enumerate((0, 2)):
                    state = out.hidden_states[layer][0, -1].numpy()
                    assert watched.hidden is not None
                    assert np.allclose(watched.hidden[count // 4 - 1, place], state, atol=5e-3)
            tokens.append(int(out.logits[0, -1].argmax()))


def test_read_back_in_chunks_equals_one_piece(
    lm: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_ids(lm, TEXTS[6])
    tokens = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    whole = read_back(lm, prompt, tokens, SETTINGS)
    monkeypatch.setattr("oracles.continuous._CHUNK_TOKENS", 5)
    pieces = read_back(lm, prompt, tokens, SETTINGS)
    for one, other in zip(whole, pieces, strict=True):
        assert one.shape == other.shape
        assert np.allclose(one, other, atol=5e-3)
    assert len(whole.entropy) == 9
    assert whole.hidden.shape == (2, 2, lm.hidden_size)


def test_a_collection_by_continuous_batching_says_so(lm: LoadedModel, tmp_path: Path) -> None:
    config = CollectConfig(repeats=2, max_new_tokens=40, batch_sizes=(4, 2), hidden_layers=(1,))
    runs = collect_runs(ContinuousBatches(lm, KV_BLOCKS), PROMPTS, tmp_path, config).runs
    assert runs is not None
    assert len(runs) == 14
    assert {run.engine for run in runs} == {"transformers-continuous"}
    assert {run.kernel for run in runs} == {"paged|sdpa"}
    validate_runs(tmp_path / "runs.parquet")
    for run in runs:
        assert run.hidden_ref is not None
        states = read_hidden(tmp_path, run.hidden_ref)
        assert states.shape == (run.output_tokens // 8, 1, lm.hidden_size)
        assert states.dtype == np.float16


def test_a_dead_loop_is_told(lm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no more blocks")

    backend = ContinuousBatches(lm, KV_BLOCKS)
    monkeypatch.setattr(type(lm.model), "forward", fail)
    with pytest.raises(CollectionStopped, match="no more blocks"):
        _run(backend)


def test_an_error_outside_the_engine_stops_its_thread(
    lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk under the hidden states must not leave a loop that keeps the process alive."""

    def full(*_: object) -> str:
        raise CollectionStopped("disk full")

    before = set(threading.enumerate())
    monkeypatch.setattr("oracles.collect.save_hidden", full)
    config = CollectConfig(repeats=1, max_new_tokens=40, batch_sizes=(4,), hidden_layers=(1,))
    with pytest.raises(CollectionStopped, match="disk full") as caught:
        collect_runs(ContinuousBatches(lm, KV_BLOCKS), PROMPTS, tmp_path, config)
    assert caught.tb is not None, "the frames are still held, and no thread is"
    assert set(threading.enumerate()) == before


def test_the_choice_of_an_engine(lm: LoadedModel) -> None:
    said: list[str] = []
    choice = EngineChoice(model=lm.name, dtype="float32", device="cpu", kv_blocks=KV_BLOCKS)
    for engine, kind in (("auto", StaticBatches), ("static", StaticBatches),
                         ("continuous", ContinuousBatches)):  # fmt: skip
        backend, loaded = open_backend(replace(choice, engine=engine), said.append)
        assert isinstance(backend, kind)
        assert loaded is not None
    assert said == []


def test_without_progress_lengths_stay_and_signals_go(lm: LoadedModel) -> None:
    plain = DecodeSettings(40, 0)
    for backend in (StaticBatches(lm), ContinuousBatches(lm, KV_BLOCKS)):
        for one, other in zip(_run(backend), _run(backend, plain), strict=True):
            assert other.progress is None
            assert other.hidden is None
            assert one == replace(
                other, progress=one.progress, wall_s=one.wall_s,
                concurrency=one.concurrency, hidden=one.hidden,
            )  # fmt: skip


def test_loops_are_recorded_and_stopped_early_only_when_asked(tmp_path: Path) -> None:
    """A model whose weights are small sticks to one token: the purest loop."""
    import torch

    lm = load_model(str(save_tiny_model(tmp_path / "m")), dtype="float32", device="cpu")
    with torch.no_grad():
        for weight in lm.model.model.layers.parameters():
            weight.zero_()  # no layer acts: each token has one successor, for ever
    found = {}
    for stop in (False, True):
        config = CollectConfig(
            repeats=1, max_new_tokens=300, batch_sizes=(8,), stop_loops=stop, progress_stride=8
        )
        out = tmp_path / str(stop)
        runs = collect_runs(StaticBatches(lm), PROMPTS, out, config).runs
        assert runs is not None
        validate_runs(out / "runs.parquet")
        found[stop] = [run for run in runs if run.finish_reason == "loop"]
        assert found[stop], "nothing looped: the test tests nothing"
        assert all(run.event_observed is False for run in found[stop])
    assert {run.output_tokens for run in found[False]} == {300}
    assert all(run.output_tokens < 300 for run in found[True])


def test_hidden_size_is_an_upper_bound(lm: LoadedModel) -> None:
    generations = _run(StaticBatches(lm))
    written = sum(run.hidden.nbytes for run in generations if run.hidden is not None)
    assert 0 < written <= hidden_bytes_at_most(lm, len(TEXTS), SETTINGS) == 7 * 10 * 2 * 32 * 2


def test_layers_are_counted_from_either_end() -> None:
    assert check_layers((0, -1, 2), 2) == (0, 2, 2)
    for wrong in (3, -4):
        with pytest.raises(InvalidInput, match=f"hidden layer {wrong} does not exist"):
            check_layers((wrong,), 2)


@pytest.mark.parametrize("ref", ["../x.safetensors", "/etc/passwd", "hidden/aa/none.safetensors"])
def test_a_reference_out_of_the_folder_is_refused(ref: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="names no file inside"):
        read_hidden(tmp_path, ref)


def test_engines_that_cannot(lm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="cannot stop loops"):
        ContinuousBatches(lm).check(DecodeSettings(40, stop_loops=True))
    odd = replace(lm, kernel="flex_attention")
    assert "flex_attention" in str(why_not_continuous(odd))
    with pytest.raises(InvalidInput, match="take --engine static"):
        ContinuousBatches(odd)
    with pytest.raises(InvalidInput, match="did you mean 'static'"):
        open_backend(EngineChoice(engine="statik"))
    with pytest.raises(InvalidInput, match="needs --model"):
        open_backend(EngineChoice(endpoint="http://127.0.0.1:9/v1"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingDependency, match="collect --engine vllm"):
        open_backend(EngineChoice(model="some/model", engine="vllm"))


def _stand_in_vllm(lm: LoadedModel) -> types.ModuleType:
    """The part of vllm that is called, answered by the static backend."""

    class SamplingParams:
        def __init__(self, *, temperature: float, max_tokens: int, seed: int) -> None:
            assert temperature == 0.0
            self.max_tokens = max_tokens

    class LLM:
        def __init__(self, **options: Any) -> None:
            assert options["max_num_seqs"] == 4
            config = types.SimpleNamespace(max_model_len=512)
            self.llm_engine = types.SimpleNamespace(model_config=config)

        def get_tokenizer(self) -> Any:
            return lm.tokenizer

        def generate(self, prompts: list[Any], how: Any, use_tqdm: bool) -> list[Any]:
            rows = [prompt["prompt_token_ids"] for prompt in prompts]
            answers = []
            for row, run in zip(
                rows, generate_batch(lm, rows, DecodeSettings(how.max_tokens, 0)), strict=True
            ):
                output = types.SimpleNamespace(
                    token_ids=list(range(run.output_tokens)), text=run.text,
                    finish_reason=run.finish_reason,
                )  # fmt: skip
                answers.append(types.SimpleNamespace(prompt_token_ids=row, outputs=[output]))
            return answers

    module = types.ModuleType("vllm")
    platform = types.SimpleNamespace(get_device_name=lambda: "stand-in")
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    module.__version__ = "0"  # type: ignore[attr-defined]
    module.platforms = types.SimpleNamespace(current_platform=platform)  # type: ignore[attr-defined]
    return module


def test_vllm_calls_and_mapping_against_a_stand_in(
    lm: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", _stand_in_vllm(lm))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    backend = OfflineVllm("some/model", size=4)
    config = CollectConfig(repeats=2, max_new_tokens=40, batch_sizes=(4, 2))
    long = Prompt("long", "toy", "toy", "x" * 600)
    collected = collect_runs(backend, [*PROMPTS, long], tmp_path, config)
    assert "context is 512" in collected.refused["long"]
    assert collected.runs is not None
    validate_runs(tmp_path / "runs.parquet")
    alone = {
        text: run.output_tokens for text, run in zip(TEXTS, _run(StaticBatches(lm)), strict=True)
    }
    for run in collected.runs:
        assert run.output_tokens == alone[str(run.prompt)]
        assert (run.engine, run.batch_invariant, run.device) == ("vllm", True, "stand-in")
