"""Fit the bundled step-time profiles to the public operator tables.

    python -m benchmarks.fit_profiles --data ../shared/data --out serving_sim/profiles [--only h100]

Sources: LLMServingSim (MIT) and AIConfigurator (Apache-2.0). Only fitted figures are written, with
their source and licence. One line a profile goes to standard output: size and held-out errors.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from serving_sim.import_llmservingsim import import_llmservingsim
from serving_sim.memory import usable_blocks
from serving_sim.models import architecture
from serving_sim.profile import save_profile
from serving_sim.surface import ProfileHeader, SurfaceProfile

LLMSERVINGSIM = "casys-kaist/LLMServingSim @ 5daddb2, profiler/perf"
MIT = "MIT, Copyright (c) 2024 CASYS Lab at KAIST"
# folder name: (hardware, short name, bytes of memory)
CARDS = {
    "RTX4090": ("NVIDIA GeForce RTX 4090", "rtx4090", 25_250_627_584),
    "RTXPRO6000": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000", 96 << 30),
}
# card, model path, GPUs
MEASURED = (
    ("RTX4090", "meta-llama/Llama-3.1-8B", 1),
    ("RTXPRO6000", "meta-llama/Llama-3.1-8B", 1),
    ("RTXPRO6000", "Qwen/Qwen3-32B", 1),
    ("RTXPRO6000", "Qwen/Qwen3-30B-A3B-Instruct-2507", 1),
)


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


def llmservingsim(data: Path) -> Iterator[Callable[[], SurfaceProfile]]:
    """Yield a fit for each set of LLMServingSim's tables."""
    for card, model, gpus in MEASURED:
        yield lambda card=card, model=model, gpus=gpus: _one_llmservingsim(data, card, model, gpus)


def _one_llmservingsim(data: Path, card: str, model: str, gpus: int) -> SurfaceProfile:
    hardware, short, memory_bytes = CARDS[card]
    shape = architecture(model)
    name = f"{short}-{model.rpartition('/')[2].lower().removesuffix('-instruct-2507')}-tp{gpus}"
    blocks = usable_blocks(
        shape, memory_bytes, max_num_batched_tokens=2048, max_num_seqs=256, tensor_parallel=gpus
    )
    experts = ", uniform routing, without the router" if shape.num_experts else ""
    header = _header(
        name, hardware, model, gpus,
        source=f"{LLMSERVINGSIM}/{card}/{model}, operator times by CUDA, composed{experts}; fitted "
        "by benchmarks/fit_profiles.py",
        licence=MIT,
        kernel="vLLM eager, default attention backend",
        versions={"vllm": "0.19.0", "cuda": "12.8" if card == "RTX4090" else "13.0"},
    )  # fmt: skip
    return import_llmservingsim(
        data / "llmservingsim" / "perf" / card / model / "bf16" / f"tp{gpus}",
        model,
        header,
        kv_capacity_tokens=16 * blocks,
    )


def main() -> None:
    """Fit, write and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("PREEMPTBENCH_DATA", "../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("serving_sim/profiles"))
    args = parser.parse_args()
    for fit in llmservingsim(Path(args.data)):
        profile = fit()
        path = args.out / f"{profile.name}.json"
        save_profile(profile, path)
        errors = ", ".join(
            f"{name} {e.median:.1%} / {e.p99:.1%} of {e.num_points}"
            for name, e in profile.errors.items()
        )
        print(f"{profile.name}: {path.stat().st_size} bytes; {errors}", flush=True)


if __name__ == "__main__":
    main()
