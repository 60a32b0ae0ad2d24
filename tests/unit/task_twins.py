"""Small MMoE and PLE models, batches for them, and the formulas of their papers."""

from __future__ import annotations

import random
from typing import TypeVar

import torch
from torch import Tensor, nn

from rayrec.layout import EmbeddingBagConfig
from rayrec.models import PLE, MMoE
from rayrec.modules import EmbeddingBagCollection
from rayrec.sparse import KeyedJaggedTensor

KEYS, SIZES, WIDTHS, DENSE = ("user", "item"), (9, 7), (4, 3), 3


def collection() -> EmbeddingBagCollection:
    sizes = zip(KEYS, SIZES, WIDTHS, strict=True)
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(n, width, key, feature_names=[key]) for key, n, width in sizes]
    )


Model = TypeVar("Model", MMoE, PLE)


def drawn(kind: type[Model], seed: int) -> tuple[Model, list[int], int]:
    """A model of random sizes, the outputs of its tasks, and its dense columns.

    PLE has one layer (CGC) to three.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    outputs = [rng.choice([1, 1, 4]) for _ in range(rng.randint(1, 4))]
    columns = DENSE * rng.randint(0, 1)
    layers = [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
    tower = [rng.randint(1, 6) for _ in range(rng.randint(0, 2))]
    dense = [5, 2][: rng.randint(0, 2)]
    experts = [rng.randint(1, 4)]
    if kind is PLE:
        experts += [rng.randint(1, 3), 1 + seed % 3]
    model = kind(collection(), outputs, columns, dense, *experts, layers, tower)
    return model, outputs, columns


def batch(seed: int, columns: int) -> tuple[Tensor, KeyedJaggedTensor]:
    """Up to twelve rows, of bags of up to three ids."""
    rng = random.Random(seed)
    rows = rng.randint(0, 12)
    lengths = [rng.randint(0, 3) for _ in range(2 * rows)]
    ids = [
        rng.randrange(SIZES[n // rows]) for n, length in enumerate(lengths) for _ in range(length)
    ]
    kjt = KeyedJaggedTensor(
        list(KEYS),
        torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride=rows,
    )
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)), kjt


class Twin:
    """Both models in float64, expert by expert and task by task, from the parameters' names."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.double() for name, p in model.named_parameters()}

    def number(self, prefix: str) -> int:
        """Modules that are numbered below a name."""
        depth = prefix.count(".") + 1
        return len({n.split(".")[depth] for n in self.values if n.startswith(f"{prefix}.")})

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.values[f"{name}.weight"].T + self.values[f"{name}.bias"]

    def mlp(self, x: Tensor, name: str) -> Tensor:
        for layer in range(self.number(f"{name}._mlp")):
            x = self.linear(x, f"{name}._mlp.{layer}._linear").relu()
        return x

    def gate(self, x: Tensor, name: str, experts: list[Tensor]) -> Tensor:
        """f(x) = sum over experts of softmax(W x)_i f_i(x)."""
        exponents = (x @ self.values[f"{name}.linear.weight"].T).exp()
        shares = exponents / exponents.sum(1, keepdim=True)
        assert shares.shape[1] == len(experts)
        return sum((shares[:, i, None] * one for i, one in enumerate(experts)), x.new_zeros(()))

    def experts(self, x: Tensor, name: str) -> list[Tensor]:
        return [self.mlp(x, f"{name}.experts.{i}") for i in range(self.number(f"{name}.experts"))]

    def towers(self, inputs: list[Tensor]) -> Tensor:
        names = [f"towers.towers.{k}.model" for k in range(len(inputs))]
        pairs = zip(names, inputs, strict=True)
        return torch.cat([self.linear(self.mlp(x, f"{n}.0"), f"{n}.1") for n, x in pairs], 1)

    def input(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        parts = [self.mlp(dense.double(), "input_arch.dense_arch.model")]
        for key in KEYS:
            table = self.values[f"input_arch.embedding_bag_collection.embedding_bags.{key}.weight"]
            bags = table[ids[key].values()].split(ids[key].lengths().tolist())
            parts.append(torch.stack([bag.sum(0) for bag in bags]) if bags else table[:0])
        return torch.cat(parts, 1)

    def mmoe(self, x: Tensor, tasks: int) -> Tensor:
        experts = self.experts(x, "experts")
        return self.towers([self.gate(x, f"gates.{k}", experts) for k in range(tasks)])

    def ple(self, x: Tensor, tasks: int) -> Tensor:
        own, shared = [x] * tasks, x
        layers = self.number("layers")
        for layer in range(layers):
            name = f"layers.{layer}"
            of_tasks = [self.experts(own[k], f"{name}.experts.{k}") for k in range(tasks)]
            of_all = self.experts(shared, f"{name}.experts.{tasks}")
            mixed = [
                self.gate(own[k], f"{name}.gates.{k}", of_tasks[k] + of_all) for k in range(tasks)
            ]
            if layer < layers - 1:
                everything = [one for experts in of_tasks for one in experts] + of_all
                shared = self.gate(shared, f"{name}.gates.{tasks}", everything)
            own = mixed
        return self.towers(own)
