"""Model sizes and KV blocks: against published parameter counts and recorded engine logs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import InvalidInput, UnknownName
from serving_sim.memory import usable_blocks
from serving_sim.models import MODELS, Architecture, architecture, architecture_from_config

H100_BYTES = 84_940_000_000  # 79.1 GiB, what the card reports to a CUDA program


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-2-70B", 68_976_648_192),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-32B", 32_762_123_264),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("DeepSeek-R1-Distill-Qwen-7B", 7_615_616_512),
    ],
)
def test_parameters_are_those_of_the_published_weights(name: str, parameters: int) -> None:
    assert MODELS[name].num_parameters == parameters


def test_a_name_may_have_an_owner_or_be_a_variant_of_the_same_shape() -> None:
    expected = MODELS["Qwen3-30B-A3B"]
    assert architecture("Qwen/Qwen3-30B-A3B-Instruct-2507") == expected
    with pytest.raises(UnknownName, match="did you mean 'Qwen3-32B'"):
        architecture("Qwen3-33B")


def test_the_recorded_rtx_4090_run_gives_its_own_blocks_back() -> None:
    """meta.json of that run: 25,250,627,584 bytes, 2,048 batched tokens, 256 sequences, 2,588
    blocks. The overhead was set by it, to 10 MB: 5 blocks."""
    blocks = usable_blocks(
        MODELS["Llama-3.1-8B"], 25_250_627_584, max_num_batched_tokens=2048, max_num_seqs=256
    )
    assert abs(blocks - 2588) <= 5


LLAMA_70B = replace(MODELS["Llama-2-70B"], vocabulary=128_256)
NEMO = Architecture(40, 5120, 32, 8, 128, 14336, 131_072)
QWEN_7B = MODELS["DeepSeek-R1-Distill-Qwen-7B"]  # the shape of Qwen2.5-7B
LLAMA_2_7B = Architecture(32, 4096, 32, 32, 128, 11008, 32_000)
RECORDED = [  # model as BLIS names it, shape, GPUs, batched tokens, blocks
    ("meta-llama/Llama-2-7b-hf", LLAMA_2_7B, 1, 2048, 7463),
    ("meta-llama/Llama-3.1-70B-Instruct", LLAMA_70B, 4, 8192, 30251),
    ("meta-llama/Llama-3.1-70B-Instruct", LLAMA_70B, 4, 2048, 30425),
    ("mistralai/Mistral-Nemo-Instruct-2407", NEMO, 2, 1024, 48009),
    ("mistralai/Mistral-Nemo-Instruct-2407", NEMO, 1, 2048, 19251),
    ("Qwen/Qwen2.5-7B-Instruct", QWEN_7B, 1, 2048, 65352),
]


@pytest.mark.parametrize(("name", "shape", "gpus", "tokens", "blocks"), RECORDED)
def test_blocks_of_other_cards_and_models_follow(
    name: str, shape: Architecture, gpus: int, tokens: int, blocks: int
) -> None:
    """Blocks of vLLM on H100 80 GB as BLIS records them; nothing was set by these. 1.1 %: vLLM
    measures its peak memory, and versions differ by a few hundred MB."""
    found = usable_blocks(
        shape, H100_BYTES, max_num_batched_tokens=tokens, max_num_seqs=128, tensor_parallel=gpus
    )
    assert found == pytest.approx(blocks, rel=0.011)


@pytest.mark.data
def test_the_recorded_blocks_are_those_of_the_data_set(public_data: Path) -> None:
    path = public_data / "costs_blis" / "trained_physics_iter29.json"
    experiments = json.loads(path.read_text(encoding="utf-8"))["experiments"]
    found = {
        (e["model"], e["tp"], e["max_num_batched_tokens"], e["total_kv_blocks"])
        for e in experiments
    }
    assert {(name, gpus, tokens, blocks) for name, _, gpus, tokens, blocks in RECORDED} <= found


def test_more_gpus_than_kv_heads_hold_copies() -> None:
    shape = MODELS["Qwen3-30B-A3B"]  # 4 KV heads
    four, eight = (
        usable_blocks(
            shape, H100_BYTES, max_num_batched_tokens=2048, max_num_seqs=128, tensor_parallel=n
        )
        for n in (4, 8)
    )
    assert four < eight < 1.2 * four


def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(InvalidInput, match=r"weights of 65\.5 GB .* leave nothing of 90% of 25\.3"):
        usable_blocks(
            MODELS["Qwen3-32B"], 25_250_627_584, max_num_batched_tokens=2048, max_num_seqs=256
        )
    for bad in ({"gpu_memory_utilization": 0.0}, {"block_size": 0}, {"tensor_parallel": 0}):
        with pytest.raises(InvalidInput, match=r"must each be at least 1|give \(0, 1\]"):
            usable_blocks(
                MODELS["Qwen3-8B"], H100_BYTES, max_num_batched_tokens=1, max_num_seqs=1,
                **bad,  # type: ignore[arg-type]
            )  # fmt: skip


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 64, "hidden_size": 5120,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 25600, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_config_gives_the_architecture() -> None:
    assert architecture_from_config(CONFIG) == MODELS["Qwen3-32B"]
    without = {key: value for key, value in CONFIG.items() if key != "head_dim"}
    assert architecture_from_config(without).head_dim == 80
    assert architecture_from_config(CONFIG | {"num_key_value_heads": None}).kv_heads == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' is not covered"),
        ({"architectures": []}, "architecture None is not covered"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "moe_intermediate_size is None"),
    ],
)
def test_a_config_that_is_not_covered_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        architecture_from_config(CONFIG | change)
