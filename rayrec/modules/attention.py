"""Target attention without padding: a candidate's row attends to the values of its own sequence.

This is the attention of the Deep Interest Network. All work is done on the T values that there are,
so its cost does not depend on the longest sequence; nothing is larger than (T, 4 D) or (T, first
hidden layer), and the host waits for nothing on any device.

    # B sequences, T values of all of them, D columns, K hidden units
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.errors import ConfigError, ShapeError
from rayrec.modules.jagged_rows import JaggedOffsets, dots, expand_rows, softmax_rows, weighted_sum

Device = torch.device | str | None
_MOST_PAIRS = 1 << 12  # of queries and values of one sequence, done at a time: fits a cache


class TargetAttention(nn.Module):
    """The sum of a sequence's values, each weighted by how it fits the query.

    The weight is an MLP of query, value, their difference and their product, as in the paper, or
    their dot product over the root of D. A sequence without values gives zeros.

    Args:
        dim: D.
        hidden: sizes of the MLP's hidden layers, with sigmoids; empty for the dot product.
        softmax: True divides a sequence's weights so that they sum to 1. The paper leaves them as
            they are, so that the sum says how strong the interest is.
    Raises:
        ConfigError: a size is below 1.
    Source: Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018. Its
    activation, Dice, takes statistics of the batch and is left out: ranks would not agree on it.
    """

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int] = (80, 40),
        softmax: bool = False,
        device: Device = None,
    ) -> None:
        super().__init__()
        if min([dim, *hidden]) < 1:
            raise ConfigError(
                f"TargetAttention(dim={dim}, hidden={tuple(hidden)}): sizes must be at least 1."
            )
        self.dim, self.softmax = dim, softmax
        sizes = [4 * dim, *hidden, 1] if hidden else []
        self.layers = nn.ModuleList(nn.Linear(a, b, device=device) for a, b in pairwise(sizes))

    def forward(self, query: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        """Attend.

        Args:
            query: (B, D), one row per sequence, or any number of rows for the only sequence.
            values: (T, D), the values of all sequences.
            offsets: (B + 1,) integers from 0 to T.
        Returns:
            as many rows of D columns as there are queries.
        Raises:
            ShapeError: there are more or fewer queries than sequences, and several sequences.
        """
        sequences = JaggedOffsets(offsets, len(values))
        if offsets.numel() == 2 and len(query) != 1:
            rows = max(1, _MOST_PAIRS // max(1, len(values)))
            return torch.cat([self._one_sequence(part, values) for part in query.split(rows)])
        if len(query) != offsets.numel() - 1:
            raise ShapeError(
                f"{len(query)} queries for {offsets.numel() - 1} sequences; give one for each."
            )
        # under autocast products are in another type than the values
        scores = self._scores(query, values, sequences).to(values.dtype)
        weights = softmax_rows(scores, sequences) if self.softmax else scores
        return weighted_sum(weights, values, sequences)

    def _one_sequence(self, query: Tensor, values: Tensor) -> Tensor:
        # N queries: (N, D)
        if not len(self.layers):
            scores = query @ values.T * self.dim**-0.5
        else:
            per_query, of_value, of_product = self._first(query)
            per_value = functional.linear(values, of_value)
            products = functional.linear(query.unsqueeze(1) * values, of_product)
            hidden = products + per_query.unsqueeze(1) + per_value
            for layer in self.layers[1:]:
                hidden = layer(hidden.sigmoid())
            scores = hidden.squeeze(2)
        scores = scores.to(values.dtype)
        return (scores.softmax(1) if self.softmax else scores) @ values

    def _scores(self, query: Tensor, values: Tensor, sequences: JaggedOffsets) -> Tensor:
        # (T,)
        if not len(self.layers):
            return dots(query, values, sequences) * self.dim**-0.5
        per_row_BK, of_value, of_product = self._first(query)
        products_TD = expand_rows(query, sequences) * values
        # a product that is added as it is made spares two passes
        hidden_TK = torch.addmm(expand_rows(per_row_BK, sequences), values, of_value.T).addmm(
            products_TD, of_product.T
        )
        for layer in self.layers[1:]:
            hidden_TK = layer(hidden_TK.sigmoid())
        return hidden_TK.squeeze(1)

    def _first(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The first layer is W (query, value, query - value, query * value). What it does with the
        # query is the same for a whole sequence, so it is done once per row: (B, K), beside the
        # weights of values and of products, (K, D).
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        of_query, of_value, of_difference, of_product = first.weight.split(self.dim, dim=1)
        per_row = functional.linear(query, of_query + of_difference, first.bias)
        return per_row, of_value - of_difference, of_product
