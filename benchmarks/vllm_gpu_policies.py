"""A real vLLM on a GPU under LIFO and two other policies, beside the simulator.

In an environment with vLLM and a GPU, then in ours (docs/deploy.md says whether it has been run):

    python -m benchmarks.vllm_gpu_policies run --out out/gpu
    python -m benchmarks.vllm_gpu_policies compare --out out/gpu

The model is a two-layer Llama with random weights, so that the pool (``num_gpu_blocks_override``)
is the only thing that is short. ``run`` starts one engine a policy, each with a decision log;
``compare`` replays the logs and prints preemptions and recomputed tokens of both, and in how many
steps and victims our engine agrees when it follows the log (``preemptbench validate``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

POLICIES = ("lifo", "least-computed", "fifo")
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NUM_REQUESTS, NUM_BLOCKS, MAX_MODEL_LEN = 200, 1200, 2048


def play(folder: Path) -> None:
    """Serve the requests once, in this process, with the policy of the environment."""
    from vllm import LLM, SamplingParams

    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
    engine = LLM(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, seed=0,
        max_model_len=MAX_MODEL_LEN, max_num_seqs=128, gpu_memory_utilization=0.3,
        num_gpu_blocks_override=NUM_BLOCKS, enable_prefix_caching=False,
        scheduler_cls="integrations.vllm_scheduler.SignalScheduler",
    )  # fmt: skip
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(10, 1000) for _ in range(rng.randint(50, 300))]}
        for _ in range(NUM_REQUESTS)
    ]
    params = [
        SamplingParams(max_tokens=rng.randint(200, 1200), ignore_eos=True, detokenize=False)
        for _ in range(NUM_REQUESTS)
    ]
    engine.generate(prompts, params)


def run(out: Path) -> None:
    """Start one engine a policy; leave a decision log and the counters of each."""
    out.mkdir(parents=True, exist_ok=True)
    for policy in POLICIES:
        own = {
            "PREEMPTBENCH_POLICY": policy,
            "PREEMPTBENCH_DECISIONS": str((out / f"{policy}.jsonl").resolve()),
            "PREEMPTBENCH_METRICS": str((out / f"{policy}.prom").resolve()),
            "PREEMPTBENCH_REPORT_EVERY_S": "0.5",
        }
        command = [sys.executable, "-m", "benchmarks.vllm_gpu_policies", "play", "--out", str(out)]
        subprocess.run(command, env=os.environ | own, check=True)
        print(f"{policy}: served", file=sys.stderr)
    import torch

    (out / "device.txt").write_text(torch.cuda.get_device_name(), encoding="utf-8")


def compare(out: Path) -> None:
    """Replay each log under its own policy; print both engines' counts."""
    from eval.log_replay import replay_log
    from eval.what_if import what_if
    from serving_sim.live_log import read_recorded
    from serving_sim.policies import get_policy

    print((out / "device.txt").read_text(encoding="utf-8"))
    print(
        f"{'policy':<18}{'preempted':>10}{'simulated':>10}{'recomputed':>11}{'simulated':>10}"
        f"{'steps alike':>16}{'victims alike':>16}"
    )
    for policy in POLICIES:
        recorded = read_recorded(out / f"{policy}.jsonl")
        found = what_if(recorded, [get_policy("lifo"), get_policy(policy)])[-1]
        recomputed = counter(out / f"{policy}.prom", "recomputed_tokens")
        followed = replay_log(recorded, get_policy(policy))
        steps = f"{followed.num_equal_steps}/{followed.num_steps}"
        victims = f"{followed.num_equal_victims}/{followed.num_victims}"
        print(
            f"{policy:<18}{recorded.num_preemptions:>10}{found.num_preemptions:>10}"
            f"{recomputed:>11}{found.recomputed_tokens:>10}{steps:>16}{victims:>16}"
        )


def counter(path: Path, name: str) -> int:
    """Return one total of a file of counters."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"preemptbench_{name}_total{{"):
            return int(line.rsplit(" ", 1)[1])
    raise SystemExit(f"{path} has no counter {name}")


def main() -> None:
    """Do what the first argument says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "play", "compare"])
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    options = parser.parse_args()
    {"run": run, "play": play, "compare": compare}[options.what](options.out)


if __name__ == "__main__":
    main()
