"""Communication between ranks: the exchange interface, process groups, the simulated world."""

from rayrec.comm.exchange import Exchange, LocalExchange, Pending
from rayrec.comm.simulated import SimulatedWorld

__all__ = ["Exchange", "LocalExchange", "Pending", "SimulatedWorld"]
