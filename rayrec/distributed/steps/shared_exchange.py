"""State that an engine keeps with a KJT between the calls that are given it, and what they teach.

Which collections share an exchange is learned from which of them a model gives the same KJT object
to. The first to be called with a KJT runs the exchange for all that shared one before; the others
find their result with the KJT. Every rank runs the same model code, so every rank learns the same,
without talking. A collection that stops claiming its share goes back to exchanges of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rayrec.distributed.steps.dedup import Distinct
from rayrec.distributed.steps.routes_ahead import Started
from rayrec.sparse import KeyedJaggedTensor

Outputs = tuple[Tensor, ...]


@dataclass(eq=False)
class SharedExchange:
    """State that one engine keeps with one KJT.

    Attributes:
        callers: the collections that were called with it.
        waiting: results for collections that have not been called yet.
        started: the exchange of its ids, if that runs ahead of the forward pass.
        distinct: its distinct ids, if they are sent in its stead.
    """

    callers: set[int] = field(default_factory=set)
    waiting: dict[int, Outputs] = field(default_factory=dict)
    started: Started | None = None
    distinct: Distinct | None = None

    @staticmethod
    def on(kjt: KeyedJaggedTensor, engine: object) -> SharedExchange:
        """Return what an engine keeps with a KJT, which is empty at first."""
        carried = kjt.carried
        if engine not in carried:
            carried[engine] = SharedExchange()
        shared = carried[engine]
        assert isinstance(shared, SharedExchange)
        return shared


class Sharing:
    """Sets of collections that share an exchange, as far as the calls until now tell.

    Args:
        features: features of every collection; it takes part where a KJT has them all.
    """

    def __init__(self, features: Sequence[frozenset[str]]) -> None:
        self._features = tuple(features)
        self._partners = {i: frozenset([i]) for i in range(len(features))}
        self._last = SharedExchange()
        self._first: dict[tuple[str, ...], frozenset[int]] = {}

    def take(self, collection: int, shared: SharedExchange) -> Outputs | None:
        """Return the result that waits for a collection, once; None when it is still to be made."""
        if shared is not self._last or collection not in shared.waiting:
            return None
        shared.callers.add(collection)
        return shared.waiting.pop(collection)

    def together(
        self, collection: int, keys: tuple[str, ...], shared: SharedExchange
    ) -> frozenset[int]:
        """Return the collections to run now that one is called and finds no result."""
        self._learn(collection, shared)
        partners = self._partners[collection] - shared.callers - {collection}
        able = {partner for partner in partners if self._features[partner].issubset(keys)}
        chosen = frozenset(able | {collection})
        if not shared.callers:
            self._first[keys] = chosen
        shared.callers.add(collection)
        return chosen

    def first_call(self, keys: tuple[str, ...]) -> frozenset[int] | None:
        """Return what the first call with a KJT of these keys will run; None if there was none."""
        return self._first.get(keys)

    def clear(self) -> None:
        """Forget results, as after a change of plan."""
        self._last = SharedExchange()

    def _learn(self, collection: int, shared: SharedExchange) -> None:
        for unclaimed in self._last.waiting:  # that collection no longer shares its KJT
            former = self._partners[unclaimed]
            for member in former:
                self._partners[member] = former - {unclaimed}
            self._partners[unclaimed] = frozenset([unclaimed])
        self._last.waiting = {}
        if shared is not self._last:
            self._last, shared.callers, shared.waiting = shared, set(), {}
        elif collection not in shared.callers:  # a second one on this KJT: share from the next on
            joined = self._partners[collection].union(*(self._partners[c] for c in shared.callers))
            for member in joined:
                self._partners[member] = joined
