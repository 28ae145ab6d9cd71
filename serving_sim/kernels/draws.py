"""Keyed draws, compiled: BLAKE2b (RFC 7693), as far as contracts.randomness needs it.

A victim rule may read a draw that belongs to (seed, request, how often it was preempted). Hashed
here, a new one costs no return to Python.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]

_BLOCK_BYTES = 128
_NUM_DIGEST_BYTES = 8
_START = np.array([
    0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
    0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
], np.uint64)  # fmt: skip
_ORDER = np.array([
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
    [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
    [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
    [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
    [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
    [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
    [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
    [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
    [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
], np.uint64)  # fmt: skip

_compiled = numba.njit(cache=True, nogil=True)


@_compiled
def _turn(word: np.uint64, places: int) -> np.uint64:
    """Rotate right."""
    return (word >> np.uint64(places)) | (word << np.uint64(64 - places))


@_compiled
def _mix(
    a: np.uint64, b: np.uint64, c: np.uint64, d: np.uint64, x: np.uint64, y: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    a += b + x
    d = _turn(d ^ a, 32)
    c += d
    b = _turn(b ^ c, 24)
    a += b + y
    d = _turn(d ^ a, 16)
    c += d
    return a, _turn(b ^ c, 63), c, d


@_compiled
def _compress(state: Words, m: Words, num_bytes: int, is_last: bool) -> None:
    """Stir the block ``m`` into ``state``; ``num_bytes`` are read by then."""
    v0, v1, v2, v3 = state[0], state[1], state[2], state[3]
    v4, v5, v6, v7 = state[4], state[5], state[6], state[7]
    v8, v9, v10, v11 = _START[0], _START[1], _START[2], _START[3]
    v12, v13, v14, v15 = _START[4], _START[5], _START[6], _START[7]
    v12 ^= np.uint64(num_bytes)
    if is_last:
        v14 = ~v14
    for o in _ORDER:
        v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m[o[0]], m[o[1]])
        v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m[o[2]], m[o[3]])
        v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m[o[4]], m[o[5]])
        v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m[o[6]], m[o[7]])
        v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m[o[8]], m[o[9]])
        v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m[o[10]], m[o[11]])
        v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m[o[12]], m[o[13]])
        v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m[o[14]], m[o[15]])
    stirred = (v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11, v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15)
    for at in range(8):
        state[at] ^= stirred[at]


@_compiled
def _digest(message: Bytes, num_bytes: int) -> Any:
    """Return the first word of the 8-byte BLAKE2b of the message, as little-endian bytes say it."""
    state = _START.copy()
    state[0] ^= np.uint64(0x01010000 ^ _NUM_DIGEST_BYTES)
    block = np.zeros(_BLOCK_BYTES // 8, np.uint64)
    num_read = 0
    while True:
        end = min(num_read + _BLOCK_BYTES, num_bytes)
        block[:] = 0
        for at in range(num_read, end):
            place = at - num_read
            block[place // 8] |= np.uint64(message[at]) << np.uint64(8 * (place % 8))
        _compress(state, block, end, end == num_bytes)
        num_read = end
        if end == num_bytes:
            return state[0]


@_compiled
def _write_number(message: Bytes, at: int, number: int) -> int:
    """Write ``number`` >= 0 in decimal digits from ``at`` on; return where they end."""
    end = at + 1
    rest = number // 10
    while rest > 0:
        end += 1
        rest //= 10
    for place in range(end - 1, at - 1, -1):
        message[place] = 48 + number % 10
        number //= 10
    return end


@_compiled
def draw_uniform(prefix: Bytes, own_id: Bytes, num_preemptions: int) -> float:
    """Return contracts.randomness.keyed_uniform(seed, purpose, id, number), bit for bit.

    ``prefix`` holds seed and purpose, each with the separator after it; see :func:`key_prefix`.
    """
    message = np.empty(len(prefix) + len(own_id) + 21, np.uint8)
    at = len(prefix)
    message[:at] = prefix
    message[at : at + len(own_id)] = own_id
    at += len(own_id)
    message[at] = 0x1F
    num_bytes = _write_number(message, at + 1, num_preemptions)
    word = _digest(message, num_bytes)
    big_endian = np.uint64(0)
    for _ in range(8):
        big_endian = (big_endian << np.uint64(8)) | (word & np.uint64(0xFF))
        word >>= np.uint64(8)
    return np.float64(big_endian >> np.uint64(11)) / 9007199254740992.0


def key_prefix(seed: int, purpose: str) -> Bytes:
    """Return what contracts.randomness writes before the ids."""
    return np.frombuffer(f"{seed}\x1f{purpose}\x1f".encode(), np.uint8)
