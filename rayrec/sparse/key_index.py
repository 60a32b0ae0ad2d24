"""Index of the bags of each key: lengths, offsets and strides, derived lazily and cached.

`KeyIndex` is the part of a KeyedJaggedTensor that does not depend on its values' content. Lengths
and offsets derive from each other on the device; strides are host integers from shapes; the lengths
per key need one host sync, which reads the offsets at the keys' cuts and the least length, in one
pass over the lengths.

    # F keys, B bags per key (the stride), R ranks
"""

from __future__ import annotations

from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from rayrec.errors import InputError, ShapeError
from rayrec.sparse import ops
from rayrec.sparse.jagged import TensorBundle

InverseIndices = tuple[list[str], Tensor]


class UnknownKeyError(InputError, KeyError):
    """A key that a KeyedJaggedTensor or KeyedTensor does not hold."""

    __str__ = Exception.__str__  # KeyError would print the message quoted


class KeyIndex(TensorBundle):
    """Keys, lengths, offsets and strides; `KeyedJaggedTensor` fills the fields."""

    _keys: list[str]
    _stride: int | None
    _stride_per_key_per_rank: list[list[int]] | None
    _stride_per_key: list[int] | None
    _length_per_key: list[int] | None
    _lengths_offset_per_key: list[int] | None
    _offset_per_key: list[int] | None
    _index_per_key: dict[str, int] | None
    _inverse_indices: InverseIndices | None

    def sync(self) -> Self:
        """Bring per-key lengths and offsets to the host now; returns self."""
        self.offset_per_key()
        return self

    def unsync(self) -> Self:
        """Forget per-key lengths and offsets; returns self."""
        self._length_per_key = self._offset_per_key = None
        return self

    def keys(self) -> list[str]:
        """F names."""
        return self._keys

    def lengths(self) -> Tensor:
        """(F * B,), computed from the offsets when not given."""
        if self._lengths is None:
            if self._offsets is None:
                raise InputError(
                    f"the KeyedJaggedTensor of keys {self._keys[:5]} has neither lengths nor "
                    "offsets; construct it with one of them."
                )
            self._lengths = torch.diff(self._offsets)
        return self._lengths

    def offsets(self) -> Tensor:
        """(F * B + 1,), computed from the lengths when not given."""
        if self._offsets is None:
            self._offsets = ops.complete_cumsum(self.lengths().reshape(-1))
        return self._offsets

    def stride(self) -> int:
        """B, the bags of a key.

        Of a VBE batch it is the columns of the inverse indices, or else the most bags of any key.

        Raises:
            ShapeError: the number of lengths is no multiple of the number of keys.
        """
        if self._stride is None:
            self._stride = self._find_stride()
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Bags of each key."""
        if self._stride_per_key is None:
            if self._stride_per_key_per_rank is None:
                self._stride_per_key = [self.stride()] * len(self._keys)
            else:
                self._stride_per_key = [sum(ranks) for ranks in self._stride_per_key_per_rank]
        return self._stride_per_key

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """(F, R) bags of each key by the rank they came from; [] when the batch has one stride."""
        return self._stride_per_key_per_rank or []

    def variable_stride_per_key(self) -> bool:
        """Return True if keys have batch sizes of their own (TorchRec's VBE)."""
        return self._stride_per_key_per_rank is not None

    def inverse_indices(self) -> InverseIndices:
        """(keys, (F, B)); InputError when there are none."""
        if self._inverse_indices is None:
            raise InputError(
                f"the KeyedJaggedTensor of keys {self._keys[:5]} has no inverse indices; ask "
                "inverse_indices_or_none()."
            )
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """(keys, (F, B)) or None."""
        return self._inverse_indices

    def length_per_key(self) -> list[int]:
        """Ids of each key; one host sync when it was not known.

        Raises:
            ShapeError: a length is negative, the lengths do not sum to the number of values, the
                offsets are not theirs, or weights are too few or too many.
        """
        if self._length_per_key is None:
            self._length_per_key = self._find_length_per_key()
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """Ids of each key, when known on the host."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """F + 1 positions in the values where keys start and end."""
        if self._offset_per_key is None:
            self._offset_per_key = ops.offsets_of(self.length_per_key())
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        """F + 1 positions, when known on the host."""
        return self._offset_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """F + 1 positions in the lengths where keys start and end."""
        if self._lengths_offset_per_key is None:
            self._lengths_offset_per_key = ops.offsets_of(self.stride_per_key())
        return self._lengths_offset_per_key

    def index_per_key(self) -> dict[str, int]:
        """Position of each key; the last one of a repeated key."""
        if self._index_per_key is None:
            self._index_per_key = {key: index for index, key in enumerate(self._keys)}
        return self._index_per_key

    def _find_stride(self) -> int:
        if not self._keys:
            return 0
        if self._stride_per_key_per_rank is not None:
            if self._inverse_indices is not None and self._inverse_indices[1].numel():
                return self._inverse_indices[1].shape[-1]
            return max(sum(row) for row in self._stride_per_key_per_rank)
        sizes = self._offsets.numel() - 1 if self._offsets is not None else self.lengths().numel()
        if sizes % len(self._keys):
            raise ShapeError(
                f"{sizes} lengths do not divide over {len(self._keys)} keys {self._keys[:5]}; "
                "every key needs one length per bag."
            )
        return sizes // len(self._keys)

    def _find_length_per_key(self) -> list[int]:
        if not self._keys:
            return []
        # a meta tensor has shapes only: any cut will do, as in TorchRec
        if self._values.is_meta:
            each, rest = divmod(self._values.numel(), len(self._keys))
            return [each + rest, *[each] * (len(self._keys) - 1)]
        # offsets that are made of the lengths below agree with them
        both = self._offsets is not None and self._lengths is not None
        cuts, offsets, lengths = self.lengths_offset_per_key(), self.offsets(), self.lengths()
        if not cuts[-1] == lengths.numel() == offsets.numel() - 1:
            raise ShapeError(
                f"{lengths.numel()} lengths and {offsets.numel()} offsets, but the bags of keys "
                f"{self._keys[:5]} number {self.stride_per_key()[:5]}."
            )
        # (F + 1,) offsets at the keys' cuts; equal strides make them a slice, which copies no index
        if self.variable_stride_per_key() or not self.stride():
            at_cuts = offsets[torch.tensor(cuts, device=offsets.device)]
        else:
            at_cuts = offsets[:: self.stride()]
        if both:
            unlike = torch.diff(offsets) != lengths.reshape(-1)
            lengths = lengths.reshape(-1).masked_fill(unlike, -1)
        # a sum hides a negative length
        extremes = torch.stack(lengths.aminmax()) if cuts[-1] else lengths.new_zeros(2)
        # the one host sync, which tells also whether every id has its bag
        *ends, low, high = torch.cat([at_cuts, extremes]).tolist()
        ids = self._values.shape[0]
        is_bad = ends[0] != 0 or ends[-1] != ids or low < 0 or high > ids
        if not is_bad and high * cuts[-1] > torch.iinfo(offsets.dtype).max:
            # offsets may have wrapped around, and ended there all the same
            is_bad = int(lengths.sum(dtype=torch.int64)) != ids
        if is_bad:
            sizes = self.lengths().reshape(-1).tolist()
            other = ", by other lengths" if both and unlike.any() else ""
            raise ShapeError(
                f"{ids} ids, but the lengths of keys {self._keys[:5]} sum to {sum(sizes)} (the "
                f"least is {min(sizes, default=0)}), and the offsets go from {ends[0]} to "
                f"{ends[-1]}{other}; give every id its bag, or drop it."
            )
        if self._weights is not None and self._weights.shape[0] != ids:
            raise ShapeError(f"{self._weights.shape[0]} weights for {ids} ids; give every id one.")
        return [stop - start for start, stop in pairwise(ends)]
