"""What every rank looks up and what travels, in the vocabulary of `groups`: the slot table, which
`compile` makes once per plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from rayrec.distributed.program.groups import CollectionSpec, GroupKey, LookupGroup, Piece, Use


@dataclass(frozen=True)
class Sizes:
    """What one rank sends to another in one step: ids and bags per piece, in the receiver's piece
    order; sequences have no bags.

    Attributes:
        extents: of the sender's outputs that are read in place, collection by collection: rows of a
            pooled one, which are the most bags of any key; ids of every use of a sequence.
    """

    extents: tuple[int, ...]
    ids: tuple[int, ...]
    bags: tuple[int, ...]
    _most: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False, compare=False)

    def most_bags(self, pieces: tuple[int, ...]) -> int:
        """Bags of the fullest of some pieces; asked many times a step."""
        if pieces not in self._most:
            self._most[pieces] = max((self.bags[piece] for piece in pieces), default=0)
        return self._most[pieces]

    @staticmethod
    def of(header: Sequence[int], extents: int) -> Sizes:
        """From a header: so many extents, ids per piece, bags per piece."""
        half = extents + (len(header) - extents) // 2
        return Sizes(tuple(header[:extents]), tuple(header[extents:half]), tuple(header[half:]))


@dataclass(frozen=True)
class Matrix:
    """Pooled groups whose rows lie side by side in a message; pieces with fewer bags than the
    fullest are padded by empty ones.
    """

    groups: tuple[LookupGroup, ...]

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """The pieces that the groups read."""
        return tuple(sorted({slot.piece for group in self.groups for slot in group.slots}))

    @cached_property
    def width(self) -> int:
        """Columns of all groups."""
        return sum(group.width for group in self.groups)

    @cached_property
    def compact(self) -> bool:
        """Whether these are row blocks, whose bags without ids may stay at home."""
        return any(group.key.compact for group in self.groups)

    def rows(self, sizes: Sizes) -> int:
        """Rows for one message: the most bags of any piece."""
        return sizes.most_bags(self.pieces)

    def values(self, sizes: Sizes) -> int:
        """Rows times columns."""
        return self.rows(sizes) * self.width


@dataclass(frozen=True)
class RankSlots:
    """All that one rank looks up: its pieces as they arrive, and its groups, pooled before
    sequence, sharded before replicated.
    """

    pieces: tuple[Piece, ...]
    groups: tuple[LookupGroup, ...]

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """What leaves for other ranks in the forward pass: sharded pooled groups, and apart those
        of row blocks, by collection.
        """
        found: dict[int | None, list[LookupGroup]] = {}
        for group in self.groups:
            if not (
                group.key.sequence
                or group.key.replicated
                or group.key.two_hop
                or group.key.in_place
            ):
                found.setdefault(group.key.collection if group.key.compact else None, []).append(
                    group
                )
        return tuple(Matrix(tuple(groups)) for groups in found.values())

    @cached_property
    def replicas(self) -> Matrix:
        """Replicated pooled groups."""
        return Matrix(
            tuple(
                g
                for g in self.groups
                if g.key.replicated and not (g.key.sequence or g.key.in_place)
            )
        )

    @cached_property
    def hop(self) -> Matrix:
        """Pooled groups of the two-hop route; the same columns and rows on every rank of a host,
        since all read the same features.
        """
        return Matrix(tuple(g for g in self.groups if g.key.two_hop))

    @cached_property
    def pooled(self) -> tuple[LookupGroup, ...]:
        """Pooled groups of the flat route, matrix by matrix and then the replicated ones."""
        return tuple(group for matrix in (*self.matrices, self.replicas) for group in matrix.groups)

    @cached_property
    def matrix_of(self) -> dict[GroupKey, Matrix]:
        """Pooled group -> the matrix that it is a part of."""
        return {
            group.key: matrix
            for matrix in (*self.matrices, self.replicas, self.hop)
            for group in matrix.groups
        }

    @cached_property
    def exchanged(self) -> tuple[LookupGroup, ...]:
        """Groups whose rows travel."""
        return tuple(group for group in self.groups if not group.key.in_place)

    @cached_property
    def in_place(self) -> tuple[LookupGroup, ...]:
        """Groups whose rows every rank reads where they lie."""
        return tuple(group for group in self.groups if group.key.in_place)

    @cached_property
    def weighted_pieces(self) -> frozenset[int]:
        """Pieces with weights that groups read whose rows travel."""
        return frozenset(
            slot.piece for group in self.exchanged if group.key.weighted for slot in group.slots
        )

    @cached_property
    def sequences(self) -> tuple[LookupGroup, ...]:
        """Sequence groups whose rows travel, sharded ones first."""
        return tuple(g for g in self.groups if g.key.sequence and not g.key.in_place)

    def rows_out(self, sizes: Sizes) -> int:
        """Values that leave for the sender of a message in the forward pass."""
        return sum(matrix.values(sizes) for matrix in self.matrices) + self._sequence_values(
            sizes, replicated=False
        )

    def grads_in(self, sizes: Sizes) -> tuple[int, int, int, int]:
        """Values that arrive from the sender of a message in the backward pass: pooled sharded,
        pooled replicated, then sequences alike.

        Sections apart, so that a codec with blocks gives every replica the same values.
        """
        pooled = sum(matrix.values(sizes) for matrix in self.matrices), self.replicas.values(sizes)
        return (
            *pooled,
            self._sequence_values(sizes, replicated=False),
            self._sequence_values(sizes, replicated=True),
        )

    def _sequence_values(self, sizes: Sizes, replicated: bool) -> int:
        groups = (g for g in self.sequences if g.key.replicated == replicated)
        return sum(sizes.ids[slot.piece] * slot.width for group in groups for slot in group.slots)


@dataclass(frozen=True)
class SlotTable:
    """What every rank looks up, for a set of collections that share one exchange.

    Attributes:
        ranks: per rank, its pieces and groups.
        collections: the specs by index, ascending.
        uses: per collection its uses in output order.
        features: every feature that is looked up, in order of first use.
        limits: feature -> rows of the smallest table it looks up; its ids must be below.
        hosts: ranks by host.
        granules: collection -> columns of the blocks that its compact matrices consist of.
        in_place: collections whose tables lie in memory that all ranks share.
    """

    ranks: tuple[RankSlots, ...]
    collections: dict[int, CollectionSpec]
    uses: dict[int, tuple[Use, ...]] = field(repr=False)
    features: tuple[str, ...]
    limits: dict[str, int]
    hosts: tuple[tuple[int, ...], ...]
    granules: dict[int, int] = field(default_factory=dict)
    in_place: frozenset[int] = frozenset()

    @cached_property
    def extents(self) -> dict[int, slice]:
        """Collection that is read in place -> where its extents are; see `Sizes`."""
        counts = {
            c: len(self.uses[c]) if self.collections[c].sequence else 1
            for c in self.collections
            if c in self.in_place
        }
        bounds = [0, *accumulate(counts.values())]
        return {c: slice(a, b) for c, a, b in zip(counts, bounds, bounds[1:], strict=False)}

    @cached_property
    def exchanged(self) -> tuple[int, ...]:
        """Collections whose rows travel."""
        return tuple(c for c in self.collections if c not in self.in_place)

    def outputs(self, collections: Iterable[int], varying: bool) -> dict[int, int]:
        """Tensors that each collection gives: one per use of sequences and where keys have
        different numbers of bags, else one matrix.
        """
        return {
            c: len(self.uses[c]) if varying or self.collections[c].sequence else 1
            for c in collections
        }

    @property
    def two_hop(self) -> bool:
        """Whether any table takes the two-hop route."""
        return any(rank.hop.groups for rank in self.ranks)

    @cached_property
    def widths(self) -> dict[int, int]:
        """Pooled collection whose rows travel -> columns of its output."""
        return {
            c: sum(u.width for u in self.uses[c])
            for c in self.exchanged
            if not self.collections[c].sequence
        }

    @property
    def weighted(self) -> bool:
        """Whether any collection reads weights."""
        return any(spec.weighted for spec in self.collections.values())


def by_collection(
    outputs: Iterable[Tensor], counts: Mapping[int, int]
) -> dict[int, tuple[Tensor, ...]]:
    """Outputs one after the other, so many of each collection, sorted by it."""
    flow = iter(outputs)
    return {c: tuple(next(flow) for _ in range(count)) for c, count in counts.items()}
