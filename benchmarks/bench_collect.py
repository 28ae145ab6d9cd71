"""What progress signals, loop detection and hidden states add to the time of decoding.

    python -m benchmarks.bench_collect [--model bundled:smollm2-135m-instruct] [--batch 8]
        [--tokens 64] [--rounds 5] [--device auto]

One batch of the bundled prompts decodes ``--tokens`` tokens a row, end-of-sequence ignored so that
every variant does the same work. Variants take turns within a round; the figure of a variant is
its fastest round, which other work on the machine disturbs least. On a CPU it is processor
seconds, which waiting for a busy core does not lengthen; on a GPU it is wall time. Such
totals still wander by several per cent on a shared machine, so the parts are timed alone too, best
of many: what a step pays for entropy and log-probability of the batch, and what a token pays in
Python. Their sum over the fastest step is the share to hold against the budget of 5 %.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from oracles.backend import DecodeSettings
from oracles.continuous import ContinuousBatches, read_back
from oracles.generate import generate_batch, greedy
from oracles.models import BUNDLED_MODEL, LoadedModel, load_model, prompt_ids
from oracles.prompts import read_prompts
from oracles.watch import RowWatch
from traces.bundled import bundled_prompts

BUDGET = 0.05
CONTINUOUS_TOKENS = 48


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


def _best(work: Callable[[], object], clock: Callable[[], float], tries: int) -> float:
    best = float("inf")
    for _ in range(tries):
        started = clock()
        work()
        best = min(best, clock() - started)
    return best


def _signal_s(lm: LoadedModel, batch: int) -> float:
    """Seconds a step of ``batch`` rows pays on the device for its signals, beyond the argmax."""
    import torch

    clock = time.process_time if lm.model.device.type == "cpu" else time.perf_counter
    shape = (batch, lm.model.config.get_text_config().vocab_size)
    logits = torch.randn(shape, device=lm.model.device, dtype=lm.model.dtype)
    plain = _best(lambda: logits.argmax(-1).tolist(), clock, 50)
    with_signals = _best(lambda: [part.tolist() for part in greedy(logits)], clock, 50)
    return with_signals - plain


def _python_s(lm: LoadedModel, settings: DecodeSettings, count: int = 20_000) -> float:
    """Seconds that one token of one row costs outside the model."""
    tokens = np.random.default_rng(0).integers(100, 20_000, count).tolist()

    def work() -> None:
        watch = RowWatch(lm, replace(settings, max_new_tokens=count + 1), [1])
        for token in tokens:
            watch.take(token, 1.0, -1.0, 0.0)

    return _best(work, time.process_time, 7) / count


def _continuous_s(lm: LoadedModel, prompts: list[str], stride: int) -> float:
    """Seconds of one continuous batch of ``prompts``, start-up of the library's loop included."""
    clock = time.process_time if lm.model.device.type == "cpu" else time.perf_counter
    backend = ContinuousBatches(lm, blocks=64 if lm.model.device.type == "cpu" else None)
    settings = DecodeSettings(CONTINUOUS_TOKENS, progress_stride=stride)
    started = clock()
    for _ in backend.run(prompts, len(prompts), settings):
        pass
    return clock() - started


def _read_back_s(lm: LoadedModel, row: list[int], settings: DecodeSettings) -> float:
    """Seconds that continuous batching pays once a run for hidden states."""
    clock = time.process_time if lm.model.device.type == "cpu" else time.perf_counter
    tokens = [row[i % len(row)] for i in range(settings.max_new_tokens)]
    return _best(lambda: read_back(lm, row, tokens, settings), clock, 3)


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
    step_s = base / args.tokens
    signal_s = _signal_s(lm, args.batch)
    plain_s, token_s = (
        _python_s(lm, variants[name]) for name in ("lengths only", "progress, stride 8")
    )
    added_s = signal_s + args.batch * (token_s - plain_s)
    print(f"a step: {step_s * 1e3:.2f} ms; its signals on the device: {signal_s * 1e3:.2f} ms")
    print(f"a token in Python: {plain_s * 1e6:.1f} us, with progress {token_s * 1e6:.1f} us")
    print(f"share of the step, by parts: {added_s / step_s:.1%} (budget {BUDGET:.0%})")
    pairs = [
        [_continuous_s(lm, [p.prompt for p in prompts], stride) for stride in (0, 8)]
        for _ in range(args.rounds)
    ]
    plain_s, watched_s = map(min, zip(*pairs, strict=True))
    print(
        f"continuous batching, {args.batch} requests x {CONTINUOUS_TOKENS} tokens: {plain_s:.2f} "
        f"s, with progress {watched_s:.2f} s ({watched_s / plain_s - 1:+.1%}, budget {BUDGET:.0%})"
    )
    again_s = _read_back_s(lm, rows[0], variants["progress, stride 8"])
    row_s = base / args.batch
    print(f"a run read back for hidden states: {again_s:.2f} s, {again_s / row_s:.0%} of it")


if __name__ == "__main__":
    main()
