"""The gradients of a step's pooled outputs at home, and how they are cut into columns for owners.

Each owner gets the gradient of the columns that it looked up, span by span, in the order in which
its rows came.
"""

# B rows of the home batch, D columns of a collection

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.distributed.program.groups import Use
from rayrec.distributed.ways.spans import Span, cut_spans

_WIDE = 256  # columns; from here on a copy and a product take one pass, span by span


@dataclass(frozen=True)
class HomeGrads:
    """The gradients of the outputs of one step.

    Attributes:
        whole: collection -> (B, D); empty where keys have different numbers of bags.
        by_use: collection -> per use (bags, width), there.
        uses: collection -> its uses, in the order of `by_use`.
    """

    whole: Mapping[int, Tensor]
    by_use: Mapping[int, Sequence[Tensor]]
    uses: Mapping[int, Sequence[Use]]

    @staticmethod
    def of(
        grads: Mapping[int, Sequence[Tensor]],
        uses: Mapping[int, Sequence[Use]],
        varying: bool,
        in_one_piece: bool,
    ) -> HomeGrads:
        """Take the gradients of the outputs of each collection.

        Args:
            varying: keys have different numbers of bags, so that there is an output per use.
            in_one_piece: copy a gradient whose rows do not lie side by side.
        """
        if varying:
            return HomeGrads({}, grads, uses)
        whole = {}
        for collection, (grad,) in grads.items():
            whole[collection] = grad.contiguous() if in_one_piece else grad
        return HomeGrads(whole, {}, uses)

    def write(self, spans: Sequence[Span], matrix: Tensor, scale: float) -> None:
        """Fill (rows, columns of all spans) with the gradient of these columns, times `scale`.

        Wide spans are multiplied into place one by one, in one pass. Narrow ones are first put side
        by side, and then scaled as one matrix.
        """
        if self.by_use:
            self._write_by_use(spans, matrix, scale)
            return
        parts = [self.whole[s.collection][:, s.column : s.column + s.width] for s in spans]
        if scale != 1.0 and matrix.shape[1] >= _WIDE * len(spans):
            for span, part in zip(spans, parts, strict=True):
                torch.mul(part, scale, out=matrix[:, span.source : span.source + span.width])
            return
        torch.cat(parts, 1, out=matrix)
        if scale != 1.0:
            matrix.mul_(scale)

    def _write_by_use(self, spans: Sequence[Span], matrix: Tensor, scale: float) -> None:
        matrix.zero_()  # padded bags have no gradient
        for span in spans:
            for use in self.uses[span.collection]:
                grad = self.by_use[span.collection][use.index]
                for cut in cut_spans([span], use):
                    first = cut.column - use.column
                    into = matrix[: grad.shape[0], cut.source : cut.source + cut.width]
                    torch.mul(grad[:, first : first + cut.width], scale, out=into)
