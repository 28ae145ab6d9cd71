"""Do calibrated bounds hold, and do they come back after a shift? Tables and figure of the docs.

    python -m benchmarks.calibration_bars [--data ../shared/data] [--splits 10] [--out docs/img]

Coverage: prompts are split, the predictor is fitted and calibrated on one side and asked on the
other, every split anew; rows as they are met. Public logs (reasoning_lengths) are asked of age-km,
which needs lengths only. Shift: requests stream through 32 slots; age-km knows the first model or
benchmark and meets another one from completion 0 on.
"""

from __future__ import annotations

import argparse
import heapq
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from contracts.runs import DecodeRun
from contracts.signals import signal_request
from eval.calibration_metrics import Coverage, coverage
from eval.save_figure import save_figure
from predictors.adaptive import AdaptiveBound, AdaptiveSettings
from predictors.age_km import AgeKmSettings
from predictors.calibrated import Calibrated
from predictors.conformal import fit_table
from predictors.cqr import CqrTable, cqr_interval, fit_cqr
from predictors.gbm_hazard import GbmHazardSettings
from predictors.registry import FamilySettings
from tests.synthetic_runs import synthetic_runs
from traces.bundled import bundled_runs
from traces.importers import import_runs
from traces.runlog import RunLog
from traces.split import split_runs
from training.calibrate import conformal_rows, cqr_rows
from training.crossfit import crossfit
from training.rows import read_run_log, training_set

SLOTS, BEFORE, AFTER, WINDOW = 32, 300, 450, 100
CAP = 16_384
MODES = {
    "fixed table": (AdaptiveSettings(step=0.0, refresh_every=0), True),
    "level only (ACI)": (AdaptiveSettings(refresh_every=0), True),
    "level and table": (AdaptiveSettings(), True),
    "the same, blind to what runs": (AdaptiveSettings(), False),
}


def public_runs(data: Path, source: str, model: str) -> list[DecodeRun]:
    """Return the runs of one model of a public source under one serving cap and one model name."""
    runs, _ = import_runs(
        "parquet",
        [data / "reasoning_lengths" / "lengths.parquet"],
        column_map={"request_key": "group_id"},
        constants={"prompt_tokens": 200, "max_new_tokens": 65_536, "temperature": 1.0},
        where={"source": source, "model": model},
    )
    out = []
    for run in runs:
        cut = run.output_tokens > CAP
        tokens = min(run.output_tokens, CAP)
        seen = not cut and run.event_observed is True
        reason = "length" if cut else run.finish_reason
        out.append(
            replace(run, model="served", max_new_tokens=CAP, output_tokens=tokens,
                    event_observed=seen, finish_reason=reason)
        )  # fmt: skip
    return [run for run in out if run.has_known_length]


def covered(
    calibrated: Calibrated, table: CqrTable, runs: Sequence[DecodeRun], stride: int
) -> list[Coverage]:
    """Return the coverage of the three 90 % bounds, before and after calibration, and of CQR's."""
    counts = [-(-run.output_tokens // stride) for run in runs]
    owner = np.repeat(np.arange(len(runs)), counts)
    age = np.concatenate([np.arange(count) for count in counts]) * stride
    left = np.array([run.output_tokens for run in runs])[owner] - age
    caps = np.array([run.max_new_tokens for run in runs])[owner]
    requests = [signal_request(run) for run in runs]
    asked = [requests[i] for i in owner.tolist()]
    room, ones = (caps - age).astype(np.float64), np.ones(len(age))
    raw, low_high = calibrated.base, calibrated.interval(asked, age, 0.9)
    bounds = (
        ("upper, own", ones, raw.quantile(asked, age, 0.9)),
        ("lower, own", raw.quantile(asked, age, 0.1), room),
        ("central, own", raw.quantile(asked, age, 0.05), raw.quantile(asked, age, 0.95)),
        ("upper", ones, calibrated.quantile(asked, age, 0.9)),
        ("lower", calibrated.quantile(asked, age, 0.1), room),
        ("central", *low_high),
        ("central, CQR", *cqr_interval(raw, table, asked, age)),
    )
    _, prompt = np.unique([run.prompt_sha256 for run in runs], return_inverse=True)
    weight = (1.0 / np.bincount(prompt))[prompt[owner]]  # each prompt counts once, as in the fit
    return [
        coverage(name, low, high, age, left, caps, weight, owner=owner)
        for name, low, high in bounds
    ]


def coverage_lines(
    name: str, log: RunLog, settings: FamilySettings, splits: int, stride: int
) -> list[str]:
    """Return table lines, a bound each, of the mean over ``splits`` splits by prompt."""
    results = []
    for seed in range(splits):
        split = split_runs(log, test_share=0.3, seed=seed)
        train, test = list(split.train), list(split.test)
        predictor = settings.fit(training_set(train), seed=seed)
        folds = crossfit(train, predictor.family, settings=settings, seed=seed)
        calibrated = Calibrated(predictor, fit_table(conformal_rows(folds, train, stride)))
        cqr = fit_cqr(cqr_rows(folds, train, 0.9, stride), 0.9)
        results.append(covered(calibrated, cqr, test, stride))
    lines = []
    for bound in range(len(results[0])):
        parts = [result[bound] for result in results]
        overall = [part.overall for part in parts]
        groups = min(len(part.by_age) for part in parts)
        by_age = np.mean([part.by_age[:groups] for part in parts], axis=0)
        lines.append(
            f"| {name} | {parts[0].bound} | {np.mean(overall):.3f} | {min(overall):.3f}–"
            f"{max(overall):.3f} | {by_age.min():.3f} | {np.mean([p.at_cap for p in parts]):.2f} "
            f"| {np.mean([p.by_request for p in parts]):.3f} "
            f"| {np.mean([p.width for p in parts]):.0f} |"
        )
    return lines


def stream(bound: AdaptiveBound, runs: Sequence[DecodeRun], feed_running: bool) -> np.ndarray:
    """Run ``runs`` through the slots; return (n, 2) in order of completion: tokens, and at how
    many of them the bound held."""
    clock, waiting, out = 0, list(reversed(runs)), []
    requests = {run.run_id: signal_request(run) for run in runs}
    running: list[tuple[int, str, int, int]] = []  # end, id, start, tokens
    while waiting or running:
        while waiting and len(running) < SLOTS:
            run = waiting.pop()
            end = clock + run.output_tokens
            heapq.heappush(running, (end, run.run_id, clock, run.output_tokens))
        clock, name, _, tokens = heapq.heappop(running)
        flight = [(requests[other], clock - start) for _, other, start, _ in running]
        if not feed_running:
            flight = []
        held = bound.complete(
            requests[name], tokens, [r for r, _ in flight], np.array([a for _, a in flight], int)
        )
        out.append((tokens, held * tokens))
    return np.array(out, dtype=np.float64)


def shift_curves(
    before: Sequence[DecodeRun], after: Sequence[DecodeRun], level: float, orders: int
) -> dict[str, np.ndarray]:
    """Return for each mode the trailing coverage over ``WINDOW`` completions, mean over orders."""
    out: dict[str, list[np.ndarray]] = {name: [] for name in MODES}
    for seed in range(orders):
        rng = np.random.default_rng(seed)
        shuffled = rng.permutation(len(before)).tolist()
        later = rng.integers(0, len(after), AFTER + SLOTS).tolist()
        known = [before[i] for i in shuffled[BEFORE:]]
        served = [before[i] for i in shuffled[:BEFORE]]
        served += [replace(after[i], run_id=f"after-{k}") for k, i in enumerate(later)]
        base = AgeKmSettings().fit(training_set(known))
        table = fit_table(conformal_rows(base, [before[i] for i in shuffled[-400:]], 64), 5)
        for name, (settings, feed) in MODES.items():
            rows = stream(AdaptiveBound(base, table, level, settings), served, feed)
            total = np.cumsum(np.vstack([[0.0, 0.0], rows]), axis=0)
            part = total[WINDOW:] - total[:-WINDOW]
            out[name].append((part[:, 1] / part[:, 0])[: BEFORE + AFTER - WINDOW])
    return {name: np.mean(curves, axis=0) for name, curves in out.items()}


def draw(panels: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Draw the trailing coverage of every shift and mode."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for ax, (title, curves) in zip(
        figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True
    ):
        ax.axhspan(0.87, 0.93, color="0.9")
        ax.axvline(0, color="black", lw=0.8)
        ax.axvline(300, color="black", lw=0.8, ls=":")
        for name, curve in curves.items():
            ax.plot(np.arange(len(curve)) + WINDOW - BEFORE, curve, lw=1.4, label=name)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel(f"completions since the shift (trailing {WINDOW})", fontsize=9)
    figure.axes[0].set_ylabel("coverage of the 90 % bound, by token", fontsize=9)
    figure.axes[0].legend(fontsize=8, frameon=False, loc="lower left")
    save_figure(figure, path)


def main() -> None:
    """Print the tables, write the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("PREEMPTBENCH_DATA", "../shared/data"))
    )
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--orders", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    parser.add_argument("--part", choices=("coverage", "public", "shift", "all"), default="all")
    options = parser.parse_args()
    head = (
        "| log, predictor | 90 % bound | held | range over splits | worst age tenth | at cap "
        "| by request | width |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    if options.part in ("coverage", "all"):
        print(head)
        logs = (
            ("SmolLM2", read_run_log(bundled_runs())),
            ("synthetic", RunLog.from_runs(synthetic_runs(num_prompts=300))),
        )
        for name, log in logs:
            for settings in (AgeKmSettings(), GbmHazardSettings()):
                family = "age-km" if isinstance(settings, AgeKmSettings) else "gbm-hazard"
                lines = coverage_lines(f"{name}, {family}", log, settings, options.splits, 8)
                print("\n".join(lines), flush=True)
    games = ("coordination-games", "DeepSeek-R1"), ("coordination-games", "o1-mini")
    maths = ("ATTS-self", "DeepSeek-R1-Distill-Llama-8B")
    if options.part in ("public", "all"):
        print(head)
        for source, model in (*games, maths, ("crosslingual-s1.1", "s1.1-14B")):
            log = RunLog.from_runs(public_runs(options.data, source, model))
            lines = coverage_lines(f"{source}, {model}", log, AgeKmSettings(), options.splits, 128)
            print("\n".join(lines), flush=True)
    if options.part in ("shift", "all"):
        r1, mini = (public_runs(options.data, *which) for which in games)
        distill = public_runs(options.data, *maths)
        shifts = {
            "model, longer: o1-mini to DeepSeek-R1, upper": (mini, r1, 0.9),
            "model, shorter: DeepSeek-R1 to o1-mini, lower": (r1, mini, 0.1),
            "benchmark: games to MATH-500, upper": (r1, distill, 0.9),
        }
        panels = {
            title: shift_curves(before, after, level, options.orders)
            for title, (before, after, level) in shifts.items()
        }
        print("| shift, bound | mode | completions 200–300 after | lowest since the shift |")
        print("| --- | --- | --- | --- |")
        for title, curves in panels.items():
            for name, curve in curves.items():
                at = BEFORE + 300 - WINDOW
                low = curve[BEFORE - WINDOW :].min()
                print(f"| {title} | {name} | {curve[at]:.3f} | {low:.3f} |")
        draw(panels, options.out / "calibration-shift.png")


if __name__ == "__main__":
    main()
