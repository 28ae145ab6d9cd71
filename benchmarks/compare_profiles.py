"""Every bundled profile beside the roofline, the others, and figures published elsewhere.

    python -m benchmarks.compare_profiles --data ../shared/data --out docs/img

Prints the tables of docs/profiles.md and writes profiles.svg and profiles.png.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from serving_sim.models import Architecture, architecture
from serving_sim.profile import StepWork, list_profiles, load_profile
from serving_sim.roofline import PEAKS, roofline_s
from serving_sim.surface import SurfaceProfile

LLAMA_2_7B = Architecture(32, 4096, 32, 32, 128, 11008, 32_000)
STEPS = {
    "1 decode at 1,024": StepWork(0, 0, 1, 1024, 1, 1024),
    "64 at 1,024": StepWork(0, 0, 64, 64 * 1024, 64, 1024),
    "64 at 8,192": StepWork(0, 0, 64, 64 * 8192, 64, 8192),
    "prefill of 1,024": StepWork(1024, 1024, 0, 0, 1),
    "64 at 1,024 + 512": StepWork(512, 512, 64, 64 * 1024, 65, 1024),
}


def surfaces() -> dict[str, SurfaceProfile]:
    """Return the bundled profiles with tables, by name."""
    loaded = {name: load_profile(name) for name in list_profiles()}
    return {name: p for name, p in loaded.items() if isinstance(p, SurfaceProfile)}


def floor_s(profile: SurfaceProfile, work: StepWork) -> float:
    """Return the roofline of a profile's card and model."""
    peak = PEAKS[profile.name.partition("-")[0]]
    shape = architecture(profile.model)
    return roofline_s(shape, peak, profile.header.tensor_parallel, work)


def print_roofline(profiles: dict[str, SurfaceProfile]) -> None:
    """Print milliseconds of a few steps and how many times the roofline they are."""
    print("| profile | " + " | ".join(STEPS) + " |")
    print("|---|" + "---|" * len(STEPS))
    for name, profile in profiles.items():
        cells = []
        for work in STEPS.values():
            seconds = profile.steps_s(np.array([work]))[0]
            cells.append(f"{1e3 * seconds:.2f} ({seconds / floor_s(profile, work):.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |")


def print_errors(profiles: dict[str, SurfaceProfile]) -> None:
    """Print the held-out errors of every profile, median / 99th percentile (points)."""
    kinds = ("decode", "prefill", "mixed", "tokens", "head")
    print("| profile | " + " | ".join(kinds) + " |")
    print("|---|" + "---|" * len(kinds))
    for name, profile in profiles.items():
        cells = []
        for kind in kinds:
            e = profile.errors.get(kind)
            cells.append(f"{e.median:.1%} / {e.p99:.1%} ({e.num_points})" if e else "–")
        print(f"| {name} | " + " | ".join(cells) + " |")


def print_blis(data: Path, profile: SurfaceProfile) -> None:
    """Print BLIS's published step law of the same card and model beside the profile.

    BLIS: beta0 + beta1 prefill tokens + beta2 decodes, microseconds; context is not in it.
    """
    tests = json.loads((data / "costs_blis/goldendataset.json").read_text("utf-8"))["tests"]
    beta = next(t["beta-coeffs"] for t in tests if t["model"].startswith("meta-llama/llama-3.1-8b"))
    print("\n| step | BLIS ms | profile ms |\n|---|---|---|")
    for label, work in {
        "1 decode at 512": StepWork(0, 0, 1, 512, 1, 512),
        "32 at 512": StepWork(0, 0, 32, 32 * 512, 32, 512),
        "128 at 512": StepWork(0, 0, 128, 128 * 512, 128, 512),
        "prefill of 512": StepWork(512, 512, 0, 0, 1),
        "prefill of 2,048": StepWork(2048, 2048, 0, 0, 1),
    }.items():
        blis_ms = (beta[0] + beta[1] * work.prefill_tokens + beta[2] * work.num_decodes) / 1e3
        print(f"| {label} | {blis_ms:.2f} | {1e3 * profile.step_s(work):.2f} |")


def print_interpolated_shapes(data: Path) -> None:
    """Print how well products of shapes that were timed follow from their neighbours."""
    from serving_sim.import_aiconfigurator import interpolated_gemm_errors

    for card in ("h100_sxm", "h200_sxm"):
        errors = interpolated_gemm_errors(data / "costs_aiconfigurator" / card)
        median, p90 = np.quantile(errors, (0.5, 0.9))
        print(f"{card}: {errors.size} products, median {median:.1%}, 90th percentile {p90:.1%}")


def print_vidur(data: Path) -> None:
    """Print Vidur's dense layers of Llama-2-7B on H100 beside the same composed here."""
    from serving_sim.import_aiconfigurator import dense_curve

    table = pq.read_table(
        data / "costs_vidur/mlp.parquet",
        filters=[
            ("device", "=", "h100"), ("model", "=", "meta-llama/Llama-2-7b-hf"),
            ("num_tensor_parallel_workers", "=", 1),
        ],
    ).to_pydict()  # fmt: skip
    parts = [
        column for name, column in table.items()
        if name.endswith("_median_ms") and name != "emb_median_ms"
    ]  # fmt: skip
    vidur_ms = dict(zip(table["num_tokens"], 32 * np.sum(parts, axis=0), strict=True))
    tokens, seconds = dense_curve(data / "costs_aiconfigurator/h100_sxm", LLAMA_2_7B)
    print("\n| tokens | Vidur ms | composed ms |\n|---|---|---|")
    for x in (16, 128, 512, 1024, 2048, 4096):
        if x in vidur_ms:
            print(f"| {x:,} | {vidur_ms[x]:.2f} | {1e3 * np.interp(x, tokens, seconds):.2f} |")


def print_splitwise(data: Path) -> None:
    """Print Splitwise's whole steps of Llama-2-70B on eight H100 beside the roofline."""
    table = pq.read_table(
        data / "costs_splitwise/perf_model.parquet",
        filters=[
            ("model", "=", "llama2-70b"), ("hardware", "=", "h100-80gb"),
            ("tensor_parallel", "=", 8), ("prompt_size", "=", 512), ("token_size", "=", 128),
        ],
    ).to_pydict()  # fmt: skip
    shape = architecture("Llama-2-70B")
    batch = np.array(table["batch_size"])
    print("\n| batch | decode step ms | times the roofline |\n|---|---|---|")
    for n in np.unique(batch).tolist():
        step_ms = float(np.median(np.array(table["token_time"])[batch == n]))
        work = StepWork(0, 0, n, n * 576, n, 576)
        floor_ms = 1e3 * roofline_s(shape, PEAKS["h100"], 8, work)
        print(f"| {n} | {step_ms:.1f} | {step_ms / floor_ms:.1f} |")


def draw(profiles: dict[str, SurfaceProfile], out: Path) -> None:
    """Draw decode steps over the batch, prefill over the chunk, both over their rooflines."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "preemptbench"
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    batches, chunks = (1, 2, 4, 8, 16, 32, 64, 128, 256), (64, 128, 256, 512, 1024, 2048)
    for name, profile in profiles.items():
        if not name.endswith("llama-3.1-8b-tp1"):
            continue
        decodes = [StepWork(0, 0, n, n * 1024, n, 1024) for n in batches]
        prompts = [StepWork(c, c, 0, 0, 1) for c in chunks]
        for panel, x, works in ((panels[0], batches, decodes), (panels[1], chunks, prompts)):
            seconds = 1e3 * profile.steps_s(np.array(works))
            (line,) = panel.plot(x, seconds, marker=".", label=name.removesuffix("-tp1"))
            floors = [1e3 * floor_s(profile, work) for work in works]
            panel.plot(x, floors, linestyle=":", color=line.get_color())
    for panel, label in zip(panels, ("decodes at 1,024 of context", "prefill chunk"), strict=False):
        panel.set(xscale="log", yscale="log", xlabel=label, ylabel="ms a step (dotted: roofline)")
    panels[0].legend(fontsize=7)
    times = [
        [profile.steps_s(np.array([w]))[0] / floor_s(profile, w) for w in STEPS.values()]
        for profile in profiles.values()
    ]
    panels[2].boxplot(times, orientation="horizontal", whis=(0, 100))
    panels[2].set_yticks(range(1, len(profiles) + 1), list(profiles), fontsize=6)
    panels[2].set(xlabel="times the roofline, steps of the table")
    for kind in ("svg", "png"):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(out / f"profiles.{kind}", metadata=metadata, dpi=110)
    plt.close(figure)


def main() -> None:
    """Print the tables and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("PREEMPTBENCH_DATA", "../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    args = parser.parse_args()
    profiles = surfaces()
    print_errors(profiles)
    print()
    print_roofline(profiles)
    print_blis(Path(args.data), profiles["h100-llama-3.1-8b-tp1"])
    print_vidur(Path(args.data))
    print_splitwise(Path(args.data))
    print()
    print_interpolated_shapes(Path(args.data))
    draw(profiles, args.out)


if __name__ == "__main__":
    main()
