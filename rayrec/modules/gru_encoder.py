"""GRU4Rec's encoder: a recurrence over jagged sequences, as one packed call, without padding.

# B sequences, T values of all of them, D columns
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from rayrec.errors import ConfigError
from rayrec.modules.jagged_dropout import JaggedDropout, value_keys
from rayrec.modules.jagged_rows import JaggedOffsets


class GRUEncoder(nn.Module):
    """Dropout, a GRU, dropout and a linear layer.

    Sequences may have any length. The host waits for the lengths once per call, which a packed
    sequence keeps there.

    Args:
        dim: D, of the values and of the states.
        layers: layers of the GRU.
        dropout: share of the columns that are dropped before and behind the GRU.
    Raises:
        ConfigError: a size is below 1.
    Source: Hidasi et al., Session-based Recommendations with Recurrent Neural Networks, ICLR 2016.
    """

    def __init__(
        self,
        dim: int = 64,
        layers: int = 1,
        dropout: float = 0.3,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if min(dim, layers) < 1:
            raise ConfigError(f"GRUEncoder(dim={dim}, layers={layers}): both must be at least 1.")
        self.gru = nn.GRU(dim, dim, layers, device=device)
        self.output = nn.Linear(dim, dim, device=device)
        self.before, self.behind = JaggedDropout(dropout, 0), JaggedDropout(dropout, 1)

    def forward(
        self,
        values: Tensor,
        offsets: Tensor,
        times: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Encode; as the forward of `AttentionEncoder`. Times are not read."""
        sequences = JaggedOffsets(offsets, len(values))
        own = None if keys is None else value_keys(keys, sequences)
        states = self.before(values, own)
        if len(values):
            states = self._recur(states, sequences)
        return self.output(self.behind(states, own))

    def _recur(self, values: Tensor, sequences: JaggedOffsets) -> Tensor:
        """Run the GRU over (T, D) values, T above 0."""
        # A packed sequence holds the first values of all sequences, longest sequence first, then
        # their second values, and so on. It needs the number of values at every position.
        positions = sequences.positions
        lengths = sequences.lengths
        by_length = torch.argsort(lengths, descending=True, stable=True)
        rank = torch.empty_like(by_length)
        rank[by_length] = torch.arange(len(by_length), device=values.device)
        batch_sizes = torch.bincount(positions)
        starts = batch_sizes.cumsum(0) - batch_sizes
        place = starts.index_select(0, positions) + rank.index_select(0, sequences.row)
        order = torch.empty_like(place)
        order[place] = torch.arange(len(place), device=values.device)
        packed = PackedSequence(values.index_select(0, order), batch_sizes.cpu())
        return self.gru(packed)[0].data.index_select(0, place)
