"""The parts of DLRM and its variants: dense columns, looked-up rows, interactions, the last MLP.

Without dense columns a part is given None for the dense row, and works on the looked-up rows alone.

    # B rows of the batch, I dense columns, F features looked up, D width of every table
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from rayrec.errors import ConfigError
from rayrec.modules import MLP, EmbeddingBagCollection, get_embedding_names_by_table, pairwise_dots
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor

Device = torch.device | str | None


class ClickBatch(Protocol):
    """Batch of DLRMTrain: dense_features (B, I), sparse_features of B rows, labels (B,)."""

    @property
    def dense_features(self) -> Tensor: ...

    @property
    def sparse_features(self) -> KeyedJaggedTensor: ...

    @property
    def labels(self) -> Tensor: ...


def logits_of_batch(model: nn.Module, batch: ClickBatch) -> Tensor:
    """Return the logits of a click model for a batch, (B, outputs).

    A model that reads more of a batch than dense columns and ids has a `forward_batch(batch)`.
    """
    of_batch = getattr(model, "forward_batch", None)
    logits: Tensor = (
        model(batch.dense_features, batch.sparse_features) if of_batch is None else of_batch(batch)
    )
    return logits


class SparseArch(nn.Module):
    """A batch of ids -> (B, F, D) rows.

    Raises:
        ConfigError: there are no tables, or they differ in width.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        tables = embedding_bag_collection.embedding_bag_configs()
        widths = {table.name: table.embedding_dim for table in tables}
        if len(set(widths.values())) != 1:
            raise ConfigError(
                f"the tables of a DLRM need one embedding_dim, found {widths or 'no tables'}."
            )
        self.embedding_bag_collection = embedding_bag_collection
        self.D = tables[0].embedding_dim
        self._names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self.F = len(self._names)

    @property
    def sparse_feature_names(self) -> list[str]:
        """Names of the F rows, in order."""
        return self._names

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """-> (B, F, D)."""
        (rows,) = KeyedTensor.regroup([self.embedding_bag_collection(features)], [self._names])
        return rows.reshape(rows.shape[0], self.F, self.D)


class DenseArch(nn.Module):
    """Dense columns (B, I) -> (B, D)."""

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: Device = None) -> None:
        super().__init__()
        self.model = MLP(in_features, layer_sizes, bias=True, activation="relu", device=device)

    def forward(self, features: Tensor) -> Tensor:
        """(B, I) -> (B, D)."""
        return self.model(features)


class InteractionArch(nn.Module):
    """The dense row and the dot products of all pairs of rows.

    (B, D) and (B, F, D) become (B, D + F + F (F - 1) / 2).

    Without a dense row: the F rows themselves and their dot products, (B, F D + F (F - 1) / 2).
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.F = num_sparse_features

    def out_features(self, width: int, has_dense: bool) -> int:
        """Columns of the output for rows of `width` columns."""
        rows = self.F + has_dense
        return (width if has_dense else self.F * width) + rows * (rows - 1) // 2

    def forward(self, dense_features: Tensor | None, sparse_features: Tensor) -> Tensor:
        """Rows -> interactions."""
        if dense_features is None:
            return torch.cat((sparse_features.flatten(1), pairwise_dots(sparse_features)), dim=1)
        rows = torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1)
        return torch.cat((dense_features, pairwise_dots(rows)), dim=1)


class InteractionDCNArch(nn.Module):
    """All rows side by side through a cross network.

    (B, D) and (B, F, D) become (B, (F + 1) D), or (B, F D) without a dense row.
    """

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: Tensor | None, sparse_features: Tensor) -> Tensor:
        """Rows -> crossed rows."""
        return self.crossnet(_side_by_side(dense_features, sparse_features))


class InteractionProjectionArch(nn.Module):
    """The dense row, and the product of two matrices that MLPs make of all rows.

    (B, D) and (B, F, D) become (B, D + F1 F2).

    Branch 1 gives F1 rows of D, branch 2 gives D rows of F2. Without a dense row: (B, F1 F2).

    Args:
        interaction_branch1: ((F + 1) D columns) -> (F1 D columns); of F D columns without a dense
            row.
        interaction_branch2: the same -> (D F2 columns).
    """

    def __init__(
        self,
        num_sparse_features: int,
        interaction_branch1: nn.Module,
        interaction_branch2: nn.Module,
    ) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def forward(self, dense_features: Tensor | None, sparse_features: Tensor) -> Tensor:
        """Rows -> interactions."""
        batch, width = sparse_features.shape[0], sparse_features.shape[2]
        rows = _side_by_side(dense_features, sparse_features)
        # (B, F1 D) and (B, D F2) are viewed as matrices; their product is (B, F1, F2).
        left, right = self.interaction_branch1(rows), self.interaction_branch2(rows)
        left = left.view(batch, left.shape[1] // width, width)
        products = torch.bmm(left, right.view(batch, width, right.shape[1] // width)).flatten(1)
        return products if dense_features is None else torch.cat((dense_features, products), dim=1)


class OverArch(nn.Module):
    """Interactions -> logits: an MLP and a last linear layer.

    Args:
        in_features: columns of the interactions.
        layer_sizes: sizes of all layers; the last is linear, and 1 for one logit.
    Raises:
        ConfigError: there are no layers.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: Device = None) -> None:
        super().__init__()
        if not layer_sizes:
            raise ConfigError(
                "over_arch_layer_sizes is empty; it needs at least the last layer, whose size is "
                "1 for one logit."
            )
        hidden = list(layer_sizes[:-1])
        self.model = nn.Sequential(
            MLP(in_features, hidden, bias=True, activation="relu", device=device),
            # A logit may be negative, so no activation follows the last layer.
            nn.Linear([in_features, *hidden][-1], layer_sizes[-1], bias=True, device=device),
        )

    def forward(self, features: Tensor) -> Tensor:
        """(B, in_features) -> (B, layer_sizes[-1])."""
        return self.model(features)


def _side_by_side(dense: Tensor | None, sparse_BFD: Tensor) -> Tensor:
    """(B, (F + 1) D), or (B, F D) without a dense row."""
    rows = sparse_BFD.flatten(1)
    return rows if dense is None else torch.cat((dense, rows), dim=1)


def dense_arch_of(
    in_features: int, layer_sizes: Sequence[int], device: Device = None
) -> tuple[nn.Module | None, int]:
    """Return the part for dense columns, and the number of columns that it gives.

    Without dense columns it is None; without layers it takes the columns as they are.
    """
    if not in_features:
        return None, 0
    if not layer_sizes:
        return nn.Identity(), in_features
    return DenseArch(in_features, layer_sizes, device), layer_sizes[-1]


def pooled_columns(collection: EmbeddingBagCollection) -> int:
    """Return the number of columns of all rows that a collection gives, side by side."""
    tables = collection.embedding_bag_configs()
    return sum(table.embedding_dim * len(table.feature_names) for table in tables)
