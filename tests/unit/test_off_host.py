"""What a step may not do where tensors lie off the host: make tensors elsewhere, or read them back.
The device is torch's "meta".
"""

from __future__ import annotations

import torch

from rayrec.comm.exchange import LocalExchange
from rayrec.distributed.program.compile import compile_slots
from rayrec.distributed.program.groups import CollectionSpec
from rayrec.distributed.steps.combine import pack_rows
from rayrec.distributed.steps.two_hop import Hops, HopSizes, send_home
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, TablePlacement, table_wise
from rayrec.optim import SGD

META = torch.device("meta")


def test_a_rank_without_rows_sends_from_where_the_others_do() -> None:
    table = EmbeddingBagConfig(10, 4, name="t", feature_names=["f"])
    plan = ShardingPlan(world_size=2, tables={"t": TablePlacement(table_wise(table, 0))})
    slots = compile_slots(plan, {0: CollectionSpec("ebc", (table,))}, {"t": SGD(lr=0.1)}, 2)
    send, _ = pack_rows(slots.ranks[1], [], [], LocalExchange(), None, META)
    assert send.shape == (0,) and send.device == META


def test_a_host_without_two_hop_tables_sends_from_where_the_others_do() -> None:
    sizes = HopSizes(rows=(3,), width=0, home=((3, 0),), local=((0,),))
    (home,) = send_home(Hops(LocalExchange(), LocalExchange()), sizes, [], None, META)
    assert home.shape == (3, 0) and home.device == META


def test_a_world_of_one_reads_no_header_back() -> None:
    payload = torch.empty(5, dtype=torch.int32, device=META)
    pending = LocalExchange().headed([[7, 5]], payload, [5], 2, lambda found: [found[0][1]])
    headers, (got,) = pending.wait()
    assert headers == [[7, 5]] and got is payload
