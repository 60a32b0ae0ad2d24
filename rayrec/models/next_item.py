"""Next-item recommendation: a user's items in their order become vectors that score all items.

The items' table serves twice: its rows are what the encoder reads, and, with a bias for each item,
what its vectors are multiplied with (a tied output). Every position of a history is trained to find
the item that follows it; behind the last one comes the row's own item. So a batch looks up three
features of one table: the history, the item, and the candidates of the loss, which
`rayrec.data.NextItemDataset` adds to the batches.

The model knows nothing of sharding but the ranks that share its table, and those only for losses
over what all ranks hold. The biases are a dense parameter, which every rank holds whole.

    # B rows, T tokens: positions of all histories, K candidates on this rank, D width
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rayrec.comm.exchange import Exchange, LocalExchange
from rayrec.data.batch import Batch, keys_of
from rayrec.errors import ConfigError, InputError
from rayrec.models.softmax import FullSoftmax, SampledSoftmax, items_of_ranks
from rayrec.modules import EmbeddingCollection
from rayrec.modules.jagged_rows import JaggedOffsets
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


class HistoryBatch(Protocol):
    """Batch of NextItemTrain: sparse_features of B rows with the candidates as one more bag, and
    sequences of the same rows.
    """

    @property
    def sparse_features(self) -> KeyedJaggedTensor: ...

    @property
    def sequences(self) -> Mapping[str, JaggedTensor]: ...


class Looked(NamedTuple):
    """Rows of a batch's items.

    Attributes:
        history: (T, D) with their lengths.
        item: (B, D).
        candidates: (K, D).
    """

    history: JaggedTensor
    item: Tensor
    candidates: Tensor


class NextItem(nn.Module):
    """Items' table, encoder and tied output.

    Args:
        embedding_collection: one table with the features below.
        encoder: forward(values (T, D), offsets (B + 1,), times, keys) -> (T, D), where a position
            sees those before it and itself, such as `rayrec.modules.SASRecEncoder`.
        history, item, candidates: names of the features; without candidates a model is trained
            with the items of all tokens of the batch, on all ranks, as its negatives.
        times: sequence of the batch with the time of each item of the history, for encoders that
            look at it; None for others.
        listed: (num_embeddings,) bool, the items that lists of the best may hold; None for all.
        bias: (num_embeddings,) initial biases of the items; None for an output without biases.
    Raises:
        ConfigError: the collection has several tables, or other features.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        encoder: nn.Module,
        history: str = "history",
        item: str = "item",
        candidates: str | None = "candidates",
        bias: Tensor | None = None,
        times: str | None = None,
        listed: Tensor | None = None,
    ) -> None:
        super().__init__()
        tables = embedding_collection.embedding_configs()
        names = [name for name in (history, item, candidates) if name is not None]
        found = [feature for table in tables for feature in table.feature_names]
        if len(tables) != 1 or set(found) != set(names):
            raise ConfigError(
                f"a next-item model has one table of the features {names}; the collection "
                f"has {len(tables)} with {found}."
            )
        (self.table,) = tables
        if bias is not None and bias.shape != (self.table.num_embeddings,):
            raise ConfigError(
                f"bias {tuple(bias.shape)} of a table of {self.table.num_embeddings} items must "
                "be one number for each."
            )
        self.items, self.encoder = embedding_collection, encoder
        self.history, self.item, self.candidates = history, item, candidates
        self.times = times
        self.listed: Tensor | None
        self.register_buffer("listed", listed)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone().float())

    @property
    def exchange(self) -> Exchange:
        """The ranks that share the table; this rank alone where it is not sharded."""
        exchange: Exchange = getattr(self.items, "exchange", None) or LocalExchange()
        return exchange

    def look_up(self, features: KeyedJaggedTensor) -> Looked:
        """Return the rows of a batch; all ranks of a sharded model call it together."""
        found = self.items(features)
        item = found[self.item].values()
        candidates = item[:0] if self.candidates is None else found[self.candidates].values()
        return Looked(found[self.history], item, candidates)

    def of_items(self, ids: Tensor) -> KeyedJaggedTensor:
        """Return a batch of one row without a history, whose item is several: it looks them up."""
        names = [name for name in (self.history, self.item, self.candidates) if name is not None]
        counts = [0, len(ids), 0][: len(names)]
        lengths = torch.tensor(counts, dtype=torch.int32, device=ids.device)
        return KeyedJaggedTensor(names, ids, lengths=lengths, stride=1)

    def encode(self, history: JaggedTensor, batch: HistoryBatch) -> Tensor:
        """Rows of the histories of a batch -> (T, D), a vector of each position."""
        times = None if self.times is None else batch.sequences[self.times].values()
        keys = keys_of(batch) if self.training else None
        encoded: Tensor = self.encoder(history.values(), history.offsets(), times, keys)
        return encoded

    def queries(self, history: JaggedTensor, batch: HistoryBatch) -> Tensor:
        """Rows of the histories of a batch -> (B, D) float32, the vector behind each history; zeros
        where there is none.
        """
        tokens, offsets = self.encode(history, batch).float(), history.offsets()
        if not len(tokens):
            return tokens.new_zeros(len(offsets) - 1, tokens.shape[1])
        last = tokens[(offsets[1:] - 1).clamp(min=0)]
        return torch.where((offsets.diff() > 0).unsqueeze(1), last, 0.0)

    def biases(self, ids: Tensor) -> Tensor:
        """Return the biases of some items."""
        if self.bias is None:
            return torch.zeros(len(ids), device=ids.device)
        return self.bias[ids]


class NextItemTrain(nn.Module):
    """A next-item model and its loss: batch -> (loss, (loss, {}, {})).

    The loss is the mean over the tokens of the batch; its `loss_count` makes training divide by
    those of the global batch. There are no predictions of rows, so that training tells the loss
    alone; `rank_items` scores a model.

    Args:
        model: the model.
        loss: what the scores of all or of some items become.
    Raises:
        ConfigError: the loss needs candidates, and the model has none.

    Example:
        data = NextItemDataset(data=rows, candidates=ItemSlices(num_items=items))
        model = NextItemTrain(NextItem(collection, encoder), FullSoftmax(items))
    """

    def __init__(self, model: NextItem, loss: FullSoftmax | SampledSoftmax) -> None:
        super().__init__()
        if model.candidates is None and isinstance(loss, FullSoftmax):
            raise ConfigError("a full softmax needs candidates, all items; name their feature.")
        self.model, self.loss = model, loss

    def forward(
        self, batch: HistoryBatch
    ) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]:
        """-> scalar loss, 0 on a rank without tokens.

        Raises:
            InputError: a row has not one item (seen on CPU; elsewhere where their sum differs).
        """
        model, features = self.model, batch.sparse_features
        rows = model.look_up(features)
        history_ids, item_ids = features[model.history].values(), features[model.item].values()
        counts = features[model.item].lengths()
        # as many as rows in all, some may be in the wrong one; elsewhere that would cost a sync
        if len(item_ids) != len(counts) or (counts.is_cpu and bool((counts != 1).any())):
            raise InputError(
                f"feature {model.item!r} has {len(item_ids)} ids in {len(counts)} rows; it needs "
                "one in each."
            )
        tokens = model.encode(rows.history, batch).float()
        # The scores are float32 whatever the encoder computes in: logs of small shares need it.
        with torch.autocast(tokens.device.type, enabled=False):
            following = next_places(rows.history.offsets(), len(history_ids))
            own_ids = torch.cat([history_ids, item_ids])[following]
            own_rows = torch.cat([rows.history.values(), rows.item])[following]
            own_scores = (tokens * own_rows).sum(1) + model.biases(own_ids)
            if model.candidates is None:
                ids, candidates, shares = items_of_ranks(own_ids, own_rows, model.exchange)
                # an item stands for all tokens that have it
                biases = model.biases(ids) + (shares * len(ids)).log()
            else:
                ids, candidates = features[model.candidates].values(), rows.candidates
                biases = model.biases(ids)
            losses = self.loss(tokens, own_scores, own_ids, candidates, biases, ids, model.exchange)
            loss = losses.sum() / max(1, len(losses))
        return loss, (loss.detach(), {}, {})

    def loss_count(self, batch: HistoryBatch) -> int:
        """Return the tokens of a batch."""
        return batch.sparse_features[self.model.history].values().numel()


def item_ids(batch: Batch, item: str) -> Tensor:
    """Return the one id of each row.

    Raises:
        InputError: a row has none, or several.
    """
    bags = batch.sparse_features[item]
    lengths = bags.lengths()
    wrong = (lengths != 1).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise InputError(
            f"feature {item!r} has {int(lengths[row])} ids in row {row} of the batch; it must hold "
            "one in each."
        )
    return bags.values()


def next_places(offsets: Tensor, tokens: int) -> Tensor:
    """Return where the item after each position stands, in all histories with the items behind.

    Args:
        offsets: (B + 1,) of the histories.
        tokens: T.
    Returns:
        (T,): t + 1 inside of a history, and T + b at the end of row b.
    """
    following = torch.arange(1, tokens + 1, device=offsets.device)
    row = JaggedOffsets(offsets, tokens).row
    return torch.where(following == offsets[1:][row], tokens + row, following)
