"""How bytes travel between ranks: the exchange seam, process groups, the simulated world."""

from rayrec.comm.exchange import Exchange, LocalExchange, Pending
from rayrec.comm.simulated import SimulatedWorld

__all__ = ["Exchange", "LocalExchange", "Pending", "SimulatedWorld"]
