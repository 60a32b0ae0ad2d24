"""Shared memory inside hosts and a process group between them, joined to one exchange.

Messages to ranks of the own host stay in memory; the others travel together in one collective of
the process group, which is under way while the own host's are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange, Pending, Splits, Views
from rayrec.comm.process_group import ProcessGroupExchange
from rayrec.comm.shared_memory import SharedMemoryExchange, gather_numbers


class JoinedExchange(Exchange):
    """The ranks of a process group, of which some share a host; `share_hosts` makes it.

    Args:
        whole: all ranks.
        near: the ranks of this host, among which `local` shares memory.
        name: number of this host.
    """

    def __init__(
        self,
        whole: ProcessGroupExchange,
        near: Sequence[int],
        local: SharedMemoryExchange,
        name: int,
    ) -> None:
        self.rank, self.world_size = whole.rank, whole.world_size
        self._whole, self._near, self._local, self._name = whole, near, local, name
        self._far = [r for r in range(whole.world_size) if r not in near]

    def all_to_all(self, send: Tensor, send_splits: Splits, recv_splits: Splits) -> Pending[Tensor]:
        """Send as `views` does, and join what arrives in source order."""
        pending = self.views(send, send_splits, recv_splits)
        return Pending(lambda: torch.cat(pending.wait()))

    def views(self, send: Tensor, send_splits: Splits, recv_splits: Splits) -> Views:
        """Exchange with other hosts through the group, and inside this host in shared memory."""
        parts = send.split(list(send_splits))
        # other hosts first: their messages travel while those of this host are copied and read
        out = [0 if r in self._near else n for r, n in enumerate(send_splits)]
        into = [0 if r in self._near else n for r, n in enumerate(recv_splits)]
        outside = self._whole.all_to_all(torch.cat([parts[r] for r in self._far]), out, into)
        near_out = [send_splits[r] for r in self._near]
        near_in = [recv_splits[r] for r in self._near]
        inside = self._local.views(torch.cat([parts[r] for r in self._near]), near_out, near_in)

        def finish() -> list[Tensor]:
            near = dict(zip(self._near, inside.wait(), strict=True))
            far = outside.wait().split(into)
            return [near[r] if r in near else far[r] for r in range(self.world_size)]

        return Pending(finish)

    def split(self, groups: Sequence[Sequence[int]]) -> Exchange:
        """Split the group, then join the memory of each part's hosts again."""
        return share_hosts(self._whole.split(groups), self._name, self._local.timeout_s)


def share_hosts(whole: ProcessGroupExchange, name: int, timeout_s: float) -> Exchange:
    """Let the ranks of `whole` with an equal `name` share memory.

    It returns `whole` itself where that is impossible. All ranks call it.

    Args:
        name: a number of this rank's host.
    """
    names = [number for (number,) in gather_numbers(whole, [name])]
    if len(set(names)) == whole.world_size:
        return whole
    near = [r for r, other in enumerate(names) if other == name]
    local = SharedMemoryExchange.open(whole, near, timeout_s)
    if len(near) == whole.world_size:
        return local or whole
    # one rank that cannot share sends all of them back to the process group
    fine = gather_numbers(whole, [int(local is not None)])
    joined = local is not None and all(number for (number,) in fine)
    return JoinedExchange(whole, near, local, name) if local is not None and joined else whole
