"""Which layouts send rows home in two hops: summed inside the host first, so that fewer bytes cross between hosts.

The runtime decides by the same rule (`rayrec.distributed.slots.takes_two_hops`); a test holds the two together. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rayrec.layout.geometry import Layout, Replicated


def summed_ranks(layout: Layout, hosts: Sequence[Sequence[int]]) -> int:
    """Ranks of a host whose rows are summed before they go home: all, where the row blocks of every column block fill hosts; else 1."""
    if isinstance(layout, Replicated) or layout.num_row_blocks < 2 or len(hosts) < 2 or len({len(host) for host in hosts}) != 1:
        return 1
    host_of = {rank: index for index, host in enumerate(hosts) for rank in host}
    per_host = len(hosts[0])
    for column in zip(*layout.owners, strict=True):
        counts = Counter(host_of[rank] for rank in column)
        if len(set(column)) != len(column) or any(count != per_host for count in counts.values()):
            return 1
    return per_host
