"""DIN: a click model in which the candidate attends to the sequences of what came before it.

Every table of sequences looks up the candidate and its histories. The candidate's row attends to
the rows of each history (`TargetAttention`), on the values that there are, and an MLP over all rows
gives the logits. Pooled features and dense columns stand beside them. The model knows nothing of
sharding, and its attention works on any device without a host sync.

    # B rows of the batch, I dense columns, D width of the tables of sequences
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.errors import ConfigError, InputError
from rayrec.models.dlrm_parts import Device, OverArch, dense_arch_of, pooled_columns
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    TargetAttention,
    get_embedding_names_by_table,
)
from rayrec.modules.jagged_rows import JaggedOffsets, sum_rows
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


class DIN(nn.Module):
    """Deep Interest Network: (B, I), ids -> logits (B, over_arch_layer_sizes[-1]).

    Args:
        embedding_collection: tables of the candidates and their histories.
        histories: history -> the candidate that attends to it, both outputs of the collection. A
            candidate with several ids counts as the sum of their rows, one without ids as zeros.
        over_arch_layer_sizes: layers of the MLP over all rows; the last is 1 for one logit.
        embedding_bag_collection: pooled tables of any widths, or None.
        dense_in_features: I; 0 for none.
        dense_arch_layer_sizes: layers of an MLP of the dense columns; empty takes them as they are.
        attention_layer_sizes: hidden layers of the attention's MLP; empty for dot products.
        softmax: True divides the weights of a history by their sum.
        beside: history -> outputs of the collection with as many events, such as what the user did
            at each. Their rows stand beside those of the history, and zeros beside the candidate.
    Raises:
        ConfigError: there is no history, or it or its candidate is not looked up.
    Source: Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018.
    Differences: actions may stand beside the items of a history; ReLU takes the place of PReLU and
    Dice in the MLP; and histories of several tables, such as items and their categories, are
    attended to each on their own.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        histories: Mapping[str, str],
        over_arch_layer_sizes: Sequence[int],
        embedding_bag_collection: EmbeddingBagCollection | None = None,
        dense_in_features: int = 0,
        dense_arch_layer_sizes: Sequence[int] = (),
        attention_layer_sizes: Sequence[int] = (80, 40),
        softmax: bool = False,
        dense_device: Device = None,
        beside: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__()
        self.beside = {name: list(own) for name, own in (beside or {}).items()}
        names = get_embedding_names_by_table(embedding_collection.embedding_configs())
        known = {name for own in names for name in own}
        missing = [n for pair in histories.items() for n in pair if n not in known]
        missing += [n for own in self.beside.values() for n in own if n not in known]
        missing += [n for n in self.beside if n not in histories]
        if missing or not histories:
            what = f"histories name {missing[0]!r}" if missing else "there is no history"
            raise ConfigError(
                f"{what}; the candidate attends to outputs of the EmbeddingCollection, which are "
                f"{sorted(known)}."
            )
        self.histories = dict(histories)
        self.candidates = list(dict.fromkeys(histories.values()))
        self.embedding_collection = embedding_collection
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_arch, columns = dense_arch_of(
            dense_in_features, dense_arch_layer_sizes, dense_device
        )
        width = embedding_collection.embedding_dim()
        widths = [width * (1 + len(self.beside.get(name, ()))) for name in self.histories]
        # a name of a feature may not name a module, so they are numbered
        self.attentions = nn.ModuleList(
            TargetAttention(own, attention_layer_sizes, softmax, dense_device) for own in widths
        )
        columns += width * len(self.candidates) + sum(widths)
        if embedding_bag_collection is not None:
            columns += pooled_columns(embedding_bag_collection)
        self.over_arch = OverArch(columns, over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """(B, I) and B rows of ids -> (B, over_arch_layer_sizes[-1]) logits. B may be 0.

        All histories may have one bag, that of a user whose candidates the rows are.

        Raises:
            InputError: what stands beside a history has not as many events (seen on CPU; elsewhere
                where their sums differ).
        """
        rows = self.embedding_collection(sparse_features)
        candidates = {name: summed(rows[name]) for name in self.candidates}
        parts = [] if self.dense_arch is None else [self.dense_arch(dense_features)]
        if self.embedding_bag_collection is not None:
            parts.append(self.embedding_bag_collection(sparse_features).values())
        parts += candidates.values()
        for attention, (history, candidate) in zip(
            self.attentions, self.histories.items(), strict=True
        ):
            own = {name: rows[name] for name in (history, *self.beside.get(history, ()))}
            offsets = aligned_offsets(own)
            events = torch.cat([one.values() for one in own.values()], dim=1)
            query = candidates[candidate]
            query = functional.pad(query, (0, events.shape[1] - query.shape[1]))
            parts.append(attention(query, events, offsets))
        return self.over_arch(torch.cat(parts, dim=1))


def summed(rows: JaggedTensor) -> Tensor:
    """Return the sum of the rows of each bag, (B, D)."""
    values = rows.values()
    return sum_rows(values, JaggedOffsets(rows.offsets(), len(values)))


def aligned_offsets(jagged: Mapping[str, JaggedTensor]) -> Tensor:
    """Return the offsets of all of these.

    Raises:
        InputError: they differ.
    """
    (name, first), *others = jagged.items()
    offsets, values = first.offsets(), len(first.values())
    for other, one in others:
        same = len(one.values()) == values
        if offsets.device.type == "cpu":
            same = same and torch.equal(one.offsets().long(), offsets.long())
        if not same:
            raise InputError(
                f"{name!r} and {other!r} have not as many events in each row; histories of a "
                "ranking model are aligned: give them the same history, or aligned_with."
            )
    return offsets
