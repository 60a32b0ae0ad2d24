"""The pooled rows that one rank looks up, as the matrices in which they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rayrec.distributed.program.groups import LookupGroup
from rayrec.distributed.program.slots import RankSlots, Sizes

# Carriers of pooled rows; see `Address.carrier`.
POOLED = "pooled"
BLOCKS = "pooled/blocks"  # row blocks, whose bags without ids may stay at home
HOPS = "pooled/hops"  # row blocks that are summed inside a host first
REPLICAS = "pooled/replicas"  # tables that every rank has


@dataclass(frozen=True)
class Matrix:
    """Groups whose rows lie side by side in a message.

    Pieces with fewer bags than the fullest are padded by empty bags.
    """

    groups: tuple[LookupGroup, ...]

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """The pieces that the groups read."""
        return tuple(sorted({slot.piece for group in self.groups for slot in group.slots}))

    @cached_property
    def width(self) -> int:
        """The columns of all groups."""
        return sum(group.width for group in self.groups)

    @cached_property
    def leaves_out(self) -> bool:
        """True for row blocks, whose bags without ids may stay at home."""
        return any(group.key.carrier == BLOCKS for group in self.groups)

    def rows(self, sizes: Sizes) -> int:
        """Return the rows for one message: the most bags of any piece."""
        return sizes.most_bags(self.pieces)

    def values(self, sizes: Sizes) -> int:
        """Return rows times columns."""
        return self.rows(sizes) * self.width


@dataclass(frozen=True)
class OwnerMatrices:
    """All pooled rows that one rank looks up and that travel.

    Attributes:
        matrices: they leave for other ranks: one of all whole tables, and one per collection of its
            row blocks.
        replicas: tables that every rank has; only their gradient travels.
        hop: row blocks that are summed inside the host; all ranks of a host have the same columns
            and rows, since all read the same features.
    """

    matrices: tuple[Matrix, ...]
    replicas: Matrix
    hop: Matrix

    @staticmethod
    def of(rank: RankSlots, collections: Sequence[int]) -> OwnerMatrices:
        """Sort the groups that a rank has of some collections."""
        together: dict[int | None, list[LookupGroup]] = {}
        for group in rank.carried_by([POOLED, BLOCKS], collections):
            apart = group.key.collection if group.key.carrier == BLOCKS else None
            together.setdefault(apart, []).append(group)
        return OwnerMatrices(
            tuple(Matrix(tuple(groups)) for groups in together.values()),
            Matrix(rank.carried_by([REPLICAS], collections)),
            Matrix(rank.carried_by([HOPS], collections)),
        )

    @cached_property
    def flat(self) -> tuple[Matrix, ...]:
        """All matrices whose gradients travel in messages."""
        return (*self.matrices, self.replicas)

    def rows_out(self, sizes: Sizes) -> int:
        """Return the values that leave for the sender of a message in the forward pass."""
        return sum(matrix.values(sizes) for matrix in self.matrices)
