"""Order in which tables leave the device where their storage is open.

The answer is a ladder of problems in which every table has one storage. If a byte of the mean rank
had a price, every item would take the option for which seconds and price are least; as the price
rises, items step along the lower hull of their (bytes, seconds) towards fewer bytes, those first
that save most bytes for a second. Along that path the storages of all items are fixed now and then,
and each such problem is packed as if nothing was open. The ladder does not depend on the memory
there is. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from rayrec.planner.options import Item, Option

RUNG = 0.95  # of the bytes of the rung before


def fixed_storages(items: Sequence[Item], world_size: int) -> Iterator[list[Item]]:
    """The items with one storage each, from the fastest storages to those of the fewest bytes.

    Where no storage is open, `items` alone.
    """
    if all(len({option.storages for option in item.options}) == 1 for item in items):
        yield list(items)
        return
    paths = [_hull(item, world_size) for item in items]
    steps = []
    for i, path in enumerate(paths):
        steps += [(_price(a, b, world_size), i, b) for a, b in pairwise(path)]
    now = [path[0] for path in paths]
    total = told = sum(_bytes(option, world_size) for option in now)
    yield _restricted(items, now)
    # Steps of all items by rising price of a byte; on each hull they come in this order anyway.
    changed = False
    for _, i, option in sorted(steps, key=lambda step: step[:2]):
        total += _bytes(option, world_size) - _bytes(now[i], world_size)
        changed |= option.storages != now[i].storages
        now[i] = option
        if changed and total < RUNG * told:
            yield _restricted(items, now)
            told, changed = total, False
    if changed:
        yield _restricted(items, now)


def least_bytes(items: Sequence[Item], world_size: int) -> float:
    """Bytes of the mean rank that no packing avoids."""
    return sum(item.least(lambda option: _bytes(option, world_size)) for item in items)


def _bytes(option: Option, world_size: int) -> float:
    return sum(option.num_bytes) / world_size + option.home_bytes


def _price(a: Option, b: Option, world_size: int) -> float:
    """Seconds per byte at which an item goes over from `a` to `b`, which takes fewer bytes."""
    return (b.mean_s - a.mean_s) / (_bytes(a, world_size) - _bytes(b, world_size))


def _hull(item: Item, world_size: int) -> list[Option]:
    """The options that are best at some price of a byte, the fastest first."""
    path: list[Option] = []
    for option in item.options:  # by rising seconds
        if path and _bytes(option, world_size) >= _bytes(path[-1], world_size):
            continue
        while len(path) > 1:
            price = _price(path[-2], path[-1], world_size)
            if _price(path[-1], option, world_size) > price:
                break
            path.pop()  # never the best: the next step already costs less per byte
        path.append(option)
    return path


def _restricted(items: Sequence[Item], chosen: Sequence[Option]) -> list[Item]:
    # Each item keeps all options that have the storages of its chosen one. Its layout stays open:
    # the packing may still take another kind or other ranks.
    restricted = []
    for item, own in zip(items, chosen, strict=True):
        options = tuple(option for option in item.options if option.storages == own.storages)
        restricted.append(replace(item, options=options))
    return restricted
