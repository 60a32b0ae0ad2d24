"""Process groups as exchanges: gloo between CPU ranks, NCCL between GPU ranks.

The rendezvous is a TCPStore that rank 0 makes on a free port and whose address travels through the
driver, so nothing depends on the environment and a later generation of the same ranks can meet
again under a new prefix. After a peer dies, gloo's all_reduce lets ranks that are not its
neighbours wait for the whole timeout, and the store lets those wait that meet; `shutdown_sockets`
closes this process's own connections from a second thread, which makes all of them raise at once.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from rayrec.comm.exchange import Exchange, Pending, Splits
from rayrec.comm.shared_memory import abort_all, close_all
from rayrec.errors import CommError, JoinError

DEFAULT_TIMEOUT_S = 300.0  # torch's own default is 30 minutes

_timeout_s = DEFAULT_TIMEOUT_S  # of the current default group; later groups take it over
# fd -> inode of the sockets that process groups of this process opened
_sockets: dict[int, int] = {}
# of those to the rendezvous
_to_store: dict[int, int] = {}


def create_store(host: str) -> dist.TCPStore:
    """Make the rendezvous of a world, on rank 0 and a free port of `host` (`store.port`)."""
    timeout = timedelta(minutes=1)
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)


def connect_store(host: str, port: int, timeout_s: float = 60.0) -> dist.TCPStore:
    """Return the rendezvous as another rank sees it.

    Raises:
        JoinError: nothing answers at `host:port` within `timeout_s` seconds.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        raise JoinError(
            f"no rendezvous at {host}:{port} after {timeout_s:.0f} s; rank 0 is gone or a "
            f"firewall is between. ({error})"
        ) from error


def init_process_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    *,
    backend: str = "gloo",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    join_s: float | None = None,
    generation: int = 0,
) -> dist.ProcessGroup:
    """Join the default process group of this process.

    Args:
        backend: "gloo" or "nccl".
        timeout_s: bound on every collective.
        join_s: bound on the meeting of all ranks; `timeout_s` when None.
        generation: distinguishes successive groups over one store.
    Raises:
        JoinError: the other ranks did not come in time, or the store is gone.
    """
    global _timeout_s
    _timeout_s = timeout_s
    # A join that failed has counted a group, and torch names groups by this count: this process
    # would wait at another key of the store than the others.
    had_one = dist.is_initialized()  # torch refuses a second one
    if not had_one:
        distributed_c10d._world.group_count = 0
    before = _socket_fds()
    _find_store(store)
    prefixed = dist.PrefixStore(f"rayrec/{generation}", store)
    timeout, join = timedelta(seconds=timeout_s), timedelta(seconds=join_s or timeout_s)
    try:
        with _meeting():
            dist.init_process_group(
                backend, store=prefixed, rank=rank, world_size=world_size, timeout=join
            )
            group = dist.group.WORLD
            assert group is not None
            # opens the connections, so that they are known below
            dist.barrier(group)
        distributed_c10d._set_pg_timeout(timeout, group)
    except BaseException as error:
        # a group that failed in the barrier would stand in the way of the next generation
        if dist.is_initialized() and not had_one:
            destroy_process_group()
        if not isinstance(error, (dist.DistError, RuntimeError)):
            raise
        raise JoinError(
            f"rank {rank} of {world_size} could not join the {backend} process group: "
            f"{_first_line(error)}"
        ) from error
    _remember_sockets(before)
    return group


def new_group(
    ranks: Sequence[int] | None = None, members_only: bool = False, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a group with connections of its own, which needs no order with the default group's.

    Args:
        ranks: members, by their rank in the default group; all when None. Every rank of the
            default group must call it, members or not.
        backend: "gloo" or "nccl"; that of the default group when None.
    """
    before = _socket_fds()
    with _meeting():
        group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=_timeout_s),
            backend=backend,
            use_local_synchronization=members_only,
        )
        if ranks is None or dist.get_rank() in ranks:
            dist.barrier(group)
    _remember_sockets(before)
    return group


def destroy_process_group() -> None:
    """Leave all groups of this process, and what its ranks share; a no-op when there is none.

    A model in a reference cycle goes first, while torch still holds its groups. The last reference
    to a gloo group waits for the group's threads, which may need the GIL to let go of the tensors
    of the last collective: torch's own reference waits without the GIL, DDP's reducer with it, and
    the process would stand still.
    """
    close_all()
    _sockets.clear()
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        gc.collect()  # a group closes its sockets only when the last reference is gone


def shutdown_sockets() -> int:
    """Shut down this process's connections to ranks and store, and shared exchanges: what waits
    for other ranks raises.

    Safe to call from any thread; the groups are unusable afterwards and must be destroyed. Returns
    how many connections were open.
    """
    # ranks that wait in shared memory have no socket to break
    abort_all()
    closed = 0
    for fd, inode in list(_sockets.items()):
        try:
            # the number may have been given to another file since
            if os.fstat(fd).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                # gloo's listener aborts the whole process when its accept fails
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                sock.shutdown(socket.SHUT_RDWR)
                closed += 1
        except OSError:
            continue
    _sockets.clear()
    return closed


def _socket_fds() -> dict[int, int]:
    inodes = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            status = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            inodes[int(name)] = status.st_ino
    return inodes


def _find_store(store: dist.Store) -> None:
    """Note which connections of this process go to a store."""
    _to_store.clear()
    port = getattr(store, "port", None)
    for fd, inode in _socket_fds().items():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername()[1] == port:
                _to_store[fd] = inode


@contextmanager
def _meeting() -> Iterator[None]:
    """Have `shutdown_sockets` end the waits for other ranks at the store, inside the block."""
    _sockets.update(_to_store)
    try:
        yield
    finally:
        for fd in _to_store:
            _sockets.pop(fd, None)


def _remember_sockets(before: dict[int, int]) -> None:
    _sockets.update({fd: inode for fd, inode in _socket_fds().items() if before.get(fd) != inode})


def timeout_s() -> float:
    """The bound on collectives of the default group, in seconds."""
    return _timeout_s


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class ProcessGroupExchange(Exchange):
    """An exchange over a torch process group.

    Args:
        group: the group; its collectives must be issued in the same order on every rank, so nobody
            else should use it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def all_to_all(self, send: Tensor, send_splits: Splits, recv_splits: Splits) -> Pending[Tensor]:
        """Start the group's all-to-all collective."""
        received = send.new_empty(sum(recv_splits))
        splits = list(recv_splits), list(send_splits)

        def start() -> dist.Work:
            return dist.all_to_all_single(received, send, *splits, group=self.group, async_op=True)

        work = self._guard(start)

        # `keep` holds what is sent until it has been sent
        def finish(keep: Tensor = send) -> Tensor:
            self._guard(work.wait)
            return received

        return Pending(finish)

    def split(self, groups: Sequence[Sequence[int]]) -> ProcessGroupExchange:
        """Make a process group of its own for each group of ranks."""
        mine = None
        everyone = dist.get_process_group_ranks(self.group)
        for group in groups:
            made = new_group([everyone[r] for r in group])
            if self.rank in group:
                mine = made
        assert mine is not None, f"groups {groups} leave rank {self.rank} out"
        return ProcessGroupExchange(mine)

    def _guard(self, call: Callable[[], object]) -> dist.Work:
        try:
            return call()  # type: ignore[return-value]
        except RuntimeError as error:
            raise CommError(
                f"rank {self.rank} of {self.world_size}: all_to_all failed, most likely because "
                f"another rank is gone: {_first_line(error)}"
            ) from error


def broadcast_seed(seed: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """Rank 0's `seed`, an unsigned 64-bit integer, on every rank of `group`."""
    box = torch.tensor([seed - 2**64 if seed >= 2**63 else seed], dtype=torch.int64, device=device)
    dist.broadcast(box, group_src=0, group=group)
    return int(box.item()) % 2**64


def gather_ints(
    mine: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> list[list[int]]:
    """Return every rank's whole numbers, in rank order; all ranks of `group` give equally many."""
    sent = torch.tensor(mine, dtype=torch.int64, device=device)
    parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, sent, group=group)
    return [part.tolist() for part in parts]
