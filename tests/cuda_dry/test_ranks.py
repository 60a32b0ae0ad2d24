"""Two processes, a GPU rank each, over a process group that takes tensors of a GPU alone, as NCCL.

The collectives are gloo's, whose CUDA code copies to page-locked memory and back. What is
particular to NCCL is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two processes of this tier's environment."""
    made = RankPool(2, "spawn")
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.cuda_dry.runs import write_clicks

    made = tmp_path_factory.mktemp("clicks")
    write_clicks(made)
    return made


def as_gpu_rank(rank: int, world: int, store: str, work: Callable[..., Any], *args: Any) -> Any:
    """Runs in a rank's process: `work(rank, world, *args)` inside a group of GPU ranks."""
    from tests.cuda_dry import install

    install()
    dist.destroy_process_group()  # the pool's own, of CPU ranks
    dist.init_process_group(
        "cuda:gloo", store=dist.FileStore(store, world), rank=rank, world_size=world
    )
    return work(rank, world, *args)


def on_gpus(pool: RankPool, folder: Path, work: Callable[..., Any], *args: Any) -> list[Any]:
    stores = len(list(folder.glob("store*")))
    return pool.run(2, as_gpu_rank, str(folder / f"store{stores}"), work, *args)


def train(rank: int, world: int, folder: Path, kind: str, device: str, wire: str) -> Any:
    """Numbers of this rank, loss of the last window, AUC over all ranks."""
    from rayrec.train import RankTrainer
    from tests.cuda_dry.runs import numbers, spec_of

    spec = spec_of(folder, world, kind, qcomms_forward=wire, share_tables=False)
    with RankTrainer(spec, device) as trainer:
        trainer.run()
        scores = trainer.evaluate(spec.eval_data)  # type: ignore[arg-type]
        assert all(state.weight.device.type == device for state in trainer.model.shard_states())
        return numbers(trainer.model), trainer.loss, scores["auc"]


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_two_gpu_ranks_train_as_two_cpu_ranks(
    pool: RankPool, folder: Path, kind: str, wire: str
) -> None:
    got = on_gpus(pool, folder, train, folder, kind, "cuda", wire)
    wanted = pool.run(2, train, folder, kind, "cpu", wire)
    # sums in another order may be rounded to another of the 256 values of a row
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if wire == "fp32" else {"rtol": 1e-2, "atol": 5e-3}
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine[1:] == pytest.approx(theirs[1:], rel=tolerance["rtol"])
        assert mine[0].keys() == theirs[0].keys()
        for name, value in theirs[0].items():
            torch.testing.assert_close(mine[0][name], value, **tolerance)


def a_cpu_tensor(rank: int, world: int) -> str:
    from rayrec.comm.choose import exchange_for

    exchange = exchange_for(None, torch.device("cuda"))
    assert exchange.all_gather(torch.ones(1, device="cuda"), [1] * world).wait()[1].is_cuda
    try:
        exchange.all_gather(torch.ones(1), [1] * world).wait()
    except Exception as error:
        return str(error)
    return ""


def test_the_group_takes_no_cpu_tensor(pool: RankPool, folder: Path) -> None:
    assert all("No backend type" in error for error in on_gpus(pool, folder, a_cpu_tensor))


def save_and_move(rank: int, world: int, folder: Path) -> None:
    """Saves on two GPU ranks, goes over to another plan, and goes back to what was saved."""
    from rayrec.driver.planning import find_tables
    from rayrec.layout import Topology
    from rayrec.planner import manual_plan
    from rayrec.train import RankTrainer
    from tests.cuda_dry.runs import numbers, spec_of

    spec = spec_of(folder, world, "row_wise", steps=4)
    with RankTrainer(spec, "cuda") as trainer:
        trainer.run()
        path = trainer.save(str(folder / "two"))
        before = numbers(trainer.model)
        tables = find_tables(spec.model)  # type: ignore[arg-type]
        plan = manual_plan(tables, "table_wise", Topology.local(world))
        trainer.model.reshard(plan)
        trainer.model.reshard(spec.plan)
        after = numbers(trainer.model)
        assert not [name for name in before if not torch.equal(before[name], after[name])]
    with RankTrainer(spec, "cuda") as other:
        other.restore(path)
        restored = numbers(other.model)
        assert not [name for name in before if not torch.equal(before[name], restored[name])]


def test_checkpoints_and_plans_of_two_gpu_ranks(pool: RankPool, folder: Path) -> None:
    on_gpus(pool, folder, save_and_move, folder)
    from rayrec.train import RankTrainer
    from tests.cuda_dry.runs import spec_of

    with RankTrainer(spec_of(folder, steps=6), "cuda") as alone:
        alone.restore(str(folder / "two"))
        alone.run()
        assert alone.step == 6


def replicas(rank: int, world: int, sync_every: int) -> list[torch.Tensor]:
    """Tables of two sharding groups of one rank each, which are replicas of each other."""
    from rayrec.distributed import DistributedModelParallel
    from rayrec.optim import RowWiseAdagrad
    from tests.cuda_dry.models import GPU, Everything, batch, plan_of

    model = DistributedModelParallel(
        Everything("meta"),
        plan=plan_of(),
        sparse_optimizer=RowWiseAdagrad(lr=0.1),
        device=GPU,
        seed=0,
        sharding_group_size=1,
        sync_every=sync_every,
    )
    for step in range(4):
        model(batch(10 * step + rank).to(GPU)).sum().backward()
    model.sync()
    return [state.weight.detach().cpu() for state in model.shard_states()]


@pytest.mark.parametrize("sync_every", [1, 2])
def test_replicas_are_equal(pool: RankPool, folder: Path, sync_every: int) -> None:
    first, second = on_gpus(pool, folder, replicas, sync_every)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def measure(rank: int, world: int) -> float:
    from rayrec.calibration.measure import measure_topology
    from rayrec.comm.choose import exchange_for
    from rayrec.layout import Topology

    device, topology = torch.device("cuda"), Topology.local(2, memory_bytes=1 << 30, device="cuda")
    return measure_topology(exchange_for(None, device), topology, device).memory_bw


@pytest.mark.slow
def test_ranks_can_be_measured(pool: RankPool, folder: Path) -> None:
    assert all(speed > 0 for speed in on_gpus(pool, folder, measure))
