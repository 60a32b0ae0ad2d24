"""The part of a world of one rank in a process group: NCCL on a GPU, gloo on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.checks import Notes, Settings, assert_equal
from benchmarks.gpu.equality import OPTIMIZERS
from benchmarks.gpu.models import cases, shard, train
from rayrec.comm.choose import Transport, exchange_for
from rayrec.comm.process_group import (
    create_store,
    destroy_process_group,
    init_process_group,
    timeout_s,
)
from rayrec.train.window import gather_objects


@contextmanager
def world_of_one(settings: Settings) -> Iterator[None]:
    """A default process group of this process alone."""
    if settings.on_gpu:
        torch.cuda.set_device(0)
    store = create_store("127.0.0.1")
    init_process_group(store, 0, 1, backend=settings.backend, timeout_s=60)
    try:
        yield
    finally:
        destroy_process_group()


def run(settings: Settings, notes: Notes) -> None:
    """See the module."""
    case = cases(settings.choose(2000, 200, 40))[-1]
    optimizer = OPTIMIZERS["adagrad"]
    alone = shard(case, optimizer, settings)
    wanted = [train(alone, case.batch(30, 5, step), step) for step in range(3)]
    with notes.check(f"{settings.backend} group") as found, world_of_one(settings):
        found["backend"] = dist.get_backend()
        assert timeout_s() == 60
        _collectives(settings)
    for how in ({}, {"prefetch": True}):
        with notes.check(f"training in the group, {how or 'plain'}"), world_of_one(settings):
            # a group of one would else train without it
            model = shard(case, optimizer, settings, transport="process_group", **how)
            assert type(model._engine.exchange).__name__ == "ProcessGroupExchange"
            for step in range(3):
                output = train(model, case.batch(30, 5, step), step)
                assert_equal(f"output of step {step}", output, wanted[step])
            model.close()


def _collectives(settings: Settings) -> None:
    """What the runtime asks of an exchange, by the group."""
    device = torch.device(settings.device)
    exchange: Any = exchange_for(None, device, Transport.PROCESS_GROUP)
    for dtype in (torch.float32, torch.int32, torch.int64, torch.uint8, torch.float16):
        send = torch.arange(9, device=device).to(dtype)
        assert_equal("all_to_all", exchange.all_to_all(send, [9], [9]).wait(), send)
        assert_equal("views", exchange.views(send, [9], [9]).wait()[0], send)
        assert_equal("all_gather", exchange.all_gather(send, [9]).wait()[0], send)
        headers, (got,) = exchange.headed(
            [[9, 5]], send, [9], 2, lambda heads: [heads[0][0]]
        ).wait()
        assert headers == [[9, 5]]
        assert_equal("headed", got, send)
    empty = torch.empty(0, device=device)
    assert exchange.all_to_all(empty, [0], [0]).wait().numel() == 0
    assert exchange.split([[0]]).world_size == 1
    assert gather_objects({"a": 1}) == [{"a": 1}]
    total = torch.ones(3, device=device)
    dist.all_reduce(total)
    assert_equal("all_reduce", total, torch.ones(3, device=device))
