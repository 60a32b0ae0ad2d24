"""Which layouts send rows home in two hops: summed inside the host first, so that fewer bytes cross
between hosts.

The rule is the runtime's own, `rayrec.layout.takes_two_hops`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.layout.geometry import Layout
from rayrec.layout.kinds import takes_two_hops


def summed_ranks(layout: Layout, hosts: Sequence[Sequence[int]]) -> int:
    """Ranks of a host whose rows are summed before they go home: all of them on the two-hop route,
    else 1.
    """
    return len(hosts[0]) if takes_two_hops(layout, hosts) else 1
