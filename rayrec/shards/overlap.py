"""Copies what a saved and a wanted rectangle share, with their optimizer state.

This is the one place that knows what a row-wise state means. Row-wise optimizer state is one value
per row and column block. Where one source block covers the wanted columns its value is copied:
exact for equal blocks, an approximation when a block is split (a part gets the mean of the whole).
Where several do, the wanted value is their mean weighted by the columns they share with it: exact
when whole blocks merge and the state sums means of squares (row-wise Adagrad). Restore and live
reshard both write through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rayrec.layout.geometry import Shard
from rayrec.shards.state import ShardState, is_time


def within(part: range, whole: range) -> slice:
    """`part` as a slice of `whole`."""
    return slice(part.start - whole.start, part.stop - whole.start)


def meet(one: range, other: range) -> bool:
    """Return True if two ranges share a number."""
    return one.start < other.stop and other.start < one.stop


class OverlapWriter:
    """Writes parts of source rectangles into wanted shards.

    `finish` completes row-wise state that several blocks share.
    """

    def __init__(self) -> None:
        self._means: dict[tuple[int, str], Tensor] = {}

    def put(
        self, source_rows: range, source_cols: range, data: Mapping[str, Tensor], target: ShardState
    ) -> None:
        """Copy what one source and one shard share; nothing when they share nothing.

        Args:
            data: column name -> (rows, cols), or (rows,) for row-wise state.
        """
        shard = target.shard
        shared = shard.intersect(Shard(shard.table, source_rows, source_cols, shard.rank))
        if shared is None:
            return
        rows, _ = shared
        from_rows, to_rows = within(rows, source_rows), within(rows, shard.rows)
        tensors = {
            name: tensor
            for name, tensor in target.tensors().items()
            if name in data or not is_time(name)
        }
        part = {name: data[name][from_rows] for name in tensors}
        self.put_rows(to_rows, source_cols, part, target, tensors)

    def put_rows(
        self,
        rows: slice | Tensor,
        source_cols: range,
        data: Mapping[str, Tensor],
        target: ShardState,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Copy some rows of a source that has columns of a shard.

        Args:
            rows: of the shard.
            data: column name -> (rows, cols), or (rows,) for row-wise state.
            tensors: columns of `target` to write.
        """
        shard = target.shard
        shared = range(
            max(source_cols.start, shard.cols.start), min(source_cols.stop, shard.cols.stop)
        )
        for name, tensor in tensors.items():
            values = data[name]
            if tensor.dim() == 2:
                tensor[rows, within(shared, shard.cols)] = values[
                    :, within(shared, source_cols)
                ].to(tensor)
            # one block has all wanted columns: exact if equal, an approximation if it is split;
            # and the ids of a dynamic table's rows are the same in every block
            elif len(shared) == len(shard.cols) or not tensor.is_floating_point():
                tensor[rows] = values.to(tensor)
            # merged blocks are summed in float64, so that equal values stay as they are
            else:
                zeros = torch.zeros(len(shard.rows), dtype=torch.float64)
                total = self._means.setdefault((id(target), name), zeros)
                total[rows] += values.double().cpu() * len(shared)

    def finish(self, targets: Iterable[ShardState]) -> None:
        """Write the means of merged blocks."""
        for target in targets:
            for name, tensor in target.optimizer.items():
                if (id(target), name) in self._means:
                    tensor.copy_(self._means[id(target), name] / len(target.shard.cols))


@torch.no_grad()
def fill(states: Sequence[ShardState], pieces: Sequence[ShardState]) -> None:
    """Write pieces of tables into the shards that consist of them."""
    writer = OverlapWriter()
    for state in states:
        for piece in pieces:
            if piece.shard.table == state.shard.table:
                writer.put(piece.shard.rows, piece.shard.cols, piece.tensors(), state)
    writer.finish(states)
