"""All ranks of a world as threads of one process, so that tests run hundreds of worlds.

The runtime's code is the real one; only the exchange differs: a mailbox between threads, with a
barrier before and after. A rank that raises breaks the barrier, so that the others end at once
instead of waiting. Costs one copy per message; not a way to train.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange, Pending, Splits
from rayrec.errors import CommError
from rayrec.shards.named_memory import SHARED, Memory

T = TypeVar("T")


class SimulatedWorld:
    """`world_size` ranks in one process.

    Example:
        outputs = SimulatedWorld(4).run(lambda exchange: step(exchange.rank, exchange))
    """

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.barrier = threading.Barrier(world_size)
        self.mailbox: dict[tuple[int, int], Tensor] = {}
        self.collectives = 0
        self.sent_bytes = 0  # between different ranks
        self.parts: dict[tuple[int, ...], SimulatedWorld] = {}  # of `split`
        self.lock = threading.Lock()

    def run(self, fn: Callable[[Exchange], T]) -> list[T]:
        """Run `fn` once per rank, side by side, and return the results in rank order.

        Raises:
            BaseException: the first error that a rank raised itself, with a note that names the
                rank.
        """
        results: dict[int, T] = {}
        errors: list[tuple[int, BaseException]] = []

        def body(rank: int) -> None:
            try:
                results[rank] = fn(_SimulatedExchange(self, rank))
            except BaseException as error:
                errors.append((rank, error))
                for world in (self, *self.parts.values()):
                    world.barrier.abort()

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"simulated-rank-{rank}")
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.barrier.reset()
        self.mailbox.clear()
        self.parts.clear()
        if errors:
            # a CommError is what another rank's error made of this one
            causes = [(r, e) for r, e in errors if not isinstance(e, CommError)]
            rank, error = (causes or errors)[0]
            error.add_note(f"on simulated rank {rank} of {self.world_size}")
            raise error
        return [results[rank] for rank in range(self.world_size)]

    def meet(self) -> None:
        """Wait for all ranks."""
        try:
            self.barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            raise CommError(
                "a simulated rank failed or did not reach the collective; see the error of that "
                "rank."
            ) from None


class _SimulatedExchange(Exchange):
    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        self.world, self.rank, self.world_size = world, rank, world.world_size

    def all_to_all(self, send: Tensor, send_splits: Splits, recv_splits: Splits) -> Pending[Tensor]:
        """Leave each part in its receiver's mailbox, and take those of this rank."""
        assert sum(send_splits) == send.numel(), f"{send.numel()} elements in {send_splits}"
        for dest, part in enumerate(send.detach().split(list(send_splits))):
            self.world.mailbox[self.rank, dest] = part
        self.world.meet()
        parts = [self.world.mailbox[source, self.rank] for source in range(self.world_size)]
        got = [part.numel() for part in parts]
        assert got == list(recv_splits), f"rank {self.rank}: {got}, not {list(recv_splits)}"
        received = torch.cat(parts)
        # nobody may fill the mailbox again before all have emptied it
        self.world.meet()
        with self.world.lock:
            self.world.collectives += self.rank == 0
            self.world.sent_bytes += send.element_size() * (send.numel() - send_splits[self.rank])
        return Pending.ready(received)

    def share(self, size: int, memory: Memory | None = None) -> Tensor | None:
        """Hand rank 0's memory to all: threads have their memory in common."""
        if self.rank == 0:
            zeros = torch.zeros(size, dtype=torch.uint8)
            self.world.mailbox[0, 0] = zeros if memory is None else memory.take(SHARED, size)
        self.world.meet()
        shared = self.world.mailbox[0, 0]
        self.world.meet()
        return shared

    def meet(self) -> None:
        """Wait at the barrier of the world's threads."""
        self.world.meet()

    def split(self, groups: Sequence[Sequence[int]]) -> _SimulatedExchange:
        """Return this rank's exchange in a world of its group alone."""
        (mine,) = [tuple(group) for group in groups if self.rank in group]
        with self.world.lock:
            fresh = SimulatedWorld(len(mine), self.world.timeout_s)
            part = self.world.parts.setdefault(mine, fresh)
        return _SimulatedExchange(part, mine.index(self.rank))
