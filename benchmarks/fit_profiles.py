"""Fit the bundled step-time profiles to the public operator tables.

    python -m benchmarks.fit_profiles --data ../shared/data --out serving_sim/profiles [--only h100]

Sources: LLMServingSim (MIT) and AIConfigurator (Apache-2.0). Only fitted figures are written, with
their source and licence. One line a profile goes to standard output: size and held-out errors.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from serving_sim.import_aiconfigurator import all_reduce_curve, import_aiconfigurator
from serving_sim.import_llmservingsim import import_llmservingsim
from serving_sim.memory import usable_blocks
from serving_sim.models import architecture
from serving_sim.profile import save_profile
from serving_sim.surface import ProfileHeader, SurfaceProfile

LLMSERVINGSIM = "casys-kaist/LLMServingSim @ 5daddb2, profiler/perf"
MIT = "MIT, Copyright (c) 2024 CASYS Lab at KAIST"
AICONFIGURATOR = "ai-dynamo/aiconfigurator @ 095f58a, aic-core systems"
APACHE = "Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES"
# folder name: (hardware, short name)
CARDS = {
    "RTX4090": ("NVIDIA GeForce RTX 4090", "rtx4090"),
    "RTXPRO6000": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
    "h100_sxm": ("NVIDIA H100 SXM 80 GB", "h100"),
    "h200_sxm": ("NVIDIA H200 SXM 141 GB", "h200"),
    "l40s": ("NVIDIA L40S 48 GB", "l40s"),
}
MEMORY_BYTES = {"RTX4090": 25_250_627_584, "RTXPRO6000": 96 << 30}  # of one GPU
# card, model path, GPUs
OPERATORS = (
    ("RTX4090", "meta-llama/Llama-3.1-8B", 1),
    ("RTXPRO6000", "meta-llama/Llama-3.1-8B", 1),
    ("RTXPRO6000", "meta-llama/Llama-3.1-8B", 2),
    ("RTXPRO6000", "Qwen/Qwen3-32B", 1),
    ("RTXPRO6000", "Qwen/Qwen3-32B", 2),
    ("RTXPRO6000", "Qwen/Qwen3-30B-A3B-Instruct-2507", 1),
)
_ON_HOPPER = (
    ("meta-llama/Llama-3.1-8B", 1),
    ("meta-llama/Llama-3.1-8B", 2),
    ("Qwen/Qwen3-8B", 1),
    ("Qwen/Qwen3-32B", 1),
    ("Qwen/Qwen3-32B", 2),
    ("Qwen/Qwen3-30B-A3B", 1),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 1),
)
KERNELS = (
    *(("h100_sxm", model, gpus) for model, gpus in _ON_HOPPER),
    *(("h200_sxm", model, gpus) for model, gpus in _ON_HOPPER),
    ("l40s", "meta-llama/Llama-3.1-8B", 1),
    ("l40s", "Qwen/Qwen3-8B", 1),
)
# decode batches that vLLM captures as CUDA graphs: 1, 2, 4, then by 8, above 256 by 16
GRAPH_BATCH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def _header(name: str, hardware: str, model: str, gpus: int, **more: object) -> ProfileHeader:
    shape = architecture(model)
    return ProfileHeader(
        name=name,
        hardware=hardware,
        model=model,
        tensor_parallel=gpus,
        num_layers=shape.layers,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        weight_bytes=shape.weight_bytes,
        **more,  # type: ignore[arg-type]
    )


def fits(data: Path) -> Iterator[tuple[str, Callable[[], SurfaceProfile]]]:
    """Yield (name, fit) of every bundled profile."""
    for tables, fit in ((OPERATORS, from_operators), (KERNELS, from_kernels)):
        for card, model, gpus in tables:
            model_text = model.rpartition("/")[2].lower().removesuffix("-instruct-2507")
            name = f"{CARDS[card][1]}-{model_text}-tp{gpus}"
            yield name, partial(fit, data, name, card, model, gpus)


def from_operators(data: Path, name: str, card: str, model: str, gpus: int) -> SurfaceProfile:
    """Fit one set of LLMServingSim's tables."""
    hardware, memory_bytes = CARDS[card][0], MEMORY_BYTES[card]
    shape = architecture(model)
    blocks = usable_blocks(
        shape, memory_bytes, max_num_batched_tokens=2048, max_num_seqs=256, tensor_parallel=gpus
    )
    remarks = ""
    if shape.num_experts:
        remarks += "; experts as uniform routing hits them, without the router"
    reduce_s = None
    if gpus > 1:  # the tables hold none, and no other data here has one for this card
        stand_in = f"{AICONFIGURATOR}/l40s (PCIe 4, {APACHE})"
        remarks += f"; all-reduce of {stand_in} stands in, slower than PCIe 5"
        reduce_s = all_reduce_curve(data / "costs_aiconfigurator" / "l40s", gpus)
    header = _header(
        name, hardware, model, gpus,
        source=f"{LLMSERVINGSIM}/{card}/{model}, operator times by CUDA, composed{remarks}; "
        "fitted by benchmarks/fit_profiles.py",
        licence=MIT,
        kernel="vLLM eager, default attention backend",
        versions={"vllm": "0.19.0", "cuda": "12.8" if card == "RTX4090" else "13.0"},
    )  # fmt: skip
    return import_llmservingsim(
        data / "llmservingsim" / "perf" / card / model / "bf16" / f"tp{gpus}",
        model,
        header,
        all_reduce_s=reduce_s,
        kv_capacity_tokens=16 * blocks,
    )


def from_kernels(data: Path, name: str, card: str, model: str, gpus: int) -> SurfaceProfile:
    """Compose and fit one model from AIConfigurator's tables."""
    header = _header(
        name, CARDS[card][0], model, gpus,
        source=f"{AICONFIGURATOR}/{card}, kernel times by CUDA, composed: norms, rotary embedding, "
        "activation and sampling by that project's formula, prefixes from whole prompts, prefill "
        "and decode attention in one step added; fitted by benchmarks/fit_profiles.py",
        licence=APACHE,
        kernel=f"FlashAttention {2 if card == 'l40s' else 3}, torch linear, Triton experts, vLLM "
        "all-reduce in CUDA graphs",
        versions={"vllm": "0.24.0"},
    )  # fmt: skip
    profile = import_aiconfigurator(data / "costs_aiconfigurator" / card, model, header)
    return replace(profile, graph_batch_sizes=GRAPH_BATCH_SIZES)


def main() -> None:
    """Fit, write and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("PREEMPTBENCH_DATA", "../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("serving_sim/profiles"))
    parser.add_argument("--only", default="", help="fit the profiles whose name holds this text")
    args = parser.parse_args()
    for name, fit in fits(Path(args.data)):
        if args.only not in name:
            continue
        profile = fit()
        path = args.out / f"{name}.json"
        save_profile(profile, path)
        errors = ", ".join(
            f"{surface} {e.median:.1%} / {e.p99:.1%} of {e.num_points}"
            for surface, e in profile.errors.items()
        )
        print(f"{name}: {path.stat().st_size} bytes; {errors}", flush=True)


if __name__ == "__main__":
    main()
