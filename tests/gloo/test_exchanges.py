"""Every transport carries the same messages: process group, shared memory, and the two joined as if
the ranks lay on two hosts.
"""

from __future__ import annotations

import gc
import random
import time

import pytest
import torch
import torch.distributed as dist

from rayrec.comm import choose
from rayrec.comm.choose import Transport, exchange_for
from rayrec.comm.exchange import Exchange
from rayrec.comm.gradient_average import start_sum
from rayrec.comm.joined import JoinedExchange
from rayrec.comm.pages import make_huge
from rayrec.comm.process_group import ProcessGroupExchange
from rayrec.comm.shared_memory import SharedMemoryExchange
from rayrec.errors import CommError, ShapeError
from tests.ranks import RankPool

SOON_S = 30.0  # waits end when something happens; else they would take the 60 s of the rank pool
KINDS = {
    "process_group": ProcessGroupExchange,
    "shared_memory": SharedMemoryExchange,
    "joined": JoinedExchange,
}


def open_exchange(kind: str, rank: int) -> Exchange:
    """An exchange over all ranks; joined: ranks 0, 1 and 2, 3 are told to be on two hosts."""
    transport = Transport.PROCESS_GROUP if kind == "process_group" else Transport.AUTO
    with pytest.MonkeyPatch.context() as patch:
        if kind == "joined":
            patch.setattr(choose, "host_identity", lambda: f"host{rank // 2}")
        exchange = exchange_for(None, torch.device("cpu"), transport)
    assert type(exchange) is KINDS[kind]
    return exchange


def message(step: int, source: int, dest: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What `source` sends to `dest` in a step."""
    return (torch.arange(size) * 7 + 1000 * source + 100 * dest + step).to(dtype)


def carry(rank: int, world: int, kind: str) -> str:
    exchange = open_exchange(kind, rank)
    rng = random.Random(5)  # the same on every rank
    for step in range(60):
        dtype = rng.choice([torch.float32, torch.int64, torch.uint8, torch.float16])
        most = rng.choice([0, 3, 50, 3000, 1 << 19 if step % 20 == 7 else 5])
        # [source][dest]
        sizes = [[rng.randint(0, most) for _ in range(world)] for _ in range(world)]
        into = [sizes[source][rank] for source in range(world)]
        parts = [message(step, rank, dest, sizes[rank][dest], dtype) for dest in range(world)]
        want = [message(step, source, rank, into[source], dtype) for source in range(world)]
        what = rng.choice(["all_to_all", "views", "headed", "gather", "two"])
        send = torch.cat(parts)
        if rng.random() < 0.5 and what != "gather":
            buffer = exchange.buffer(send.numel(), send)
            send = buffer.copy_(send)
        if what == "all_to_all":
            got = list(exchange.all_to_all(send, sizes[rank], into).wait().split(into))
        elif what == "headed":
            headers = [[step, rank * 10 + dest, sizes[rank][dest]] for dest in range(world)]
            heads, got = exchange.headed(
                headers, send, sizes[rank], 3, lambda found: [h[2] for h in found]
            ).wait()
            assert heads == [[step, source * 10 + rank, into[source]] for source in range(world)]
        elif what == "gather":
            alike = [sizes[source][0] for source in range(world)]
            got = exchange.all_gather(message(step, rank, 0, alike[rank], dtype), alike).wait()
            want = [message(step, source, 0, alike[source], dtype) for source in range(world)]
        elif what == "two":  # the next starts before the last was waited for
            first = exchange.views(send, sizes[rank], into)
            second = exchange.all_to_all(send.clone(), sizes[rank], into)
            third = exchange.all_to_all(send.clone(), sizes[rank], into)
            got = first.wait()
            assert torch.equal(second.wait(), torch.cat(want))
            assert torch.equal(third.wait(), torch.cat(want))
        else:
            got = exchange.views(send, sizes[rank], into).wait()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (step, what, dtype)
    part = exchange.split([[r for r in range(world) if r % 2 == odd] for odd in (0, 1)])
    assert (part.rank, part.world_size) == (rank // 2, len(range(rank % 2, world, 2)))
    got = part.all_gather(torch.tensor([rank]), [1] * part.world_size).wait()
    assert [int(v) for v in got] == list(range(rank % 2, world, 2))
    return type(part).__name__


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", ["process_group", "shared_memory"])
def test_messages_arrive(ranks: RankPool, kind: str, world: int) -> None:
    ranks.run(world, carry, kind)


def test_messages_arrive_between_and_inside_hosts(ranks: RankPool) -> None:
    # ranks 0, 2 and 1, 3 are on different hosts
    assert set(ranks.run(4, carry, "joined")) == {"ProcessGroupExchange"}


def write_and_read(rank: int, world: int) -> int:
    """Every rank writes its part of a common memory and reads the others'; how many bytes it maps
    afterwards.
    """
    exchange = open_exchange("shared_memory", rank)
    for step, size in enumerate((1000, 5, 3 << 20, 4 << 20)):
        memory = exchange.share(size * world)
        assert memory is not None and memory.shape == (size * world,) and not memory.any()
        make_huge(memory)
        exchange.meet()  # nobody finds what another has written meanwhile
        for turn in range(5):
            memory[rank * size : (rank + 1) * size] = 10 * turn + rank + step
            exchange.meet()
            assert all(
                (memory[r * size : (r + 1) * size] == 10 * turn + r + step).all()
                for r in range(world)
            )
            # the wait that lets all write again
            got = exchange.all_gather(torch.full((3,), rank), [3] * world).wait()
            assert [part.tolist() for part in got] == [[r] * 3 for r in range(world)]
        view = memory[5:]
        del memory
        assert view[0] >= 0  # the memory is there as long as any tensor shows it
    del view
    gc.collect()
    return sum(
        "memfd" in line
        and int(line.split("-")[1].split()[0], 16) - int(line.split("-")[0], 16) >= 1 << 22
        for line in open("/proc/self/maps")
    )


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_memory_that_ends_with_its_tensors(ranks: RankPool, world: int) -> None:
    assert ranks.run(world, write_and_read) == [0] * world


def test_other_exchanges_share_no_memory(ranks: RankPool) -> None:
    assert ranks.run(2, share_nothing) == [True, True]


def share_nothing(rank: int, world: int) -> bool:
    exchange = open_exchange("process_group", rank)
    exchange.meet()
    return exchange.share(8) is None


def meet_the_dead(rank: int, world: int) -> float:
    exchange = open_exchange("shared_memory", rank)
    if rank == 0:
        exchange.close()
        return 0.0
    start = time.perf_counter()
    with pytest.raises(CommError, match="rank 0 is gone"):
        exchange.meet()
    return time.perf_counter() - start


def test_nobody_waits_to_meet_a_rank_that_has_left(ranks: RankPool) -> None:
    assert max(ranks.run(2, meet_the_dead)) < SOON_S


def disagree(rank: int, world: int) -> None:
    exchange = open_exchange("shared_memory", rank)
    with pytest.raises(
        ShapeError, match=f"rank {rank} expected 3 elements from rank {1 - rank}, which sent 2"
    ):
        exchange.all_to_all(
            torch.zeros(4), [2, 2], [2 if r == rank else 3 for r in range(2)]
        ).wait()


def test_sizes_that_differ_are_named(ranks: RankPool) -> None:
    ranks.run(2, disagree)


def leave(rank: int, world: int) -> float:
    exchange = open_exchange("shared_memory", rank)
    assert isinstance(exchange, SharedMemoryExchange)
    exchange.all_to_all(torch.zeros(2), [1, 1], [1, 1]).wait()
    if rank == 1:
        exchange.close()
        with pytest.raises(CommError, match="has been closed"):
            exchange.all_to_all(torch.zeros(2), [1, 1], [1, 1])
        return 0.0
    start = time.monotonic()
    with pytest.raises(CommError, match="rank 1 is gone: it has left"):
        exchange.all_to_all(torch.zeros(2), [1, 1], [1, 1]).wait()
    return time.monotonic() - start


def test_a_rank_that_leaves_is_noticed(ranks: RankPool) -> None:
    assert max(ranks.run(2, leave)) < SOON_S


def outwait(rank: int, world: int) -> None:
    exchange = open_exchange("shared_memory", rank)
    assert isinstance(exchange, SharedMemoryExchange)
    exchange.peers.timeout_s = 0.3
    if rank == 0:
        with pytest.raises(CommError, match=r"rank 1 is gone: it did not come within 0\.3 s"):
            exchange.all_to_all(torch.zeros(2), [1, 1], [1, 1]).wait()
    dist.barrier()  # rank 1 is there all the time


def test_a_rank_that_never_comes_is_named(ranks: RankPool) -> None:
    ranks.run(2, outwait)


def abort(rank: int, world: int) -> float:
    import threading

    from rayrec.comm.process_group import shutdown_sockets

    exchange = open_exchange("shared_memory", rank)
    if rank == 1:
        with pytest.raises(RuntimeError):
            dist.barrier()  # until rank 0 cuts its connections
        return 0.0
    timer = threading.Timer(0.2, shutdown_sockets)
    timer.start()
    start = time.monotonic()
    with pytest.raises(CommError, match="aborted while it waited for rank 1"):
        exchange.all_to_all(torch.zeros(2), [1, 1], [1, 1]).wait()
    timer.join()
    return time.monotonic() - start


def test_another_thread_ends_a_wait(ranks: RankPool) -> None:
    assert ranks.run(2, abort)[0] < SOON_S


def test_the_transport_is_the_users_choice(ranks: RankPool) -> None:
    ranks.run(2, insist)


def insist(rank: int, world: int) -> None:
    assert isinstance(
        exchange_for(None, torch.device("cpu"), Transport.SHARED_MEMORY), SharedMemoryExchange
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "host_identity", lambda: f"host{rank}")
        assert isinstance(
            exchange_for(None, torch.device("cpu"), Transport.AUTO), ProcessGroupExchange
        )
        with pytest.raises(CommError, match="no two ranks share a host"):
            exchange_for(None, torch.device("cpu"), Transport.SHARED_MEMORY)
    with pytest.raises(CommError, match="is for CPU ranks"):
        exchange_for(None, torch.device("cuda"), Transport.SHARED_MEMORY)
    assert choose.host_identity() == choose.host_identity()


def sum_many(rank: int, world: int) -> None:
    exchange = open_exchange("shared_memory", rank)
    assert isinstance(exchange, SharedMemoryExchange)
    for round_ in range(3):
        sizes = [1, 7, 300_000, 12, 5]  # more under way than the outbox has halves
        buffers = [torch.arange(n, dtype=torch.float32) * (rank + 1) + round_ for n in sizes]
        wanted = [
            torch.arange(n, dtype=torch.float32) * sum(range(1, world + 1)) + round_ * world
            for n in sizes
        ]
        started = [start_sum(exchange, buffer) for buffer in buffers]
        for finish in started:
            finish()
        assert all(torch.equal(a, b) for a, b in zip(buffers, wanted, strict=True))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_that_overlap_are_right(ranks: RankPool, world: int) -> None:
    ranks.run(world, sum_many)
