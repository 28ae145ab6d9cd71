"""Steps of transformers' continuous batching on the CPU, and of vLLM as far as a stand-in goes."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from contracts.errors import InvalidInput, MissingDependency
from preemptbench.cli import cli
from serving_sim.calibration import paged
from serving_sim.calibration.backends import open_bench
from serving_sim.calibration.bench_config import BenchConfig
from serving_sim.calibration.capacity import ModelFacts
from serving_sim.calibration.paged import PagedBench, pages
from serving_sim.calibration.steps import StepDoesNotFit, StepShape
from serving_sim.calibration.timing import TimingRules
from serving_sim.calibration.vllm_bench import EngineTimer, VllmBench
from serving_sim.profile import load_profile
from serving_sim.surface import SurfaceProfile

RULES = TimingRules(warm_ups=2, min_timed=3, max_timed=9)
FACTS = ModelFacts("Llama", "float32", 2, 4, 2, 16, 64, 128, 256, 4096, 427_264, 4)

# transformers' continuous batching


@pytest.fixture(scope="module")
def bench() -> PagedBench:
    pytest.importorskip("torch")
    pytest.importorskip("transformers.generation.continuous_batching.model_runner")
    config = BenchConfig(
        model="tiny-llama", backend="paged", dtype="float32", device="cpu", rules=RULES
    )
    found = open_bench(config, [StepShape(32, 300), StepShape(0, 0, 4, 64)])
    assert isinstance(found, PagedBench)
    return found


def test_a_paged_prefill_chooses_the_tokens_of_the_whole_sequence(bench: PagedBench) -> None:
    """Eight chunks: were the step no forward pass of this model, one in 256 would agree."""
    import torch

    batch = bench._processor.inputs_and_outputs
    for chunk in range(5, 13):
        bench._step(StepShape(chunk, 0))()
        ids = batch.input_ids[:chunk].long()[None]
        chosen = int(batch.output_ids[0, 0])
        with torch.no_grad():
            bench._model.set_attn_implementation("eager")
            logits = bench._model(input_ids=ids, use_cache=False).logits[0, -1]
            bench._model.set_attn_implementation("sdpa")
        assert chosen == int(logits.argmax())


def test_the_librarys_batch_has_the_composition_that_was_asked_for(bench: PagedBench) -> None:
    batch = bench._processor.inputs_and_outputs
    for shape, queries, contexts in (
        (StepShape(0, 0, 3, 20), [1, 1, 1], [20, 20, 20]),
        (StepShape(0, 0, 3, 20, 500), [1, 1, 1], [20, 20, 500]),
        (StepShape(6, 300), [6], [306]),
        (StepShape(6, 10, 2, 33), [1, 1, 6], [33, 33, 16]),
    ):
        bench._step(shape)()
        ends = [0, *batch.cumulative_seqlens_q[1 : len(queries) + 1].tolist()]
        assert [b - a for a, b in itertools.pairwise(ends)] == queries
        totals = [0, *batch.cumulative_seqlens_k["full_attention"][1 : len(queries) + 1].tolist()]
        assert [b - a for a, b in itertools.pairwise(totals)] == contexts
        places = [at for q, k in zip(queries, contexts, strict=True) for at in range(k - q, k)]
        assert batch.position_ids[: sum(queries)].tolist() == places


def test_a_paged_step_reads_the_pages_of_its_context(bench: PagedBench) -> None:
    """The same token at the same place after another context: the logits differ."""
    import torch

    seen: list[Any] = []
    hook = bench._model.lm_head.register_forward_hook(lambda *call: seen.append(call[2].clone()))
    try:
        run = bench._step(StepShape(0, 0, 1, 40))
        run()
        run()
        bench._processor.cache.cache_tensor.view(torch.float32).normal_()
        run()
    finally:
        hook.remove()
    torch.testing.assert_close(seen[0], seen[1], rtol=0.0, atol=0.0)
    assert float((seen[0] - seen[2]).abs().max()) > 1e-3


def test_a_step_with_more_pages_than_there_are_does_not_fit(bench: PagedBench) -> None:
    assert pages(StepShape(0, 0, 4, 257)) == 8
    assert bench.room_tokens == 4 * 256
    with pytest.raises(StepDoesNotFit, match="8 pages of 256 tokens; there is room for 4"):
        bench.time(StepShape(0, 0, 4, 257))
    assert bench.time(StepShape(0, 0, 4, 256)).seconds > 0.0


def test_the_paged_kernel_and_backend_are_named(bench: PagedBench) -> None:
    assert bench.kernel == "paged sdpa auto, pages of 256 tokens, eager"
    assert bench.identity["backend"] == "paged"
    assert bench.identity["timer"] == "time.perf_counter"


def test_a_paged_calibration_ends_in_a_profile_with_a_skew_share(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers.generation.continuous_batching.model_runner")
    out = tmp_path / "p.json"
    result = CliRunner().invoke(
        cli,
        ["calibrate", "--model", "tiny-llama", "--backend", "paged", "--device", "cpu", "--dtype",
         "float32", "--max-timed", "3", "--target-error", "0.99", "--max-batch", "4",
         "--max-context", "64", "--max-chunk", "32", "--json", "--out", str(out)],
    )  # fmt: skip
    assert result.exception is None, result.output
    profile, facts = load_profile(out), json.loads(result.stdout)
    assert isinstance(profile, SurfaceProfile)
    assert "transformers' continuous batching" in profile.header.source
    assert profile.header.kernel == "paged sdpa auto, pages of 256 tokens, eager"
    assert facts["skew_share"] == profile.skew_share
    assert sum("longest" in line for line in (tmp_path / "p.jsonl").open()) > 0


def test_without_continuous_batching_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    config = BenchConfig(model="tiny-llama", backend="paged", dtype="float32", device="cpu")
    monkeypatch.setitem(sys.modules, "transformers.generation.continuous_batching", None)
    with pytest.raises(InvalidInput, match=r"no continuous batching .* take transformers 5\.24"):
        open_bench(config, [StepShape(0, 0, 1, 16)])


def test_flash_that_is_not_installed_is_refused() -> None:
    pytest.importorskip("torch")
    config = BenchConfig(model="tiny-llama", backend="paged", attention="flash", device="cpu")
    with pytest.raises(InvalidInput, match="needs the package flash-attn"):
        paged._implementation(config, "cpu")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown backend 'pages': did you mean 'paged'"):
        BenchConfig(model="x", backend="pages")


# vLLM, by a stand-in that schedules as vLLM does: running requests first, prompts in chunks


@dataclass
class FakeRequest:
    request_id: str
    prompt_tokens: int
    computed: int = 0
    generated: int = 0


@dataclass
class FakeEngine:
    """Notes (tokens, context after the step) of each request of each step."""

    max_num_scheduled_tokens: int = 32
    drops_outputs: bool = False
    requests: dict[str, FakeRequest] = field(default_factory=dict)
    steps: list[list[tuple[int, int]]] = field(default_factory=list)

    def add_request(self, request_id: str, prompt: dict[str, list[int]], sampling: object) -> None:
        if len(prompt["prompt_token_ids"]) > 4096:
            raise ValueError("prompt is longer than the maximum model length")
        self.requests[request_id] = FakeRequest(request_id, len(prompt["prompt_token_ids"]))

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.requests[request_id]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[FakeRequest]:
        budget, outputs, taken = self.max_num_scheduled_tokens, [], []
        for request in self.requests.values():
            known = request.prompt_tokens + request.generated
            tokens = min(known - request.computed, budget)
            if not tokens:
                continue
            budget -= tokens
            request.computed += tokens
            taken.append((tokens, request.computed))
            if request.computed == known:
                request.generated += 1
                outputs.append(request)
        self.steps.append(taken)
        started = all(request.generated > 1 for request in outputs)
        return outputs[1:] if self.drops_outputs and started else outputs


def _vllm_bench(engine: FakeEngine) -> VllmBench:
    return VllmBench(
        config=BenchConfig(model="tiny-llama", backend="vllm", rules=RULES), facts=FACTS,
        sha256="0", hardware="none", engine=engine, scheduler=engine, sampling=None,
        block_tokens=16, room_tokens=5120, wait=lambda: None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "last"),
    [
        (StepShape(0, 0, 3, 20), [(1, 20), (1, 20), (1, 20)]),
        (StepShape(0, 0, 3, 100), [(1, 100)] * 3),
        (StepShape(0, 0, 3, 20, 200), [(1, 20), (1, 20), (1, 200)]),
        (StepShape(9, 0), [(9, 9)]),
        (StepShape(9, 70), [(9, 79)]),
        (StepShape(9, 0, 2, 20), [(1, 20), (1, 20), (9, 9)]),
    ],
)
def test_the_last_timed_step_of_an_engine_is_the_one_asked_for(
    shape: StepShape, last: list[tuple[int, int]]
) -> None:
    """Decodes that wait while others prefill go on by about a token a step, which the prompts allow
    for; decodes take of the budget too, so it can be one or two off."""
    engine = FakeEngine()
    bench = _vllm_bench(engine)
    assert bench.time(shape).num_timed == RULES.min_timed
    found = engine.steps[-1]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in last]
    for (_, context), (_, wanted) in zip(found, last, strict=True):
        assert abs(context - wanted) <= (2 if shape.num_decodes else 0)
    assert not engine.requests  # nothing is left for the next step
    assert engine.max_num_scheduled_tokens == 32


def test_an_engine_that_takes_other_steps_is_refused() -> None:
    with pytest.raises(InvalidInput, match="gave 2 tokens where 3 requests were ready"):
        _vllm_bench(FakeEngine(drops_outputs=True)).time(StepShape(0, 0, 3, 6))


def test_what_an_engine_has_no_room_for_does_not_fit() -> None:
    bench = _vllm_bench(FakeEngine())
    with pytest.raises(StepDoesNotFit, match="needs 384 blocks of 16 tokens"):
        bench.time(StepShape(0, 0, 3, 2048))
    with pytest.raises(StepDoesNotFit, match="vLLM refuses it: prompt is longer"):
        bench.time(StepShape(100, 4000))


def test_an_engines_step_is_timed_between_two_waits() -> None:
    calls: list[str] = []
    timer = EngineTimer(lambda: calls.append("step"), lambda: calls.append("wait"))
    assert len(timer.time(lambda: calls.append("ready"), 2)) == 2
    assert calls == ["ready", "wait", "step", "wait"] * 2


def test_without_vllm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    config = BenchConfig(model="tiny-llama", backend="vllm")
    with pytest.raises(MissingDependency, match=r"pip install 'preemptbench\[vllm\]'"):
        open_bench(config, [StepShape(0, 0, 1, 16)])
