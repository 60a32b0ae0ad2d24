"""Random tables, topologies, layouts and plans for the tests of layout and planner; everything
follows from a seed.
"""

from __future__ import annotations

import random
from itertools import pairwise

from rayrec.layout import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    Layout,
    PoolingType,
    Replicated,
    ShardingPlan,
    Storage,
    TableLayout,
    TablePlacement,
    Topology,
)
from rayrec.planner import ParameterConstraints
from rayrec.planner.memory import RankMemory, layout_memory
from rayrec.planner.work import TableWork


def memory_by_rank(
    work: TableWork, layout: Layout, sparse_optimizer: str, summed: int = 1
) -> tuple[RankMemory, ...]:
    """Bytes of one table on every rank of the world, as owner and as home."""
    owners, home = layout_memory(work, layout, sparse_optimizer, summed)
    return tuple(home + owners.get(rank, RankMemory()) for rank in range(work.world_size))


def random_cuts(rng: random.Random, size: int, multiple: int = 1, most: int = 5) -> tuple[int, ...]:
    """0 .. size with up to `most` parts of any size."""
    inner = range(multiple, size, multiple)
    return (0, *sorted(rng.sample(inner, min(len(inner), rng.randrange(most)))), size)


def random_layout(rng: random.Random, rows: int, dim: int, world_size: int) -> Layout:
    """Uneven cuts and any owners, or a replica on every rank."""
    if rng.random() < 0.15:
        return Replicated(rows, dim, tuple(range(world_size)))
    row_cuts, col_cuts = random_cuts(rng, rows), random_cuts(rng, dim, 4)
    owners = tuple(tuple(rng.randrange(world_size) for _ in col_cuts[1:]) for _ in row_cuts[1:])
    return TableLayout(row_cuts, col_cuts, owners)


def random_hosts(rng: random.Random, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Ranks cut into hosts of any size."""
    cuts = random_cuts(rng, world_size, most=4)
    return tuple(tuple(range(a, b)) for a, b in pairwise(cuts))


def random_tables(rng: random.Random, count: int) -> list[BaseEmbeddingConfig]:
    """Tables of one row to a million, pooled and not, of one or several features, some of an odd
    width.
    """
    out: list[BaseEmbeddingConfig] = []
    other = random.Random(rng.getstate()[1][0])  # leaves what else follows from the seed as it is
    for i in range(count):
        rows = int(10 ** rng.uniform(0, 6))
        dim = 4 * rng.choice([1, 2, 4, 8, 16, 24, 32, 64]) - other.choice([0, 0, 0, 0, 0, 1, 3])
        names = [f"f{i}_{k}" for k in range(rng.choice([1, 1, 1, 2, 3]))]
        kind = rng.choice(
            [DataType.FP32, other.choice([DataType.FP16, DataType.FP16, DataType.BF16])]
        )
        if rng.random() < 0.2:
            out.append(EmbeddingConfig(rows, dim, f"t{i}", kind, names))
        else:
            pooling = rng.choice([PoolingType.SUM, PoolingType.MEAN])
            out.append(EmbeddingBagConfig(rows, dim, f"t{i}", kind, names, pooling=pooling))
    return out


def random_storage(rng: random.Random) -> Storage:
    """On the device, off it, or off it with a cache of any size."""
    return rng.choice(
        [Storage(), Storage("host"), Storage("cached", rng.choice([0.001, 0.2, 1.0]))]
    )


def random_plan(seed: int) -> ShardingPlan:
    """Any valid plan, without estimates; some table names need quoting in JSON."""
    rng = random.Random(seed)
    world_size, odd = rng.randrange(1, 9), seed % 3
    names = rng.sample(
        [
            "user",
            'quo"te',
            "grüße",
            "a b",
            "back\\slash",
            "tables",
            "kind",
            "x\ny",
            *map(str, range(9)),
        ],
        rng.randrange(8),
    )
    tables = {
        name: TablePlacement(
            random_layout(rng, rng.randrange(1, 200), 4 * rng.randrange(1, 12) - odd, world_size),
            random_storage(rng),
        )
        for name in names
    }
    return ShardingPlan(world_size=world_size, tables=tables, hosts=random_hosts(rng, world_size))


def random_topology(rng: random.Random, memory_bytes: int) -> Topology:
    """1 to 8 ranks on hosts of any size, memory near `memory_bytes`, speeds of one device or the
    other.
    """
    world_size = rng.randrange(1, 9)
    hosts = random_hosts(rng, world_size) if rng.random() < 0.5 else None
    base = Topology.local(world_size, memory_bytes=memory_bytes, device=rng.choice(["cpu", "cuda"]))
    limits = tuple(int(memory_bytes * rng.uniform(0.7, 1.3)) for _ in range(world_size))
    return Topology(
        hosts=hosts or base.hosts,
        memory_bytes=limits,
        device=base.device,
        memory_bw=base.memory_bw,
        intra_host_bw=base.intra_host_bw,
        inter_host_bw=base.inter_host_bw,
        latency_s=base.latency_s,
        input_hidden=rng.choice([0.0, 0.0, 0.5, 1.0]),
    )


def random_wire(rng: random.Random) -> dict[str, str]:
    """Types of rows and gradients on the wire."""
    return {
        name: rng.choice(["fp32", "fp32", "fp16", "int8"])
        for name in ("qcomms_forward", "qcomms_backward")
    }


def _of_kernels(table: BaseEmbeddingConfig, storage: str) -> str:
    """A storage that such a table may have on a GPU."""
    fused = table.embedding_dim % 4 == 0 and table.data_type is not DataType.BF16
    return storage if fused or storage == "device" else "auto"


def random_constraints(
    rng: random.Random, tables: list[BaseEmbeddingConfig]
) -> dict[str, ParameterConstraints]:
    """Pooling factors, skew and storage for some tables, narrow limits for a few."""
    return {
        table.name: ParameterConstraints(
            pooling_factor=rng.choice([0.5, 1.0, 3.0, 20.0]),
            min_partition=rng.choice([None, None, 4, 16, 32]),
            weighted=rng.random() < 0.3,
            skew=rng.choice([0.0, 0.0, 0.7, 1.3]),
            storage=_of_kernels(
                table, rng.choice(["device", "device", "host", "cached", "auto", "auto"])
            ),
            cache_load_factor=rng.choice([0.02, 0.2]),
        )
        for table in tables
        if rng.random() < 0.7
    }
