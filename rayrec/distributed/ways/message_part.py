"""Base of pooled rows and of sequences: each is one part of the message to every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.program.groups import GroupKey, LookupGroup
from rayrec.distributed.program.slots import Sizes
from rayrec.distributed.steps.unpack import Arrived
from rayrec.distributed.ways.way import Step

Rows = Mapping[GroupKey, Tensor]


class MessagePart(ABC):
    """The rows of some collections within the messages of a step.

    In the forward pass a message from an owner to a home rank holds the rows that the home rank
    asked for; in the backward pass the home rank sends their gradients in the same order.

    Attributes:
        collections: the collections whose rows these are.
        groups: groups that this rank looks up for them.
    """

    collections: tuple[int, ...]
    groups: tuple[LookupGroup, ...]

    @abstractmethod
    def unpack(self, got: Sequence[Sizes], arrived: Sequence[Arrived]) -> dict[GroupKey, GroupIds]:
        """Sort the ids that arrived from every rank, for the kernels of this rank."""

    @abstractmethod
    def rows_out(self, owner: int, sizes: Sizes) -> int:
        """Return how many values an owner sends to a home rank, whose ids had these sizes."""

    @abstractmethod
    def grads_out(self, owner: int, sizes: Sizes) -> tuple[int, ...]:
        """Return how many values the home rank sends back to the owner, section by section.

        A codec with blocks sees the sections apart, so that all replicas get the same values.
        """

    @abstractmethod
    def pack(self, rows: Rows, got: Sequence[Sizes]) -> list[list[Tensor]]:
        """Return for every home rank the flat values that are sent there, in order."""

    def whole(self, rows: Rows) -> Tensor | None:
        """Return all values for all ranks in one piece, if they lie so already."""
        return None

    @abstractmethod
    def join(
        self, step: Step, received: Sequence[Tensor], rows: Rows
    ) -> tuple[dict[int, list[Tensor]], Any]:
        """Return the outputs of each collection, and what `pack_back` needs to know.

        Args:
            received: from every owner its values for this rank, flat, as `pack` has put them there.
            rows: the outputs of this rank's own kernels, where replicated tables are read.
        Returns:
            Collection -> its outputs, as `Leg.run` returns them; and anything to keep until then.
        """

    @abstractmethod
    def lone_matrix(self, got: Sequence[Sizes]) -> tuple[list[int], int] | None:
        """Return the rows for every rank and the columns, if all gradients make one matrix."""

    @abstractmethod
    def pack_back(
        self,
        step: Step,
        grads: Mapping[int, Sequence[Tensor]],
        buffers: Sequence[Tensor],
        scale: float,
        kept: Any,
    ) -> None:
        """Fill the flat buffer for every owner with the gradients of its rows, times `scale`.

        Args:
            grads: collection -> the gradients of its outputs, in their shapes.
            kept: the second value that `join` returned.
        """

    @abstractmethod
    def split(
        self, messages: Sequence[Tensor], got: Sequence[Sizes], scale: float, into: Tensor | None
    ) -> dict[GroupKey, Tensor]:
        """Return the gradient of every kernel's output, in its shape, times `scale`.

        Args:
            messages: from every home rank its gradients for this rank, flat.
            into: the matrix of `lone_matrix`; a message that lies there already is not copied.
        """


def stack(parts: Sequence[Tensor], width: int, scale: float, into: Tensor | None = None) -> Tensor:
    """Return (rows of all parts, width): flat parts below each other, times `scale`."""
    if len(parts) == 1 and scale == 1.0:
        return parts[0].view(-1, width)
    sizes = [part.numel() for part in parts]
    stacked = parts[0].new_empty(sum(sizes)) if into is None else into.view(-1)
    for part, place in zip(parts, stacked.split(sizes), strict=True):
        if scale != 1.0:
            torch.mul(part, scale, out=place)
        elif part.data_ptr() != place.data_ptr():
            place.copy_(part)
    return stacked.view(-1, width)
