"""Seconds of a training step: any layout is priced from its rectangles, with no branch per kind.

As owner, a rank pays for the ids it receives, the rows it reads and pools, the rows it sends, the
gradients it receives, and the fused update. As home of its own rows of the batch it pays for
packing ids and gradients for every owner and for joining what they return: a cost that all ranks
share alike, and that wide splits raise. The wire is priced on the owner's side: all owners together
send what all homes together receive, and homes are even, so the slowest owner is never faster than
a home. Where rows are read in place (`rayrec.distributed.ways.in_place`), a rank pays as owner
for ids and the update alone, and as home for looking up its own bags.

Each part of a step is counted first (`Amounts`: slots, items, bytes) and then priced by the
topology's constants, so that a calibration can fit the constants to measured parts. What a
pipelined trainer hides of the input part (`Topology.input_hidden`) is counted and not priced. Rows
of a host that are summed before they go home (`summed_ranks`) cross between hosts once. Leaves out:
the two more collectives of that route, the dense model. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rayrec.layout.geometry import Layout, Replicated, Shard
from rayrec.layout.rates import PARTS, PartRates
from rayrec.layout.topology import Topology
from rayrec.planner.amounts import Amounts, StepAmounts, StepCost
from rayrec.planner.work import (
    ID_BYTES,
    ROW_ELEMENT_BYTES,
    TableWork,
    Traffic,
    layout_traffic,
    returned_rows,
    row_blocks,
    shard_traffic,
    shards_by_rank,
    summed_ranks,
)
from rayrec.spec.optimizers import optimizer_class

LINE_BYTES = 64  # memory moves in lines: a row of 16 bytes costs as much as one of 64
# per id in the backward: a radix sort reads and writes (id, bag) pairs a few times
SORT_BYTES = 8 * ID_BYTES
# bytes/s at which a GPU reads rows of its host's memory: PCIe 4.0 x16, less its protocol
HOST_LINK_BW = 20e9
# Passes over rows that arrive without the bags that have no ids: they are put in place one by one,
# where a copy takes 2.
PLACED = 6.0
# bytes at random places that an owner reads and writes to give an id of a dynamic table its row: 34
# ns an id were measured at 12 GB/s
MAPPED_BYTES = 400
COLLECTIVES, OF_INPUT = 4, 2  # headers, ids, rows, gradients; the first two are the input part


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


class _Rows(NamedTuple):
    """Memory traffic of one rank in a step, for the shards that it owns.

    Attributes:
        ids: number of ids looked up, of all ranks.
        values: bytes of the rows that are returned. read: bytes of all rows looked up.
        touched: bytes of the different rows among them.
        gradients: bytes of row gradients. updated: bytes of rows and state read and written.
    """

    ids: float
    values: float
    read: float
    touched: float
    gradients: float
    updated: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices for one topology and sparse optimizer."""

    topology: Topology
    sparse_optimizer: str = "rowwise_adagrad"

    def owner_amounts(
        self,
        work: TableWork,
        shards: Sequence[Shard],
        rank: int,
        replicated: bool = False,
        summed: int = 1,
    ) -> StepAmounts:
        """Return the work of `rank` in a step as owner of `shards` of one table.

        Args:
            replicated: every rank holds these shards: all see all ids and make all updates, and no
                rows travel.
            summed: ranks of this host that sum their rows before these go home; see `summed_ranks`.
        """
        world = work.world_size
        near = len(self.topology.hosts[self.topology.host_of[rank]]) - 1
        far = world - 1 - near
        traffic = shard_traffic(work, shards, summed)
        rows = self._owned_rows(work, shards, summed)
        slots = len(shards) * work.features
        pieces = len({shard.rows for shard in shards}) * work.features * world
        # Headers, lengths and ids of all ranks arrive and are grouped by slot: two passes.
        sent = traffic.id_bytes
        mapped = rows.ids * MAPPED_BYTES if work.id_bytes else 0.0
        stream = 2.0 * world * sent
        ids_in = Amounts(pieces, stream=stream, rows=mapped, near=near * sent, far=far * sent)
        # The backward sorts ids, sums gradients of equal ones, and updates each row once.
        sorting = rows.ids * SORT_BYTES + rows.gradients
        update = Amounts(slots, items=rows.ids, stream=sorting, rows=rows.updated)
        if work.in_place:
            return StepAmounts(ids_in, update=update)
        there, back = work.wire
        # Pooled rows are copied for the wire, 2 passes; gradients are scaled in place.
        copies, gradient_copies, near_sizes = 2.0, 2.0, (there.size, back.size)
        if summed > 1:
            # Rows are summed as well, and gradients handed on inside the host; only what goes from
            # host to host is coded.
            near, far = world // summed * (summed - 1), world // summed - 1
            copies, gradient_copies, near_sizes = 4.0, 5.0, (1.0, 1.0)
        copies = 0.0 if replicated else copies + there.passes / summed
        gradient_copies += back.passes / summed
        out, into = 0.0 if replicated else traffic.row_bytes, traffic.row_bytes
        # Ids and rows are read, pooled rows written.
        pooling = rows.ids * ID_BYTES + rows.read + rows.values
        lookup = Amounts(slots, items=rows.ids, stream=pooling, rows=rows.touched)
        output = Amounts(
            slots,
            stream=copies * rows.values,
            near=near * out * near_sizes[0],
            far=far * out * there.size,
        )
        gradient = Amounts(
            slots,
            stream=gradient_copies * rows.values,
            near=near * into * near_sizes[1],
            far=far * into * back.size,
        )
        return StepAmounts(ids_in, lookup, output, gradient, update)

    def _owned_rows(self, work: TableWork, shards: Sequence[Shard], summed: int) -> _Rows:
        optimizer = optimizer_class(work.optimizer or self.sparse_optimizer)
        # A byte of the host's memory costs as many of the device's. Rows that a cache misses come
        # into it, and others leave for them; states per row stay on the device.
        link = self.topology.memory_bw / HOST_LINK_BW
        row_cost = link if work.off_device and not work.cached else 1.0
        state_cost = link if work.off_device and optimizer.has_element_state() else 1.0
        fetched = 2 * work.missed * link
        world = work.world_size
        all_ids = values = read = touched = gradients = updated = 0.0
        for shard in shards:
            rows, width = len(shard.rows), len(shard.cols)
            # A block of rows has its share of the ids, and of the different ones among them.
            ids = world * work.ids * rows / work.rows
            distinct = work.distinct * rows / work.rows
            row_line = _lines(width * work.element_bytes)
            state_line = _lines(optimizer.state_bytes(width))
            all_ids += ids
            values += world * returned_rows(work, shard, summed) * width * ROW_ELEMENT_BYTES
            read += (ids * row_cost + distinct * fetched) * row_line
            touched += distinct * row_line
            gradients += ids * _lines(width * ROW_ELEMENT_BYTES)
            # An update reads and writes each distinct row and its state once.
            updated += 2 * distinct * (row_line * row_cost + state_line * state_cost)
        return _Rows(all_ids, values, read, touched, gradients, updated)

    def home_amounts(
        self,
        work: TableWork,
        total: Traffic,
        slots: int,
        replicated: bool = False,
        summed: int = 1,
        blocks: int = 1,
    ) -> StepAmounts:
        """Return the work that one table gives EVERY rank, as home of its batch.

        Args:
            total: traffic with all owners. slots: rectangles, of all owners. blocks: row blocks.
        """
        bucketized = blocks > 1 and (work.pooled or not work.in_place)
        sorted_items = work.ids + work.bags * blocks if bucketized else 0.0
        pieces = slots * work.features
        ids_out = Amounts(home_slots=pieces, items=sorted_items, stream=2 * total.id_bytes)
        if work.in_place:
            return self._read_in_place(work, ids_out, 1 if replicated else slots // blocks)
        # Of a replicated table only the rows of its own copy arrive; of ranks that sum, one sum.
        arriving = total.row_bytes / (work.world_size if replicated else summed)
        decoding = 0.0 if replicated else work.wire.forward.passes
        every_bag = work.bags * work.dim * ROW_ELEMENT_BYTES * blocks
        some_bags = work.pooled and blocks > 1 and total.row_bytes < every_bag * (1 - 1e-9)
        passes = PLACED if some_bags else 2.0
        return StepAmounts(
            ids_out,
            Amounts(),
            Amounts(
                home_slots=pieces,
                items=work.bags * (1 if replicated else slots),
                stream=(passes + decoding) * arriving,
            ),
            Amounts(
                home_slots=pieces,
                items=work.bags * slots,
                stream=(passes + work.wire.backward.passes) * total.row_bytes / summed,
            ),
            Amounts(),
        )

    def _read_in_place(self, work: TableWork, ids_out: Amounts, column_blocks: int) -> StepAmounts:
        """Each rank looks up its own bags, and writes the gradient of its output once.

        Args:
            ids_out: work of a home to hand its ids to their owners.
            column_blocks: column blocks of the table; each holds a slot for every feature.
        """
        ids = work.ids * column_blocks
        # A split by columns reads every id once per block; rows are read at their own width.
        output = (work.bags if work.pooled else work.ids) * work.dim * ROW_ELEMENT_BYTES
        read = ids * _lines(-(-work.dim // column_blocks) * work.element_bytes)
        touched = work.distinct_at_home * _lines(work.dim * work.element_bytes)
        pooling = ids * ID_BYTES + read + output
        lookup = Amounts(column_blocks * work.features, items=ids, stream=pooling, rows=touched)
        # The output's gradient is read, and written once for all ranks to read.
        return StepAmounts(ids_out, lookup, gradient=Amounts(stream=2.0 * output))

    def seconds(self, amounts: StepAmounts) -> StepCost:
        """Amounts times the topology's constants, without what is paid once a step."""
        rates = self.topology.rates
        parts = zip(PARTS, amounts, strict=True)
        return self._shown(StepCost(*(self._seconds(getattr(rates, name), a) for name, a in parts)))

    def _shown(self, cost: StepCost) -> StepCost:
        """Return a cost without the share of the input that a pipelined trainer hides."""
        hidden = self.topology.input_hidden
        return replace(cost, input_s=cost.input_s * (1 - hidden)) if hidden else cost

    def _seconds(self, rates: PartRates, amounts: Amounts) -> float:
        slots, home_slots, items, stream, rows, near, far = amounts
        topology = self.topology
        # fixed work + bytes through memory + bytes over each link; parts of a step do not overlap
        counted = slots * rates.slot_s + home_slots * rates.home_slot_s + items * rates.item_s
        moved = (stream * rates.stream + rows * rates.rows) / topology.memory_bw
        return counted + moved + near / topology.intra_host_bw + far / topology.inter_host_bw

    def layout_home_amounts(self, work: TableWork, layout: Layout) -> StepAmounts:
        """`home_amounts` of a real layout."""
        summed = self.summed(work, layout)
        slots = len(layout.shards(""))
        total = layout_traffic(work, shards_by_rank(layout), summed)
        replicated = isinstance(layout, Replicated)
        return self.home_amounts(work, total, slots, replicated, summed, row_blocks(layout))

    def layout_home_cost(self, work: TableWork, layout: Layout) -> StepCost:
        """Price of `home_amounts` of a real layout."""
        return self.seconds(self.layout_home_amounts(work, layout))

    def summed(self, work: TableWork, layout: Layout) -> int:
        """Ranks of a host that sum the rows of this layout before they go home."""
        return summed_ranks(layout, self.topology.hosts) if work.pooled else 1

    def amounts(self, work: TableWork, layout: Layout) -> dict[int, StepAmounts]:
        """Return the work of each rank that owns a part of a layout, as owner."""
        replicated, summed = isinstance(layout, Replicated), self.summed(work, layout)
        known: dict[tuple[object, ...], StepAmounts] = {}  # most pieces are alike
        by_rank = {}
        for rank, shards in shards_by_rank(layout).items():
            near = len(self.topology.hosts[self.topology.host_of[rank]])
            # What a piece costs depends on its shape, on how many row blocks the rank has, and on
            # the size of its host.
            key = (near, len({shard.rows for shard in shards}), *(shard.shape for shard in shards))
            if key not in known:
                known[key] = self.owner_amounts(work, shards, rank, replicated, summed)
            by_rank[rank] = known[key]
        return by_rank

    def price(self, work: TableWork, layout: Layout) -> dict[int, StepCost]:
        """Price of a layout on each rank that owns a part of it, as owner."""
        return {rank: self.seconds(amounts) for rank, amounts in self.amounts(work, layout).items()}

    def fixed_cost(self) -> StepCost:
        """The fixed time of every part and the latency of the collectives, once a step."""
        rates = self.topology.rates
        # A hidden input part hides its collectives' latency as well.
        waited = COLLECTIVES - OF_INPUT * self.topology.input_hidden
        latency = waited * self.topology.latency_s if self.topology.world_size > 1 else 0.0
        parts = self._shown(StepCost(*(getattr(rates, part).fixed_s for part in PARTS)))
        return parts + StepCost(overhead_s=rates.step_s + latency)
