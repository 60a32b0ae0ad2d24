"""State that an engine keeps with a KJT between the calls that are given it, and what they teach.

Which collections share an exchange is learned from which of them a model gives the same KJT object
to. The first to be called with a KJT runs the exchange for all that shared one before; the others
find their result with the KJT. Every rank runs the same model code, so every rank learns the same,
without talking. A collection that stops claiming its share goes back to exchanges of its own.

A result is shared by calls of one `Mode` alone, and until the next backward pass, which changes
rows. So a tower under no_grad, or one whose loss has a backward pass of its own, shares nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from rayrec.distributed.steps.dedup import Distinct
from rayrec.distributed.steps.routes_ahead import Started
from rayrec.errors import InputError
from rayrec.sparse import KeyedJaggedTensor

Outputs = tuple[Tensor, ...]


class Mode(NamedTuple):
    """What the result of a call depends on, beside ids and rows.

    Attributes:
        gradients: it is part of a graph.
        inference: it is a tensor of torch.inference_mode, which no graph takes.
        trains: dynamic tables may admit ids.
    """

    gradients: bool
    inference: bool
    trains: bool

    @staticmethod
    def of(training: bool) -> Mode:
        """Return the mode of a call now, of a collection that is in training mode or not."""
        gradients = torch.is_grad_enabled()
        return Mode(gradients, torch.is_inference_mode_enabled(), training and gradients)


@dataclass(eq=False)
class SharedExchange:
    """State that one engine keeps with one KJT.

    Attributes:
        mode: the mode of its last call; None before the first one.
        callers: the collections that were called with it in that mode, since the last backward
            pass.
        waiting: results for collections that have not been called yet.
        started: the exchange of its ids, if that runs ahead of the forward pass.
        distinct: its distinct ids, if they are sent in its stead.
    """

    mode: Mode | None = None
    callers: set[int] = field(default_factory=set)
    waiting: dict[int, Outputs] = field(default_factory=dict)
    started: Started | None = None
    distinct: Distinct | None = None

    @staticmethod
    def on(kjt: KeyedJaggedTensor, engine: object) -> SharedExchange:
        """Return what an engine keeps with a KJT, which is empty at first.

        Raises:
            InputError: a collection was given something else.
        """
        if not isinstance(kjt, KeyedJaggedTensor):
            raise InputError(
                f"a sharded collection was given a {type(kjt).__name__}; it looks up the ids of a "
                "KeyedJaggedTensor, which KeyedJaggedTensor.from_jt_dict makes of JaggedTensors."
            )
        shared = kjt.carried.setdefault(engine, SharedExchange())
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

    def take(self, collection: int, shared: SharedExchange, mode: Mode) -> Outputs | None:
        """Return the result that waits for a collection, once; None when it is still to be made."""
        if shared.mode not in (None, mode):
            self.begin_anew(shared)
        if shared is not self._last or collection not in shared.waiting:
            return None
        shared.callers.add(collection)
        return shared.waiting.pop(collection)

    def begin_anew(self, shared: SharedExchange) -> None:
        """Share nothing with the calls until now, as after a backward pass."""
        self._part(shared)
        shared.callers = set()

    def until_backward(self, output: Tensor, shared: SharedExchange) -> None:
        """Begin anew once an output has its backward pass, which changes rows of all outputs."""
        if output.requires_grad:
            # torch warns of other hooks where a tensor is saved
            output.register_hook(unserializable_hook(lambda _: self.begin_anew(shared)))

    def together(
        self, collection: int, keys: tuple[str, ...], shared: SharedExchange, mode: Mode
    ) -> frozenset[int]:
        """Return the collections to run now that one is called and finds no result."""
        self._learn(collection, shared)
        partners = self._partners[collection] - shared.callers - {collection}
        able = {partner for partner in partners if self._features[partner].issubset(keys)}
        chosen = frozenset(able | {collection})
        if shared.mode is None:
            self._first[keys] = chosen
        shared.mode = mode
        shared.callers.add(collection)
        return chosen

    def first_call(self, keys: tuple[str, ...]) -> frozenset[int] | None:
        """Return what the first call with a KJT of these keys will run; None if there was none."""
        return self._first.get(keys)

    def clear(self) -> None:
        """Forget results, as after a change of plan."""
        # they hold the graph, whose hooks hold them: a circle that Python does not see
        self._last.waiting = {}
        self._last = SharedExchange()

    def _part(self, shared: SharedExchange) -> None:
        """Drop results that nobody has claimed; their collections no longer share a KJT."""
        for unclaimed in shared.waiting:
            former = self._partners[unclaimed]
            for member in former:
                self._partners[member] = former - {unclaimed}
            self._partners[unclaimed] = frozenset([unclaimed])
        shared.waiting = {}

    def _learn(self, collection: int, shared: SharedExchange) -> None:
        self._part(self._last)
        if shared is not self._last:
            self._last, shared.callers, shared.waiting = shared, set(), {}
        elif collection not in shared.callers:  # a second one on this KJT: share from the next on
            joined = self._partners[collection].union(*(self._partners[c] for c in shared.callers))
            for member in joined:
                self._partners[member] = joined
