"""The folder of a collection: whose it is, which process does what, and the merged run log.

Several processes may share one folder (torchrun, accelerate launch): each takes the prompts whose
hash falls to its rank and writes its own shard. Nothing but the folder connects them. The process
that finds all ranks finished merges.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from contracts.files import atomic_write_text
from contracts.runs import DecodeRun, sha256_text
from oracles.prompts import Prompt
from oracles.shards import read_shard, shard_paths
from traces.runlog import write_runs
from traces.safe_json import read_json


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of ``world`` processes this one is; rank 0 of 1 when it is alone."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise InvalidInput(f"rank {self.rank} of {self.world}: ranks are 0 to {self.world - 1}")

    def owns(self, prompt: Prompt) -> bool:
        """Whether the hash of the prompt's text falls to this rank."""
        return int(sha256_text(prompt.prompt)[:15], 16) % self.world == self.rank


def rank_from_environment(environment: Mapping[str, str] = os.environ) -> Rank:
    """Read RANK and WORLD_SIZE, which torchrun and accelerate launch set; alone without them."""
    words = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
    try:
        return Rank(int(words[0]), int(words[1]))
    except ValueError:
        raise InvalidInput(
            f"RANK={words[0]!r}, WORLD_SIZE={words[1]!r}: both must be whole numbers; unset them "
            "to run alone"
        ) from None


def claim_folder(out_dir: Path, identity: Mapping[str, Any]) -> None:
    """Write the identity of this collection, or compare it with the one that is there.

    More repeats than before extend a collection; any other difference is refused.
    """
    wanted = json.loads(json.dumps(identity))
    path = out_dir / "collection.json"
    before = read_json(path) if path.exists() else None
    if before is not None:
        grows = int(before.get("repeats", 0)) <= wanted["repeats"]
        for field, value in wanted.items():
            if before.get(field) != value and not (field == "repeats" and grows):
                raise InvalidInput(
                    f"{out_dir} holds a collection with {field} = {before.get(field)!r}; this one "
                    f"has {value!r}: use the same settings to resume, or another --out folder"
                )
    if before != wanted:
        atomic_write_text(path, json.dumps(wanted, indent=1) + "\n")


def keys_done(out_dir: Path) -> set[tuple[str, int]]:
    """Return (request_key, repeat) of every run in any shard, whoever wrote it."""
    return {
        (run.request_key, run.repeat) for path in shard_paths(out_dir) for run in read_shard(path)
    }


def merged_runs(out_dir: Path, prompts: Sequence[Prompt] | None = None) -> list[DecodeRun]:
    """Return the runs of all shards, each (request_key, repeat) once.

    The order does not depend on who wrote what when: by repeat, then as in ``prompts`` (by
    prompt_id without them).
    """
    runs: dict[tuple[str, int], DecodeRun] = {}
    for path in shard_paths(out_dir):
        for run in read_shard(path):
            runs.setdefault((run.request_key, run.repeat), run)
    place = {prompt.prompt_id: number for number, prompt in enumerate(prompts or ())}
    return sorted(
        runs.values(),
        key=lambda run: (run.repeat, place.get(run.prompt_id, len(place)), run.prompt_id),
    )


def merge(
    out_dir: Path,
    prompts: Sequence[Prompt] | None = None,
    refused: Mapping[str, str] | None = None,
) -> list[DecodeRun]:
    """Write ``runs.parquet`` (and its manifest) from the shards of ``out_dir``; return its runs.

    ``refused`` (prompt_id to reason) goes into the manifest. Raises InvalidInput when the folder
    holds no run.
    """
    runs = merged_runs(out_dir, prompts)
    if not runs:
        why = next(iter((refused or {}).values()), "collect into it first")
        raise InvalidInput(f"{out_dir} holds no run to merge: {why}")
    facts = {"collection": read_json(out_dir / "collection.json"), "refused": dict(refused or {})}
    write_runs(runs, out_dir / "runs.parquet", facts)
    return runs


def finish(
    out_dir: Path, rank: Rank, prompts: Sequence[Prompt], refused: Mapping[str, str]
) -> list[DecodeRun] | None:
    """Mark ``rank`` as finished; merge, and return the runs, if it was the last one."""
    with _locked(out_dir / "merge.lock"):
        stamp = sha256_text((out_dir / "collection.json").read_text(encoding="utf-8"))
        mark = {"world": rank.world, "collection": stamp, "refused": dict(refused)}
        atomic_write_text(_mark_path(out_dir, rank.rank), json.dumps(mark) + "\n")
        everyone: dict[str, str] = {}
        for other in range(rank.world):
            path = _mark_path(out_dir, other)
            found = read_json(path) if path.exists() else {}
            if (found.get("world"), found.get("collection")) != (rank.world, stamp):
                return None
            everyone |= found["refused"]
        return merge(out_dir, prompts, everyone)


def unfinish(out_dir: Path, rank: Rank) -> None:
    """Take back the mark of an earlier start: this rank works again."""
    _mark_path(out_dir, rank.rank).unlink(missing_ok=True)


def _mark_path(out_dir: Path, rank: int) -> Path:
    return out_dir / f"finished-{rank}.json"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
