"""The slot table: what every rank looks up, for some collections that share one exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from rayrec.distributed.program.groups import CollectionSpec, LookupGroup, Piece, Use


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank's message to another: ids and bags per piece, in the receiver's order.

    Attributes:
        extents: counts of the sender's whole batch that a way asks for; see `SlotTable.headers`.
        ids: per piece.
        bags: per piece; 0 for the pieces of sequences.
    """

    extents: tuple[int, ...]
    ids: tuple[int, ...]
    bags: tuple[int, ...]
    _most: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False, compare=False)

    def most_bags(self, pieces: tuple[int, ...]) -> int:
        """Return the bags of the fullest of some pieces; a step asks it many times."""
        if pieces not in self._most:
            self._most[pieces] = max((self.bags[piece] for piece in pieces), default=0)
        return self._most[pieces]

    @staticmethod
    def of(header: Sequence[int], extents: int) -> Sizes:
        """Read a header: so many extents, ids per piece, bags per piece."""
        # Each piece has one number of ids and one of bags, so both halves are equally long.
        half = extents + (len(header) - extents) // 2
        return Sizes(tuple(header[:extents]), tuple(header[extents:half]), tuple(header[half:]))


@dataclass(frozen=True)
class RankSlots:
    """All that one rank looks up: its pieces as they arrive, and its groups, carrier by carrier."""

    pieces: tuple[Piece, ...]
    groups: tuple[LookupGroup, ...]

    def carried_by(
        self, carriers: Sequence[str], collections: Sequence[int]
    ) -> tuple[LookupGroup, ...]:
        """Return the groups of some carriers and collections, in the order of all groups."""
        groups = (group for group in self.groups if group.key.collection in collections)
        return tuple(group for group in groups if group.key.carrier in carriers)


@dataclass(frozen=True)
class SlotTable:
    """Slots that every rank looks up, for a set of collections that share one exchange.

    Attributes:
        ranks: per rank, its pieces and groups.
        collections: the specs by index, ascending.
        uses: per collection its uses in output order.
        limits: every feature that is looked up, in order of first use -> the least `id_limit` of
            the tables that it looks up.
        hosts: ranks by host.
        granules: collection -> columns of the blocks that its outputs consist of, where tables that
            are cut by rows are also cut by columns.
        headers: collection -> counts that each rank tells of its batch: per entry a feature, whose
            ids are counted, or None for the most bags of any feature.
    """

    ranks: tuple[RankSlots, ...]
    collections: dict[int, CollectionSpec]
    uses: dict[int, tuple[Use, ...]] = field(repr=False)
    limits: dict[str, int]
    hosts: tuple[tuple[int, ...], ...]
    granules: dict[int, int] = field(default_factory=dict)
    headers: dict[int, tuple[str | None, ...]] = field(default_factory=dict)

    @cached_property
    def extents(self) -> dict[int, slice]:
        """Return for each collection where its entries of the header are; see `Sizes.extents`."""
        bounds = [0, *accumulate(len(entries) for entries in self.headers.values())]
        pairs = zip(self.headers, bounds, bounds[1:], strict=False)
        return {collection: slice(start, stop) for collection, start, stop in pairs}

    def outputs(self, collections: Iterable[int], varying: bool) -> dict[int, int]:
        """Return how many tensors each collection gives.

        A sequence gives one per use, and so does a pooled collection whose keys have different
        numbers of bags; else a pooled collection gives one matrix.
        """
        counts = {}
        for collection in collections:
            # Outputs with different numbers of rows cannot share one matrix.
            by_use = varying or self.collections[collection].sequence
            counts[collection] = len(self.uses[collection]) if by_use else 1
        return counts

    def width_of(self, collection: int) -> int:
        """Return the columns of the output of a pooled collection."""
        return sum(use.width for use in self.uses[collection])

    @cached_property
    def uses_time(self) -> bool:
        """True if any collection asks for the time of the data, which headers then tell."""
        return any(spec.uses_time for spec in self.collections.values())

    @property
    def weighted(self) -> bool:
        """True if any collection reads weights."""
        return any(spec.weighted for spec in self.collections.values())


def by_collection(
    outputs: Iterable[Tensor], counts: Mapping[int, int]
) -> dict[int, tuple[Tensor, ...]]:
    """Sort outputs that follow each other, so many of each collection, by their collection."""
    flow = iter(outputs)
    return {c: tuple(next(flow) for _ in range(count)) for c, count in counts.items()}
