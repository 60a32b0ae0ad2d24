"""The rows of the ids of dynamic tables that all ranks read in place.

Only the owner of a row knows whose it is. So once ids have travelled, each owner gives rows to its
own, and tells the ranks that sent them. Then every rank looks its batch up by rows, as if the
tables were static. A row of `ABSENT` is that of an id without one.
"""

# N ids

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.program.compile import blocks_of
from rayrec.distributed.program.groups import GroupKey, LookupGroup, Use
from rayrec.distributed.program.slots import SlotTable
from rayrec.distributed.steps.source_rows import SourceRows
from rayrec.distributed.ways.way import Step
from rayrec.dynamic.id_map import ABSENT
from rayrec.dynamic.key_blocks import first_rows
from rayrec.layout import Layout, TableLayout

Parts = list[list[Tensor]]  # by slot and source


class _Told(NamedTuple):
    """A slot whose rows its owner tells.

    Attributes:
        group, number: its group among those of its owner, and its number there.
        collection, use: numbers of its use.
        row_block: of a table with several; else None.
    """

    group: int
    number: int
    collection: int
    use: int
    row_block: int | None


class _Asked(NamedTuple):
    """A use of a collection with dynamic tables.

    Attributes:
        blocks: blocks of its table and the rows of each; None for a static table.
        cuts: row cuts of a table with several row blocks, or None.
    """

    feature: str
    blocks: tuple[int, int] | None
    cuts: Tensor | None


class OwnedRows:
    """Rows of one rank's batch, as the owners of dynamic tables know them.

    Args:
        slots: slots that every rank looks up.
        rank: this rank.
        groups: per rank, the groups whose tables are read in place.
        layouts: collection -> layouts of its tables.
    Attributes:
        collections: those with dynamic tables.
    """

    def __init__(
        self,
        slots: SlotTable,
        rank: int,
        groups: Sequence[Sequence[LookupGroup]],
        layouts: Mapping[int, Mapping[str, Layout]],
    ) -> None:
        self._layouts = layouts
        dynamic = [[group for group in of_rank if group.key.dynamic] for of_rank in groups]
        self._own, ranks = dynamic[rank], range(len(groups))
        self._tells = [self._told(dynamic[rank], source == rank) for source in ranks]
        self._hears = [self._told(dynamic[owner], owner == rank) for owner in ranks]
        found = {group.key.collection for of_rank in dynamic for group in of_rank}
        self.collections = tuple(sorted(found))
        self._asked = {c: self._asked_of(slots, c) for c in self.collections}

    def _told(self, groups: Sequence[LookupGroup], to_itself: bool) -> list[_Told]:
        """Return the slots of an owner whose rows it tells another rank, or itself: those of the
        first columns; of a replicated table every rank has its own.
        """
        told = []
        for i, group in enumerate(groups):
            for number, slot in enumerate(group.slots):
                layout, block = self._layout(slot.use), None
                is_cut = isinstance(layout, TableLayout)
                if slot.shard.cols.start or not (to_itself or is_cut):
                    continue
                if isinstance(layout, TableLayout) and layout.num_row_blocks > 1:
                    block = layout.row_block(slot.shard.rows.start)
                told.append(_Told(i, number, slot.use.collection, slot.use.index, block))
        return told

    def _layout(self, use: Use) -> Layout:
        return self._layouts[use.collection][use.table]

    def _asked_of(self, slots: SlotTable, collection: int) -> list[_Asked]:
        tables = {table.name: table for table in slots.collections[collection].tables}
        asked = []
        for use in slots.uses[collection]:
            table, layout = tables[use.table], self._layout(use)
            blocks, cuts = None, None
            if table.dynamic is not None:
                blocks = blocks_of(table)
                if isinstance(layout, TableLayout) and layout.num_row_blocks > 1:
                    cuts = torch.tensor(layout.row_cuts)
            asked.append(_Asked(use.feature, blocks, cuts))
        return asked

    def find(self, step: Step) -> tuple[dict[GroupKey, GroupIds], dict[int, list[Tensor]]]:
        """Give rows to the ids that this rank owns, and learn those of its batch.

        All ranks call it together.

        Returns:
            what this rank's kernels update; and collection -> per use (N,) rows of its table, for
            use before the ranks exchange anything else.
        """
        mapped, parts = dict(step.routed.groups), []
        for group in self._own:
            routed, ids = step.routed.groups[group.key], step.lookups[group.key].ids
            assert ids is not None, "the tables of the group are dynamic"
            rows, mapped[group.key] = ids.find(routed)
            parts.append(_parts(group, rows, routed.parts))
        send: list[Tensor] = []
        sent = []
        for source, told in enumerate(self._tells):
            mine = [parts[one.group][one.number][source] for one in told]
            sent.append(sum(part.numel() for part in mine))
            send += mine
        wanted = self._wanted(step.routed.source, step.send.keys)
        counts = [[wanted.count(one) for one in told] for told in self._hears]
        buffer = step.exchange.buffer(sum(sent), _NONE)
        message = torch.cat([*send, _NONE], out=buffer)
        got = step.exchange.views(message, sent, [sum(of_owner) for of_owner in counts]).wait()
        for rows, sizes, told in zip(got, counts, self._hears, strict=True):
            for part, one in zip(rows.split_with_sizes(sizes), told, strict=True):
                wanted.fill(one, part)
        return mapped, wanted.rows

    def _wanted(self, source: SourceRows, keys: Sequence[str]) -> _Wanted:
        where, bounds = {key: i for i, key in enumerate(keys)}, source.kjt_offsets
        wanted = _Wanted({}, {}, {})
        for collection, asked in self._asked.items():
            wanted.rows[collection] = found = []
            wanted.sizes[collection] = sizes = []
            for index, (feature, blocks, cuts) in enumerate(asked):
                key = where[feature]
                sizes.append(bounds[key + 1] - bounds[key])
                if blocks is not None and cuts is None:
                    found.append(_NONE)
                    continue
                ids = source.parts[0].ids[bounds[key] : bounds[key + 1]]
                if blocks is not None and cuts is not None:
                    of_ids = torch.bucketize(first_rows(ids, *blocks), cuts, right=True) - 1
                    for block in range(cuts.numel() - 1):
                        wanted.places[collection, index, block] = of_ids == block
                    ids = torch.full_like(ids, ABSENT)
                found.append(ids)
        return wanted


class _Wanted(NamedTuple):
    """The rows of one rank's batch, until all are filled in.

    Attributes:
        rows: collection -> per use (N,); static tables have them from the beginning.
        sizes: collection -> per use N.
        places: collection, use and row block -> (N,) which ids lie there, of tables with several.
    """

    rows: dict[int, list[Tensor]]
    sizes: dict[int, list[int]]
    places: dict[tuple[int, int, int | None], Tensor]

    def count(self, told: _Told) -> int:
        """Return how many rows an owner tells."""
        here = self.places.get((told.collection, told.use, told.row_block))
        return self.sizes[told.collection][told.use] if here is None else int(here.sum())

    def fill(self, told: _Told, rows: Tensor) -> None:
        """Take the rows that an owner has told."""
        here = self.places.get((told.collection, told.use, told.row_block))
        if here is None:
            self.rows[told.collection][told.use] = rows
        else:
            self.rows[told.collection][told.use][here] = rows


def _parts(group: LookupGroup, rows: Tensor, sizes: Sequence[int]) -> Parts:
    """Return rows of the table for the ids of every slot, source by source.

    Args:
        rows: (N,) of the shards, slot by slot.
        sizes: ids of every slot from every source.
    """
    flow, sources = rows.split_with_sizes(list(sizes)), len(sizes) // len(group.slots)
    found = [list(flow[i : i + sources]) for i in range(0, len(flow), sources)]
    for slot, of_slot in zip(group.slots, found, strict=True):
        first = slot.shard.rows.start
        if first:  # rows of the table, not of the shard
            of_slot[:] = [torch.where(part == ABSENT, ABSENT, part + first) for part in of_slot]
    return found


_NONE = torch.empty(0, dtype=torch.int64)
