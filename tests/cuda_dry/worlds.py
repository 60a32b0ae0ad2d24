"""Ranks simulated as threads of one process, each on a stand-in device of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from rayrec.comm import SimulatedWorld, simulated
from rayrec.comm.exchange import Exchange, Pending

T = TypeVar("T")


def _all_to_all(
    self: simulated._SimulatedExchange,
    send: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
) -> Pending[Tensor]:
    """As NCCL's: it takes tensors of the rank's own device alone."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert send.device == device, f"a tensor of {send.device} in an exchange on {device}"
    for dest, part in enumerate(send.detach().split(list(send_splits))):
        self.world.mailbox[self.rank, dest] = part
    self.world.meet()
    parts = [self.world.mailbox[rank, self.rank].to(device) for rank in range(self.world_size)]
    assert [part.numel() for part in parts] == list(recv_splits)
    received = torch.cat(parts)
    self.world.meet()
    return Pending.ready(received)


def run_ranks(world_size: int, main: Callable[[Exchange, torch.device], T]) -> list[T]:
    """Run `main(exchange, device)` once per rank."""

    def rank(exchange: Exchange) -> T:
        device = torch.device("cuda", exchange.rank)
        torch.cuda.set_device(device)  # of this thread
        return main(exchange, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated._SimulatedExchange, "all_to_all", _all_to_all)
        return SimulatedWorld(world_size).run(rank)
