"""What a step may not do where tensors lie off the host: make tensors elsewhere, or read them back.

The device is torch's "meta".
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rayrec.comm.codec import Codecs
from rayrec.comm.exchange import LocalExchange
from rayrec.distributed.program.compile import compile_slots
from rayrec.distributed.program.groups import CollectionSpec
from rayrec.distributed.program.slots import Sizes
from rayrec.distributed.ways.exchanged import Exchanged
from rayrec.distributed.ways.matrices import Matrix, OwnerMatrices
from rayrec.distributed.ways.two_hop import TwoHop
from rayrec.layout import EmbeddingBagConfig, table_wise
from rayrec.optim import SGD
from tests.worlds import plan_for

META = torch.device("meta")
NOTHING = Sizes((), (), ())


def test_a_rank_without_rows_sends_from_where_the_others_do() -> None:
    table = EmbeddingBagConfig(10, 4, name="t", feature_names=["f"])
    plan = plan_for(2, {"t": table_wise(table, 0)})
    way = Exchanged(plan, META, Codecs(), None)
    specs = {0: CollectionSpec("ebc", (table,))}
    leg = way.leg(compile_slots(plan, specs, {"t": SGD(lr=0.1)}, 2, {0: way}), 1, [0])
    step = SimpleNamespace(
        routed=SimpleNamespace(got=[NOTHING, NOTHING]),
        exchange=LocalExchange(),
        anchor=torch.zeros(0, device=META),
    )
    send, _ = leg._pack(step, {}, None)
    assert send.shape == (0,) and send.device == META


def test_a_host_without_two_hop_tables_sends_from_where_the_others_do() -> None:
    hops = TwoHop(LocalExchange(), LocalExchange(), ((0,),), 0, Codecs())
    routed = SimpleNamespace(got=(NOTHING,), sent=(NOTHING,))
    (home,) = hops.send_home([OwnerMatrices((), Matrix(()), Matrix(()))], routed, [], META)
    assert home.shape == (0, 0) and home.device == META


def test_a_world_of_one_reads_no_header_back() -> None:
    payload = torch.empty(5, dtype=torch.int32, device=META)
    pending = LocalExchange().headed([[7, 5]], payload, [5], 2, lambda found: [found[0][1]])
    headers, (got,) = pending.wait()
    assert headers == [[7, 5]] and got is payload
