"""FBGEMM's cache of rows in device memory, as its kernels keep it.

It has sets of 32 lines, and of a set the line goes that was longest unused. Rows of the tables lie
in managed memory, one after the other, and are numbered over all tables (linear ids). The cache
holds the number of the row in every line, -1 in an empty one, and the step in which it was used
last. Rows are hashed to sets in another way than by the kernels: only which rows collide differs.
"""

# S sets, 32 lines of each, N ids

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Call = Mapping[str, Any]


def linearize(call: Call, output: Tensor) -> None:
    """Fill (N,) with linear ids; ids of tables without a cache get the number behind all rows."""
    firsts = call["cache_hash_size_cumsum"].tolist()
    offsets, count = call["offsets"].long(), len(firsts) - 1
    bags = (offsets.numel() - 1) // count
    for t in range(count):
        span = slice(int(offsets[t * bags]), int(offsets[(t + 1) * bags]))
        ids = call["indices"][span]
        output[span] = ids + firsts[t] if firsts[t] >= 0 else torch.full_like(ids, firsts[-1])


def _set_of(row: int, state: Tensor) -> int:
    return row * 2654435761 % state.shape[0]


def find(row: int, state: Tensor) -> int:
    """The line of a linear id, or -1."""
    lines = state[_set_of(row, state)]
    hits = (lines == row).nonzero()
    return _set_of(row, state) * state.shape[1] + int(hits[0]) if hits.numel() else -1


def look_up(call: Call, output: Tensor) -> None:
    """Fill (N,) with the lines of linear ids, -1 where a row is not in the cache."""
    wanted, state = call["linear_cache_indices"].tolist(), call["lxu_cache_state"]
    where = call["lxu_cache_locations_output"]
    lines = {row: -1 if row == call["invalid_index"] else find(row, state) for row in set(wanted)}
    (output if where is None else where).copy_(torch.tensor([lines[row] for row in wanted]))


def _row(call: Call, row: int, memory: Tensor) -> Tensor:
    """A row of the tables in managed memory."""
    t = int(call["cache_index_table_map"][row])
    widths, starts = call["D_offsets"], call["weights_offsets"]
    firsts = call.get("hash_size_cumsum", call.get("cache_hash_size_cumsum"))
    width = int(widths[t + 1] - widths[t])
    first = int(starts[t]) + (row - int(firsts[t])) * width
    return memory[first : first + width]


def _write_back(call: Call, line: int, memory: Tensor) -> None:
    row = int(call["lxu_cache_state"].view(-1)[line])
    if row >= 0:
        into = _row(call, row, memory)
        into.copy_(call["lxu_cache_weights"][line, : into.numel()])


def populate(call: Call, output: Tensor | None) -> None:
    """Bring the rows of linear ids in, each into an empty line of its set or the longest unused.

    A line that is used in this step stays, so that a row may find no place.
    """
    state, used, now = call["lxu_cache_state"], call["lru_state"], call["time_stamp"]
    rows = [
        r
        for r in call["linear_cache_indices"].unique().tolist()
        if r != call["total_cache_hash_size"]
    ]
    for row in rows:
        line = find(row, state)
        if line >= 0:
            used.view(-1)[line] = now
    for row in (row for row in rows if find(row, state) < 0):
        number = _set_of(row, state)
        ages = torch.where(state[number] < 0, torch.full_like(used[number], -1), used[number])
        if int(ages.min()) == now:
            continue
        line = number * state.shape[1] + int(ages.argmin())
        _write_back(call, line, call["weights"])
        source = _row(call, row, call["weights"])
        call["lxu_cache_weights"][line, : source.numel()] = source
        state.view(-1)[line], used.view(-1)[line] = row, now


def flush(call: Call, output: Tensor | None) -> None:
    """Write every row back; lines stay as they are."""
    for line in range(call["lxu_cache_state"].numel()):
        _write_back(call, line, call["uvm_weights"])


OPERATORS: dict[str, Callable[[Any, Any], None]] = {
    "linearize_cache_indices": linearize,
    "lru_cache_populate": populate,
    "lxu_cache_lookup": look_up,
    "lxu_cache_flush": flush,
}
