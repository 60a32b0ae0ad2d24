"""A topology counts its ranks and hosts, and refuses what no machine is like."""

from __future__ import annotations

import pickle

import pytest

from rayrec.errors import ConfigError
from rayrec.layout import Topology


def test_hosts_and_ranks_are_counted() -> None:
    topology = Topology(hosts=((0,), (1, 2, 3)), memory_bytes=(1, 2, 3, 4))
    assert (
        topology.world_size == 4
        and topology.ranks == (0, 1, 2, 3)
        and topology.host_of == (0, 1, 1, 1)
    )
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert Topology.uniform(2, 2, 5).hosts == ((0, 1), (2, 3))


def test_local_shares_half_of_this_machine() -> None:
    one, two = Topology.local(1).memory_bytes, Topology.local(2).memory_bytes
    assert one[0] > 0 and abs(sum(two) - one[0]) <= 1
    assert Topology.local(2, memory_bytes=7).memory_bytes == (7, 7)
    assert Topology.local(1, memory_bytes=1, device="cuda").memory_bw > Topology.local(1).memory_bw


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(hosts=(), memory_bytes=()), "ranks 0, 1, 2"),
        (lambda: Topology(hosts=((0, 2),), memory_bytes=(1, 1)), "in order"),
        (lambda: Topology(hosts=((0,), ()), memory_bytes=(1,)), "at least one per host"),
        (lambda: Topology(hosts=((0, 1),), memory_bytes=(1,)), "names 1 ranks, hosts name 2"),
        (lambda: Topology(hosts=((0,),), memory_bytes=(-1,)), "memory_bytes has -1, negative"),
        (lambda: Topology.local(2, float("nan")), "memory_bytes has nan, .* give bytes"),  # type: ignore[arg-type]
        (lambda: Topology.local(2, "8GB"), "memory_bytes has '8GB', .* give bytes"),  # type: ignore[arg-type]
        (lambda: Topology(hosts=((0,),), memory_bytes=(1,), memory_bw=0.0), "memory_bw=0.0"),
        (
            lambda: Topology(hosts=((0,),), memory_bytes=(1,), inter_host_bw=float("nan")),
            "inter_host_bw=nan",
        ),
        (lambda: Topology(hosts=((0,),), memory_bytes=(1,), latency_s=-1.0), "latency_s=-1.0"),
        (lambda: Topology(hosts=((0,),), memory_bytes=(1,), input_hidden=1.5), "input_hidden=1.5"),
        (lambda: Topology(hosts=((0,),), memory_bytes=(1,), device="tpu"), "'tpu' is unknown"),  # type: ignore[arg-type]
        (lambda: Topology.uniform(1, 1, 1, "tpu"), "'tpu' is unknown"),  # type: ignore[arg-type]
        (lambda: Topology.local(0), "0 ranks"),
        (lambda: Topology.local(2.0), r"whole numbers of .* got 1 hosts of 2\.0 ranks"),  # type: ignore[arg-type]
        (lambda: Topology.local("2"), "whole numbers of .* got 1 hosts of '2' ranks"),  # type: ignore[arg-type]
        (lambda: Topology.local(1, device="cuda"), "memory_bytes for a GPU"),
    ],
)
def test_what_no_machine_is_like_is_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make()
