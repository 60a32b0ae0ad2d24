"""DLRM and DLRM-DCNv2: an MLP of dense columns, tables of ids, interactions, an MLP to a logit.

The models know nothing of sharding: they hold any embedding bag collection and hand it the batch's
KeyedJaggedTensor. Module names are TorchRec's, so its checkpoints of dense parameters load. A model
without dense columns (dense_in_features=0) has no dense arch: DLRM then feeds the looked-up rows
themselves beside their dot products to the over arch, DLRM_DCN crosses the rows alone.

    # B rows of the batch, I dense columns, F features looked up, D width of every table
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from rayrec.errors import ConfigError
from rayrec.models.dlrm_parts import (
    ClickBatch,
    DenseArch,
    Device,
    InteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    OverArch,
    SparseArch,
    logits_of_batch,
)
from rayrec.modules import EmbeddingBagCollection, LowRankCrossNet
from rayrec.sparse import KeyedJaggedTensor


class DLRM(nn.Module):
    """Deep Learning Recommendation Model: (B, I), ids -> logits (B, over_arch_layer_sizes[-1]).

    Args:
        dense_in_features: I; 0 for none, dense_arch_layer_sizes is then not read.
        dense_arch_layer_sizes: layers of the dense MLP; the last is D.
        over_arch_layer_sizes: layers of the over MLP; the last is 1 for one logit.
    Raises:
        ConfigError: widths do not fit.
    Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation
    Systems, arXiv 1906.00091.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: Device = None,
    ) -> None:
        super().__init__()
        self._start(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, dense_device
        )
        interaction = InteractionArch(self.sparse_arch.F)
        self.inter_arch: nn.Module = interaction
        wide = interaction.out_features(self.sparse_arch.D, self.dense_arch is not None)
        self.over_arch = OverArch(wide, over_arch_layer_sizes, dense_device)

    def _start(
        self,
        collection: EmbeddingBagCollection,
        dense_in_features: int,
        layer_sizes: Sequence[int],
        device: Device,
    ) -> None:
        # The subclasses share this start and make interactions of their own. They call it in place
        # of the constructor of DLRM, which would make parameters that nobody uses.
        self.sparse_arch = SparseArch(collection)
        self.dense_arch: DenseArch | None = None
        if dense_in_features:
            if not layer_sizes or layer_sizes[-1] != self.sparse_arch.D:
                raise ConfigError(
                    f"dense_arch_layer_sizes={list(layer_sizes)} must end in the tables' "
                    f"embedding_dim, {self.sparse_arch.D}: the dense row interacts with the "
                    "looked-up rows."
                )
            self.dense_arch = DenseArch(dense_in_features, layer_sizes, device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """(B, I) and B rows of ids -> (B, over_arch_layer_sizes[-1]) logits. B may be 0."""
        dense = None if self.dense_arch is None else self.dense_arch(dense_features)
        return self.over_arch(self.inter_arch(dense, self.sparse_arch(sparse_features)))


class DLRM_DCN(DLRM):
    """DLRM with a low-rank cross network (DCN v2) in place of the dot products, as in MLPerf.

    Source: Wang et al., DCN V2, arXiv 2008.13535.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: Device = None,
    ) -> None:
        nn.Module.__init__(self)
        self._start(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, dense_device
        )
        # A cross network keeps the width of its input, so the over arch is as wide as all rows.
        rows = self.sparse_arch.F + (self.dense_arch is not None)
        crossnet = LowRankCrossNet(
            rows * self.sparse_arch.D, dcn_num_layers, dcn_low_rank_dim, dense_device
        )
        self.inter_arch = InteractionDCNArch(self.sparse_arch.F, crossnet)
        self.over_arch = OverArch(rows * self.sparse_arch.D, over_arch_layer_sizes, dense_device)


class DLRM_Projection(DLRM):
    """DLRM whose interaction is the product of two matrices that MLPs make of all rows.

    Args:
        interaction_branch1_layer_sizes: layers of the first MLP; the last is a multiple F1 of D.
        interaction_branch2_layer_sizes: layers of the second MLP; the last is a multiple F2 of D.
    Raises:
        ConfigError: widths do not fit.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        interaction_branch1_layer_sizes: Sequence[int],
        interaction_branch2_layer_sizes: Sequence[int],
        dense_device: Device = None,
    ) -> None:
        nn.Module.__init__(self)
        self._start(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, dense_device
        )
        width, has_dense = self.sparse_arch.D, self.dense_arch is not None
        branches, interactions = [], 1
        for number, sizes in (
            (1, interaction_branch1_layer_sizes),
            (2, interaction_branch2_layer_sizes),
        ):
            if not sizes or sizes[-1] % width:
                raise ConfigError(
                    f"interaction_branch{number}_layer_sizes={list(sizes)} must end in a multiple "
                    f"of the tables' embedding_dim, {width}."
                )
            branches.append(
                DenseArch((self.sparse_arch.F + has_dense) * width, sizes, dense_device)
            )
            interactions *= sizes[-1] // width
        self.inter_arch = InteractionProjectionArch(self.sparse_arch.F, *branches)
        self.over_arch = OverArch(
            has_dense * width + interactions, over_arch_layer_sizes, dense_device
        )


class DLRMTrain(nn.Module):
    """A click model and its loss: batch -> (loss, (loss, logits, labels)), the triple detached.

    The loss is binary cross entropy, the mean over the local batch; of no rows it is 0, with zero
    gradients. Where the batch has weights, each row's loss is multiplied by its own before the mean
    over the rows, so weights with a mean of 1 keep the size of the steps.
    """

    def __init__(self, dlrm_module: nn.Module) -> None:
        super().__init__()
        self.model = dlrm_module

    def forward(self, batch: ClickBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """B rows -> scalar loss; loss, logits (B,), labels (B,)."""
        # The model gives one logit per row, (B, 1); labels are (B,).
        logits = logits_of_batch(self.model, batch).squeeze(-1)
        # The mean over no rows would be nan. The sum is 0 and stays in the graph, so that a rank
        # without rows takes part in the collectives of the backward pass.
        reduction = "mean" if logits.numel() else "sum"
        loss = functional.binary_cross_entropy_with_logits(
            logits,
            batch.labels.to(logits.dtype),
            weight=getattr(batch, "weights", None),
            reduction=reduction,
        )
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
