"""The parts of MMoE and PLE: the input, experts, gates that mix them, and a tower per task.

An expert is an MLP. A gate gives every row a weight for each expert, and the weights of a row sum
up to 1. The cost of a model is that of all its experts, since every row goes through each of them.

    # B rows of the batch, I dense columns, C columns of the input, N experts, H columns of each
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rayrec.checks import whole_number
from rayrec.errors import ConfigError
from rayrec.models.dlrm_parts import Device, OverArch, dense_arch_of, pooled_columns
from rayrec.modules import MLP, EmbeddingBagCollection
from rayrec.sparse import KeyedJaggedTensor


class InputArch(nn.Module):
    """Dense columns and pooled rows side by side: (B, I), ids -> (B, C).

    Args:
        embedding_bag_collection: pooled tables of any widths.
        dense_in_features: I; 0 for none.
        dense_arch_layer_sizes: layers of an MLP of the dense columns; empty takes them as they are.
    Attributes:
        out_features: C.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int = 0,
        dense_arch_layer_sizes: Sequence[int] = (),
        device: Device = None,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_arch, columns = dense_arch_of(dense_in_features, dense_arch_layer_sizes, device)
        self.out_features = columns + pooled_columns(embedding_bag_collection)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """(B, I) and B rows of ids -> (B, C)."""
        rows = self.embedding_bag_collection(sparse_features).values()
        if self.dense_arch is None:
            return rows
        return torch.cat((self.dense_arch(dense_features), rows), dim=1)


class Experts(nn.Module):
    """Experts of one input: (B, C) -> (B, N, H).

    Raises:
        ConfigError: there is no expert, or an expert has no layer.
    """

    def __init__(
        self, in_features: int, number: int, layer_sizes: Sequence[int], device: Device = None
    ) -> None:
        super().__init__()
        whole_number("the number of experts", number)
        if not layer_sizes:
            raise ConfigError("expert_layer_sizes is empty; an expert needs at least one layer.")
        self.experts = nn.ModuleList(
            MLP(in_features, layer_sizes, device=device) for _ in range(number)
        )

    def forward(self, features: Tensor) -> Tensor:
        """(B, C) -> (B, N, H)."""
        return torch.stack([expert(features) for expert in self.experts], dim=1)


class Gate(nn.Module):
    """Mean of experts whose weights are a softmax of the input: (B, C), (B, N, H) -> (B, H)."""

    def __init__(self, in_features: int, number: int, device: Device = None) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, number, bias=False, device=device)

    def forward(self, features: Tensor, experts_BNH: Tensor) -> Tensor:
        """(B, C), (B, N, H) -> (B, H)."""
        weights_BN = self.linear(features).softmax(dim=1)
        return (weights_BN.unsqueeze(2) * experts_BNH).sum(dim=1)


class Towers(nn.Module):
    """An MLP per task, each with an input of its own; their outputs lie side by side.

    Args:
        in_features: H, the columns of every input.
        task_outputs: outputs of each task.
        layer_sizes: hidden layers of every tower.
    Raises:
        ConfigError: there is no task.
    """

    def __init__(
        self,
        in_features: int,
        task_outputs: Sequence[int],
        layer_sizes: Sequence[int],
        device: Device = None,
    ) -> None:
        super().__init__()
        if not task_outputs:
            raise ConfigError("task_outputs is empty; give the number of outputs of each task.")
        self.towers = nn.ModuleList(
            OverArch(in_features, [*layer_sizes, outputs], device) for outputs in task_outputs
        )

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """(B, H) for each task -> (B, sum of task_outputs)."""
        towers = zip(self.towers, inputs, strict=True)
        return torch.cat([tower(own) for tower, own in towers], dim=1)
