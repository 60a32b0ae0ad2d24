"""One collective of one rank over shared memory, between its start and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rayrec.comm.exchange import Headed, SplitsOf
from rayrec.errors import ShapeError

if TYPE_CHECKING:
    from rayrec.comm.shared_memory import SharedMemoryExchange


class Collective:
    """One collective of this rank, started."""

    def __init__(
        self, exchange: SharedMemoryExchange, number: int, own: Tensor, header: list[int]
    ) -> None:
        self.exchange, self.number, self._own, self._header = exchange, number, own, header
        self._arrived: list[tuple[list[int], Tensor]] | None = None

    def _parts(self) -> list[tuple[list[int], Tensor]]:
        """Return per source its header and its message, a view."""
        if self._arrived is None:
            self._arrived = []
            for rank in range(self.exchange.world_size):
                if rank == self.exchange.rank:
                    self._arrived.append((self._header, self._own))
                    continue
                # bytes of the message and of its header in the peer's outbox
                outbox, (begin, end, head, tail) = self.exchange.peers.read(rank, self.number)
                header = outbox.words[head // 8 : tail // 8].tolist()
                self._arrived.append((header, outbox.bytes[begin:end].view(self._own.dtype)))
            self.exchange.done(self)
        return self._arrived

    def own(self) -> None:
        """Finish by copying what arrived, so that the peers may write again."""
        self._arrived = [(header, part.clone()) for header, part in self._parts()]

    def finish(self, expected: Sequence[int] | SplitsOf) -> Headed:
        """Headers and messages, checked against the sizes that this rank expects."""
        parts = self._parts()
        headers, messages = [header for header, _ in parts], [part for _, part in parts]
        wanted = expected(headers) if callable(expected) else expected
        for rank, (message, size) in enumerate(zip(messages, wanted, strict=True)):
            if message.numel() != size:
                raise ShapeError(
                    f"rank {self.exchange.rank} expected {size} elements from rank {rank}, which "
                    f"sent {message.numel()}: the ranks do not share one plan."
                )
        return headers, messages
