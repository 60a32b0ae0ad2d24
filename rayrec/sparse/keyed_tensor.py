"""`KeyedTensor`: dense tensors of different widths side by side, each found by its key.

What an EmbeddingBagCollection returns: (B, sum of widths). Views and regrouping cost nothing or one
copy; a group whose keys lie side by side in one tensor is a view. Names, argument order and meaning
are TorchRec's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor

from rayrec.errors import InputError, ShapeError
from rayrec.sparse import ops
from rayrec.sparse.jagged import describe
from rayrec.sparse.key_index import UnknownKeyError


class KeyedTensor:
    """Dense tensors by key.

    Args:
        keys: F names.
        length_per_key: F widths along `key_dim`.
        values: (B, sum of widths) when key_dim is 1.
        offset_per_key, index_per_key: caches that a caller already has.
    """

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        self._keys, self._length_per_key = list(keys), list(length_per_key)
        self._values, self._key_dim = values, key_dim
        self._offset_per_key, self._index_per_key = offset_per_key, index_per_key

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        """Join one tensor per key along `cat_dim`.

        Raises:
            ShapeError: the numbers of keys and tensors differ, or there are none.
        """
        if len(keys) != len(tensors) or not tensors:
            raise ShapeError(
                f"from_tensor_list got {len(keys)} keys and {len(tensors)} tensors; it needs one "
                "tensor per key, at least one."
            )
        widths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, widths, torch.cat(list(tensors), dim=cat_dim), key_dim)

    def keys(self) -> list[str]:
        """F names."""
        return self._keys

    def values(self) -> Tensor:
        """All of it: (B, sum of widths) when key_dim is 1."""
        return self._values

    def wait(self) -> KeyedTensor:
        """Return itself; TorchRec's sharded modules give results to wait for."""
        return self

    def key_dim(self) -> int:
        """The dimension along which keys lie."""
        return self._key_dim

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Bytes of the values."""
        return self._values.numel() * self._values.element_size()

    def length_per_key(self) -> list[int]:
        """F widths."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """F + 1 positions along key_dim where keys start and end.

        Raises:
            ShapeError: there is not one width per key, or they are not those of the values.
        """
        if self._offset_per_key is None:
            widths, shape = self._length_per_key, tuple(self._values.shape)
            offsets = ops.offsets_of(widths)
            fits = len(widths) == len(self._keys) and min(widths, default=0) >= 0
            if not fits or offsets[-1] != shape[self._key_dim]:
                raise ShapeError(
                    f"{len(self._keys)} keys {self._keys[:5]} have the widths {widths[:5]}, which "
                    f"sum to {offsets[-1]}; values {shape} have {shape[self._key_dim]} along "
                    f"dimension {self._key_dim}. Give each key its width."
                )
            self._offset_per_key = offsets
        return self._offset_per_key

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        if self._index_per_key is None:
            self._index_per_key = {key: index for index, key in enumerate(self._keys)}
        return self._index_per_key

    def __getitem__(self, key: str) -> Tensor:
        """The tensor of one key, as a view.

        Raises:
            UnknownKeyError: a KeyError and an InputError.
        """
        if key not in self.index_per_key():
            raise UnknownKeyError(f"no key {key!r} in this KeyedTensor; it has {self._keys}.")
        index = self.index_per_key()[key]
        start, width = self.offset_per_key()[index], self._length_per_key[index]
        return self._values.narrow(self._key_dim, start, width)

    def to_dict(self) -> dict[str, Tensor]:
        """The tensor of every key, as views."""
        self.offset_per_key()  # which checks the widths
        parts = self._values.split(self._length_per_key, dim=self._key_dim)
        return dict(zip(self._keys, parts, strict=True))

    @staticmethod
    def regroup(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """One tensor per group: the tensors of its keys, side by side.

        Args:
            keyed_tensors: tensors that have the keys; of a key in several, the last one counts.
            groups: names; a key may serve several groups.
        Returns:
            One (B, sum of the group's widths) per group; a view when the keys already lie side by
            side. A group without keys gives (B, 0).
        Raises:
            UnknownKeyError: no tensor has the key.
            InputError: there are no tensors.
        """
        if not keyed_tensors:
            raise InputError("regroup got no KeyedTensor, so there is nothing to take keys from.")
        first = keyed_tensors[0]
        # all of one tensor as it is, which a model asks for that looks up one collection
        is_whole = len(keyed_tensors) == len(groups) == 1 and groups[0] == first._keys
        if is_whole and len(first.index_per_key()) == len(first._keys):
            return [first._values]
        home = {key: (kt, index) for kt in keyed_tensors for index, key in enumerate(kt.keys())}
        groups_spans = [_spans(home, group) for group in groups]
        # every tensor is cut once for all groups, so that its backward is one operator
        wanted: dict[int, tuple[KeyedTensor, set[range]]] = {}
        for kt, span in chain.from_iterable(groups_spans):
            wanted.setdefault(id(kt), (kt, set()))[1].add(span)
        pieces = {number: _cut(kt, spans) for number, (kt, spans) in wanted.items()}
        joined = []
        for spans in groups_spans:
            parts = [(kt, pieces[id(kt)][span]) for kt, span in spans]
            joined.append(_join(parts) if parts else _nothing(keyed_tensors[0]))
        return joined

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """`regroup`, with a name per group.

        Raises:
            ShapeError: the numbers of groups and names differ.
        """
        if len(groups) != len(keys):
            raise ShapeError(
                f"regroup_as_dict got {len(groups)} groups and {len(keys)} keys; it needs one key "
                "per group."
            )
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """The values on `device`."""
        moved = self._values.to(device, non_blocking=non_blocking)
        caches = self._offset_per_key, self._index_per_key
        return KeyedTensor(self._keys, self._length_per_key, moved, self._key_dim, *caches)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the CUDA allocator that `stream` uses the values."""
        self._values.record_stream(stream)

    def __str__(self) -> str:
        if not self._keys:
            return "KeyedTensor()\n"
        lines = [f'    "{key}": {self[key].tolist()}' for key in self._keys]
        return "KeyedTensor({\n" + ",\n".join(lines) + "\n})\n"

    def __repr__(self) -> str:
        widths = dict(zip(self._keys, self._length_per_key, strict=True))
        where = f"key_dim={self._key_dim}, device='{self.device()}'"
        return f"KeyedTensor({widths}, values={describe(self._values)}, {where})"


def _spans(
    home: dict[str, tuple[KeyedTensor, int]], group: Sequence[str]
) -> list[tuple[KeyedTensor, range]]:
    """Return the ranges of a group's keys in order; neighbours in one KeyedTensor are one range."""
    spans: list[tuple[KeyedTensor, range]] = []
    for key in group:
        if key not in home:
            raise UnknownKeyError(
                f"no key {key!r} in the tensors to regroup; they have {sorted(home)}."
            )
        kt, index = home[key]
        if spans and spans[-1][0] is kt and spans[-1][1].stop == index:
            spans[-1] = (kt, range(spans[-1][1].start, index + 1))
        else:
            spans.append((kt, range(index, index + 1)))
    return spans


def _nothing(kt: KeyedTensor) -> Tensor:
    """(B, 0)."""
    return kt.values().narrow(kt.key_dim(), 0, 0)


def _cut(kt: KeyedTensor, spans: set[range]) -> dict[range, Tensor]:
    """The columns of each range of keys, as views."""
    # a view of everything would still cost its backward a copy
    if spans == {range(len(kt.keys()))}:
        return dict.fromkeys(spans, kt.values())
    cuts, dim = kt.offset_per_key(), kt.key_dim()
    bounds = {0, len(kt.keys())}
    for span in spans:
        bounds |= {span.start, span.stop}
    between = [range(*pair) for pair in pairwise(sorted(bounds))]
    # groups may share some keys, but not the same neighbours
    if not spans <= set(between):
        width = {span: cuts[span.stop] - cuts[span.start] for span in spans}
        return {span: kt.values().narrow(dim, cuts[span.start], width[span]) for span in spans}
    # one split, whose backward is one cat: every narrow would fill a gradient of the whole with
    # zeros
    parts = kt.values().split([cuts[span.stop] - cuts[span.start] for span in between], dim=dim)
    return dict(zip(between, parts, strict=True))


def _join(parts: Sequence[tuple[KeyedTensor, Tensor]]) -> Tensor:
    if len(parts) == 1:
        return parts[0][1]
    return torch.cat([part for _, part in parts], dim=parts[0][0].key_dim())
