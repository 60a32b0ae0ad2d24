"""Stable 64-bit hashes of ids and strings: the same bytes give the same bucket everywhere.

DEFINITION. mix(x) is the output function of splitmix64, modulo 2**64:
    x += 0x9E3779B97F4A7C15; x = (x ^ x>>30) * 0xBF58476D1CE4E5B9; x = (x ^ x>>27) *
    0x94D049BB133111EB; return x ^ x>>31
An integer i (two's complement, 64 bit) hashes to mix(i). A string of n bytes (UTF-8 for text)
hashes to h after h = mix(n) and h = mix(h ^ w) for each of its little-endian 8-byte words w, the
last padded with zeros. The bucket is the hash modulo the buckets. The id of a string in a dynamic
table is its whole hash as a signed number, and -2 in place of -1, which is no id. Cost: one pass
per 8 bytes of the longest string over the strings that are that long, or where few are long a step
per 8 bytes of each, and one padded copy of the bytes. The same mix makes the seeds and permutations
of `order`. numpy's generators promise no fixed streams; this definition does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# so few strings, beyond so many bytes of each, take fewer steps one by one
_FEW, _LONG = 16, 1024


def mix(x: U64) -> U64:
    """splitmix64's output function of each element; uint64 in, new uint64 array out, any shape."""
    x = x + np.uint64(_GOLDEN)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def mix_int(*parts: int) -> int:
    """One 64-bit number from several, order-sensitive: h = 0; h = mix(h ^ part) for each part."""
    h = 0
    for part in parts:
        h = ((h ^ (part & _MASK)) + _GOLDEN) & _MASK
        h = ((h ^ h >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ h >> 27) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 31
    return h


def random_bits(key: int, start: int, stop: int) -> U64:
    """Elements [start, stop) of the splitmix64 stream of `key`, equal to that part of the whole."""
    counter = np.arange(start, stop, dtype=np.uint64)
    counter *= np.uint64(_GOLDEN)
    counter += np.uint64(key & _MASK)
    return mix(counter)


def permutation(key: int, n: int) -> NDArray[np.int64]:
    """A permutation of range(n), a pure function of (key, n).

    It is the stable order of n random 64-bit numbers.
    """
    return np.argsort(random_bits(key, 0, n), kind="stable").astype(np.int64, copy=False)


def hash_integers(ids: NDArray[np.int64], buckets: int) -> NDArray[np.int64]:
    """(N,) int64 ids of any sign -> (N,) int64 in [0, buckets)."""
    return to_buckets(mix(ids.astype(np.int64, copy=False).view(np.uint64)), buckets)


def to_buckets(hashes: U64, buckets: int) -> NDArray[np.int64]:
    """(N,) uint64 -> (N,) int64, modulo `buckets` >= 1."""
    return (hashes % np.uint64(buckets)).view(np.int64)


def to_ids(hashes: U64) -> NDArray[np.int64]:
    """(N,) uint64 -> (N,) int64 ids of a dynamic table: the same bits, but -2 for -1."""
    ids = hashes.view(np.int64)
    return np.where(ids == -1, np.int64(-2), ids)


def hash_bytes(data: NDArray[np.uint8], offsets: NDArray[Any]) -> U64:
    """Hash the strings data[offsets[i]:offsets[i + 1]].

    Args:
        data: (M,) bytes.
        offsets: (N + 1,) ascending, within [0, M].
    Returns:
        (N,) uint64 by the definition above.
    """
    starts = offsets[:-1].astype(np.int64)
    lengths = np.diff(offsets).astype(np.int64)
    h = mix(lengths.view(np.uint64))
    if not lengths.size or not lengths.max():
        return h
    low, high = int(offsets[0]), int(offsets[-1])
    # one 8-byte word of every string at a time; strings that have ended drop out of `rows`.
    # 8 more bytes: the last word of the last string may reach past its end
    padded = np.zeros(high - low + 8, np.uint8)
    padded[: high - low] = data[low:high]
    # the word that starts at each byte
    words: U64 = np.ndarray((high - low + 1,), np.dtype("<u8"), buffer=padded, strides=(1,))
    starts -= low
    rows: NDArray[np.int64] | None = np.flatnonzero(lengths) if lengths.min() == 0 else None
    done = 0
    while True:
        if done == _LONG and (lengths.size if rows is None else rows.size) <= _FEW:
            for row in range(lengths.size) if rows is None else rows.tolist():
                start, length = int(starts[row]), int(lengths[row])
                text = data[low + start : low + start + length].tobytes()
                whole = np.frombuffer(text + bytes(-length % 8), "<u8")
                h[row] = mix_int(length, *whole.tolist())
            return h
        at = starts if rows is None else starts[rows]
        left = (lengths if rows is None else lengths[rows]) - done
        word = words[at + done]
        short = left < 8
        # bytes beyond a string's end belong to the next string and count as zeros
        if short.any():
            bits = left.clip(0, 7).view(np.uint64) * np.uint64(8)
            mask = (np.uint64(1) << bits) - np.uint64(1)
            word &= np.where(short, mask, np.uint64(_MASK))
        if rows is None:
            h = mix(h ^ word)
        else:
            h[rows] = mix(h[rows] ^ word)
        done += 8
        if (left <= 8).any():
            keep = left > 8
            rows = np.flatnonzero(keep) if rows is None else rows[keep]
            if not rows.size:
                return h
