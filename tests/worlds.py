"""Random worlds for the equality tests: tables, plans over every kind and free grids, ragged batches, and the unsharded reference.

The reference is the simplest code that could be right: the unsharded collection, dense gradients by autograd, and the optimizer's formula
written out over the global batch. Row-wise Adagrad is applied per column block, since its accumulator is one value per row and block.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from rayrec.layout import (
    DataType,
    EmbeddingBagConfig,
    Layout,
    PoolingType,
    ShardingPlan,
    TableLayout,
    TablePlacement,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD, Adagrad, RowWiseAdagrad, SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor

OPTIMIZERS: tuple[SparseOptimizer, ...] = (SGD(lr=0.1), Adagrad(lr=0.1, eps=1e-6), RowWiseAdagrad(lr=0.1, eps=1e-6))


@dataclass
class World:
    """One random world: hosts of ranks, collections of tables, a plan over all of them."""

    seed: int
    hosts: tuple[tuple[int, ...], ...]
    collections: list[tuple[EmbeddingBagConfig, ...]]
    weighted: list[bool]
    plan: ShardingPlan
    optimizer: SparseOptimizer
    rng: random.Random = field(repr=False, default_factory=random.Random)

    @property
    def world_size(self) -> int:
        return sum(len(h) for h in self.hosts)

    @property
    def tables(self) -> list[EmbeddingBagConfig]:
        return [t for c in self.collections for t in c]

    def features(self) -> list[str]:
        return sorted({f for t in self.tables for f in t.feature_names})

    def batch(self, rows: int, generator: random.Random) -> KeyedJaggedTensor:
        """A ragged batch in which every feature has `rows` bags, empty ones and repeated ids among them."""
        keys = self.features()
        generator.shuffle(keys)
        limits = {f: min(t.num_embeddings for t in self.tables if f in t.feature_names) for f in keys}
        lengths: list[int] = []
        ids: list[int] = []
        for key in keys:
            longest = generator.choice([0, 1, 1, 4])
            for _ in range(rows):
                lengths.append(generator.randint(0, longest))
                ids += [generator.randrange(limits[key]) for _ in range(lengths[-1])]
        weights = torch.tensor([generator.random() for _ in ids]) if any(self.weighted) else None
        values = torch.tensor(ids, dtype=torch.int64)
        return KeyedJaggedTensor(
            keys, values, weights, torch.tensor(lengths, dtype=generator.choice([torch.int32, torch.int64])), stride=rows
        )


def random_layout(table: EmbeddingBagConfig, hosts: Sequence[Sequence[int]], rng: random.Random) -> Layout:
    """Any of the seven kinds or a free, uneven grid."""
    ranks = [r for h in hosts for r in h]
    some = [rng.choice(ranks) for _ in range(rng.randint(1, 3))]
    return rng.choice(
        [
            lambda: table_wise(table, rng.choice(ranks)),
            lambda: row_wise(table, ranks),
            lambda: column_wise(table, some),
            lambda: table_row_wise(table, rng.choice(hosts)),
            lambda: table_column_wise(table, rng.choice(hosts)),
            lambda: grid_shard(table, hosts),
            lambda: data_parallel(table, ranks),
            lambda: free_grid(table, ranks, rng),
        ]
    )()


def free_grid(table: EmbeddingBagConfig, ranks: Sequence[int], rng: random.Random) -> TableLayout:
    """Uneven row and column cuts with any owners, one rank several blocks among them."""
    rows = sorted(rng.sample(range(1, table.num_embeddings), min(rng.randint(0, 3), table.num_embeddings - 1)))
    cols = sorted(rng.sample(range(4, table.embedding_dim, 4), min(rng.randint(0, 2), table.embedding_dim // 4 - 1)))
    row_cuts, col_cuts = (0, *rows, table.num_embeddings), (0, *cols, table.embedding_dim)
    owners = tuple(tuple(rng.choice(ranks) for _ in col_cuts[1:]) for _ in row_cuts[1:])
    return TableLayout(row_cuts, col_cuts, owners)


def random_world(seed: int, hosts: Sequence[Sequence[int]] | None = None, optimizer: SparseOptimizer | None = None) -> World:
    """A world that is a function of `seed`."""
    rng = random.Random(seed)
    if hosts is None:
        per_host, num_hosts = rng.choice([(1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (4, 1), (1, 1)])
        hosts = [range(h * per_host, (h + 1) * per_host) for h in range(num_hosts)]
    hosts = tuple(tuple(h) for h in hosts)
    names = [f"f{i}" for i in range(rng.randint(1, 6))]
    collections, weighted, count = [], [], 0
    for _ in range(rng.choice([1, 1, 2])):
        tables = []
        for _ in range(rng.randint(1, 4)):
            tables.append(
                EmbeddingBagConfig(
                    num_embeddings=rng.randint(2, 40),
                    embedding_dim=4 * rng.randint(1, 5),
                    name=f"t{count}",
                    feature_names=rng.sample(names, rng.randint(1, min(3, len(names)))),
                    pooling=rng.choice([PoolingType.SUM, PoolingType.SUM, PoolingType.MEAN]),
                    data_type=DataType.FP32,
                )
            )
            count += 1
        collections.append(tuple(tables))
        weighted.append(rng.random() < 0.3)
    world_size = sum(len(h) for h in hosts)
    placements = {t.name: TablePlacement(random_layout(t, hosts, rng)) for c in collections for t in c}
    plan = ShardingPlan(world_size=world_size, tables=placements, hosts=hosts)
    return World(seed, hosts, collections, weighted, plan, optimizer or rng.choice(OPTIMIZERS), rng)


def build_collections(world: World, device: str = "cpu") -> torch.nn.ModuleList:
    """The unsharded collections; on a real device their rows are a function of the world's seed."""
    torch.manual_seed(world.seed)
    return torch.nn.ModuleList(
        EmbeddingBagCollection(tables=list(tables), is_weighted=weighted, device=torch.device(device))
        for tables, weighted in zip(world.collections, world.weighted, strict=True)
    )


class Reference:
    """The unsharded collections with the optimizer's formula written out.

    Args:
        world: whose plan only matters for the column blocks of row-wise state.
    """

    def __init__(self, world: World) -> None:
        self.world, self.modules = world, build_collections(world)
        self.state: dict[str, Tensor] = {}

    def weights(self) -> dict[str, Tensor]:
        return {t.name: c.embedding_bags[t.name].weight for c, ts in zip(self.modules, self.world.collections, strict=True) for t in ts}

    def step(self, batches: Sequence[KeyedJaggedTensor], targets: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """One step on the global batch: mean over ranks of each rank's loss; returns the outputs [rank][collection]."""
        outputs = [[module(batch).values() for module in self.modules] for batch in batches]
        losses = [sum((o * t).sum() for o, t in zip(out, target, strict=True)) for out, target in zip(outputs, targets, strict=True)]
        total = sum(losses) / len(batches)
        if isinstance(total, Tensor) and total.requires_grad:
            for weight in self.weights().values():
                weight.grad = None
            total.backward()
            for name, weight in self.weights().items():
                self._update(name, weight)
        return [[o.detach() for o in out] for out in outputs]

    @torch.no_grad()
    def _update(self, name: str, weight: Tensor) -> None:
        grad, optimizer = weight.grad, self.world.optimizer
        if grad is None:
            return
        if isinstance(optimizer, SGD):
            weight -= optimizer.lr * grad
        elif isinstance(optimizer, Adagrad):
            state = self.state.setdefault(name, torch.zeros_like(weight))
            state += grad**2
            weight -= optimizer.lr * grad / (state.sqrt() + optimizer.eps)
        else:
            assert isinstance(optimizer, RowWiseAdagrad)
            layout = self.world.plan.tables[name].layout
            cuts = layout.col_cuts if isinstance(layout, TableLayout) else (0, weight.shape[1])
            state = self.state.setdefault(name, torch.zeros(weight.shape[0], len(cuts) - 1))
            for j, (a, b) in enumerate(pairwise(cuts)):
                state[:, j] += (grad[:, a:b] ** 2).mean(1)
                weight[:, a:b] -= optimizer.lr * grad[:, a:b] / (state[:, j : j + 1].sqrt() + optimizer.eps)
