"""Who shares an exchange: learned from which collections a model gives the same KJT object to.

The first of several collections to be called with a KJT runs the exchange for all that shared one
before; the others find their result here. Every rank runs the same model code, so every rank learns
the same, without talking. A collection that stops claiming its share goes back to exchanges of its
own.
"""

from __future__ import annotations

from torch import Tensor

from rayrec.sparse import KeyedJaggedTensor

Outputs = tuple[Tensor, ...]


class Inbox:
    """Results that wait for their collection, and what was learned of sharing.

    Args:
        collections: how many there are.
    """

    def __init__(self, collections: int) -> None:
        self._partners = {i: frozenset([i]) for i in range(collections)}
        self._seen: KeyedJaggedTensor | None = None
        self._callers: set[int] = set()
        self._waiting: dict[int, Outputs] = {}
        self._first: dict[tuple[str, ...], frozenset[int]] = {}

    def take(self, collection: int, kjt: KeyedJaggedTensor) -> Outputs | None:
        """The result of a collection for this very KJT, once; None when its exchange is still to be
        run.
        """
        if kjt is not self._seen or collection not in self._waiting:
            return None
        self._callers.add(collection)
        return self._waiting.pop(collection)

    def together(self, collection: int, kjt: KeyedJaggedTensor) -> frozenset[int]:
        """The collections whose exchange to run now that `collection` is called with a KJT and
        finds no result.
        """
        self._learn(collection, kjt)
        chosen = self._partners[collection] - self._callers | {collection}
        if not self._callers:
            self._first[tuple(kjt.keys())] = chosen
        self._callers.add(collection)
        return chosen

    def put(self, results: dict[int, Outputs]) -> None:
        """Keep results for the collections that have not been called yet."""
        self._waiting = results

    def first_call(self, kjt: KeyedJaggedTensor) -> frozenset[int] | None:
        """The collections that the first call with a KJT of these keys will run; None before any
        such call.
        """
        return self._first.get(tuple(kjt.keys()))

    def clear(self) -> None:
        """Forget results, as after a change of plan."""
        self._seen, self._waiting = None, {}

    def _learn(self, collection: int, kjt: KeyedJaggedTensor) -> None:
        # a result that nobody fetched: that collection no longer shares this KJT
        for unclaimed in self._waiting:
            former = self._partners[unclaimed]
            for member in former:
                self._partners[member] = (
                    former - {unclaimed} if member != unclaimed else frozenset([unclaimed])
                )
        self._waiting = {}
        if kjt is not self._seen:
            self._seen, self._callers = kjt, set()
        elif (
            collection not in self._callers
        ):  # a second collection on the same object: share from the next step on
            joined = self._partners[collection].union(*(self._partners[c] for c in self._callers))
            for member in joined:
                self._partners[member] = joined
