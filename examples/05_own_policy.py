"""A policy of your own: checked by the conformance suite, then run beside LIFO and largest-kv.

python examples/05_own_policy.py [RUNS.parquet]
"""

import sys
from pathlib import Path

import numpy as np

from contracts.conformance import check_policy
from contracts.policy import FloatArray, Policy, RunningViews
from eval.outcomes import score_breach
from serving_sim.config import EngineConfig
from serving_sim.engine import simulate
from serving_sim.policies import get_policy
from serving_sim.profile import load_profile
from traces.arrivals import build_workload
from traces.bundled import bundled_runs
from traces.runlog import read_runs


def spare_the_evicted(views: RunningViews) -> FloatArray:
    """The largest KV first, but who was preempted already only when nobody else is left."""
    return np.where(views.num_preemptions == 0, views.kv_blocks, -views.num_preemptions) * 1.0


OWN = Policy("spare-the-evicted", spare_the_evicted)
path = Path(sys.argv[1]) if len(sys.argv) > 1 else bundled_runs()
check_policy(OWN)
runs = [run for run in read_runs(path) if run.repeat == 0]
sizes = {"num_warmup": 30, "num_tagged": 120, "num_filler": 100}
workload = build_workload(runs, rate_per_s=10.0, seed=0, deadline_s=8.0, name="own-policy", **sizes)
engine = EngineConfig(num_blocks=161, max_num_batched_tokens=2048, drain_s=8.0)
profile = load_profile("rtx4090-llama-3.1-8b")
for policy in (get_policy("lifo"), get_policy("largest-kv"), OWN):
    result = simulate(workload, engine, profile, policy)
    breach = score_breach(result.records, deadline_s=8.0).breach
    print(f"{policy.name:<20} breach {breach:.1%}, {result.num_preemptions} preemptions")
