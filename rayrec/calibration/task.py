"""`CalibrateTask`: the measurement of a cluster as a task of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayrec.calibration.measure import measure_topology
from rayrec.comm.choose import exchange_for
from rayrec.comm.exchange import Exchange, LocalExchange
from rayrec.layout import Topology
from rayrec.train.seat import RankContext


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateTask:
    """Measure these ranks; `topology` says which of them share a host and what memory they have."""

    topology: Topology

    def run(self, context: RankContext) -> Topology:
        """Measure on this rank, together with all ranks."""
        device = torch.device("cuda:0" if context.seat.device == "cuda" else "cpu")
        exchange: Exchange = LocalExchange()
        if self.topology.world_size > 1:
            exchange = exchange_for(None, device)
        return measure_topology(exchange, self.topology, device, context.report)
