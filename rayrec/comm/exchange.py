"""The seam between the sharded runtime and the wire.

`route` and the ways speak to an `Exchange` and to nothing else, so that a simulated world, gloo,
NCCL and shared memory run the same code. An exchange moves flat tensors of one dtype; it knows
neither features nor tables. `Pending` is a launched collective: the only future type of the
library. `Exchange` gives all that follows from `all_to_all` alone; shared memory overrides it to
save copies and waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rayrec.comm.pages import private_memory
from rayrec.shards.named_memory import SHARED, Memory

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A launched piece of work whose result is fetched once or more by `wait()`."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._value: T | None = None

    @staticmethod
    def ready(value: U) -> Pending[U]:
        """Return a result that is already here."""
        return Pending(lambda: value)

    def wait(self) -> T:
        """Block until the result is here and return it.

        Raises:
            CommError: a peer is gone or the collective timed out.
        """
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
        return self._value  # type: ignore[return-value]


Splits = Sequence[int]  # elements per rank
Headers = Sequence[Sequence[int]]  # integers per rank
SplitsOf = Callable[[list[list[int]]], list[int]]
Headed = tuple[list[list[int]], list[Tensor]]
Views = Pending[list[Tensor]]


class Exchange(ABC):
    """A group of ranks that can exchange flat tensors.

    Attributes:
        keeps_own: True if it is cheaper not to send a rank's message to itself.
    """

    rank: int
    world_size: int
    keeps_own = False

    @abstractmethod
    def all_to_all(self, send: Tensor, send_splits: Splits, recv_splits: Splits) -> Pending[Tensor]:
        """Send `send_splits[r]` elements to every rank r and receive `recv_splits[r]` from each.

        Args:
            send: (sum of send_splits,), contiguous; it must stay unchanged until the result has
                been waited for.
            send_splits, recv_splits: elements per rank; what a rank sends to another is what that
                one receives.
        Returns:
            Pending of (sum of recv_splits,), same dtype and device, in source order. With one rank
            it may be `send` itself.
        Raises:
            CommError: from `wait()`.
        """

    def views(self, send: Tensor, send_splits: Splits, recv_splits: Splits) -> Views:
        """Do as `all_to_all`, but give one tensor per source.

        The tensors are valid only until the next collective on this exchange starts.
        """
        pending = self.all_to_all(send, send_splits, recv_splits)
        return Pending(lambda: list(pending.wait().split(list(recv_splits))))

    def headed(
        self, headers: Headers, send: Tensor, send_splits: Splits, head: int, splits_of: SplitsOf
    ) -> Pending[Headed]:
        """Do as `views`, where a receiver learns the sizes from headers that are sent along.

        Here these are two collectives, and the host waits for the first to read the headers.

        Args:
            headers: per destination, integers of at most 63 bits.
            head: integers in every header that this rank receives.
            splits_of: the `recv_splits` that follow from the headers of all sources.
        Returns:
            Pending of the headers and the tensors per source, with the lifetime of `views`.
        """
        flat = torch.tensor([value for header in headers for value in header], dtype=torch.int64)
        # a blocking copy would wait for all that a GPU has been given
        flat = flat.to(send.device, non_blocking=True)
        sizes = [len(header) for header in headers]
        values = self.all_to_all(flat, sizes, [head] * self.world_size).wait().tolist()
        # headers in source order, `head` integers each; they tell what to receive
        received = [values[i * head : (i + 1) * head] for i in range(self.world_size)]
        pending = self.views(send, send_splits, splits_of(received))
        return Pending(lambda: (received, pending.wait()))

    def all_gather(self, send: Tensor, sizes: Splits) -> Views:
        """Send all of `send` to every rank; `sizes[r]` elements come from rank r.

        The result lives as long as that of `views`.
        """
        return self.views(send.repeat(self.world_size), [send.numel()] * self.world_size, sizes)

    def buffer(self, size: int, like: Tensor) -> Tensor:
        """Give uninitialized memory (size,) to be filled and sent by the next collective.

        It has like's dtype and device. Earlier views end here. In shared memory it lies where the
        others read, which saves a copy.
        """
        return like.new_empty(size)

    def share(self, size: int, memory: Memory | None = None) -> Tensor | None:
        """Give (size,) zero bytes that all ranks read and write, or None without shared memory.

        All ranks call it together with one size. Before a rank reads what another wrote, the two
        must meet; see `meet`.

        Args:
            memory: on rank 0 it holds the bytes, as its piece "shared"; what lies there stays.
        """
        return None

    def meet(self) -> None:
        """Wait until every rank has come here.

        What a rank wrote into shared memory before can then be read, and what it read can be
        overwritten. Any collective whose result has been waited for does the same.
        """
        if self.world_size > 1:
            self.all_gather(torch.zeros(1), [1] * self.world_size).wait()

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Exchange:
        """Give the exchange of this rank's own group, when the ranks part into `groups`.

        All ranks call it together. Ranks of the result are positions in the group.
        """


class LocalExchange(Exchange):
    """The exchange of a world of one rank: everything stays where it is."""

    rank = 0
    world_size = 1

    def all_to_all(self, send: Tensor, send_splits: Splits, recv_splits: Splits) -> Pending[Tensor]:
        """Return `send` itself: the one rank is its own source."""
        assert list(send_splits) == list(recv_splits) == [send.numel()]
        return Pending.ready(send)

    def headed(
        self, headers: Headers, send: Tensor, send_splits: Splits, head: int, splits_of: SplitsOf
    ) -> Pending[Headed]:
        """Return the header and the message as they are."""
        received = [list(header) for header in headers]
        splits = splits_of(received)
        assert splits == list(send_splits) == [send.numel()]
        return Pending.ready((received, [send]))

    def share(self, size: int, memory: Memory | None = None) -> Tensor | None:
        """Return memory of this process, or the piece "shared" of `memory`."""
        return private_memory(size) if memory is None else memory.take(SHARED, size)

    def split(self, groups: Sequence[Sequence[int]]) -> Exchange:
        """Return this exchange: the one rank is its own group."""
        return self
