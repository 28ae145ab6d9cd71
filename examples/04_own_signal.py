"""A signal of your own: checked by the conformance suite, then read by a policy in the engine.

python examples/04_own_signal.py [RUNS.parquet]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from contracts.conformance import check_signal
from contracts.policy import FloatArray, IntArray
from contracts.signals import SignalRequest, build_grid, signal_request
from eval.outcomes import score_breach
from serving_sim.config import EngineConfig
from serving_sim.engine import simulate
from serving_sim.policies import get_policy
from serving_sim.profile import load_profile
from traces.arrivals import build_workload
from traces.bundled import bundled_runs
from traces.runlog import read_runs


class PromptLength:  # a naive guess: three output tokens for each prompt token, less the age
    name, clairvoyant, source_run_ids = "prompt-length", False, frozenset[str]()

    def remaining(self, requests: Sequence[SignalRequest], ages: IntArray) -> FloatArray:
        caps, prompts = np.array([(r.max_tokens, r.prompt_tokens) for r in requests]).T
        return np.asarray(np.clip(3.0 * prompts - ages, 1.0, np.maximum(1, caps - ages)))


path = Path(sys.argv[1]) if len(sys.argv) > 1 else bundled_runs()
runs = [run for run in read_runs(path) if run.repeat == 0]
check_signal(PromptLength(), runs)
sizes = {"num_warmup": 30, "num_tagged": 120, "num_filler": 100}
workload = build_workload(runs, rate_per_s=10.0, seed=0, deadline_s=8.0, name="own-signal", **sizes)
asked = {run.run_id: signal_request(run) for run in runs}
grid = build_grid(PromptLength(), [asked[run_id] for run_id in workload.run_ids or ()])
engine = EngineConfig(num_blocks=161, max_num_batched_tokens=2048, drain_s=8.0)
profile = load_profile("rtx4090-llama-3.1-8b")
for name in ("lifo", "longest-remaining"):  # lifo reads no signal: the grid changes nothing
    records = simulate(workload, engine, profile, get_policy(name), signal=grid).records
    print(f"{name:<20} breach {score_breach(records, deadline_s=8.0).breach:.1%}")
