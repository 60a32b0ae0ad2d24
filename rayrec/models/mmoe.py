"""MMoE: tasks that share experts, each of which mixes them by a gate of its own.

# B rows of the batch, I dense columns, K outputs of all tasks together
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rayrec.models.dlrm_parts import Device
from rayrec.models.experts import Experts, Gate, InputArch, Towers
from rayrec.modules import EmbeddingBagCollection
from rayrec.sparse import KeyedJaggedTensor


class MMoE(nn.Module):
    """Multi-gate mixture of experts: (B, I), ids -> (B, K), the outputs of the tasks side by side.

    `MultiTaskTrain` gives it its loss.

    Args:
        embedding_bag_collection: pooled tables of any widths.
        task_outputs: outputs of each task, in order: 1, or the number of classes.
        dense_in_features: I; 0 for none.
        dense_arch_layer_sizes: layers of an MLP of the dense columns; empty takes them as they are.
        num_experts: number of experts, which all tasks share.
        expert_layer_sizes: layers of every expert, each followed by ReLU.
        tower_layer_sizes: hidden layers of each task's tower.
    Raises:
        ConfigError: there is no task or no expert, or an expert has no layer.
    Source: Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate
    Mixture-of-Experts, KDD 2018; the defaults are those of its synthetic data.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        task_outputs: Sequence[int],
        dense_in_features: int = 0,
        dense_arch_layer_sizes: Sequence[int] = (),
        num_experts: int = 8,
        expert_layer_sizes: Sequence[int] = (16,),
        tower_layer_sizes: Sequence[int] = (8,),
        dense_device: Device = None,
    ) -> None:
        super().__init__()
        self.input_arch = InputArch(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, dense_device
        )
        columns = self.input_arch.out_features
        self.experts = Experts(columns, num_experts, expert_layer_sizes, dense_device)
        self.gates = nn.ModuleList(Gate(columns, num_experts, dense_device) for _ in task_outputs)
        self.towers = Towers(expert_layer_sizes[-1], task_outputs, tower_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """(B, I) and B rows of ids -> (B, K). B may be 0."""
        features = self.input_arch(dense_features, sparse_features)
        experts = self.experts(features)
        return self.towers([gate(features, experts) for gate in self.gates])
