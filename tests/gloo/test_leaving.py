"""Leaving the process groups never stands still: with a model in a reference cycle, with ids still
travelling, and after a failure. Who could not join one world joins the next.
"""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayrec.comm.process_group import (
    connect_store,
    create_store,
    destroy_process_group,
    init_process_group,
    new_group,
    shutdown_sockets,
)
from rayrec.errors import ConfigError, JoinError
from tests.gloo.small_dlrm import dmp, parts
from tests.ranks import RankPool


def leave_with_garbage(rank: int, world_size: int) -> float:
    """Seconds that a rank took to leave; rank 1 takes part in the last collective 0.3 s after rank
    0 began to.
    """
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.cycle = [model]  # type: ignore[assignment]
    model(torch.ones(1, 2)).sum().backward()
    store = dist.distributed_c10d._get_default_store()
    if rank:
        store.wait(["leaving"])
        # the last collective of rank 0 is under way while it leaves, and then lets go of a tensor
        # of Python's
        time.sleep(0.3)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if rank:
        work.wait()
    del model, work
    started = time.perf_counter()
    store.set("leaving", "")
    destroy_process_group()
    gc.collect()
    return time.perf_counter() - started


def test_a_model_in_a_cycle_does_not_hold_up_its_groups(ranks: RankPool) -> None:
    # the first DDP of a process keeps its group alive
    ranks.run(2, leave_with_garbage, timeout_s=30)
    # it waited for the thread that did the collective
    assert ranks.run(2, leave_with_garbage, timeout_s=30)[0] > 0.2


def prefetching() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def closed(rank: int, world_size: int) -> None:
    model, _ = dmp(world_size, prefetch=True)
    before = model(parts(0, rank, world_size))[1][1]
    assert model.prefetch(parts(1, rank, world_size).sparse_features)
    assert len(prefetching()) == 1
    for _ in range(2):
        model.close()
        assert not prefetching() and model._engine._ahead is None
    with torch.no_grad():
        assert torch.equal(model(parts(0, rank, world_size))[1][1], before)
    with pytest.raises(ConfigError, match="do not close it"):
        model.prefetch(parts(1, rank, world_size).sparse_features)


def test_a_closed_model_works_without_prefetching(ranks: RankPool) -> None:
    ranks.run(2, closed)


def abandoned(rank: int, world_size: int) -> None:
    model, _ = dmp(world_size, prefetch=True)
    model(parts(0, rank, world_size))
    if rank:
        with pytest.raises(RuntimeError):
            dist.barrier()  # until rank 0 cuts its connections
        model.close(wait=False)
        return
    assert model.prefetch(parts(1, rank, world_size).sparse_features)  # rank 1 never takes part
    (thread,) = prefetching()
    model.close(wait=False)
    assert thread.is_alive()
    shutdown_sockets()
    thread.join(10)
    assert not thread.is_alive()


def test_after_a_failure_nothing_waits_for_other_ranks(ranks: RankPool) -> None:
    ranks.run(2, abandoned, timeout_s=30)


def another_world(rank: int) -> dist.TCPStore:
    """A rendezvous of its own for the ranks of the pool's group, which they leave for it."""
    pool = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = create_store("127.0.0.1")
        pool.set("port", str(store.port))
    else:
        store = connect_store("127.0.0.1", int(pool.get("port")))
    destroy_process_group()
    return store


def meet_after_failures(rank: int, world_size: int) -> float:
    store = another_world(rank)
    for life in range(2 * rank):
        # rank 0 of this world is the one that lives, as where the others were killed
        with pytest.raises(JoinError, match="rank 0 of 2 could not join"):
            init_process_group(create_store("127.0.0.1"), 0, 2, timeout_s=0.2, generation=life)
    group = init_process_group(store, rank, 2, timeout_s=60.0, join_s=10.0, generation=3)
    # the bound of a meeting is not that of collectives
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=60)
    total = torch.tensor([float(rank)])
    for each in (group, new_group(), new_group([0, 1], members_only=True)):
        dist.all_reduce(total, group=each)
    return total.item()


def test_a_rank_whose_joins_failed_meets_a_new_one(ranks: RankPool) -> None:
    """Else it waits for the other one at another key of the store, and so for ever."""
    assert ranks.run(2, meet_after_failures, timeout_s=60) == [4.0, 4.0]


def cut_off(rank: int, world_size: int) -> None:
    """The others never come: to a group of both ranks, and to a world."""
    init_process_group(another_world(rank), rank, 2, timeout_s=60.0, generation=4)
    if rank == 0:
        threading.Timer(0.3, shutdown_sockets).start()
        with pytest.raises(dist.DistError):
            new_group([0, 1])
    destroy_process_group()
    if rank == 1:
        threading.Timer(0.3, shutdown_sockets).start()
        with pytest.raises(JoinError, match="could not join"):
            init_process_group(create_store("127.0.0.1"), 0, 2, timeout_s=60.0, generation=5)


def test_a_wait_for_ranks_that_do_not_come_can_be_cut(ranks: RankPool) -> None:
    ranks.run(2, cut_off, timeout_s=30)


def interrupted(rank: int, world_size: int) -> None:
    """Join a world of its own, which an error of another kind ends once connections are open."""
    destroy_process_group()
    store, barrier = create_store("127.0.0.1"), dist.barrier

    def ends(*_: object) -> None:
        raise KeyError("gone")

    dist.barrier = ends
    try:
        with pytest.raises(KeyError, match="gone"):
            init_process_group(store, 0, 1)
    finally:
        dist.barrier = barrier
    assert not dist.is_initialized()
    # a group that was there before stays
    init_process_group(store, 0, 1, generation=1)
    with pytest.raises(ValueError, match="twice"):
        init_process_group(store, 0, 1, generation=2)
    assert dist.is_initialized()


def test_an_error_of_any_kind_leaves_no_half_joined_world(ranks: RankPool) -> None:
    ranks.run(1, interrupted, timeout_s=60)
