"""Copies what a saved and a wanted rectangle share, with their optimizer state.

This is the one place that knows what a row-wise state means.

Row-wise optimizer state is one value per row and column block. Where one source block covers the
wanted columns its value is copied: exact for equal blocks, an approximation when a block is split
(a part gets the mean of the whole). Where several do, the wanted value is their mean weighted by
the columns they share with it: exact when whole blocks merge and the state sums means of squares
(row-wise Adagrad). Restore and live reshard both write through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rayrec.shards.state import ShardState


def within(part: range, whole: range) -> slice:
    """`part` as a slice of `whole`."""
    return slice(part.start - whole.start, part.stop - whole.start)


class Placer:
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
            source_rows, source_cols: the rectangle that `data` holds.
            data: column name -> (rows, cols), or (rows,) for row-wise state.
            target: a shard of the same table, written in place.
        """
        shard = target.shard
        rows = range(
            max(source_rows.start, shard.rows.start), min(source_rows.stop, shard.rows.stop)
        )
        cols = range(
            max(source_cols.start, shard.cols.start), min(source_cols.stop, shard.cols.stop)
        )
        if not len(rows) or not len(cols):
            return
        from_rows, to_rows = within(rows, source_rows), within(rows, shard.rows)
        for name, tensor in target.tensors().items():
            values = data[name][from_rows]
            if tensor.dim() == 2:
                tensor[to_rows, within(cols, shard.cols)].copy_(
                    values[:, within(cols, source_cols)]
                )
            elif len(cols) == len(
                shard.cols
            ):  # one block has all wanted columns: exact if equal, an approximation if it is split
                tensor[to_rows].copy_(values)
            else:  # merged blocks; float64 so that equal values stay as they are
                total = self._means.setdefault(
                    (id(target), name), torch.zeros(len(shard.rows), dtype=torch.float64)
                )
                total[to_rows] += values.double().cpu() * len(cols)

    def finish(self, targets: Iterable[ShardState]) -> None:
        """Write the means of merged blocks."""
        for target in targets:
            for name, tensor in target.optimizer.items():
                if (id(target), name) in self._means:
                    tensor.copy_(self._means[id(target), name] / len(target.shard.cols))
