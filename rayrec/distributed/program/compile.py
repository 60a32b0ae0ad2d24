"""Compiling the slot table: from a plan and the collections' tables to what every rank looks up.

A pure function of its arguments, so that every rank gets the same table without talking. Costs one
pass over uses x shards x ranks, once per set of collections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import gcd

from rayrec.distributed.program.groups import (
    GATHERED,
    CollectionSpec,
    GroupKey,
    LookupGroup,
    Piece,
    Slot,
    Use,
    is_vectorized,
)
from rayrec.distributed.program.slots import RankSlots, SlotTable
from rayrec.layout import (
    COLUMN_MULTIPLE,
    BaseEmbeddingConfig,
    Replicated,
    Shard,
    ShardingPlan,
    TableLayout,
    takes_two_hops,
)
from rayrec.layout.kinds import COMPACT_COLUMNS
from rayrec.optim import SparseOptimizer


def uses_of(collection: int, tables: Sequence[BaseEmbeddingConfig]) -> tuple[Use, ...]:
    """The uses of one collection in output order: tables in order, the features of each in order."""
    uses: list[Use] = []
    column = 0
    for table in tables:
        for feature in table.feature_names:
            uses.append(
                Use(len(uses), collection, table.name, feature, column, table.embedding_dim)
            )
            column += table.embedding_dim
    return tuple(uses)


def granule_of(uses: Sequence[Use], plan: ShardingPlan) -> int:
    """Columns of the widest blocks that the uses of one collection, cut by columns where tables are
    cut by rows, consist of.
    """
    found = 0
    for use in uses:
        layout = plan.tables[use.table].layout
        found = gcd(found, use.column, use.width)
        if isinstance(layout, TableLayout) and layout.num_row_blocks > 1:
            found = gcd(found, *layout.col_cuts)
    return found


def compile_slots(
    plan: ShardingPlan,
    specs: Mapping[int, CollectionSpec],
    optimizers: Mapping[str, SparseOptimizer],
    world_size: int,
    in_place: Mapping[int, Mapping[Shard, int]] | None = None,
) -> SlotTable:
    """Compile the slot table of some collections; a pure function, so that every rank gets the same
    one.

    Args:
        plan: covers every table.
        specs: collections by index.
        optimizers: of every table.
        world_size: W.
        in_place: collections whose tables lie in memory that all ranks share, with the first value
            of every shard there.
    """
    in_place = in_place or {}
    uses = {c: uses_of(c, specs[c].tables) for c in sorted(specs)}
    configs = {table.name: table for spec in specs.values() for table in spec.tables}
    builders = [_RankBuilder() for _ in range(world_size)]
    limits: dict[str, int] = {}
    granules = {c: granule_of(uses[c], plan) for c in uses}
    for use in (use for c in uses for use in uses[c]):
        config, spec, placement = configs[use.table], specs[use.collection], plan.tables[use.table]
        limits[use.feature] = min(
            limits.get(use.feature, config.num_embeddings), config.num_embeddings
        )
        layout = placement.layout
        near = use.collection in in_place
        cuts = (
            layout.row_cuts
            if isinstance(layout, TableLayout) and layout.num_row_blocks > 1
            else None
        )
        # owners pick their ids themselves, and so know where each was
        cuts = None if near and spec.sequence else cuts
        two_hop = not (spec.sequence or near) and takes_two_hops(layout, plan.hosts)
        compact = (
            cuts is not None
            and not (spec.sequence or two_hop or near)
            and granules[use.collection] >= COMPACT_COLUMNS
        )
        for shard in layout.shards(use.table):
            key = GroupKey(
                collection=use.collection,
                replicated=isinstance(layout, Replicated),
                data_type=config.data_type,
                weighted=spec.weighted,
                storage=placement.storage,
                optimizer=optimizers[use.table],
                sequence=spec.sequence,
                width=len(shard.cols) if spec.sequence or placement.storage.kind == "cached" else 0,
                two_hop=two_hop,
                compact=compact,
                chain=(shard.cols.start if spec.sequence else GATHERED) if near else None,
                odd=len(shard.cols) % COLUMN_MULTIPLE > 0,
            )
            block = (
                layout.row_block(shard.rows.start)
                if cuts is not None and isinstance(layout, TableLayout)
                else 0
            )
            piece = Piece(use.feature, cuts, block, spec.sequence, spec.weighted, compact)
            builders[shard.rank].add(
                key, use, shard, block, piece, len(shard.rows) == config.num_embeddings
            )
    ranks = tuple(builder.build(in_place) for builder in builders)
    found = {c: specs[c] for c in sorted(specs)}
    return SlotTable(
        ranks,
        found,
        uses,
        tuple(limits),
        limits,
        plan.hosts,
        granules,
        frozenset(in_place.keys() & specs.keys()),
    )


class _RankBuilder:
    def __init__(self) -> None:
        self.pieces: dict[Piece, int] = {}
        self.groups: dict[GroupKey, list[Slot]] = {}

    def add(
        self, key: GroupKey, use: Use, shard: Shard, block: int, piece: Piece, whole: bool
    ) -> None:
        index = self.pieces.setdefault(piece, len(self.pieces))
        self.groups.setdefault(key, []).append(Slot(use, shard, block, index, whole))

    def build(self, in_place: Mapping[int, Mapping[Shard, int]]) -> RankSlots:
        # sharded groups first: their columns lead in the gradient buffer, so that the forward send
        # is a prefix of the same order
        groups: dict[GroupKey, list[Slot]] = {}
        for key, slots in self.groups.items():
            groups.update(
                _chains(key, slots) if key.in_place and not key.sequence else {key: slots}
            )
        keys = sorted(
            groups,
            key=lambda k: (
                k.sequence,
                k.replicated,
                k.two_hop,
                k.compact,
                k.collection,
                k.width,
                repr(k),
            ),
        )
        return RankSlots(
            tuple(self.pieces),
            tuple(_group(key, groups[key], in_place.get(key.collection, {})) for key in keys),
        )


def _chains(key: GroupKey, slots: Sequence[Slot]) -> dict[GroupKey, list[Slot]]:
    """Slots whose columns ascend, shard by shard. Apart those whose gradients are gathered: no run
    of columns, or their kernel needs it.
    """
    by_shard: dict[Shard, list[Slot]] = {}
    for slot in sorted(slots, key=lambda s: s.column):
        by_shard.setdefault(slot.shard, []).append(slot)
    gathered = key.optimizer.max_gradient is not None or not is_vectorized(
        key.optimizer, key.data_type
    )
    chains: list[list[Slot]] = []
    found: dict[GroupKey, list[Slot]] = {}
    for run in by_shard.values():
        if gathered or any(a.column + a.width != b.column for a, b in pairwise(run)):
            found.setdefault(key, []).extend(run)
            continue
        chain = next((c for c in chains if c[-1].column + c[-1].width <= run[0].column), None)
        if chain is None:
            chains.append(run)
        else:
            chain.extend(run)
    return found | {replace(key, chain=i): chain for i, chain in enumerate(chains)}


def _group(key: GroupKey, slots: list[Slot], starts: Mapping[Shard, int]) -> LookupGroup:
    first: dict[Shard, tuple[int, int]] = {}
    for slot in slots:
        # on the two-hop route every rank of a host has one block of each column, and all must order
        # them alike; chains ascend
        first.setdefault(
            slot.shard, (0 if key.two_hop or key.in_place else slot.block, slot.column)
        )
    # the kernel wants the slots of one shard side by side
    shards = tuple(sorted(first, key=lambda s: first[s]))
    rank_of = {shard: i for i, shard in enumerate(shards)}
    bases = (
        tuple(starts[shard] // key.width for shard in shards)
        if key.in_place and key.sequence
        else ()
    )
    return LookupGroup(
        key, shards, tuple(sorted(slots, key=lambda s: (rank_of[s.shard], s.column))), bases
    )
