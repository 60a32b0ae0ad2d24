"""Shared memory as an exchange: ranks of one host read messages where they were written.

Every rank owns an outbox and a page of words: how many collectives it has started, how many it has
finished reading, and where in the outbox each rank's message lies. A collective is one copy into
the outbox (none if `buffer` was filled), one store that publishes it, and one wait for the stores
of the others, who then read in place. The outbox is double: collective k + 2 overwrites k, which
every rank has read by the time it starts k + 1, so no second wait is needed. Outboxes grow to the
largest message and are used again.

A wait ends at once when a peer ends or leaves, when `abort_all` is called in this process, and at
the latest after the timeout.
"""

from __future__ import annotations

import atexit
import os
import weakref
from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange, Headed, Headers, Pending, Splits, SplitsOf, Views
from rayrec.comm.pages import map_file
from rayrec.comm.shared_peers import LEFT, MAPPED, READ, STARTED, Collective, Peers, words_of_half
from rayrec.comm.shared_segment import OwnSegment, Segment, futex_wake, unnamed_file, unsupported
from rayrec.errors import CommError
from rayrec.shards.named_memory import SHARED, Memory

_LEAST_BYTES = 1 << 20
_LEAVE_S = 10.0

_alive: weakref.WeakSet[SharedMemoryExchange] = weakref.WeakSet()


class SharedMemoryExchange(Exchange):
    """Some ranks of one host, by shared memory. Make it with `open`.

    Attributes:
        collectives: started so far.
    """

    keeps_own = True

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.collectives = 0
        self._page = OwnSegment(8 * words_of_half(1, world_size).stop)
        self._outbox: list[OwnSegment | None] = [None, None]
        self._unfinished: list[Collective] = []
        self._peers: Peers | None = None
        self._closed = False
        self._owner = os.getpid()

    @staticmethod
    def open(over: Exchange, ranks: Sequence[int], timeout_s: float) -> SharedMemoryExchange | None:
        """Share memory between this rank and others of `over`; None on all of them where one
        cannot.

        All ranks of `over` call it together, each with the group that it belongs to.

        Args:
            over: an exchange that joins the ranks already, which carries their first messages.
            ranks: the ranks of the group.
            timeout_s: the longest wait for a peer.
        """
        made = None
        if unsupported() is None:
            made = SharedMemoryExchange(ranks.index(over.rank), len(ranks), timeout_s)
        # ranks that cannot take part still gather, or the others would wait for them
        mine = [os.getpid(), made._page.fd, made._page.size] if made is not None else [0, -1, 0]
        told = gather_numbers(over, mine)
        if made is not None:
            made._peers = Peers.attach(made.rank, [told[rank] for rank in ranks], timeout_s)
        fine = made is not None and made._peers is not None
        agreed = gather_numbers(over, [int(fine)])
        if made is None or not all(agreed[rank] == [1] for rank in ranks):
            return None
        made._page.close()  # all have attached
        _alive.add(made)
        return made

    def all_to_all(self, send: Tensor, send_splits: Splits, recv_splits: Splits) -> Pending[Tensor]:
        """Write this rank's messages, and copy the others' into one tensor."""
        collective = self._start(send, send_splits, None)

        def finish() -> Tensor:
            received = torch.cat(collective.finish(recv_splits)[1])
            self._release()
            return received

        return Pending(finish)

    def views(self, send: Tensor, send_splits: Splits, recv_splits: Splits) -> Views:
        """Write this rank's messages, and read the others' where they lie."""
        collective = self._start(send, send_splits, None)
        return Pending(lambda: collective.finish(recv_splits)[1])

    def headed(
        self, headers: Headers, send: Tensor, send_splits: Splits, head: int, splits_of: SplitsOf
    ) -> Pending[Headed]:
        """Send headers and messages together, in one collective."""
        collective = self._start(send, send_splits, headers)
        return Pending(lambda: collective.finish(splits_of))

    def all_gather(self, send: Tensor, sizes: Splits) -> Views:
        """Write the message once, for all ranks to read."""
        collective = self._start(send, None, None)
        return Pending(lambda: collective.finish(sizes)[1])

    def buffer(self, size: int, like: Tensor) -> Tensor:
        """Return the outbox of the next collective, so that what is written there needs no copy."""
        outbox = self._prepare(self.collectives + 1, size * like.element_size())
        return outbox.bytes[: size * like.element_size()].view(like.dtype)

    def meet(self) -> None:
        """Wait for all ranks, in a collective without messages."""
        # views of older messages are copied first, since peers may write again after this
        self._free(self.collectives + 1)
        self.collectives += 1
        words = self._page.words
        words[MAPPED] = self._finished()
        words[STARTED] = self.collectives
        futex_wake(self._page.address)
        self.peers.await_all(STARTED, self.collectives)

    def share(self, size: int, memory: Memory | None = None) -> Tensor | None:
        """Let rank 0 make the memory, and map it on every rank."""
        made = -1
        try:
            if self.rank == 0:
                made = unnamed_file(size) if memory is None else memory.file(SHARED, size)
            fd = int(self.all_gather(torch.tensor([made]), [1] * self.world_size).wait()[0])
            mapped = map_file(made, size) if self.rank == 0 else self.peers.map(0, fd, size)
            self.meet()  # all have mapped it
        except OSError as error:
            raise CommError(
                f"rank {self.rank}: {error}. Give ranks more memory, or let rows travel with "
                "share_tables=False."
            ) from error
        finally:
            if made >= 0:
                os.close(made)
        return mapped

    def split(self, groups: Sequence[Sequence[int]]) -> Exchange:
        """Open a shared-memory exchange among the ranks of this rank's group."""
        mine = next(tuple(group) for group in groups if self.rank in group)
        part = SharedMemoryExchange.open(self, mine, self.timeout_s)
        if part is None:
            raise CommError(
                f"rank {self.rank}: ranks {mine} share memory in the large group and cannot in "
                "the small one."
            )
        return part

    def abort(self) -> None:
        """End this process's waits with CommError, now and later; from any thread."""
        self.peers.abort()

    def close(self) -> None:
        """Leave, so that peers that wait for this rank raise.

        It waits some seconds at most for peers to map what was sent to them.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        # a peer that has mapped the last message can read it after this rank is gone
        self.peers.let_map(self.collectives, _LEAVE_S)
        self._page.words[LEFT] = 1
        futex_wake(self._page.address)

    def __del__(self) -> None:
        if self._peers is not None:
            self.close()

    @property
    def peers(self) -> Peers:
        """The other ranks."""
        assert self._peers is not None, "made by open"
        return self._peers

    def _start(self, send: Tensor, splits: Splits | None, headers: Headers | None) -> Collective:
        """Write and publish one message per rank; without `splits` all of `send` to everyone."""
        assert send.is_contiguous() and send.device.type == "cpu", "contiguous CPU tensors only"
        number, width = self.collectives + 1, send.element_size()
        flat = array("q", chain.from_iterable(headers) if headers else ())
        # the outbox: all messages, then all headers as 64-bit words
        head_at = -(-send.numel() * width // 8) * 8
        outbox = self._prepare(number, head_at + 8 * len(flat))
        # a tensor that `buffer` gave lies there already
        if send.data_ptr() != outbox.address:
            self._write(outbox, send, splits)
        if flat:
            outbox.words[head_at // 8 : head_at // 8 + len(flat)] = memoryview(flat)
        table = array("q", (outbox.fd, outbox.size))
        at, begin = head_at, 0
        for rank in range(self.world_size):
            count = send.numel() if splits is None else splits[rank]
            size = 8 * len(headers[rank]) if headers else 0
            table.extend((begin * width, (begin + count) * width, at, at + size))
            at += size
            begin += 0 if splits is None else count
        assert splits is None or begin == send.numel(), f"{send.numel()} elements in {splits}"
        words = self._page.words
        words[words_of_half(number, self.world_size)] = memoryview(table)
        self.collectives = number
        # last, since this store publishes all that was written above
        words[STARTED] = number
        futex_wake(self._page.address)
        own = send if splits is None else send[sum(splits[: self.rank]) :][: splits[self.rank]]
        header = list(headers[self.rank]) if headers else []
        collective = Collective(self.peers, number, own, header, self._done)
        self._unfinished.append(collective)
        return collective

    def _write(self, outbox: Segment, send: Tensor, splits: Splits | None) -> None:
        into = outbox.bytes[: send.numel() * send.element_size()].view(send.dtype)
        if splits is None:
            into.copy_(send)
            return
        # nobody reads this rank's own part, which is taken from `send`
        own = sum(splits[: self.rank])
        after = own + splits[self.rank]
        if own:
            into[:own].copy_(send[:own])
        if after < send.numel():
            into[after:].copy_(send[after:])

    def _prepare(self, number: int, size: int) -> OwnSegment:
        """Return the half of the outbox for collective `number`, free and large enough."""
        self._free(number)
        half = number % 2
        # all ranks have read `number` - 2 when they start `number` - 1, so this rarely waits
        self.peers.await_all(READ, number - 2)
        outbox = self._outbox[half]
        if outbox is None or outbox.size < size:
            # every peer that needed the old one has attached
            if outbox is not None:
                outbox.close()
            outbox = OwnSegment(max(_LEAST_BYTES, 1 << (size - 1).bit_length()))
            self._outbox[half] = outbox
        return outbox

    def _free(self, number: int) -> None:
        """Copy what is still to be read of messages that collective `number` may overwrite."""
        if self._closed:
            raise CommError(f"rank {self.rank}: this exchange has been closed.")
        for collective in list(self._unfinished):
            if collective.number <= number - 2:
                collective.own()
        self._release()

    def _release(self) -> None:
        """Tell peers what this rank has finished reading; views handed out are dead from here."""
        self._page.words[READ] = self._finished()

    def _finished(self) -> int:
        return self._unfinished[0].number - 1 if self._unfinished else self.collectives

    def _done(self, collective: Collective) -> None:
        """Tell peers that a collective of this rank has been mapped."""
        self._unfinished.remove(collective)
        self._page.words[MAPPED] = self._finished()


def gather_numbers(over: Exchange, mine: Sequence[int]) -> list[list[int]]:
    """Return every rank's whole numbers, in rank order; all ranks give equally many."""
    sizes = [len(mine)] * over.world_size
    return [part.tolist() for part in over.all_gather(torch.tensor(mine), sizes).wait()]


def abort_all() -> None:
    """Call `SharedMemoryExchange.abort` of all exchanges of this process."""
    for exchange in list(_alive):
        exchange.abort()


@atexit.register
def close_all() -> None:
    """Call `SharedMemoryExchange.close` of all exchanges of this process."""
    for exchange in list(_alive):
        exchange.close()
        _alive.discard(exchange)
