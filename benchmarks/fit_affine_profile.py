"""Fit the bundled affine step-time profile to operator times measured by CUDA.

    python -m benchmarks.fit_affine_profile --data ../shared/data --out rtx4090-llama-3.1-8b.json

Reads the LLMServingSim tables (casys-kaist/LLMServingSim @ 5daddb2, MIT). A step of Llama-3.1-8B
is embedding + 32 layers + final norm + head + sampler. Every row of the attention table is one
step: a prefill chunk on top of some KV, beside decodes of one KV length. The fit is non-negative
least squares on relative errors; one step in five (by a keyed draw) is held out. Steps of decodes
only are 1.5 % of the grid but most of what an engine does, so they carry half of the weight.
"""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from contracts.randomness import keyed_generator
from serving_sim.profile import AffineProfile, FitReport, StepWork, save_profile

NUM_LAYERS = 32
PER_LAYER = {
    "layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1,
    "gate_up_proj": 1, "act_fn": 1, "down_proj": 1,
}  # fmt: skip
MAX_CONTEXT_TOKENS = 4096  # the range that is fitted, per request
TABLES = "llmservingsim/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1"


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def curve(rows: list[dict[str, str]], layer: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, microseconds) of one layer, x rising."""
    pairs = sorted((int(row[x]), float(row["time_us"])) for row in rows if row["layer"] == layer)
    xs, ys = zip(*pairs, strict=True)
    return np.array(xs), np.array(ys)


def measured_steps(folder: Path) -> tuple[list[StepWork], np.ndarray]:
    """Return the work of every step in the tables and its seconds."""
    dense = read_rows(folder / "dense.csv")
    per_sequence = read_rows(folder / "per_sequence.csv")
    layer_curves = [(curve(dense, layer, "tokens"), n) for layer, n in PER_LAYER.items()]
    once_curves = [curve(dense, layer, "tokens") for layer in ("embedding", "final_layernorm")]
    head_curves = [curve(per_sequence, layer, "sequences") for layer in ("lm_head", "sampler")]
    steps, seconds = [], []
    for row in read_rows(folder / "attention.csv"):
        chunk, prefix = int(row["prefill_chunk"]), int(row["kv_prefill"])
        decodes, context = int(row["n_decode"]), int(row["kv_decode"])
        if max(prefix + chunk, context) > MAX_CONTEXT_TOKENS:
            continue
        tokens, requests = chunk + decodes, decodes + (chunk > 0)
        layer_us = float(row["time_us"])
        layer_us += sum(n * np.interp(tokens, *points) for points, n in layer_curves)
        once_us = sum(np.interp(tokens, *points) for points in once_curves)
        head_us = sum(np.interp(requests, *points) for points in head_curves)
        prefill_context = prefix + chunk if chunk else 0
        steps.append(StepWork(chunk, prefill_context, decodes, decodes * context, requests))
        seconds.append((NUM_LAYERS * layer_us + once_us + head_us) * 1e-6)
    return steps, np.array(seconds)


def fit(steps: list[StepWork], seconds: np.ndarray) -> AffineProfile:
    """Return the profile that fits four steps in five, with its errors on the fifth."""
    work = np.array(steps, dtype=np.float64)
    terms = np.column_stack(
        [np.ones(len(work)), work[:, 0] + work[:, 2], work[:, 1] + work[:, 3], work[:, 4]]
    )
    is_decode = work[:, 0] == 0
    held_out = keyed_generator(0, "fit-held-out").random(len(work)) < 0.2
    class_size = np.where(is_decode, (is_decode & ~held_out).sum(), (~is_decode & ~held_out).sum())
    weights = (class_size**-0.5 / seconds)[~held_out]
    coefficients, _ = nnls(terms[~held_out] * weights[:, None], seconds[~held_out] * weights)
    errors = np.abs(terms @ coefficients / seconds - 1.0)
    decode_errors, prefill_errors = errors[held_out & is_decode], errors[held_out & ~is_decode]
    report = FitReport(
        num_fitted=int((~held_out).sum()),
        num_held_out=int(held_out.sum()),
        decode_median_error=round(float(np.median(decode_errors)), 4),
        decode_p90_error=round(float(np.quantile(decode_errors, 0.9)), 4),
        prefill_median_error=round(float(np.median(prefill_errors)), 4),
        prefill_p90_error=round(float(np.quantile(prefill_errors, 0.9)), 4),
        max_prefill_tokens=int(work[:, 0].max()),
        max_num_decodes=int(work[:, 2].max()),
        max_context_tokens_per_request=MAX_CONTEXT_TOKENS,
    )
    fixed, per_token, per_context, per_request = (float(f"{c:.6g}") for c in coefficients)
    return AffineProfile(
        name="rtx4090-llama-3.1-8b",
        fixed_s=fixed,
        per_token_s=per_token,
        per_context_token_s=per_context,
        per_request_s=per_request,
        source="casys-kaist/LLMServingSim @ 5daddb2, profiler/perf/RTX4090, vLLM 0.19.0 operator "
        "times by CUDA; fitted by benchmarks/fit_affine_profile.py",
        licence="MIT, Copyright (c) 2024 CASYS Lab at KAIST",
        hardware="NVIDIA GeForce RTX 4090",
        model="meta-llama/Llama-3.1-8B bf16, tensor parallel 1",
        fit=report,
    )


def main() -> None:
    """Fit, print the coefficients and the held-out errors, and write the profile."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("PREEMPTBENCH_DATA", "../shared/data"))
    parser.add_argument("--out", type=Path, default=None, help="profile JSON to write")
    args = parser.parse_args()
    steps, seconds = measured_steps(Path(args.data) / TABLES)
    profile = fit(steps, seconds)
    print(profile)
    predicted = np.array([profile.step_s(step) for step in steps])
    decodes_only = np.array([step.prefill_tokens == 0 for step in steps])
    for label, rows in (("decode only", decodes_only), ("with prefill", ~decodes_only)):
        error = predicted[rows] / seconds[rows] - 1.0
        low, middle, high = np.quantile(error, [0.1, 0.5, 0.9])
        print(
            f"{label}: {rows.sum()} steps, error p10 {low:+.1%} p50 {middle:+.1%} p90 {high:+.1%}"
        )
    if args.out is not None:
        save_profile(profile, args.out)


if __name__ == "__main__":
    main()
