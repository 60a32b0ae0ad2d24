"""The other ranks of a shared-memory exchange: their pages, their outboxes, their lives; and one
collective, as it is read from them.

A page holds words that only its owner writes; a peer waits until one of them has grown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from rayrec.comm.exchange import Headed, SplitsOf
from rayrec.comm.pages import map_file
from rayrec.comm.shared_segment import PeerLife, Segment, futex_wait, futex_wake, opened
from rayrec.errors import CommError, ShapeError

# the first words of a page: collectives started, those of all ranks that its owner has mapped,
# those it has finished reading, whether it has left
STARTED, MAPPED, READ, LEFT = range(4)
_SPIN_S = 100e-6  # a sleeping wait costs about as much to wake up
_SLICE_S = 0.05


def words_of_half(number: int, ranks: int) -> slice:
    """Return the words of a page about the half of the outbox that collective `number` uses.

    They are its fd, its size, and for each rank the first and last byte of its message and of its
    header. The half of an odd number comes last in the page.
    """
    size = 2 + 4 * ranks
    first = LEFT + 1 + number % 2 * size
    return slice(first, first + size)


class Peers:
    """The other ranks. Make it with `attach`.

    Attributes:
        aborted: True once waits must end with an error.
    """

    def __init__(self, rank: int, pids: Sequence[int], timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, len(pids), timeout_s
        self.aborted = False
        self._pids = pids
        self._others = [r for r in range(len(pids)) if r != rank]
        self._pages: dict[int, Segment] = {}
        self._lives: dict[int, PeerLife] = {}
        # (rank, half) -> fd, size, mapped
        self._outboxes: dict[tuple[int, int], tuple[int, int, Segment]] = {}
        self._spin_s = _SPIN_S if self.world_size <= len(os.sched_getaffinity(0)) else 0.0

    @staticmethod
    def attach(rank: int, everyone: Sequence[Sequence[int]], timeout_s: float) -> Peers | None:
        """Map the pages of all other ranks; None where that is impossible.

        Args:
            everyone: per rank its process, and the fd and the size of its page.
        """
        made = Peers(rank, [pid for pid, _, _ in everyone], timeout_s)
        try:
            for other in made._others:
                pid, fd, size = everyone[other]
                made._lives[other] = PeerLife(pid)
                made._pages[other] = Segment.attach(pid, fd, size)
        except (OSError, ValueError):
            return None
        return made

    def read(self, rank: int, number: int) -> tuple[Segment, memoryview]:
        """Return a peer's outbox and its entry for this rank, once collective `number` started."""
        self._await(rank, STARTED, number)
        table = self._pages[rank].words[words_of_half(number, self.world_size)]
        fd, size = table[0], table[1]
        # mapped once; a larger outbox comes with another fd
        known = self._outboxes.get((rank, number % 2))
        if known is None or known[:2] != (fd, size):
            try:
                known = (fd, size, Segment.attach(self._pids[rank], fd, size))
            except OSError as error:
                raise self._gone(rank, f"its memory cannot be attached ({error})") from error
            self._outboxes[rank, number % 2] = known
        return known[2], table[2 + 4 * self.rank : 6 + 4 * self.rank]

    def map(self, rank: int, fd: int, size: int) -> Tensor:
        """Memory that a peer made, as (size,) uint8.

        Raises:
            CommError: the peer is gone.
        """
        try:
            with opened(self._pids[rank], fd) as file:
                return map_file(file, size)
        except OSError as error:
            raise self._gone(rank, f"its memory cannot be mapped ({error})") from error

    def await_all(self, index: int, least: int) -> None:
        """Wait until a word of every peer's page is at least `least`.

        Raises:
            CommError: a peer has ended or left, the wait was aborted, or it took longer than the
                timeout.
        """
        for rank in self._others:
            self._await(rank, index, least)

    def abort(self) -> None:
        """End waits, now and later; from any thread."""
        self.aborted = True
        for page in self._pages.values():
            futex_wake(page.address)

    def let_map(self, number: int, timeout_s: float) -> None:
        """Wait at most `timeout_s` until every peer has mapped collective `number` or is gone."""
        deadline = time.monotonic() + (0.0 if self.aborted else timeout_s)
        for rank in self._others:
            words = self._pages[rank].words
            while (
                words[MAPPED] < number
                and not words[LEFT]
                and not self._lives[rank].ended()
                and time.monotonic() < deadline
            ):
                time.sleep(0.0005)

    def _await(self, rank: int, index: int, least: int) -> None:
        words = self._pages[rank].words
        if words[index] >= least:
            return
        # spin first: a sleeper costs about as much to wake as a short wait
        start = time.perf_counter()
        spun = start + self._spin_s
        while time.perf_counter() < spun:
            for _ in range(16):
                if words[index] >= least:
                    return
        page = self._pages[rank]
        deadline = start + self.timeout_s
        while True:
            seen = words[STARTED]
            # asked before the word, so that a last message is not missed
            ended, left = self._lives[rank].ended(), words[LEFT]
            if words[index] >= least:
                return
            if self.aborted:
                raise CommError(
                    f"rank {self.rank} of {self.world_size}: the exchange was aborted while it "
                    f"waited for rank {rank}."
                )
            if ended or left:
                why = "its process has ended" if ended else "it has left the exchange"
                raise self._gone(rank, why)
            if time.perf_counter() > deadline:
                raise self._gone(rank, f"it did not come within {self.timeout_s:g} s")
            futex_wait(page.address, seen, _SLICE_S if index == STARTED else 0.002)

    def _gone(self, rank: int, why: str) -> CommError:
        return CommError(
            f"rank {self.rank} of {self.world_size}: the exchange failed because rank {rank} is "
            f"gone: {why}."
        )


class Collective:
    """One collective of this rank, started.

    Args:
        own: this rank's message to itself.
        header: the header of it.
        done: called once the messages of all peers are mapped.
    """

    def __init__(
        self,
        peers: Peers,
        number: int,
        own: Tensor,
        header: list[int],
        done: Callable[[Collective], None],
    ) -> None:
        self.number = number
        self._peers, self._own, self._header, self._done = peers, own, header, done
        self._arrived: list[tuple[list[int], Tensor]] | None = None

    def _parts(self) -> list[tuple[list[int], Tensor]]:
        """Return per source its header and its message, a view."""
        if self._arrived is None:
            self._arrived = []
            for rank in range(self._peers.world_size):
                if rank == self._peers.rank:
                    self._arrived.append((self._header, self._own))
                    continue
                # bytes of the message and of its header in the peer's outbox
                outbox, (begin, end, head, tail) = self._peers.read(rank, self.number)
                header = outbox.words[head // 8 : tail // 8].tolist()
                self._arrived.append((header, outbox.bytes[begin:end].view(self._own.dtype)))
            self._done(self)
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
                    f"rank {self._peers.rank} expected {size} elements from rank {rank}, which "
                    f"sent {message.numel()}: the ranks do not share one plan."
                )
        return headers, messages
