"""The seam between the sharded runtime and the wire.

`route` and `combine` speak to an `Exchange` and to nothing else, so that a simulated world, gloo, NCCL (and later shared memory) run
the same code. An exchange moves flat tensors of one dtype; it knows neither features nor tables. `Pending` is a launched collective:
the only future type of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A launched piece of work whose result is fetched once or more by `wait()`."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._value: T | None = None

    @staticmethod
    def ready(value: U) -> Pending[U]:
        """A result that is already here."""
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


class Exchange(Protocol):
    """A group of ranks that can exchange flat tensors.

    Attributes:
        rank: index of this rank in the group.
        world_size: number of ranks.
    """

    rank: int
    world_size: int

    def all_to_all(self, send: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int]) -> Pending[Tensor]:
        """Send `send_splits[r]` elements to every rank r, in rank order, and receive `recv_splits[r]` from each.

        Args:
            send: (sum of send_splits,), contiguous; it must stay unchanged until the result has been waited for.
            send_splits, recv_splits: elements per rank; what a rank sends to another is what that one receives.
        Returns:
            Pending of (sum of recv_splits,), same dtype and device, in source order. With one rank it may be `send` itself.
        Raises:
            CommError: from `wait()`.
        """
        ...

    def split(self, groups: Sequence[Sequence[int]]) -> Exchange:
        """The exchange of this rank's own group, when the ranks part into `groups`; all ranks call it together.

        Ranks of the result are positions in the group.
        """
        ...


class LocalExchange:
    """The exchange of a world of one rank: everything stays where it is."""

    rank = 0
    world_size = 1

    def all_to_all(self, send: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int]) -> Pending[Tensor]:
        """See `Exchange.all_to_all`."""
        assert list(send_splits) == list(recv_splits) == [send.numel()]
        return Pending.ready(send)

    def split(self, groups: Sequence[Sequence[int]]) -> Exchange:
        """See `Exchange.split`."""
        return self
