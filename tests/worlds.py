"""Random worlds for the equality tests: tables, plans over every kind and free grids, ragged
batches, and the unsharded reference.

The reference is the simplest code that could be right: the unsharded collection, dense gradients by
autograd, and the optimizer's formula written out over the global batch. Row-wise Adagrad is applied
per column block, since its accumulator is one value per row and block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.init import xavier_normal_

from rayrec.distributed.sharding import weight_of
from rayrec.layout import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    Layout,
    PoolingType,
    Shard,
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
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.optim import SGD, Adagrad, RowWiseAdagrad, SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor

# Where the parts of a gradient cancel, nothing but rounding is left of it, 1e-7 or so, and a step
# is at most lr / eps times that: with this eps 1e-6, below the tolerances of any comparison.
EPS = 1e-2
OPTIMIZERS: tuple[SparseOptimizer, ...] = (
    SGD(lr=0.1),
    Adagrad(lr=0.1, eps=EPS),
    RowWiseAdagrad(lr=0.1, eps=EPS),
)


def triangular_(weight: Tensor) -> None:
    """An `init_fn` of two draws."""
    weight.copy_(torch.rand_like(weight) - torch.rand_like(weight))


INIT_FNS = (None, None, xavier_normal_, triangular_)

WIDE = 16  # columns from which on bags without ids stay at home


@dataclass
class World:
    """One random world: hosts of ranks, collections of tables, a plan over all of them."""

    seed: int
    hosts: tuple[tuple[int, ...], ...]
    collections: list[tuple[BaseEmbeddingConfig, ...]]
    weighted: list[bool]
    plan: ShardingPlan
    optimizer: SparseOptimizer
    rng: random.Random = field(repr=False, default_factory=random.Random)
    varying: bool = False  # keys have different numbers of bags, and inverse indices

    @property
    def world_size(self) -> int:
        return sum(len(h) for h in self.hosts)

    @property
    def tables(self) -> list[BaseEmbeddingConfig]:
        return [t for c in self.collections for t in c]

    def features(self) -> list[str]:
        return sorted({f for t in self.tables for f in t.feature_names})

    def is_sequence(self, collection: int) -> bool:
        return isinstance(self.collections[collection][0], EmbeddingConfig)

    def batch(self, rows: int, generator: random.Random) -> KeyedJaggedTensor:
        """A ragged batch of `rows` rows, empty bags and repeated ids among them."""
        keys = self.features()
        generator.shuffle(keys)
        limits = {
            f: min(t.num_embeddings for t in self.tables if f in t.feature_names) for f in keys
        }
        strides = [generator.randint(min(rows, 1), rows) if self.varying else rows for _ in keys]
        lengths: list[int] = []
        ids: list[int] = []
        for key, stride in zip(keys, strides, strict=True):
            longest = generator.choice([0, 1, 1, 4])
            for _ in range(stride):
                lengths.append(generator.randint(0, longest))
                ids += [generator.randrange(limits[key]) for _ in range(lengths[-1])]
        weights = torch.tensor([generator.random() for _ in ids]) if any(self.weighted) else None
        values = torch.tensor(ids, dtype=torch.int64)
        sizes = torch.tensor(lengths, dtype=generator.choice([torch.int32, torch.int64]))
        if not self.varying:
            return KeyedJaggedTensor(keys, values, weights, sizes, stride=rows)
        inverse = torch.tensor(
            [[generator.randrange(n) for _ in range(rows)] for n in strides], dtype=torch.int64
        ).view(len(keys), rows)
        per_rank = [[n] for n in strides]
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            sizes,
            stride_per_key_per_rank=per_rank,
            inverse_indices=(keys, inverse),
        )


def plan_for(
    world_size: int, layouts: Mapping[str, Layout], hosts: tuple[tuple[int, ...], ...] = ()
) -> ShardingPlan:
    """A plan of tables that lie on their devices, by name."""
    tables = {name: TablePlacement(layout) for name, layout in layouts.items()}
    return ShardingPlan(world_size=world_size, tables=tables, hosts=hosts)


def part_of(table: Tensor, shard: Shard) -> Tensor:
    """The rows and columns of a whole table that a shard has."""
    return table[shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop]


def whole_tables(
    tables: Sequence[BaseEmbeddingConfig], shards: Iterable[tuple[Shard, Tensor]]
) -> dict[str, Tensor]:
    """Tables put together of the shards of all ranks, every cell of them."""
    whole = {t.name: torch.full((t.num_embeddings, t.embedding_dim), math.nan) for t in tables}
    for shard, weight in shards:
        part_of(whole[shard.table], shard).copy_(weight)
    assert not any(table.isnan().any() for table in whole.values())
    return whole


def output_of(module: torch.nn.Module, kjt: KeyedJaggedTensor) -> Tensor:
    """The output of a collection of either kind as one tensor: (B, D), or every sequence's values
    one after the other.
    """
    output = module(kjt)
    if isinstance(output, dict):
        return torch.cat([jagged.values().reshape(-1) for jagged in output.values()])
    return output.values()


def random_layout(
    table: EmbeddingBagConfig, hosts: Sequence[Sequence[int]], rng: random.Random
) -> Layout:
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
    rows = sorted(
        rng.sample(range(1, table.num_embeddings), min(rng.randint(0, 3), table.num_embeddings - 1))
    )
    unit = WIDE if table.embedding_dim % WIDE == 0 else 4
    inner = range(unit, table.embedding_dim, unit)
    cols = sorted(rng.sample(inner, min(rng.randint(0, 2), len(inner))))
    row_cuts, col_cuts = (0, *rows, table.num_embeddings), (0, *cols, table.embedding_dim)
    owners = tuple(tuple(rng.choice(ranks) for _ in col_cuts[1:]) for _ in row_cuts[1:])
    return TableLayout(row_cuts, col_cuts, owners)


def random_world(
    seed: int,
    hosts: Sequence[Sequence[int]] | None = None,
    optimizer: SparseOptimizer | None = None,
    sequences: bool = False,
    varying: bool = False,
    unit: int | None = None,
) -> World:
    """A world that is a function of `seed`, with sequence collections and variable batches among
    them when asked for.

    Args:
        unit: of which all widths are multiples; unless given, 4 or `WIDE`, or nothing at all, by
            the seed.
    """
    rng, other = random.Random(seed), random.Random(~seed)
    odd, unit = unit is None and other.random() < 0.3, unit or other.choice([4, WIDE])
    if hosts is None:
        per_host, num_hosts = rng.choice([(1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (4, 1), (1, 1)])
        hosts = [range(h * per_host, (h + 1) * per_host) for h in range(num_hosts)]
    hosts = tuple(tuple(h) for h in hosts)
    names = [f"f{i}" for i in range(rng.randint(1, 6))]
    collections, weighted, count = [], [], 0
    for _ in range(rng.choice([1, 1, 2])):
        tables: list[BaseEmbeddingConfig] = []
        sequence = sequences and rng.random() < 0.5
        dim = unit * rng.randint(1, 5) - odd * other.randint(0, 3)
        for _ in range(rng.randint(1, 4)):
            rows, features = (
                rng.randint(2, 40),
                rng.sample(names, rng.randint(1, min(3, len(names)))),
            )
            if sequence:
                tables.append(EmbeddingConfig(rows, dim, name=f"t{count}", feature_names=features))
            else:
                pooling = rng.choice([PoolingType.SUM, PoolingType.SUM, PoolingType.MEAN])
                width = unit * rng.randint(1, 5) - odd * other.randint(0, 3)
                tables.append(
                    EmbeddingBagConfig(
                        rows, width, name=f"t{count}", feature_names=features, pooling=pooling
                    )
                )
            tables[-1].init_fn = other.choice(INIT_FNS)
            count += 1
        collections.append(tuple(tables))
        weighted.append(not sequence and rng.random() < 0.3)
    layouts = {t.name: random_layout(t, hosts, rng) for c in collections for t in c}
    plan = plan_for(sum(len(h) for h in hosts), layouts, hosts)
    return World(
        seed, hosts, collections, weighted, plan, optimizer or rng.choice(OPTIMIZERS), rng, varying
    )


def build_collections(world: World, device: str = "cpu") -> torch.nn.ModuleList:
    """The unsharded collections; on a real device their rows are a function of the world's seed."""
    torch.manual_seed(world.seed)
    return torch.nn.ModuleList(
        EmbeddingCollection(list(tables), device=torch.device(device))
        if world.is_sequence(i)
        else EmbeddingBagCollection(
            tables=list(tables), is_weighted=weighted, device=torch.device(device)
        )
        for i, (tables, weighted) in enumerate(zip(world.collections, world.weighted, strict=True))
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
        return {
            t.name: weight_of(c, t.name)
            for c, ts in zip(self.modules, self.world.collections, strict=True)
            for t in ts
        }

    def step(
        self, batches: Sequence[KeyedJaggedTensor], targets: Sequence[Sequence[Tensor]]
    ) -> list[list[Tensor]]:
        """One step on the global batch: mean over ranks of each rank's loss; returns the outputs
        [rank][collection].
        """
        outputs = [[output_of(module, batch) for module in self.modules] for batch in batches]
        losses = [
            sum((o * t).sum() for o, t in zip(out, target, strict=True))
            for out, target in zip(outputs, targets, strict=True)
        ]
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
        if weight.grad is None:
            return
        # squares of float16 would be zero
        grad, optimizer = weight.grad.float(), self.world.optimizer
        if isinstance(optimizer, SGD):
            weight -= optimizer.lr * grad
        elif isinstance(optimizer, Adagrad):
            state = self.state.setdefault(name, torch.zeros_like(weight, dtype=torch.float32))
            state += grad**2
            weight -= optimizer.lr * grad / (state.sqrt() + optimizer.eps)
        else:
            assert isinstance(optimizer, RowWiseAdagrad)
            layout = self.world.plan.tables[name].layout
            cuts = layout.col_cuts if isinstance(layout, TableLayout) else (0, weight.shape[1])
            state = self.state.setdefault(name, torch.zeros(weight.shape[0], len(cuts) - 1))
            for j, (a, b) in enumerate(pairwise(cuts)):
                state[:, j] += (grad[:, a:b] ** 2).mean(1)
                weight[:, a:b] -= (
                    optimizer.lr * grad[:, a:b] / (state[:, j : j + 1].sqrt() + optimizer.eps)
                )
