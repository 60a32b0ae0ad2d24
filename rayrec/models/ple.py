"""PLE: tasks that share some experts and have others of their own, in layers of extraction.

Every layer has an input per task and one that is shared. A task's gate mixes its own and the shared
experts; the gate of the shared part mixes all experts. The first layer's inputs are all the
model's, and the last layer has no shared part. One layer is what the paper calls CGC.

    # B rows of the batch, I dense columns, K outputs of all tasks together, T tasks
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rayrec.checks import whole_number
from rayrec.models.dlrm_parts import Device
from rayrec.models.experts import Experts, Gate, InputArch, Towers
from rayrec.modules import EmbeddingBagCollection
from rayrec.sparse import KeyedJaggedTensor


class ExtractionLayer(nn.Module):
    """Shared and own experts, and a gate per output: T + 1 inputs -> T + 1 outputs, or T.

    Args:
        in_features: columns of every input.
        tasks: T.
        task_experts, shared_experts: number of experts of each task, and of all together.
        expert_layer_sizes: layers of every expert.
        is_last: True gives the tasks' outputs alone, without the shared one.
    """

    def __init__(
        self,
        in_features: int,
        tasks: int,
        task_experts: int,
        shared_experts: int,
        expert_layer_sizes: Sequence[int],
        is_last: bool,
        device: Device = None,
    ) -> None:
        super().__init__()
        numbers = [task_experts] * tasks + [shared_experts]
        self.experts = nn.ModuleList(
            Experts(in_features, number, expert_layer_sizes, device) for number in numbers
        )
        mixed = [task_experts + shared_experts] * tasks + [sum(numbers)] * (not is_last)
        self.gates = nn.ModuleList(Gate(in_features, number, device) for number in mixed)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The tasks' inputs and behind them the shared one, (B, in_features) each -> outputs."""
        *own, shared = [part(one) for part, one in zip(self.experts, inputs, strict=True)]
        mixed = [torch.cat((one, shared), dim=1) for one in own]
        if len(self.gates) > len(own):
            mixed.append(torch.cat((*own, shared), dim=1))
        # the last layer has no gate for the shared input
        return [gate(one, many) for gate, one, many in zip(self.gates, inputs, mixed, strict=False)]


class PLE(nn.Module):
    """Progressive layered extraction: (B, I), ids -> (B, K), the tasks' outputs side by side.

    `MultiTaskTrain` gives it its loss.

    Args:
        embedding_bag_collection: pooled tables of any widths.
        task_outputs: outputs of each task, in order: 1, or the number of classes.
        dense_in_features: I; 0 for none.
        dense_arch_layer_sizes: layers of an MLP of the dense columns; empty takes them as they are.
        task_experts: number of experts of each task alone, in every layer.
        shared_experts: number of experts that all tasks share, in every layer.
        extraction_layers: number of layers; 1 is CGC.
        expert_layer_sizes: layers of every expert, each followed by ReLU.
        tower_layer_sizes: hidden layers of each task's tower.
    Raises:
        ConfigError: there is no task, layer or expert, or an expert has no layer.
    Source: Tang et al., Progressive Layered Extraction, RecSys 2020. Two layers, and experts of one
    layer, are its own; it tunes the numbers of experts. The widths are MMoE's, where the paper has
    layers of 256, 128 and 64 for each task.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        task_outputs: Sequence[int],
        dense_in_features: int = 0,
        dense_arch_layer_sizes: Sequence[int] = (),
        task_experts: int = 4,
        shared_experts: int = 8,
        extraction_layers: int = 2,
        expert_layer_sizes: Sequence[int] = (16,),
        tower_layer_sizes: Sequence[int] = (8,),
        dense_device: Device = None,
    ) -> None:
        super().__init__()
        whole_number("extraction_layers", extraction_layers)
        self.input_arch = InputArch(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, dense_device
        )
        self.layers = nn.ModuleList()
        columns, self._tasks = self.input_arch.out_features, len(task_outputs)
        for left in reversed(range(extraction_layers)):
            numbers = self._tasks, task_experts, shared_experts
            is_last = left == 0
            self.layers.append(
                ExtractionLayer(columns, *numbers, expert_layer_sizes, is_last, dense_device)
            )
            columns = expert_layer_sizes[-1]
        self.towers = Towers(columns, task_outputs, tower_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """(B, I) and B rows of ids -> (B, K). B may be 0."""
        features = self.input_arch(dense_features, sparse_features)
        parts = [features] * (self._tasks + 1)
        for layer in self.layers:
            parts = layer(parts)
        return self.towers(parts)
