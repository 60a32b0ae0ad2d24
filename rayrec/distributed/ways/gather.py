"""Many narrow column spans moved row by row, as one index_select over blocks of equal width.

`torch.cat` of column slices walks each slice down all rows, a cache miss or more per row and slice
once matrices outgrow the caches; a block gather reads and writes every row once from left to right.
It needs one source and blocks of at least 16 columns to be worth it.
"""

# B rows, w columns of a block

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

_LEAST_WIDTH = 16  # columns of float32: a cache line


@dataclass(frozen=True, eq=False)
class BlockGather:
    """Output blocks of `width` columns, each from block `index[i]` of the source."""

    width: int
    index: Tensor
    columns: int  # of the source

    @staticmethod
    def of(
        pieces: Sequence[tuple[int, int]], columns: int, least: int, device: torch.device
    ) -> BlockGather | None:
        """Make the gather of neighbouring output spans, or None where `torch.cat` is as good.

        Args:
            pieces: per span its first source column and its width, in output order.
            columns: the columns of the source. Blocks are as wide as fits them and all spans.
            least: number of spans that a gather must replace at least.
        """
        width = gcd(columns, *(value for piece in pieces for value in piece))
        if len(pieces) < least or width < _LEAST_WIDTH:
            return None
        index = [first // width + i for first, size in pieces for i in range(size // width)]
        return BlockGather(width, torch.tensor(index, device=device), columns)

    def __call__(self, source: Tensor, out: Tensor | None = None) -> Tensor:
        """Return (B, output columns) from (B, columns), in a contiguous `out` if it is given."""
        rows = source.shape[0]
        blocks = source.contiguous().view(rows, self.columns // self.width, self.width)
        into = None if out is None else out.view(rows, self.index.numel(), self.width)
        return torch.index_select(blocks, 1, self.index, out=into).view(
            rows, self.index.numel() * self.width
        )
