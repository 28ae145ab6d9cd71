"""Lets the real SGLang retract from made-up batches, with this project's plug-in or without.

Runs in an environment that can import SGLang, from the root of this repository, without a GPU:

    python -m tests.conformance.sglang_driver batches.jsonl

Each line is a batch: ``environ`` (None: no plug-in), ``page``, ``free`` tokens, ``reqs``. For each
it prints a JSON line: who was retracted, in order, who was aborted, and what the plug-in counted.
SGLang's own code finds the plug-in, orders, loops and keeps; what would need a device (releasing
KV, filtering tensors) is a stand-in.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ENTRY_POINTS = "[sglang.srt.plugins]\npreemptbench = integrations.sglang_entry:register\n"


def find_plugin() -> None:
    """Put the plug-in where an installed package would have it, and let SGLang load it."""
    folder = Path(tempfile.mkdtemp()) / "preemptbench-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: preemptbench\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    sys.path.insert(0, str(folder.parent))
    from sglang.srt.plugins import load_plugins

    load_plugins()


def publish_settings() -> None:
    """Stand in for what a starting server publishes."""
    from sglang.srt import runtime_context

    context = runtime_context.get_context()
    schedule = SimpleNamespace(retraction_policy="length", schedule_low_priority_values_first=False)
    context._config_bags = {"schedule": schedule}
    context._server_args = SimpleNamespace(tp_size=1)


def make_req(row: dict[str, Any]) -> Any:
    """Return SGLang's own request, decoding."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req(
        rid=row["rid"],
        origin_input_text="",
        origin_input_ids=array("q", [1] * row["prompt"]),
        sampling_params=SamplingParams(max_new_tokens=row["cap"]),
        priority=row["priority"],
    )
    req.output_ids = array("q", [1] * row["written"])
    req.retraction_count = row["retractions"]
    req.kv.kv_committed_len = row["committed"]
    req.kv.kv_allocated_len = row["allocated"]
    return req


def retract(line: dict[str, Any]) -> dict[str, Any]:
    """Let SGLang retract from one batch."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    pool = SimpleNamespace(page_size=line["page"], free=line["free"])
    pool.available_size = lambda: pool.free
    pool.check_decode_capacity = lambda num_tokens, **_: num_tokens <= pool.free

    def release(req: Any, **_: Any) -> bool:
        pool.free += req.kv.kv_allocated_len
        return True

    schedule_batch.release_req = release
    batch = schedule_batch.ScheduleBatch.__new__(schedule_batch.ScheduleBatch)
    batch.reqs = [make_req(row) for row in line["reqs"]]
    batch.token_to_kv_pool_allocator, batch.tree_cache = pool, None
    batch.req_to_token_pool = batch.hisparse_coordinator = None
    batch.spec_algorithm = SpeculativeAlgorithm.NONE
    batch.filter_batch = lambda keep_indices: setattr(
        batch, "reqs", [batch.reqs[i] for i in keep_indices]
    )
    retracted: list[Any] = []
    aborted: list[Any] = []
    if not batch.check_decode_mem():
        retracted, _, aborted = batch.retract_decode()
    return {"retracted": [req.rid for req in retracted], "aborted": [req.rid for req in aborted]}


def main() -> None:
    """Run all batches of the file; the plug-in is loaded once, as in a server."""
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text("utf-8").splitlines()]
    environ = lines[0]["environ"]
    os.environ.update(environ or {})
    if environ is not None:
        find_plugin()
    publish_settings()
    for line in lines:
        print(json.dumps(retract(line)))  # noqa: T201


if __name__ == "__main__":
    main()
