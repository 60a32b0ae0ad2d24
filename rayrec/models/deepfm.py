"""DeepFM: a deep layer and a factorization machine over the same rows, and one logit.

The model knows nothing of sharding: it holds any embedding bag collection and hands it the batch's
KeyedJaggedTensor. Class and parameter names are TorchRec's. Differences: `SimpleDeepFMNN` returns
logits, not their sigmoid, so that the loss is stable and the same for all click models; the
factorization machine can also be that of the paper. Tables have one width, and there may be no
dense columns.

    # B rows of the batch, I dense columns, F features looked up, D width of every table
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rayrec.errors import ConfigError
from rayrec.models.dlrm import DLRMTrain
from rayrec.models.dlrm_parts import ClickBatch, Device, SparseArch
from rayrec.modules import EmbeddingBagCollection
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor


class DeepFM(nn.Module):
    """The deep part: rows side by side through a module of the user's.

    Args:
        dense_module: (B, sum of the rows' columns) -> (B, any).
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Rows of B, of any shape behind -> what dense_module gives."""
        return self.dense_module(_side_by_side(embeddings))


class FactorizationMachine(nn.Module):
    """Second order interactions without parameters: half of (sum of x)^2 - sum of x^2.

    The time is linear in the inputs.

    Args:
        per_column: False, as in TorchRec: x are all columns of all rows, so every pair of columns
            counts. True, as in the paper: columns interact only with their own kind, which makes
            the sum of the dot products of all pairs of rows; needs rows of one width.
    Source: Rendle, Factorization Machines, ICDM 2010; Guo et al., DeepFM, arXiv 1703.04247.
    """

    def __init__(self, per_column: bool = False) -> None:
        super().__init__()
        self.per_column = per_column

    def forward(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Rows of B, of any shape behind -> (B, 1).

        Raises:
            ConfigError: per_column, and rows of different widths.
        """
        # (sum of x)^2 holds every product of a pair twice and every square once. Without the
        # squares, half of it is the sum over all pairs.
        if not self.per_column:
            flat = _side_by_side(embeddings)
            return 0.5 * (flat.sum(1, keepdim=True).square() - flat.square().sum(1, keepdim=True))
        widths = {row.shape[-1] for row in embeddings}
        if len(widths) > 1:
            raise ConfigError(
                f"a factorization machine per column needs rows of one width, got {sorted(widths)}."
            )
        # A part may hold one row (B, D) or several (B, F, D); both become (B, rows, D).
        (width,) = widths
        parts = [row.reshape(len(row), row.shape[1:].numel() // width, width) for row in embeddings]
        rows_BFD = torch.cat(parts, dim=1)
        return 0.5 * (rows_BFD.sum(1).square() - rows_BFD.square().sum(1)).sum(1, keepdim=True)


class FMInteractionArch(nn.Module):
    """The dense row, the deep part and the factorization machine side by side.

    (B, D) and (B, F, D) become (B, D + deep_fm_dimension + 1).

    Without a dense row: (B, deep_fm_dimension + 1); without sparse features: the dense row.

    Args:
        fm_in_features: columns of all rows, dense one included.
        sparse_feature_names: keys of the KeyedTensor that are read, in this order.
    """

    def __init__(
        self,
        fm_in_features: int,
        sparse_feature_names: Sequence[str],
        deep_fm_dimension: int,
        device: Device = None,
        per_column: bool = False,
    ) -> None:
        super().__init__()
        self.sparse_feature_names = list(sparse_feature_names)
        self.deep_fm = DeepFM(
            nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension, device=device), nn.ReLU())
        )
        self.fm = FactorizationMachine(per_column)

    def forward(
        self, dense_features: Tensor | None, sparse_features: Tensor | KeyedTensor
    ) -> Tensor:
        """Rows -> interactions. B may be 0."""
        if dense_features is not None and not self.sparse_feature_names:
            return dense_features
        if isinstance(sparse_features, KeyedTensor):
            (sparse_features,) = KeyedTensor.regroup([sparse_features], [self.sparse_feature_names])
        rows = [sparse_features] if dense_features is None else [dense_features, sparse_features]
        interactions = [self.deep_fm(rows), self.fm(rows)]
        if dense_features is not None:
            # The dense row comes first, as in TorchRec: the weights of the over arch depend on the
            # order.
            interactions.insert(0, dense_features)
        return torch.cat(interactions, dim=1)


class DeepFMDenseArch(nn.Module):
    """Dense columns (B, I) -> (B, D)."""

    def __init__(
        self, in_features: int, hidden_layer_size: int, embedding_dim: int, device: Device = None
    ) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size, device=device),
            nn.ReLU(),
            nn.Linear(hidden_layer_size, embedding_dim, device=device),
            nn.ReLU(),
        )

    def forward(self, features: Tensor) -> Tensor:
        """(B, I) -> (B, D)."""
        return self.model(features)


class DeepFMOverArch(nn.Module):
    """Interactions (B, in_features) -> logits (B, 1)."""

    def __init__(self, in_features: int, device: Device = None) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(in_features, 1, device=device))

    def forward(self, features: Tensor) -> Tensor:
        """(B, in_features) -> (B, 1)."""
        return self.model(features)


class SimpleDeepFMNN(nn.Module):
    """DeepFM over dense columns and tables of one width: (B, I), ids -> logits (B, 1).

    TorchRec's gives `logits.sigmoid()`.

    Args:
        num_dense_features: I; 0 for none, hidden_layer_size is then not read.
    Raises:
        ConfigError: there are no tables, or they differ in width.
    """

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: EmbeddingBagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
        dense_device: Device = None,
        per_column: bool = False,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        # The dense row has the width of a table, so it counts as one more row of the interactions.
        width, has_dense = self.sparse_arch.D, bool(num_dense_features)
        self.dense_arch: DeepFMDenseArch | None = None
        if has_dense:
            sizes = (num_dense_features, hidden_layer_size, width)
            self.dense_arch = DeepFMDenseArch(*sizes, dense_device)
        rows, names = self.sparse_arch.F + has_dense, self.sparse_arch.sparse_feature_names
        self.inter_arch = FMInteractionArch(
            rows * width, names, deep_fm_dimension, dense_device, per_column
        )
        self.over_arch = DeepFMOverArch(has_dense * width + deep_fm_dimension + 1, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """(B, I) and B rows of ids -> (B, 1) logits. B may be 0."""
        dense = None if self.dense_arch is None else self.dense_arch(dense_features)
        return self.over_arch(self.inter_arch(dense, self.sparse_arch(sparse_features)))


class DeepFMTrain(nn.Module):
    """DeepFM and its loss: batch -> (loss, (loss, logits, labels)), exactly as `DLRMTrain`."""

    def __init__(self, deepfm_module: SimpleDeepFMNN) -> None:
        super().__init__()
        self.model = deepfm_module

    def forward(self, batch: ClickBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """B rows -> scalar loss; loss, logits (B,), labels (B,)."""
        # the loss of a DLRM reads `self.model` and nothing else
        return DLRMTrain.forward(self, batch)  # type: ignore[arg-type]


def _side_by_side(embeddings: Sequence[Tensor]) -> Tensor:
    """(B, columns of all)."""
    flat = [rows.flatten(1) for rows in embeddings]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
