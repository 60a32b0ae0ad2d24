"""Ids that are born and die: which id holds a place of a column at a time, and its planted effects.

A column has as many places as ids are alive. A place keeps its popularity for ever; its id lives
for so many rows, and another one takes over then. Places change hands at times spread evenly by a
hash. An id is a number of 64 bits, negative ones among them, and what is planted for it is a
function of the seed and the id, so that a chunk of any time is drawn without those before it.
"""

# N ids

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rayrec.data.hashing import mix, mix_int, random_bits, to_ids

Ints = NDArray[np.int64]
_MOST_PLACES = 32  # bits of a place in the number that is hashed into an id


class Drift:
    """The ids of some columns over time.

    Args:
        seed: of ids, of the times at which they change, and of what is planted for them.
        lifetime: rows from the birth to the death of an id.
        places: ids that are alive at a time, by column.
    """

    def __init__(self, seed: int, lifetime: int, places: list[int]) -> None:
        self._seed, self._lifetime = seed, lifetime
        self._keys = [np.uint64(mix_int(seed, 6, column)) for column in range(len(places))]
        self._offsets = [
            (random_bits(mix_int(seed, 7, column), 0, size) % np.uint64(lifetime)).view(np.int64)
            for column, size in enumerate(places)
        ]

    def ids(self, column: int, places: Ints, times: Ints) -> Ints:
        """Return (N,) ids that hold (N,) places of a column at (N,) times, in rows."""
        lives = (times + self._offsets[column][places]) // self._lifetime
        numbers = (lives << _MOST_PLACES | places).view(np.uint64)
        return to_ids(mix(numbers ^ self._keys[column]))

    def normals(self, kind: int, ids: Ints) -> NDArray[np.float64]:
        """Return (N,) standard normal numbers of a kind, a function of seed, kind and id each."""
        first = mix(ids.view(np.uint64) ^ np.uint64(mix_int(self._seed, 8, kind)))
        # 53 bits of each hash as a number above 0 and below 1, two of which make a normal one
        one, two = (((h >> np.uint64(11)) + 0.5) * 2.0**-53 for h in (first, mix(first)))
        normal: NDArray[np.float64] = np.sqrt(-2 * np.log(one)) * np.cos(2 * np.pi * two)
        return normal
