"""Is a cluster fit to train? A check of thirty seconds, as `rayrec smoke` runs it.

Ray answers, the ranks find room and start, they form a process group, one all_to_all brings every
number where it belongs, and one sharded training step runs on every rank with a table cut over all
of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rayrec.driver.controller import Controller
from rayrec.driver.head import alive_nodes, head, resources
from rayrec.driver.rank_group import Prepared, RankGroup
from rayrec.driver.run import Rules
from rayrec.driver.scaling import ScalingConfig
from rayrec.errors import CommError
from rayrec.train.seat import RankContext


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeTask:
    """Smoke test of every rank; returns its lines."""

    def run(self, context: RankContext) -> list[str]:
        """Try an all_to_all and a training step, together with all ranks."""
        seat = context.seat
        device = "cuda:0" if seat.device == "cuda" else "cpu"
        return [
            _all_to_all(seat.rank, seat.world_size, device),
            _step(seat.rank, seat.world_size, device),
        ]


def _all_to_all(rank: int, world_size: int, device: str) -> str:
    import torch
    import torch.distributed as dist

    # Number 1000 r + d goes from rank r to rank d, so a number in the wrong place shows who sent
    # it.
    send = torch.arange(world_size, device=device) + 1000 * rank
    received = torch.empty_like(send)
    started = time.perf_counter()
    dist.all_to_all_single(received, send)
    # Reading the numbers also waits for the device, so the time is that of the whole exchange.
    expected = torch.arange(world_size) * 1000 + rank
    if received.cpu().tolist() != expected.tolist():
        raise CommError(
            f"rank {rank}: all_to_all brought {received.tolist()}, expected {expected.tolist()}"
        )
    spent_ms = 1e3 * (time.perf_counter() - started)
    return f"all_to_all among {world_size} ranks ({dist.get_backend()}) in {spent_ms:.1f} ms"


def _step(rank: int, world_size: int, device: str) -> str:
    import torch

    from rayrec.distributed import DistributedModelParallel
    from rayrec.layout import EmbeddingBagConfig, ShardingPlan, TablePlacement, row_wise
    from rayrec.models import DLRM, DLRMTrain
    from rayrec.modules import EmbeddingBagCollection
    from rayrec.optim import RowWiseAdagrad
    from rayrec.sparse import KeyedJaggedTensor
    from rayrec.train.step import train_step

    # Every rank owns 64 rows, so that ids of every rank travel to all others.
    table = EmbeddingBagConfig(
        num_embeddings=64 * world_size, embedding_dim=8, name="table", feature_names=["feature"]
    )
    plan = ShardingPlan(
        world_size=world_size, tables={"table": TablePlacement(row_wise(table, range(world_size)))}
    )
    torch.manual_seed(0)
    model = DLRMTrain(DLRM(EmbeddingBagCollection(tables=[table], device="meta"), 4, [8], [8, 1]))
    sharded = DistributedModelParallel(
        model, plan=plan, sparse_optimizer=RowWiseAdagrad(lr=0.1), device=device, seed=0
    )
    rows = 16
    # The model is the same on all ranks, and the batches differ.
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(table.num_embeddings, (rows,), generator=generator)
    batch = SimpleNamespace(
        dense_features=torch.randn(rows, 4, generator=generator).to(device),
        sparse_features=KeyedJaggedTensor(
            ["feature"], ids, lengths=torch.ones(rows, dtype=torch.int32)
        ).to(torch.device(device)),
        labels=(ids % 2).float().to(device),
        rows=rows,
        global_rows=rows * world_size,
    )
    dense = torch.optim.SGD(sharded.parameters(), lr=0.1)
    before = [state.weight.detach().clone() for state in sharded.shard_states()]
    started = time.perf_counter()
    loss = float(train_step(sharded, dense, batch, world_size).loss_sum) / rows
    seconds = time.perf_counter() - started
    changed = any(
        bool((state.weight != old).any())
        for state, old in zip(sharded.shard_states(), before, strict=True)
    )
    if not changed or not loss > 0:
        raise CommError(f"rank {rank}: a training step with loss {loss} left the shard as it was")
    return f"rank {rank}: one sharded training step in {1e3 * seconds:.0f} ms, loss {loss:.4f}"


def check_cluster(scaling: ScalingConfig, say: Callable[[str], None]) -> None:
    """Start the ranks and try them; every success is reported in a line.

    Args:
        scaling: the ranks to try, at least one.
        say: receives each line.
    Raises:
        ConfigError: the ranks do not fit the cluster.
        TrainingFailed: a rank failed, or got wrong numbers.
        RunInterrupted: Ctrl-C or SIGTERM ended the check.
    """
    import ray

    def prepare(group: RankGroup) -> Prepared:
        there = head.answer(resources, group.check).total
        alive = len(head.answer(alive_nodes, group.check))
        room = f"{there.get('CPU', 0):g} CPU, {there.get('GPU', 0):g} GPU"
        say(f"OK Ray {ray.__version__}: {alive} nodes, {room}")
        hosts = [f"{group.addresses[ranks[0]].host}: {len(ranks)}" for ranks in group.hosts]
        say(f"OK {group.world_size} ranks started, by host {', '.join(hosts)}")
        return Prepared(SmokeTask())

    def on_event(event: Any) -> None:
        if isinstance(event, str):
            say(event)

    rules = Rules(scaling=scaling, timeout_s=60.0, obeys_stop=False)
    ran = Controller(rules, prepare, on_event).run()
    say(f"OK {ran.results[0][0]}")
    for _, step in ran.results:
        say(f"OK {step}")
