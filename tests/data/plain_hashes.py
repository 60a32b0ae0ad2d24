"""The hashes of `rayrec.data.hashing` read word by word from their definition, in plain Python."""

from __future__ import annotations

MASK = (1 << 64) - 1


def scalar_mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def scalar_hash(text: bytes) -> int:
    h = scalar_mix(len(text))
    for i in range(0, len(text), 8):
        h = scalar_mix(h ^ int.from_bytes(text[i : i + 8].ljust(8, b"\0"), "little"))
    return h


def scalar_id(text: bytes) -> int:
    """The id of a text in a dynamic table."""
    signed = (scalar_hash(text) ^ 1 << 63) - (1 << 63)
    return -2 if signed == -1 else signed


def unmixed(y: int) -> int:
    """The number of which `scalar_mix` makes y."""
    y ^= y >> 31 ^ y >> 62
    y = y * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    y ^= y >> 27 ^ y >> 54
    y = y * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    y ^= y >> 30 ^ y >> 60
    return (y - 0x9E3779B97F4A7C15) & MASK
