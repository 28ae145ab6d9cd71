"""What progress signals, loop detection and hidden states add to the time of decoding.

    python -m benchmarks.bench_collect [--model bundled:smollm2-135m-instruct] [--batch 8]
        [--tokens 64] [--rounds 5] [--device auto]

One batch of the bundled prompts decodes ``--tokens`` tokens a row, end-of-sequence ignored so that
every variant does the same work. Variants take turns within a round; the figure of a variant is
its fastest round, which other work on the machine disturbs least. On a CPU it is processor
seconds, which waiting for a busy core does not lengthen; on a GPU it is wall time. "per token in
Python" times the bookkeeping of one token alone: entropy is computed on the device for the whole
batch, the rest is Python, and does not shrink on a faster device. The budget is 5 % of decode time.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np

from oracles.backend import DecodeSettings
from oracles.generate import generate_batch
from oracles.models import BUNDLED_MODEL, LoadedModel, load_model, prompt_ids
from oracles.prompts import read_prompts
from oracles.watch import RowWatch
from traces.bundled import bundled_prompts

BUDGET = 0.05


def _variants(tokens: int, layers: int) -> dict[str, DecodeSettings]:
    plain = DecodeSettings(tokens, progress_stride=0)
    return {
        "lengths only": plain,
        "progress, stride 8": replace(plain, progress_stride=8),
        "progress + 1 hidden layer": replace(
            plain, progress_stride=8, hidden_layers=(layers // 2,)
        ),
    }


def _seconds(lm: LoadedModel, rows: list[list[int]], settings: DecodeSettings) -> float:
    clock = time.process_time if lm.model.device.type == "cpu" else time.perf_counter
    started = clock()
    generate_batch(lm, rows, settings)  # ends with numbers read back, so the device is done
    return clock() - started


def _python_us(lm: LoadedModel, settings: DecodeSettings, count: int = 20_000) -> float:
    """Microseconds that one token of one row costs outside the model, at best of five."""
    tokens = np.random.default_rng(0).integers(100, 20_000, count).tolist()
    best = float("inf")
    for _ in range(5):
        watch = RowWatch(lm, replace(settings, max_new_tokens=count + 1), [1])
        started = time.process_time()
        for token in tokens:
            watch.take(token, 1.0, -1.0, 0.0)
        best = min(best, time.process_time() - started)
    return best / count * 1e6


def main() -> None:
    """Print one line a variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    lm = replace(load_model(args.model, device=args.device), eos_ids=frozenset())
    prompts = read_prompts(bundled_prompts())[: args.batch]
    rows = [prompt_ids(lm, prompt.prompt) for prompt in prompts]
    variants = _variants(args.tokens, lm.num_layers)
    times: dict[str, list[float]] = {name: [] for name in variants}
    _seconds(lm, rows, next(iter(variants.values())))  # warm
    for _ in range(args.rounds):
        for name, settings in variants.items():
            times[name].append(_seconds(lm, rows, settings))
    base = min(times["lengths only"])
    print(f"{lm.name}, {lm.dtype}, {lm.device}; {args.batch} rows x {args.tokens} tokens")
    for name, seconds in times.items():
        over = min(seconds) / base - 1
        verdict = "" if name == "lengths only" else f"  {over:+.1%} (budget {BUDGET:.0%})"
        print(f"{name:28s}{min(seconds):8.2f} s{verdict}")
    for name in ("lengths only", "progress, stride 8"):
        print(f"{name:28s}{_python_us(lm, variants[name]):8.1f} us per token in Python")


if __name__ == "__main__":
    main()
