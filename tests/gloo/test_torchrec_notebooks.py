"""The notebooks of TorchRec, walked cell by cell with rayrec's imports, and with TorchRec's own
where it is installed. The cells are the same code for both; `library` holds all that differs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from tests.ranks import RankPool

CPU = torch.device("cpu")


def library(name: str) -> Any:
    """The imports of the notebooks, and how a plan is handed to a sharder."""
    if name == "torchrec":
        import torchrec
        from torchrec import distributed as sharding
        from torchrec.distributed import embeddingbag, planner
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingType
        from torchrec.optim.optimizers import in_backward_optimizer_filter
    else:
        import rayrec as torchrec
        from rayrec import ParameterConstraints, planner
        from rayrec import distributed as sharding
        from rayrec.distributed import DistributedModelParallel, ModuleSharder, ShardingEnv
        from rayrec.layout import ShardingType
        from rayrec.optim import in_backward_optimizer_filter

        embeddingbag = sharding
    return SimpleNamespace(
        torchrec=torchrec,
        distributed=sharding,
        EmbeddingBagCollectionSharder=embeddingbag.EmbeddingBagCollectionSharder,
        EmbeddingShardingPlanner=planner.EmbeddingShardingPlanner,
        Topology=torchrec.Topology if name == "rayrec" else planner.Topology,
        DistributedModelParallel=DistributedModelParallel,
        ParameterConstraints=ParameterConstraints,
        ModuleSharder=ModuleSharder,
        ShardingEnv=ShardingEnv,
        ShardingType=ShardingType,
        in_backward_optimizer_filter=in_backward_optimizer_filter,
        keeps_rows=name == "rayrec",  # TorchRec makes new ones, and expects a state_dict
        plan_for_sharder=(lambda plan: plan) if name == "rayrec" else lambda plan: plan.plan[""],
    )


@pytest.fixture(params=["rayrec", "torchrec"])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "torchrec":
        pytest.importorskip("torchrec", reason="TorchRec is not installed")
    return request.param


@pytest.fixture
def walkers(name: str, ranks: RankPool) -> Iterator[RankPool]:
    """Two ranks; new ones for TorchRec, which remembers the group that a process had before."""
    pool = RankPool(2) if name == "torchrec" else ranks
    yield pool
    if pool is not ranks:
        pool.close()


def line(printed: Any) -> str:
    """What is printed of a value, in one line."""
    return " ".join(str(printed).split())


def shop(torchrec: Any, device: str) -> nn.Module:
    """The tables of both introductions."""
    configs = [
        torchrec.EmbeddingBagConfig(
            name=f"{feature}_table",
            embedding_dim=64,
            num_embeddings=4096,
            feature_names=[feature],
            pooling=torchrec.PoolingType.SUM,
        )
        for feature in ("product", "user")
    ]
    return torchrec.EmbeddingBagCollection(device=device, tables=configs)


def introduction(rank: int, world_size: int, name: str) -> str:
    """Tables on the meta device, a model that shards itself, and a batch."""
    lib = library(name)
    ebc = shop(lib.torchrec, "meta")
    model = lib.torchrec.distributed.DistributedModelParallel(ebc, device=CPU)
    assert all(f"{table}_table" in str(model) + str(model.plan) for table in ("product", "user"))
    mb = lib.torchrec.KeyedJaggedTensor(
        keys=["product", "user"],
        values=torch.tensor([101, 202, 303, 404, 505, 606]),
        lengths=torch.tensor([2, 0, 1, 1, 1, 1], dtype=torch.int64),
    )
    pooled = model(mb)
    assert pooled.keys() == ["product", "user"] and pooled.values().shape == (3, 128)
    empty = (pooled["product"] == 0).all(1)
    assert empty.tolist() == [False, True, False] and (pooled["user"] != 0).any(1).all()
    return line(mb.to(CPU))


def test_the_introduction_runs(walkers: RankPool, name: str) -> None:
    (printed,) = walkers.run(1, introduction, name)
    assert printed == (
        'KeyedJaggedTensor({ "product": [[101, 202], [], [303]], "user": [[404], [505], [606]] })'
    )


def interactive(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Jagged tensors, a planner, sharders, results to wait for, and optimizers in the backward."""
    lib, seen = library(name), dict[str, Any]()
    jagged = lib.torchrec.JaggedTensor(values=torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
    seen["offsets"] = jagged.offsets().tolist()
    seen["dense"] = [part.tolist() for part in jagged.to_dense()]
    seen["printed"] = line(jagged)
    bags = {"product": ([1, 2, 1, 5], [3, 1]), "user": ([2, 3, 4, 1], [2, 2])}
    kjt = lib.torchrec.KeyedJaggedTensor.from_jt_dict(
        {
            key: lib.torchrec.JaggedTensor(values=torch.tensor(ids), lengths=torch.tensor(lengths))
            for key, (ids, lengths) in bags.items()
        }
    )
    seen["kjt"] = kjt.keys(), kjt.lengths().tolist(), kjt.values().tolist(), line(kjt)
    seen["kjt offsets"] = kjt.offsets().tolist(), list(kjt.to_dict())
    ebc = shop(lib.torchrec, "cpu")
    plain = ebc(kjt)
    seen["output"] = plain.keys(), plain.values().shape

    # the group, a sharder, a planner and its plan
    pg = dist.GroupMember.WORLD
    sharder = lib.EmbeddingBagCollectionSharder()
    planner = lib.EmbeddingShardingPlanner(
        topology=lib.Topology(world_size=1, compute_device=CPU.type)
    )
    plan = planner.collective_plan(ebc, [sharder], pg)
    assert "product_table" in str(plan)
    env = lib.ShardingEnv.from_process_group(pg)
    params = lib.plan_for_sharder(plan)
    sharded_ebc = sharder.shard(ebc, params, env, CPU)
    waited = sharded_ebc(kjt).wait()
    assert not lib.keeps_rows or torch.equal(waited.values(), plain.values())
    seen["sharded"] = type(waited) is type(plain), list(waited.to_dict())
    out = lib.torchrec.distributed.DistributedModelParallel(ebc, device=CPU)(kjt).wait()
    assert not lib.keeps_rows or torch.equal(out.values(), plain.values())

    # both ways to an optimizer, and a step that nobody asks for
    fused_params = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.02,
        "eps": 0.002,
    }
    fused = lib.EmbeddingBagCollectionSharder(fused_params=fused_params)
    sharded_fused = fused.shard(ebc, params, env, CPU)
    marked = copy.deepcopy(ebc)
    for _, param in marked.named_parameters():
        apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.5})
    sharded_marked = sharder.shard(marked, params, env, CPU)
    seen["rates"] = [
        round(model.fused_optimizer.param_groups[0]["lr"], 6)
        for model in (sharded_fused, sharded_marked)
    ]
    named = sharded_fused.named_parameters()
    seen["other parameters"] = list(dict(lib.in_backward_optimizer_filter(named)))
    for key, model in (("fused", sharded_fused), ("marked", sharded_marked)):
        losses = []
        for _ in range(2):
            values = model(kjt).wait().values()
            losses.append(torch.sum(torch.ones_like(values) - values))
            losses[-1].backward()
        seen[f"{key} loss fell by"] = float(losses[0] - losses[1])
    return seen


def test_the_interactive_tutorial_runs(walkers: RankPool, name: str) -> None:
    (seen,) = walkers.run(1, interactive, name)
    falls = seen.pop("fused loss fell by"), seen.pop("marked loss fell by")
    # rows of the two tables by how often they are looked up: a gradient of -n per element
    times = [2, 1, 1, 1, 1, 1, 1]
    wanted = (
        sum(64 * n * 0.02 * n / (n + 0.002) for n in times),
        sum(64 * 0.5 * n * n for n in times),
    )
    assert falls == pytest.approx(wanted, rel=1e-3)  # sums of 256 float32 values near -1 to 1
    assert seen == {
        "offsets": [0, 1, 3],
        "dense": [[5], [7, 1]],
        "printed": "JaggedTensor({ [[5], [7, 1]] })",
        "kjt": (
            ["product", "user"],
            [3, 1, 2, 2],
            [1, 2, 1, 5, 2, 3, 4, 1],
            'KeyedJaggedTensor({ "product": [[1, 2, 1], [5]], "user": [[2, 3], [4, 1]] })',
        ),
        "kjt offsets": ([0, 3, 4, 6, 8], ["product", "user"]),
        "output": (["product", "user"], (2, 128)),
        "sharded": (True, ["product", "user"]),
        "rates": [0.02, 0.5],
        "other parameters": [],
    }


def large_and_small(torchrec: Any) -> list[Any]:
    """The tables of the notebook on sharding: two large and two small ones."""
    return [
        torchrec.EmbeddingBagConfig(
            name=f"{size}_table_{i}",
            embedding_dim=64,
            num_embeddings=rows,
            feature_names=[f"{size}_table_feature_{i}"],
            pooling=torchrec.PoolingType.SUM,
        )
        for size, rows in (("large", 4096), ("small", 1024))
        for i in range(2)
    ]


def single_rank_execution(
    rank: int, world_size: int, name: str, kind: str
) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Kinds and sizes of the shards of this rank, whose look-up is that of the unsharded module."""
    lib = library(name)
    torch.manual_seed(0)
    tables = large_and_small(lib.torchrec)
    module = lib.torchrec.EmbeddingBagCollection(device=CPU, tables=tables)
    types = [lib.ShardingType[kind].value]
    constraints = {table.name: lib.ParameterConstraints(sharding_types=types) for table in tables}
    pg = dist.group.WORLD
    planner = lib.EmbeddingShardingPlanner(
        topology=lib.Topology(world_size=world_size, compute_device=CPU.type),
        constraints=constraints,
    )
    sharders: list[lib.ModuleSharder[nn.Module]] = [lib.EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(module, sharders, pg)
    model = lib.DistributedModelParallel(
        module, env=lib.ShardingEnv.from_process_group(pg), plan=plan, sharders=sharders, device=CPU
    )
    features = [table.feature_names[0] for table in tables]
    kjt = lib.torchrec.KeyedJaggedTensor(
        keys=features, values=torch.arange(8) + rank, lengths=torch.full((8,), 1)
    )
    looked_up = model(kjt).wait().values()
    assert not lib.keeps_rows or torch.equal(looked_up, module(kjt).values())
    if name == "torchrec":
        placed = plan.plan[""]
        kinds = {table: placed[table].sharding_type for table in placed}
        owners = {table: placed[table].ranks for table in placed}
    else:
        kinds = {table: plan.kind(table) for table in plan.tables}
        owners = {table: list(plan.tables[table].layout.ranks) for table in plan.tables}
    return kinds, owners


@pytest.mark.parametrize("kind", ["TABLE_WISE", "ROW_WISE", "COLUMN_WISE", "DATA_PARALLEL"])
def test_the_notebook_on_sharding_runs(walkers: RankPool, name: str, kind: str) -> None:
    if (name, kind) == ("torchrec", "ROW_WISE"):
        pytest.skip("TorchRec cuts no table by rows on CPU ranks")
    (kinds, owners), other = walkers.run(2, single_rank_execution, name, kind)
    assert other == (kinds, owners) and len(kinds) == 4
    if kind == "TABLE_WISE":  # a large and a small one each
        assert sorted(owners["large_table_0"] + owners["large_table_1"]) == [0, 1]
        assert sorted(owners["small_table_0"] + owners["small_table_1"]) == [0, 1]
    elif kind != "COLUMN_WISE":  # TorchRec leaves 64 columns whole
        assert set(map(tuple, owners.values())) == {(0, 1)}
    assert set(kinds.values()) == {kind.lower()}
