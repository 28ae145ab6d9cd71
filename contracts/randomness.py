"""Keyed random streams: a draw depends on (seed, purpose, ids), never on the order of events.

Two policies that meet the same seed therefore meet the same arrivals, lengths and noise (common
random numbers). Keys are hashed with BLAKE2b, so they do not depend on ``PYTHONHASHSEED``.
"""

from __future__ import annotations

import hashlib

import numpy as np

_TWO_53 = float(1 << 53)


def _digest(seed: int, purpose: str, ids: tuple[object, ...], size: int) -> bytes:
    key = "\x1f".join([str(seed), purpose, *map(str, ids)])
    return hashlib.blake2b(key.encode(), digest_size=size).digest()


def keyed_uniform(seed: int, purpose: str, *ids: object) -> float:
    """Return the one uniform number in [0, 1) that belongs to (seed, purpose, ids)."""
    bits = int.from_bytes(_digest(seed, purpose, ids, 8), "big") >> 11
    return bits / _TWO_53


def keyed_generator(seed: int, purpose: str, *ids: object) -> np.random.Generator:
    """Return a fresh generator (Philox) whose whole stream belongs to (seed, purpose, ids)."""
    key = int.from_bytes(_digest(seed, purpose, ids, 16), "big")
    return np.random.Generator(np.random.Philox(key=key))
