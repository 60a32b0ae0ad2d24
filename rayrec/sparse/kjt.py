"""`KeyedJaggedTensor`: for each key a list of bags of ids, key-major in one tensor of values.

Bag b of key f lies at offsets[f * B + b] .. offsets[f * B + b + 1]. A KJT is immutable; what can be
derived is derived lazily and cached. With a variable batch per key (VBE) every key has its own
number of bags, and `inverse_indices` maps the B rows of the full batch to a key's bags.

Names, argument order and meaning are TorchRec's. `split` and `permute` carry inverse indices along,
pytrees keep the stride, offsets of no bags are [0]. Left out: torch.jit scripting and the dist_*
methods, whose work `rayrec.distributed` does.

    # F keys, B bags per key (the stride), N ids in all, R ranks
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rayrec.errors import InputError
from rayrec.fields.typed import shown
from rayrec.layout.dynamic import LATEST_S, time_problem
from rayrec.sparse import rearrange
from rayrec.sparse.jagged import JaggedTensor, describe, integer_sizes, no_list, whole_offsets
from rayrec.sparse.key_index import InverseIndices, KeyIndex, UnknownKeyError


class KeyedJaggedTensor(KeyIndex):
    """F keys, each with a list of bags of ids.

    Args:
        keys: F names; a permute may repeat one.
        values: (N,) ids, key-major.
        weights: (N,) or None.
        lengths: (F * B,) integers, or (F, B); needed when `offsets` is None.
        offsets: (F * B + 1,) integers from 0; needed when `lengths` is None.
        stride: B; by default the number of lengths over F.
        stride_per_key_per_rank: (F, R) host integers, bags by key and rank; makes it a VBE batch.
        stride_per_key, length_per_key, lengths_offset_per_key: caches that a caller already has.
        offset_per_key, index_per_key, jt_dict: likewise.
        inverse_indices: (keys, (F, B) integers): row b of the full batch is bag inverse[f, b] of
            key f.
        time: the largest time of the batch's rows, seconds since 1970 by the data's own clock, for
            dynamic tables that ask for it; it goes along with what is made of the batch.
    Raises:
        InputError: lengths, offsets or the stride are not integers, ids or weights are no tensors,
            or the time is out of range.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: InverseIndices | None = None,
        time: int | None = None,
    ) -> None:
        if isinstance(stride, (Tensor, float, str)):
            raise InputError(
                f"stride={shown(stride)} is no number of bags; give int(stride), or leave it out."
            )
        if isinstance(stride_per_key_per_rank, Tensor):
            stride_per_key_per_rank = stride_per_key_per_rank.tolist()
        no_list("values", values)
        no_list("weights", weights)
        self._keys = list(keys)
        self._values, self._weights = values, weights
        self._lengths = integer_sizes("lengths", lengths)
        self._offsets = whole_offsets(integer_sizes("offsets", offsets))
        self._stride = stride
        self._stride_per_key_per_rank = None
        if stride_per_key_per_rank is not None:
            self._stride_per_key_per_rank = [list(row) for row in stride_per_key_per_rank]
        self._stride_per_key = stride_per_key
        self._length_per_key = length_per_key
        self._lengths_offset_per_key = lengths_offset_per_key
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        self._jt_dict = jt_dict
        self._inverse_indices = inverse_indices
        self._time = time
        if time is not None and not 0 <= time <= LATEST_S:
            raise InputError(time_problem(time))
        self._carried: dict[Any, Any] | None = None

    @property
    def carried(self) -> dict[Any, Any]:
        """Values that others keep with this object, by their keeper, such as ids routed ahead.

        A copy, a pickle and whatever is made of a KJT carry nothing.
        """
        if self._carried is None:
            self._carried = {}
        return self._carried

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_carried": None}

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """Make it from (F * B + 1,) offsets, and bring the lengths per key to the host at once."""
        parts = (keys, values, weights, None, offsets, stride, stride_per_key_per_rank)
        return KeyedJaggedTensor(*parts, inverse_indices=inverse_indices).sync()

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """Make it from (F * B,) lengths, and bring the lengths per key to the host at once."""
        parts = (keys, values, weights, lengths, None, stride, stride_per_key_per_rank)
        return KeyedJaggedTensor(*parts, inverse_indices=inverse_indices).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One key per entry; entries of different batch sizes give a VBE batch of one rank.

        Raises:
            InputError: the dict is empty, or only some entries have weights.
        """
        return rearrange.from_jt_dict(KeyedJaggedTensor, jt_dict)

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Put the keys of several batches of equal stride one after another.

        Raises:
            InputError: the list is empty, or only some parts have weights or inverse indices.
            ShapeError: the strides differ.
        """
        return rearrange.concat(KeyedJaggedTensor, kjt_list)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """No keys, stride 0."""
        jt = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        return KeyedJaggedTensor([], jt.values(), jt.weights_or_none(), jt.lengths(), stride=0)

    @staticmethod
    def empty_like(
        kjt: KeyedJaggedTensor, device: torch.device | str | None = None
    ) -> KeyedJaggedTensor:
        """No keys, with the stride, dtypes and device of `kjt`.

        With `device`: uninitialised tensors of its shapes there, for a later copy.
        """
        if device is not None:
            return kjt._map(lambda t: torch.empty_like(t, device=device))
        return rearrange.split(kjt, [0])[0]

    @property
    def time(self) -> int | None:
        """The largest time of the batch's rows, in seconds since 1970; None where it has none."""
        return self._time

    def weights(self) -> Tensor:
        """(N,); InputError when there are none."""
        if self._weights is None:
            raise InputError(
                f"the KeyedJaggedTensor of keys {self._keys[:5]} has no weights; ask "
                "weights_or_none() or construct it with weights."
            )
        return self._weights

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Cut the keys into groups of `segments` sizes, as views; a group of all keys is `self`."""
        return rearrange.split(self, segments)

    def permute(
        self, indices: Sequence[int], indices_tensor: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """Take keys by position, repeats allowed; `indices_tensor`: the same for CUDA, int32."""
        return rearrange.permute(self, indices, indices_tensor)

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """The same batch with lengths of one dimension."""
        return self._like(lengths=self.lengths().reshape(-1))

    def __getitem__(self, key: str) -> JaggedTensor:
        """Bags of one key, as views.

        Raises:
            UnknownKeyError: a KeyError and an InputError.
        """
        if key not in self.index_per_key():
            raise UnknownKeyError(f"no key {key!r} in this KeyedJaggedTensor; it has {self._keys}.")

        if self._jt_dict is not None:
            return self._jt_dict[key]
        # views: the key's ids, and one length for each of its bags
        index = self.index_per_key()[key]
        ids = slice(*self.offset_per_key()[index : index + 2])
        bags = slice(*self.lengths_offset_per_key()[index : index + 2])
        weights = None if self._weights is None else self._weights[ids]
        return JaggedTensor(self._values[ids], weights, lengths=self.lengths().reshape(-1)[bags])

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Bags of every key, as views, cached.

        `compute_offsets` is TorchRec's; here offsets are computed when they are asked for.
        """
        if self._jt_dict is None:
            sizes = self.length_per_key()
            lengths = self.lengths().reshape(-1).split(self.stride_per_key())
            weights = [None] * len(sizes) if self._weights is None else self._weights.split(sizes)
            parts = zip(self._values.split(sizes), weights, lengths, strict=True)
            bags = [JaggedTensor(*part) for part in parts]
            self._jt_dict = dict(zip(self._keys, bags, strict=True))
        return self._jt_dict

    def to(
        self,
        device: torch.device | str,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> KeyedJaggedTensor:
        """All tensors on `device`; `dtype` is the wanted dtype of the weights."""
        moved = self._map(lambda t: t.to(device, non_blocking=non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        return moved

    def __str__(self) -> str:
        if not self._keys or (self._offsets is None and self._lengths is None):
            return "KeyedJaggedTensor()\n"
        offsets, lines = self.offsets().tolist(), []
        cuts = pairwise(self.lengths_offset_per_key())
        for key, (start, stop) in zip(self._keys, cuts, strict=True):
            bags = list(pairwise(offsets[start : stop + 1]))
            text = str([self._values[a:b].tolist() for a, b in bags])
            if self._weights is not None:
                weights = [self._weights[a:b].tolist() for a, b in bags]
                text = f'{{\n        "values": {text},\n        "weights": {weights}\n    }}'
            lines.append(f'    "{key}": {text}')
        return "KeyedJaggedTensor({\n" + ",\n".join(lines) + "\n})\n"

    def __repr__(self) -> str:
        stride = f"stride={self.stride()}"
        if self.variable_stride_per_key():
            stride = f"stride_per_key={self.stride_per_key()}"
        tensors = f"values={describe(self._values)}, weights={describe(self._weights)}"
        where = f"device='{self.device()}'"
        return f"KeyedJaggedTensor(keys={self._keys}, {stride}, {tensors}, {where})"

    def _tensors(self) -> tuple[Tensor | None, ...]:
        inverse = self._inverse_indices[1] if self._inverse_indices else None
        return self._values, self._weights, self._lengths, self._offsets, inverse

    def _like(self, **changes: Any) -> KeyedJaggedTensor:
        """A copy with some constructor arguments changed; caches on the host go along."""
        # the views in jt_dict would be those of the old tensors
        kept = {name: getattr(self, "_" + name) for name in _ARGUMENTS if name != "jt_dict"}
        return KeyedJaggedTensor(**kept | changes)

    def _map(self, change: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
        changed = [None if tensor is None else change(tensor) for tensor in self._tensors()]
        values, weights, lengths, offsets, inverse = changed
        parts = {"values": values, "weights": weights, "lengths": lengths, "offsets": offsets}
        if self._inverse_indices is None:
            return self._like(**parts)
        return self._like(**parts, inverse_indices=(self._inverse_indices[0], inverse))


# names of the constructor's arguments, which are those of the fields
_ARGUMENTS = tuple(inspect.signature(KeyedJaggedTensor).parameters)
