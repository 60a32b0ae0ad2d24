"""The messages of one step: rows go from their owners to every rank, and gradients go back.

A message holds the pooled rows of all collections, then their sequences; rows that are summed
inside hosts first have two exchanges of their own. Gradients go back the same way. They arrive
summed over ranks, while dense gradients are averaged by DDP: the one division by the number of
ranks is in `reverse`, and `weights` takes it back, since weights belong to the dense part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayrec.comm.codec import Codec, Codecs, Sections, coded_all_to_all
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.program.groups import GroupKey
from rayrec.distributed.program.slots import Sizes, SlotTable, by_collection
from rayrec.distributed.steps.unpack import Arrived
from rayrec.distributed.ways.message_part import MessagePart
from rayrec.distributed.ways.pooled import Pooled
from rayrec.distributed.ways.sequences import Sequences
from rayrec.distributed.ways.way import Joined, Leg, Step
from rayrec.distributed.ways.weights import RouteWeights
from rayrec.observe.timer import span


class MessageLeg(Leg):
    """The messages of one step.

    Attributes:
        groups: groups that this rank looks up.
        weighted: the groups among them whose ids have weights.
        weighted_pieces: per owner, the pieces with weights that such groups read.
    """

    def __init__(
        self,
        slots: SlotTable,
        rank: int,
        collections: Sequence[int],
        pooled: Pooled | None,
        sequence: Sequences | None,
        codecs: Codecs,
    ) -> None:
        self.collections = tuple(collections)
        self.pooled, self._rank, self._slots, self._codecs = pooled, rank, slots, codecs
        self._parts: list[MessagePart] = [part for part in (pooled, sequence) if part is not None]
        keys = {group.key for part in self._parts for group in part.groups}
        self.groups = tuple(group for group in slots.ranks[rank].groups if group.key in keys)
        self.weighted = tuple(group for group in self.groups if group.key.weighted)
        self.weighted_pieces = tuple(
            self._weighted_pieces(owner) for owner in range(len(slots.ranks))
        )

    def _weighted_pieces(self, owner: int) -> frozenset[int]:
        # Unweighted groups may read the same piece, but want no gradient of its weights.
        pieces: set[int] = set()
        for group in self._slots.ranks[owner].groups:
            if group.key.collection in self.collections and group.key.weighted:
                pieces.update(slot.piece for slot in group.slots)
        return frozenset(pieces)

    def unpack(
        self, got: Sequence[Sizes], arrived: Sequence[Arrived]
    ) -> Mapping[GroupKey, GroupIds]:
        """Sort the ids that arrived, for the kernels of both parts."""
        ids: dict[GroupKey, GroupIds] = {}
        for part in self._parts:
            ids.update(part.unpack(got, arrived))
        return ids

    def run(self, step: Step) -> tuple[Tensor, ...]:
        """Let each kernel look up its rows, then send them home."""
        anchor, ids = step.anchor, dict(step.routed.groups)
        if step.weights is not None:
            # Learned weights join the graph here, as the kernels' backward gives their gradient.
            anchor, *of_groups = RouteWeights.apply(self, step, step.weights)
            for group, weights in zip(self.weighted, of_groups, strict=True):
                ids[group.key] = replace(ids[group.key], weights=weights)
        with span(step.timer, "lookup"):
            rows = [step.look_up(group.key, ids[group.key]) for group in self.groups]
        if step.timer is not None:
            for made in rows:
                step.timer.follow("update", made)
        if self._as_looked_up is not None and not step.bags:
            by_key = {group.key: made for group, made in zip(self.groups, rows, strict=True)}
            return tuple(by_key[key] for key in self._as_looked_up)
        with span(step.timer, "output"):
            outputs = Joined.apply(self, step, anchor, *rows)
        if step.timer is not None:
            step.timer.follow("gradient", outputs[0])
        return outputs

    @property
    def _as_looked_up(self) -> tuple[GroupKey, ...] | None:
        """The kernels whose outputs are those of the collections; None where rows are joined."""
        return self.pooled.as_looked_up if self.pooled and len(self._parts) == 1 else None

    def join(self, step: Step, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Send rows home and join them there; `inputs` are the rows that the kernels found."""
        sent, got, parts = step.routed.sent, step.routed.got, self._parts
        rows = {group.key: r for group, r in zip(self.groups, inputs, strict=True)}
        own = self._apart(step, self._codecs.forward)
        flat, kept_message = self._pack(step, rows, own)
        # values of each part in the message to and from every rank
        out, into = [], []
        for rank in range(len(got)):
            out.append([part.rows_out(self._rank, got[rank]) for part in parts])
            into.append([part.rows_out(rank, sent[rank]) for part in parts])
        messages = self._swap(
            step,
            self._codecs.forward,
            flat,
            kept_message,
            [[sum(sizes)] for sizes in out],
            [[sum(sizes)] for sizes in into],
        )
        outputs: dict[int, list[Tensor]] = {}
        kept = []
        of_parts = [message.split(sizes) for message, sizes in zip(messages, into, strict=True)]
        for i, part in enumerate(parts):
            joined, remembered = part.join(step, [message[i] for message in of_parts], rows)
            outputs.update(joined)
            kept.append(remembered)
        return [output for c in self.collections for output in outputs[c]], kept

    def reverse(self, step: Step, grads: Sequence[Tensor], kept: Sequence[Any]) -> list[Tensor]:
        """Send the gradients of the outputs to the owners of their rows."""
        sent, got, parts = step.routed.sent, step.routed.got, self._parts
        of_outputs = by_collection(grads, self._slots.outputs(self.collections, bool(step.bags)))
        of_parts = [{c: of_outputs[c] for c in part.collections} for part in parts]
        codec, scale = self._codecs.backward, 1.0 / len(got)
        # gradients are scaled before the wire, unless a codec would lose bits there
        early = scale if codec is None else 1.0
        # per rank the sections of all parts
        out, into = [], []
        for rank in range(len(got)):
            out.append([part.grads_out(rank, sent[rank]) for part in parts])
            into.append([part.grads_out(self._rank, got[rank]) for part in parts])
        own = self._apart(step, codec)
        sizes_out = [0 if rank == own else _total(sections) for rank, sections in enumerate(out)]
        flat = step.exchange.buffer(sum(sizes_out), grads[0])
        buffers = list(flat.split(sizes_out))
        matrix = message = None
        if own is not None:
            matrix, message = self._own_message(got, grads[0], _total(out[own]), own)
            buffers[own] = message
        # [owner][part], flat views of the buffers; the parts write to them directly
        cut = [
            buffer.split([sum(sections) for sections in of_rank])
            for buffer, of_rank in zip(buffers, out, strict=True)
        ]
        for i, part in enumerate(parts):
            into_ranks = [buffer[i] for buffer in cut]
            part.pack_back(step, of_parts[i], into_ranks, early, kept[i])
        messages = self._swap(step, codec, flat, message, _joined(out), _joined(into))
        back: dict[GroupKey, Tensor] = {}
        for i, part in enumerate(parts):
            mine = []
            for values, of_rank in zip(messages, into, strict=True):
                mine.append(values.split([sum(sections) for sections in of_rank])[i])
            # Decoded gradients are scaled here, if they were not scaled before the wire.
            back.update(part.split(mine, got, scale / early, matrix))
        if self.pooled is not None:
            back.update(self.pooled.hop_back(step, of_parts[0], kept[0], scale))
        return [back[group.key] for group in self.groups]

    def _apart(self, step: Step, codec: Codec | None) -> int | None:
        """Return this rank, where its message to itself stays out of the exchange.

        A codec must see it, so that all replicas get equal values.
        """
        return self._rank if codec is None and step.exchange.keeps_own else None

    def _pack(
        self, step: Step, rows: Mapping[GroupKey, Tensor], own: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the messages to all ranks, flat and in rank order, and the one that is kept apart.

        Rows that make one message in one piece already are sent without a copy.

        Args:
            rows: the output of every kernel of this rank.
            own: this rank, if its message to itself is kept apart.
        """
        got = step.routed.got
        packing = [part for part in self._parts if part.groups]
        if own is None and len(packing) == 1:
            whole = packing[0].whole(rows)
            if whole is not None:
                return whole, None
        messages: list[list[Tensor]] = [[] for _ in got]
        for part in packing:
            for message, values in zip(messages, part.pack(rows, got), strict=True):
                message.extend(values)
        kept = None if own is None else messages.pop(own)
        flat = [values for message in messages for values in message]
        # a rank without rows sends from where the others do
        like = next(iter(rows.values()), step.anchor.detach())
        send = step.exchange.buffer(sum(values.numel() for values in flat), like)
        if flat:
            torch.cat(flat, out=send)
        if kept is None:
            return send, None
        if len(kept) == 1:
            return send, kept[0]
        return send, torch.cat(kept) if kept else like.new_empty(0)

    def _own_message(
        self, got: Sequence[Sizes], like: Tensor, values: int, own: int
    ) -> tuple[Tensor | None, Tensor]:
        """Return where this rank's gradients for its own rows are written.

        Args:
            like: a tensor of the wanted type and device.
            values: the length of the message.
            own: this rank.
        Returns:
            The matrix of the gradients of all ranks, if they make one, and the message, flat. The
            message is then a view of its rows in the matrix, and need not be copied there later.
        """
        with_groups = [part for part in self._parts if part.groups]
        lone = with_groups[0].lone_matrix(got) if len(with_groups) == 1 else None
        if lone is None:
            return None, like.new_empty(values)
        rows, width = lone
        matrix = like.new_empty(sum(rows), width)
        before = sum(rows[:own])
        return matrix, matrix[before : before + rows[own]].view(-1)

    def _swap(
        self,
        step: Step,
        codec: Codec | None,
        send: Tensor,
        kept: Tensor | None,
        out: Sections,
        into: Sections,
    ) -> list[Tensor]:
        """Return what arrived from every rank, flat, with the message that was kept in its place.

        Args:
            send: the messages to all ranks, one after the other, without the one that was kept.
            kept: this rank's message to itself, or None if it travels like the others.
            out, into: per rank, the values of each section of the messages.
        """
        if kept is None:
            return coded_all_to_all(step.exchange, codec, send, out, into)
        splits_out = [sum(sections) for sections in out]
        splits_in = [sum(sections) for sections in into]
        splits_out[self._rank] = splits_in[self._rank] = 0
        received = step.exchange.views(send, splits_out, splits_in).wait()
        received[self._rank] = kept
        return received


def _total(of_parts: Sequence[Sequence[int]]) -> int:
    return sum(sum(sections) for sections in of_parts)


def _joined(of_ranks: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return per rank the sections of all parts in one list."""
    return [[size for sections in of_parts for size in sections] for of_parts in of_ranks]
