"""Pooled rows: what leaves an owner, and how it is put together at home.

Every rank sends each other rank the rows of that rank's bags, all its slots side by side. At home a
slot of row block 0 is written to its output columns, and later blocks are added in block order, so
that the sum repeats bit for bit. Columns that are neighbours on both sides move as one copy.

The rows of a replicated table are taken from this rank's own look-up and cross no wire. Its
gradient goes to every replica in the same order everywhere, so that all make the same update.
"""

# B rows of the home batch, D columns of a collection

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.program.groups import GroupKey
from rayrec.distributed.program.slots import Sizes, SlotTable
from rayrec.distributed.steps.unpack import Arrived, pooled_ids
from rayrec.distributed.ways.compact import BlockPlan, Places, join_blocks
from rayrec.distributed.ways.message_part import MessagePart, Rows, stack
from rayrec.distributed.ways.spans import Buffers, HomeGrads, cut_spans, plan_join
from rayrec.distributed.ways.two_hop import TwoHop
from rayrec.distributed.ways.way import Step

# (owner, matrix) -> where its rows belong, where bags without ids stayed at home; the backward pass
# needs it again
_PlacesOf = Mapping[tuple[int, int], Places]


class Pooled(MessagePart):
    """The pooled rows of some collections; see the module.

    Args:
        hops: sums rows inside hosts first, where the plan has tables for that.
    """

    def __init__(
        self,
        slots: SlotTable,
        rank: int,
        device: torch.device,
        collections: Sequence[int],
        hops: TwoHop | None,
    ) -> None:
        self.collections = tuple(collections)
        widths = {c: slots.width_of(c) for c in collections}
        self.plan = plan_join(slots, rank, widths)
        self._slots, self._device = slots, device
        self._mine = self.plan.owners[rank]
        self._hops = hops if any(owner.hop.groups for owner in self.plan.owners) else None
        flat = [group for matrix in self._mine.flat for group in matrix.groups]
        self.groups = (*flat, *self._mine.hop.groups)
        self._block_plans: dict[tuple[str, ...], BlockPlan] = {}

    def unpack(self, got: Sequence[Sizes], arrived: Sequence[Arrived]) -> dict[GroupKey, GroupIds]:
        """Sort the ids of each matrix, with bags padded to its fullest piece."""
        ids = {}
        for matrix in (*self._mine.flat, self._mine.hop):
            # The pieces of a matrix are padded to the fullest, since their rows lie side by side.
            rows = [matrix.rows(sizes) for sizes in got]
            for group in matrix.groups:
                ids[group.key] = pooled_ids(group, rows, arrived)
        return ids

    # forward

    @cached_property
    def as_looked_up(self) -> tuple[GroupKey, ...] | None:
        """Per collection the kernel whose output is that of the collection, if all have one.

        It is so on a rank alone, where nothing is put together or sent.
        """
        keys = []
        for collection in self.collections:
            groups = [group for group in self.groups if group.key.collection == collection]
            spans = self.plan.writes[collection]
            if len(self.plan.owners) > 1 or len(groups) != 1 or len(spans) != 1 or spans[0].owner:
                return None
            if spans[0].width != groups[0].width:  # other row blocks are added
                return None
            keys.append(groups[0].key)
        return tuple(keys)

    def rows_out(self, owner: int, sizes: Sizes) -> int:
        """Return the number of values of an owner's matrices, but for replicas and hops."""
        return self.plan.owners[owner].rows_out(sizes)

    def whole(self, rows: Rows) -> Tensor | None:
        """Return the rows if one matrix has them all, in the order of the ranks; else None."""
        if len(self._mine.matrices) != 1:
            return None
        return _side_by_side([rows[group.key] for group in self._mine.matrices[0].groups]).view(-1)

    def pack(self, rows: Rows, got: Sequence[Sizes]) -> list[list[Tensor]]:
        """Cut the rows of each matrix by home rank."""
        messages: list[list[Tensor]] = [[] for _ in got]
        for matrix in self._mine.matrices:
            values = _side_by_side([rows[group.key] for group in matrix.groups])
            counts = [matrix.rows(sizes) for sizes in got]
            for message, part in zip(messages, values.split(counts), strict=True):
                message.append(part.view(-1))
        return messages

    def join(
        self, step: Step, received: Sequence[Tensor], rows: Rows
    ) -> tuple[dict[int, list[Tensor]], _PlacesOf]:
        """Sum row blocks and join column blocks, per collection."""
        home = self._arrive(step, received, rows)
        places = self._places(step)
        cut_collections = {place.columns.collection for place in places.values()}
        outputs = {}
        for collection in self.collections:
            if step.bags:
                outputs[collection] = self._join_varying(home, collection, step.bags)
            elif collection in cut_collections:
                filled = step.routed.source
                outputs[collection] = [join_blocks(self.plan, home, collection, places, filled)]
            else:
                outputs[collection] = [self._join(home, collection)]
        return outputs, places

    def _arrive(self, step: Step, received: Sequence[Tensor], rows: Rows) -> Buffers:
        """Sort what arrived, with this rank's own rows of replicated tables; see `Span`."""
        routed, rank = step.routed, self.plan.rank
        buffers: list[list[Tensor]] = []
        for owner, sizes, values in zip(self.plan.owners, routed.sent, received, strict=True):
            counts = [matrix.values(sizes) for matrix in owner.matrices]
            parts = zip(values.split(counts), owner.matrices, strict=True)
            buffers.append([part.view(m.rows(sizes), m.width) for part, m in parts])
        replicas = self._mine.replicas
        if replicas.groups:
            # A replica looks up the bags of all ranks, in rank order; only this rank's are used.
            before = sum(replicas.rows(sizes) for sizes in routed.got[:rank])
            own = slice(before, before + replicas.rows(routed.sent[rank]))
            buffers[rank].append(torch.cat([rows[g.key][own] for g in replicas.groups], 1))
        if self._hops is not None:
            of_hops = [rows[group.key] for group in self._mine.hop.groups]
            sums = self._hops.send_home(self.plan.owners, routed, of_hops, self._device)
            buffers += [[of_host] for of_host in sums]
        return buffers

    def _places(self, step: Step) -> dict[tuple[int, int], Places]:
        """Return where rows belong whose bags without ids stayed at home; empty if none did."""
        keys = step.send.keys
        if keys not in self._block_plans:
            plan = BlockPlan.of(self._slots, self.plan, step.send, self._device)
            self._block_plans[keys] = plan
        return self._block_plans[keys].places(step.routed)

    def _join(self, home: Buffers, collection: int) -> Tensor:
        """Return (B, D): row blocks summed and column blocks side by side, where all bags came."""
        plan = self.plan
        output = torch.cat([span.of(home) for span in plan.writes[collection]], 1)
        # Row block 0 is written by now. The order of `adds` fixes the order of every sum.
        for span in plan.adds:
            if span.collection == collection:
                output[:, span.column : span.column + span.width].add_(span.of(home))
        return output

    def _join_varying(
        self, home: Buffers, collection: int, bags: Mapping[str, int]
    ) -> list[Tensor]:
        """Return per use (bags, width), where keys have different numbers of bags."""
        plan, outputs = self.plan, []
        adds = [span for span in plan.adds if span.collection == collection]
        for use in self._slots.uses[collection]:
            count = bags[use.feature]
            cuts = cut_spans(plan.writes[collection], use)
            output = torch.cat([cut.of(home)[:count] for cut in cuts], 1)
            for cut in cut_spans(adds, use):
                first = cut.column - use.column
                output[:, first : first + cut.width].add_(cut.of(home)[:count])
            outputs.append(output)
        return outputs

    # backward

    def grads_out(self, owner: int, sizes: Sizes) -> tuple[int, int]:
        """Count the values of rows that one rank has, and of rows that all ranks have."""
        of_owner = self.plan.owners[owner]
        return of_owner.rows_out(sizes), of_owner.replicas.values(sizes)

    def lone_matrix(self, got: Sequence[Sizes]) -> tuple[list[int], int] | None:
        """Return the size of the gradients if one matrix without replicas holds them all."""
        # Replicas would be a second matrix behind the first one in every message.
        if len(self._mine.matrices) != 1 or self._mine.replicas.groups:
            return None
        matrix = self._mine.matrices[0]
        return [matrix.rows(sizes) for sizes in got], matrix.width

    def pack_back(
        self,
        step: Step,
        grads: Mapping[int, Sequence[Tensor]],
        buffers: Sequence[Tensor],
        scale: float,
        kept: _PlacesOf,
    ) -> None:
        """Write the gradients of each owner's matrices, then those of its replicas."""
        home = self._home_grads(step, grads, kept)
        for owner, (of_owner, sizes, buffer) in enumerate(
            zip(self.plan.owners, step.routed.sent, buffers, strict=True)
        ):
            parts = buffer.split([matrix.values(sizes) for matrix in of_owner.flat])
            for i, (matrix, part) in enumerate(zip(of_owner.flat, parts, strict=True)):
                if not part.numel():
                    continue
                into = part.view(-1, matrix.width)
                spans, place = self.plan.sends_back[owner][i], kept.get((owner, i))
                if place is not None:
                    place.take(home.whole[spans[0].collection], into, scale)
                else:
                    home.write(spans, into, scale)

    def _home_grads(
        self, step: Step, grads: Mapping[int, Sequence[Tensor]], kept: _PlacesOf
    ) -> HomeGrads:
        if step.bags:
            return HomeGrads({}, grads, self._slots.uses)
        # a look-up by index wants a gradient in one piece
        whole = {c: grad.contiguous() if kept else grad for c, (grad,) in grads.items()}
        return HomeGrads(whole, {}, self._slots.uses)

    def split(
        self, messages: Sequence[Tensor], got: Sequence[Sizes], scale: float, into: Tensor | None
    ) -> dict[GroupKey, Tensor]:
        """Stack the gradients of each matrix, and split them by kernel."""
        grads: dict[GroupKey, Tensor] = {}
        # [home rank][matrix]
        cut = [
            message.split([matrix.values(sizes) for matrix in self._mine.flat])
            for message, sizes in zip(messages, got, strict=True)
        ]
        for i, matrix in enumerate(self._mine.flat):
            if not matrix.groups:
                continue
            stacked = stack([of_rank[i] for of_rank in cut], matrix.width, scale, into)
            columns = stacked.split([group.width for group in matrix.groups], 1)
            grads.update((g.key, part) for g, part in zip(matrix.groups, columns, strict=True))
        return grads

    def hop_back(
        self, step: Step, grads: Mapping[int, Sequence[Tensor]], kept: _PlacesOf, scale: float
    ) -> dict[GroupKey, Tensor]:
        """Return the gradients of rows that are summed inside hosts, by their own exchanges.

        Args:
            grads: collection -> the gradients of its outputs.
        Returns:
            Per kernel (bags of all ranks, its width), times `scale`; nothing without such tables.
        """
        if self._hops is None:
            return {}
        home, like = self._home_grads(step, grads, kept), next(iter(grads.values()))[0]

        def fill(shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
            matrices = [like.new_empty(shape) for shape in shapes]
            for spans, matrix in zip(self.plan.hops_back, matrices, strict=True):
                if matrix.numel():
                    home.write(spans, matrix, 1.0)
            return matrices

        groups = self._mine.hop.groups
        summed = self._hops.send_back(self.plan.owners, step.routed, fill).mul_(scale)
        parts = summed.split([group.width for group in groups], 1)
        return {group.key: part for group, part in zip(groups, parts, strict=True)}


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), 1)
