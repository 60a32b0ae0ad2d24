"""Seconds of a training step: any layout is priced from its rectangles, with no branch per kind.

As owner, a rank pays for the ids it receives, the rows it reads and pools, the rows it sends, the
gradients it receives, and the fused update. As home of its own rows of the batch it pays for
packing ids and gradients for every owner and for joining what they return: a cost that all ranks
share alike, and that wide splits raise. The wire is priced on the owner's side: all owners together
send what all homes together receive, and homes are even, so the slowest owner is never faster than
a home. Where rows are read in place (`rayrec.distributed.shared.in_place`), a rank pays as owner
for ids and the update alone, and as home for looking up its own bags.

Each part of a step is counted first (`Amounts`: slots, items, bytes) and then priced by the
topology's constants, so that a calibration can fit the constants to measured parts. What a
pipelined trainer hides of the input part (`Topology.input_hidden`) is counted and not priced. Rows
of a host that are summed before they go home (`routes`) cross between hosts once. Leaves out: the
two more collectives of that route, the dense model. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from rayrec.layout.geometry import Layout, Replicated, Shard
from rayrec.layout.rates import PARTS, PartRates
from rayrec.layout.topology import Topology
from rayrec.planner.memory import shards_by_rank
from rayrec.planner.routes import summed_ranks
from rayrec.planner.work import (
    ID_BYTES,
    NO_TRAFFIC,
    ROW_ELEMENT_BYTES,
    TableWork,
    Traffic,
    returned_rows,
    shard_traffic,
)
from rayrec.spec.optimizers import optimizer_class

LINE_BYTES = 64  # memory moves in lines: a row of 16 bytes costs as much as one of 64
# per id in the backward: a radix sort reads and writes (id, bag) pairs a few times
SORT_BYTES = 8 * ID_BYTES
# bytes/s at which a GPU reads rows of its host's memory: PCIe 4.0 x16, less its protocol
HOST_LINK_BW = 20e9
# passes that rows cost at home which come without the other bags and are put in place one by one,
# where a copy is 2
PLACED = 6.0
COLLECTIVES, OF_INPUT = 4, 2  # headers, ids, rows, gradients


class Amounts(NamedTuple):
    """What one part of a step does on one rank, in the terms of `PartRates`.

    Attributes:
        stream: bytes read and written in order or from a cache. rows: bytes of distinct rows
            touched.
        near, far: bytes received from, or sent to, ranks of this host and of other hosts.
    """

    slots: float = 0.0
    home_slots: float = 0.0
    items: float = 0.0
    stream: float = 0.0
    rows: float = 0.0
    near: float = 0.0
    far: float = 0.0


class StepAmounts(NamedTuple):
    """Of all parts, in the order of `PARTS`."""

    input: Amounts = Amounts()
    lookup: Amounts = Amounts()
    output: Amounts = Amounts()
    gradient: Amounts = Amounts()
    update: Amounts = Amounts()

    def plus(self, other: StepAmounts) -> StepAmounts:
        """Both together."""
        return StepAmounts(
            *(Amounts(*map(sum, zip(a, b, strict=True))) for a, b in zip(self, other, strict=True))
        )


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step on one rank, by part; adds up over tables."""

    input_s: float = 0.0
    lookup_s: float = 0.0
    output_s: float = 0.0
    gradient_s: float = 0.0
    update_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All parts together."""
        return (
            self.input_s
            + self.lookup_s
            + self.output_s
            + self.gradient_s
            + self.update_s
            + self.overhead_s
        )

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


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
        """What owning `shards` of one table asks of `rank`.

        Args:
            summed: ranks of this host that sum their rows before these go home, see `routes`.
            replicated: every rank holds these shards: all see all ids and make all updates, and no
                rows travel.
        """
        topology, world = self.topology, work.world_size
        near = len(topology.hosts[topology.host_of[rank]]) - 1
        far = world - 1 - near
        there, back = work.wire
        # pooled rows are copied for the wire; gradients scaled in place
        rows_near, rows_far, copies, gradient_copies = near, far, 2.0, 2.0
        near_sizes = there.size, back.size
        if summed > 1:
            hosts = world // summed
            # and summed; handed on in the host
            rows_near, rows_far, copies, gradient_copies = hosts * (summed - 1), hosts - 1, 4.0, 5.0
            near_sizes = 1.0, 1.0  # only what goes from host to host is coded
        copies = 0.0 if replicated else copies + there.passes / summed
        gradient_copies += back.passes / summed
        traffic = shard_traffic(work, shards, summed)
        optimizer = optimizer_class(self.sparse_optimizer)
        # a byte from the host's memory, in bytes of the device's; missed rows come into the cache,
        # and others leave for them
        link = topology.memory_bw / HOST_LINK_BW
        row_cost = link if work.off_device and not work.cached else 1.0
        # states per row stay on the device
        state_cost = link if work.off_device and optimizer.has_element_state() else 1.0
        fetched = 2 * work.missed * link
        slots = len(shards) * work.features
        all_ids = values = read = touched = updated = gradients = 0.0
        for shard in shards:
            rows, width = len(shard.rows), len(shard.cols)
            ids = world * work.ids * rows / work.rows
            row_line = _lines(width * work.element_bytes)
            distinct = work.distinct * rows / work.rows
            all_ids += ids
            values += world * returned_rows(work, shard, summed) * width * ROW_ELEMENT_BYTES
            read += (ids * row_cost + distinct * fetched) * row_line
            touched += distinct * row_line
            gradients += ids * _lines(width * ROW_ELEMENT_BYTES)
            updated += (
                2
                * distinct
                * (row_line * row_cost + _lines(optimizer.state_bytes(width)) * state_cost)
            )
        out, into = 0.0 if replicated else traffic.row_bytes, traffic.row_bytes
        pieces = len({shard.rows for shard in shards}) * work.features * world
        ids_in = Amounts(
            pieces,
            stream=2.0 * world * traffic.id_bytes,
            near=near * traffic.id_bytes,
            far=far * traffic.id_bytes,
        )
        if work.in_place:
            return StepAmounts(
                ids_in,
                update=Amounts(
                    slots, items=all_ids, stream=all_ids * SORT_BYTES + gradients, rows=updated
                ),
            )
        return StepAmounts(
            ids_in,
            Amounts(slots, items=all_ids, stream=all_ids * ID_BYTES + read + values, rows=touched),
            Amounts(
                slots,
                stream=copies * values,
                near=rows_near * out * near_sizes[0],
                far=rows_far * out * there.size,
            ),
            Amounts(
                slots,
                stream=gradient_copies * values,
                near=rows_near * into * near_sizes[1],
                far=rows_far * into * back.size,
            ),
            Amounts(slots, items=all_ids, stream=all_ids * SORT_BYTES + gradients, rows=updated),
        )

    def home_amounts(
        self,
        work: TableWork,
        total: Traffic,
        slots: int,
        replicated: bool = False,
        summed: int = 1,
        blocks: int = 1,
    ) -> StepAmounts:
        """What one table asks of EVERY rank, as home of its batch.

        Args:
            total: with all owners together. slots: rectangles, of all owners. blocks: row blocks.
        """
        sorted_items = (
            work.ids + work.bags * blocks
            if blocks > 1 and (work.pooled or not work.in_place)
            else 0.0
        )
        pieces = slots * work.features
        if work.in_place:
            return self._read_in_place(
                work, total, 1 if replicated else slots // blocks, pieces, sorted_items
            )
        arriving = total.row_bytes / (work.world_size if replicated else summed)
        decoding, encoding = (
            0.0 if replicated else work.wire.forward.passes,
            work.wire.backward.passes,
        )
        every_bag = work.bags * work.dim * ROW_ELEMENT_BYTES * blocks
        passes = (
            PLACED
            if work.pooled and blocks > 1 and total.row_bytes < every_bag * (1 - 1e-9)
            else 2.0
        )
        return StepAmounts(
            Amounts(home_slots=pieces, items=sorted_items, stream=2 * total.id_bytes),
            Amounts(),
            Amounts(
                home_slots=pieces,
                items=work.bags * (1 if replicated else slots),
                stream=(passes + decoding) * arriving,
            ),
            Amounts(
                home_slots=pieces,
                items=work.bags * slots,
                stream=(passes + encoding) * total.row_bytes / summed,
            ),
            Amounts(),
        )

    def _read_in_place(
        self, work: TableWork, total: Traffic, column_blocks: int, pieces: int, sorted_items: float
    ) -> StepAmounts:
        """Each rank looks up its own bags, and writes the gradient of its output once."""
        ids, output = (
            work.ids * column_blocks,
            (work.bags if work.pooled else work.ids) * work.dim * ROW_ELEMENT_BYTES,
        )
        read = ids * _lines(-(-work.dim // column_blocks) * work.element_bytes)
        touched = work.distinct_at_home * _lines(work.dim * work.element_bytes)
        return StepAmounts(
            Amounts(home_slots=pieces, items=sorted_items, stream=2 * total.id_bytes),
            Amounts(
                column_blocks * work.features,
                items=ids,
                stream=ids * ID_BYTES + read + output,
                rows=touched,
            ),
            Amounts(),
            Amounts(stream=2.0 * output),
            Amounts(),
        )

    def seconds(self, amounts: StepAmounts) -> StepCost:
        """Amounts times the topology's constants, without what is paid once a step."""
        return self._shown(
            StepCost(
                *(
                    self._seconds(getattr(self.topology.rates, part), a)
                    for part, a in zip(PARTS, amounts, strict=True)
                )
            )
        )

    def _shown(self, cost: StepCost) -> StepCost:
        """Without what a pipelined trainer hides."""
        hidden = self.topology.input_hidden
        return replace(cost, input_s=cost.input_s * (1 - hidden)) if hidden else cost

    def _seconds(self, rates: PartRates, amounts: Amounts) -> float:
        slots, home_slots, items, stream, rows, near, far = amounts
        topology = self.topology
        counted = slots * rates.slot_s + home_slots * rates.home_slot_s + items * rates.item_s
        moved = (stream * rates.stream + rows * rates.rows) / topology.memory_bw
        return counted + moved + near / topology.intra_host_bw + far / topology.inter_host_bw

    def owner_cost(
        self,
        work: TableWork,
        shards: Sequence[Shard],
        rank: int,
        replicated: bool = False,
        summed: int = 1,
    ) -> StepCost:
        """Price of `owner_amounts`."""
        return self.seconds(self.owner_amounts(work, shards, rank, replicated, summed))

    def home_cost(
        self,
        work: TableWork,
        total: Traffic,
        slots: int,
        replicated: bool = False,
        summed: int = 1,
        blocks: int = 1,
    ) -> StepCost:
        """Price of `home_amounts`."""
        return self.seconds(self.home_amounts(work, total, slots, replicated, summed, blocks))

    def layout_home_amounts(self, work: TableWork, layout: Layout) -> StepAmounts:
        """`home_amounts` of a real layout."""
        by_rank = shards_by_rank(layout)
        summed = self.summed(work, layout)
        total = sum(
            (shard_traffic(work, shards, summed) for shards in by_rank.values()), NO_TRAFFIC
        )
        replicated = isinstance(layout, Replicated)
        blocks = 1 if isinstance(layout, Replicated) else layout.num_row_blocks
        return self.home_amounts(
            work, total, sum(map(len, by_rank.values())), replicated, summed, blocks
        )

    def layout_home_cost(self, work: TableWork, layout: Layout) -> StepCost:
        """`home_cost` of a real layout."""
        return self.seconds(self.layout_home_amounts(work, layout))

    def summed(self, work: TableWork, layout: Layout) -> int:
        """Ranks of a host that sum the rows of this layout before they go home."""
        return summed_ranks(layout, self.topology.hosts) if work.pooled else 1

    def amounts(self, work: TableWork, layout: Layout) -> dict[int, StepAmounts]:
        """What a layout asks of each rank that owns a part of it, as owner."""
        replicated, summed = isinstance(layout, Replicated), self.summed(work, layout)
        known: dict[tuple[object, ...], StepAmounts] = {}  # most pieces are alike
        found = {}
        for rank, shards in shards_by_rank(layout).items():
            near = len(self.topology.hosts[self.topology.host_of[rank]])
            key = (near, len({shard.rows for shard in shards}), *(shard.shape for shard in shards))
            if key not in known:
                known[key] = self.owner_amounts(work, shards, rank, replicated, summed)
            found[rank] = known[key]
        return found

    def price(self, work: TableWork, layout: Layout) -> dict[int, StepCost]:
        """Price of a layout on each rank that owns a part of it, as owner."""
        return {rank: self.seconds(amounts) for rank, amounts in self.amounts(work, layout).items()}

    def fixed_cost(self) -> StepCost:
        """What every rank pays once a step: the fixed time of every part, and the latency of the
        collectives.
        """
        rates = self.topology.rates
        waited = COLLECTIVES - OF_INPUT * self.topology.input_hidden
        latency = waited * self.topology.latency_s if self.topology.world_size > 1 else 0.0
        return self._shown(StepCost(*(getattr(rates, part).fixed_s for part in PARTS))) + StepCost(
            overhead_s=rates.step_s + latency
        )
