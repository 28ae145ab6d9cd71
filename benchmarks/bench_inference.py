"""How long a length predictor takes to answer for the requests that run.

    python -m benchmarks.bench_inference [--requests 256] [--trees 150] [--repeats 200]

gbm-hazard with its default settings, trained on the bundled log, asked for 256 running requests at
once: from a checkpoint's arrays (compiled), through OnlinePredictor, with LightGBM's own predict on
the same rows, and in onnxruntime when it is installed. Then the probe's step, as large as for a
135M model (states 576 wide; a network of random weights costs what a trained one does) with every
request's state new, and one sentence encoder on one text a request, as ELIS needs every 50 tokens.
One thread; the least of many repeats, which a busy machine spoils last. The bars for all 256 are
1 ms (gbm-hazard) and 5 ms (probe).
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from contracts.policy import IntArray
from contracts.runs import DecodeRun
from contracts.signals import signal_request
from predictors.boosting import BoostingSettings
from predictors.encoders import EncoderSettings, load_encoder
from predictors.features import FEATURE_NAMES, feature_columns, feature_matrix
from predictors.gbm_hazard import (
    GbmHazard,
    GbmHazardSettings,
    hazard_rows,
    horizon_edges,
    landmarks,
)
from predictors.neural import Scaler, new_perceptron
from predictors.online import OnlinePredictor
from predictors.probe import Probe
from predictors.quick_trees import quick_scores, quick_trees
from predictors.torch_loop import weights_of
from predictors.trees import raw_scores, raw_scores_swept
from traces.bundled import bundled_runs
from training.rows import read_run_log, training_set

STATE_WIDTH = 576  # of SmolLM2-135M


def least_ms(call: Callable[[], object], repeats: int) -> float:
    """Return the least wall milliseconds of ``call``, after one warm-up."""
    call()
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return float(best * 1e3)


def lightgbm_booster(
    runs: Sequence[DecodeRun], settings: GbmHazardSettings, edges: IntArray
) -> Any:
    """Return a LightGBM booster of the same size on the same rows, for its own predict."""
    import lightgbm

    training = training_set(runs)
    run, ages = landmarks(training, settings.num_landmarks, 0)
    owner, bins, ended = hazard_rows(training, run, ages, edges)
    known = feature_matrix([training.requests[i] for i in run.tolist()], ages)
    rows = np.column_stack([known[owner], edges[bins]])
    how = settings.boosting
    params = {
        "objective": "binary", "num_leaves": how.num_leaves, "learning_rate": how.learning_rate,
        "min_data_in_leaf": how.min_rows_per_leaf, "feature_fraction": how.feature_share,
        "lambda_l2": how.l2, "num_threads": 1, "verbosity": -1,
    }  # fmt: skip
    data = lightgbm.Dataset(rows, ended.astype(float))
    return lightgbm.train(params, data, num_boost_round=how.num_trees)


def online(predictor: GbmHazard, runs: Sequence[DecodeRun], count: int) -> OnlinePredictor:
    """Return an OnlinePredictor in which ``count`` requests run, each 64 tokens old."""
    engine = OnlinePredictor(predictor)
    rng = np.random.default_rng(0)
    for index in range(count):
        request = replace(signal_request(runs[index % len(runs)]), run_id=str(index))
        engine.start(request)
        ids = rng.integers(0, 1000, 64).tolist()
        engine.update(request.run_id, ids, ["a"] * 64, rng.exponential(1, 64), -rng.random(64))
    return engine


def onnx_ms(predictor: GbmHazard, rows: np.ndarray, repeats: int) -> float | None:
    """Return the milliseconds of the exported model in onnxruntime, None without it."""
    if not all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime")):
        return None
    import onnxruntime

    from predictors.onnx_export import export_onnx

    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(predictor, path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        feed = {"features": rows.astype(np.float32)}
        return least_ms(lambda: session.run(None, feed), repeats)


def probe_ms(count: int, repeats: int) -> float:
    """Return the milliseconds in which ``count`` new states become remaining lengths."""
    import torch

    rng = np.random.default_rng(0)
    edges = horizon_edges(3, 8192, 20)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = new_perceptron((1 + STATE_WIDTH, 128, len(edges) + 1))
    scaler = Scaler(np.zeros(STATE_WIDTH), np.ones(STATE_WIDTH))
    prior = np.full(len(edges) + 1, 1.0)
    provenance = training_set(read_run_log(bundled_runs())).provenance
    reads = (30, 8, "bins")
    probe = Probe(provenance, edges, reads, scaler, weights_of(network), prior, 0.5)
    states = rng.standard_normal((count, STATE_WIDTH)).astype(np.float16)
    ages, left = np.full(count, 64), np.full(count, 8000)
    beliefs = np.tile(prior / prior.sum(), (count, 1))

    def step() -> object:
        mass = probe.joined(beliefs, probe.said(states, ages))
        return probe.mean_of(1.0 - np.cumsum(mass, axis=1)[:, :-1], left)

    return least_ms(step, repeats)


def encoder_ms(texts: Sequence[str], sample: int = 16) -> float | None:
    """Return the milliseconds MiniLM (22.7 M weights) takes for ``texts``, from ``sample`` of
    them; None without the package."""
    if importlib.util.find_spec("all_minilm_l6_v2") is None:
        return None
    encoder = load_encoder(EncoderSettings(keep_end=True))
    return least_ms(lambda: [encoder._vector(t) for t in texts[:sample]], 3) * len(texts) / sample


def main() -> None:
    """Fit, time, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--trees", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    runs = list(read_run_log(bundled_runs()))
    boosting = BoostingSettings(num_trees=options.trees)
    settings = GbmHazardSettings(boosting=boosting)
    predictor = settings.fit(training_set(runs))
    engine = online(predictor, runs, options.requests)
    names = list(engine._running)
    rows = engine._known(np.array([engine._running[name].row for name in names]))
    rows = rows[:, feature_columns(FEATURE_NAMES)]
    edges = predictor.edges.astype(np.float64)
    plan = quick_trees(predictor.trees, edges)
    assert plan is not None
    padded = np.column_stack([rows, np.zeros(len(rows))])
    every_bin = np.repeat(padded, len(edges), axis=0)
    every_bin[:, -1] = np.tile(edges, len(rows))
    booster = lightgbm_booster(runs, settings, predictor.edges)

    def all_stale() -> object:
        engine._answer_age[:] = -1
        return engine.remaining(names)

    def step() -> object:  # an eighth is due in each step of the engine
        engine._answer_age[: len(names) // engine.stride] = -1
        return engine.remaining(names)

    asked = [replace(signal_request(runs[i % len(runs)])) for i in range(options.requests)]
    ages = np.full(options.requests, 64)
    table = [
        ("trees by masked bits (arrays, compiled; what is used)",
         least_ms(lambda: quick_scores(plan, padded), options.repeats)),
        ("trees walked, swept over all bins (arrays, compiled)",
         least_ms(lambda: raw_scores_swept(predictor.trees, padded, edges), options.repeats)),
        ("trees row by row (arrays, compiled)",
         least_ms(lambda: raw_scores(predictor.trees, every_bin), options.repeats // 4)),
        ("OnlinePredictor.remaining, all answers due", least_ms(all_stale, options.repeats)),
        ("OnlinePredictor.remaining, an eighth due (stride 8)", least_ms(step, options.repeats)),
        ("Predictor.remaining from requests (prompt texts read again)",
         least_ms(lambda: predictor.remaining(asked, ages), options.repeats // 20)),
        ("LightGBM predict, all bins as rows",
         least_ms(lambda: booster.predict(every_bin, num_threads=1), options.repeats // 10)),
        ("onnxruntime", onnx_ms(predictor, rows, options.repeats)),
        ("probe: network, filter and mean, every state new",
         probe_ms(options.requests, options.repeats)),
        ("MiniLM on one text each (ELIS idea), from 16 of them",
         encoder_ms([(runs[i % len(runs)].text or "") for i in range(options.requests)])),
    ]  # fmt: skip
    print(f"{options.requests} requests, {options.trees} trees, {len(edges)} bins, one thread")
    print("| what | ms, least |\n| --- | --- |")
    for what, ms in table:
        print(f"| {what} | {'not installed' if ms is None else f'{ms:.2f}'} |")


if __name__ == "__main__":
    main()
