"""Memory that all ranks of a host share, for the gradients of one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.comm.pages import make_huge

_LEAST_BYTES = 1 << 20


class SharedGradients:
    """Memory for the gradients of one step of all ranks; it grows to the largest step.

    Attributes:
        free: True once every rank has read those of the last step.
    """

    def __init__(self) -> None:
        self.free = True
        self._memory = torch.empty(0)

    def matrices(self, shapes: Sequence[tuple[int, int]], exchange: Exchange) -> list[Tensor]:
        """Return one matrix of each shape, which all ranks share; all ranks call it together.

        The contents are those of a former step. The memory grows to a power of two of bytes; all
        ranks know all shapes, so all grow in the same step.
        """
        sizes = [rows * width for rows, width in shapes]
        if self._memory.numel() < sum(sizes):
            size = max(_LEAST_BYTES, 1 << (4 * sum(sizes) - 1).bit_length())
            memory = exchange.share(size)
            assert memory is not None, "tables are shared"
            if exchange.rank == 0:
                make_huge(memory)
            self._memory = memory.view(torch.float32)
        parts = self._memory[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
