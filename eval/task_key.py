"""The content address of a task: everything that can change its numbers, and nothing else.

In it: the settings, the bytes of every input file, the text of the user's own policies, and the
source of every module a cell passes through, so that a changed engine never finds old results.
Not in it: host, worker count, output path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from eval.named_policies import policy_file

_CODE = ("contracts", "traces", "predictors", "oracles", "serving_sim", "eval")


def content_key(
    settings: Mapping[str, Any], inputs: Mapping[str, Path], policies: Sequence[str]
) -> str:
    """Return 16 hexadecimal digits; paths inside ``settings`` are replaced by what they hold.

    A policy of the user's own counts with every Python file beside it, since it may import them;
    anything else such a file reads is not seen.
    """
    identity = {
        "settings": {k: v for k, v in settings.items() if k not in ("runs", "trace", "signals")},
        "signals": [(s["name"], s["allow_mismatch"]) for s in settings["signals"]],
        "inputs": {name: path_sha256(path) for name, path in inputs.items()},
        "policies": [_policy_source(name) for name in policies],
        "code": code_sha256(),
    }
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@lru_cache
def code_sha256() -> str:
    """Return the hash of every module that can change a cell's numbers."""
    root = Path(__file__).parents[1]
    return _digest_of(sorted(path for name in _CODE for path in (root / name).rglob("*.py")))


def path_sha256(path: Path) -> str:
    """Return the hash of a file, or of all files of a folder with their names."""
    return _digest_of(sorted(p for p in path.rglob("*") if p.is_file()) or [path])


def _policy_source(name: str) -> str | None:
    file = policy_file(name)
    return None if file is None else _digest_of(sorted(file.resolve().parent.glob("*.py")))


def _digest_of(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()
