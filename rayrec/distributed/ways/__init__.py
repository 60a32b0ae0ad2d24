"""The ways: how rows of tables reach the ranks that asked for them, and gradients the owners.

`WAYS` is the registry: a collection takes the first way that takes it. A new way is a module of its
own and a line here.

| module | holds |
|---|---|
| way | what a way is, and the autograd function that all of them share |
| in_place | tables in memory that all ranks map: rows do not travel at all |
| exchanged | rows travel in one message per rank: pooled rows, sequences, two hops |
"""

from __future__ import annotations

from rayrec.distributed.ways.exchanged import Exchanged
from rayrec.distributed.ways.in_place import InPlace
from rayrec.distributed.ways.way import Leg, Open, Step, Way, World

# The last one takes every collection.
WAYS: list[Open] = [InPlace.open, Exchanged.open]

__all__ = ["WAYS", "Leg", "Open", "Step", "Way", "World"]
