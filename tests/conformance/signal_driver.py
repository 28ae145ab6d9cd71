"""Runs the real vLLM with this project's scheduler class; each workload brings its environment.

Runs in vLLM's environment, from the root of this repository:

    python -m tests.conformance.signal_driver workloads.jsonl LOG_FOLDER [--max-steps N]

Each line is a driver workload with one more field, ``environ`` (None: vLLM's own scheduler). With
``speaks`` its requests write what tests/conformance/speech.py says, and some ask for logprobs;
with ``leave`` every so many steps the client of one unfinished request leaves.
``LOG_FOLDER/NNNN.jsonl`` is its decision log, ``NNNN.json`` what is left when it ended.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.vllm_prefix_driver import Run
from tests.conformance import speech


class SpeakingRun(Run):
    """Requests write varied tokens, and the engine lists what they were drawn from."""

    def word(self, index: int, number: int) -> int:
        """Return output token ``number``, from 1."""
        return speech.tokens_of(index)[number - 1]

    def logprobs(self, requests: list[Any]) -> Any:
        """Return the lists of the sampled tokens; in every other step, as speculative decoding
        does, without rows for requests that sampled nothing."""
        from vllm.v1.outputs import LogprobsLists

        rows, starts = [], []
        is_dense = self.num_steps % 2 == 0
        nothing = np.zeros_like(speech.logprobs_of(0)[0])
        for request in requests:
            starts.append(len(rows))
            number = self.number_sampled(request)
            if number is not None:
                rows.append(speech.logprobs_of(self.index[request.request_id])[number - 1])
            elif is_dense:
                rows.append(nothing)
        listed = np.array(rows).reshape(-1, len(nothing))
        ids = np.zeros(listed.shape, dtype=np.int32)
        return LogprobsLists(ids, listed, ids[:, 0], None if is_dense else starts)


class LeavingRun(Run):
    """Every ``leave`` steps a client leaves: whoever comes first of a fixed shuffle. And, as in a
    served engine, a step may have returned before the next one could be planned ahead."""

    leave = 5

    def _plan(self) -> bool:
        from vllm.v1.request import RequestStatus

        unfinished = [name for name, r in self.scheduler.requests.items() if not r.is_finished()]
        if unfinished and self.num_steps % self.leave == self.leave - 1:
            name = min(unfinished, key=lambda one: self.index[one] * 7919 % 104_729)
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.num_finished += 1
        return super()._plan() and self.num_steps % 7 < 4


def scheduler_class(is_async: bool) -> str:
    """Return the class to ask vLLM for."""
    return f"integrations.vllm_scheduler.{'' if is_async else 'Sync'}SignalScheduler"


def use_virtual_clock(now_s: Callable[[], float]) -> None:
    """Let the scheduler class read the driver's clock instead of the day's."""
    from integrations.vllm_scheduler import _SignalVictims

    _SignalVictims.now_s = staticmethod(now_s)


def play(workload: dict[str, Any], folder: Path, number: int, version: str, max_steps: int) -> None:
    """Run one workload and write its two files."""
    environ = workload.pop("environ")
    speaks, leave = workload.pop("speaks", False), workload.pop("leave", 0)
    engine = dict(workload["engine"])
    for key in [key for key in os.environ if key.startswith("PREEMPTBENCH_")]:
        del os.environ[key]
    if environ is not None:
        os.environ.update(environ)
        engine["scheduler_cls"] = scheduler_class(engine.get("async_scheduling", False))
    path = folder / f"{number:04d}.jsonl"
    if environ is not None and environ.get("PREEMPTBENCH_DECISIONS"):
        os.environ["PREEMPTBENCH_DECISIONS"] = str(path.with_suffix(".live.jsonl"))
    with path.open("w", encoding="utf-8") as log:
        log.write(json.dumps({"vllm_version": version} | workload) + "\n")
        use_virtual_clock(lambda: 0.0)
        rows = workload["requests"]
        if speaks:
            rows = [row | {"logprobs": speech.asked_by(i)} for i, row in enumerate(rows)]
        kind = SpeakingRun if speaks else LeavingRun if leave else Run
        run = kind({"engine": engine, "requests": rows}, log)
        if isinstance(run, LeavingRun):
            run.leave = leave
        use_virtual_clock(lambda: run.clock_s)
        run.play(max_steps)
    left: dict[str, Any] = {"num_finished": run.num_finished, "num_steps": run.num_steps}
    if environ is not None:
        chooser = run.scheduler.chooser
        left["counters"] = chooser.counters.as_dict()
        left["num_tracked"] = len(chooser.tracked)
        if run.scheduler.live_log is not None:
            run.scheduler.shutdown()
    (folder / f"{number:04d}.json").write_text(json.dumps(left), encoding="utf-8")


def main() -> None:
    """Run every workload of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workloads", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-steps", type=int, default=1_000_000_000)
    options = parser.parse_args()
    import vllm

    options.folder.mkdir(parents=True, exist_ok=True)
    lines = options.workloads.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        play(json.loads(line), options.folder, number, vllm.__version__, options.max_steps)


if __name__ == "__main__":
    main()
