"""`JaggedTensor`: B bags of different lengths as one tensor of values and their offsets.

Lengths and offsets derive from each other, lazily and once; bags are slices of the values. Names,
argument order and meaning are TorchRec's; torch.jit scripting is left out. Offsets of no bags are
[0], never an empty tensor, so every consumer may read offsets[-1].

    # B bags, N values in all, D optional width of a value
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rayrec.errors import InputError
from rayrec.sparse import ops

_INTEGERS = (torch.int64, torch.int32)
_NARROW = (torch.int16, torch.int8, torch.uint8)


def no_list(name: str, value: Any) -> None:
    """Refuse a list or an array of numpy, which an argument of this name is not.

    Raises:
        InputError: says what to give.
    """
    if isinstance(value, list | tuple | np.ndarray):
        raise InputError(
            f"{name} is a {type(value).__name__}, not a tensor; give torch.as_tensor({name})."
        )


def integer_sizes(name: str, sizes: Tensor | None) -> Tensor | None:
    """Lengths or offsets as integers that can hold their sum; torch makes floats of an empty list.

    Raises:
        InputError: they are of no integer type, or no tensor.
    """
    if not isinstance(sizes, Tensor) or sizes.dtype in _INTEGERS:
        no_list(name, sizes)
        return sizes
    if sizes.dtype in _NARROW:
        return sizes.int()
    if sizes.numel():
        raise InputError(
            f"{name} must be integers, got {sizes.dtype}; convert them with {name}.int() or "
            f"{name}.long()."
        )
    return sizes.long()


def whole_offsets(offsets: Tensor | None) -> Tensor | None:
    """Offsets of no bags as [0], where TorchRec's users may pass an empty tensor."""
    return offsets.new_zeros(1) if isinstance(offsets, Tensor) and offsets.numel() == 0 else offsets


def bags_of(values: Tensor, offsets: Tensor) -> list[Tensor]:
    """The B bags as views; one host sync when `offsets` are on a GPU."""
    return [values[start:stop] for start, stop in pairwise(offsets.tolist())]


def describe(tensor: Tensor | None) -> str:
    """Shape and dtype in one word, for repr."""
    if tensor is None:
        return "None"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


class TensorBundle(ABC):
    """Base of jagged containers: values, weights, lengths and offsets that move together."""

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None

    def values(self) -> Tensor:
        """(N,) or (N, D) for all bags, one after another."""
        return self._values

    def weights_or_none(self) -> Tensor | None:
        """(N,) or None."""
        return self._weights

    def lengths_or_none(self) -> Tensor | None:
        """One per bag, when given or computed before."""
        return self._lengths

    def offsets_or_none(self) -> Tensor | None:
        """One more than bags, when given or computed before."""
        return self._offsets

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Bytes of all tensors held."""
        return sum(t.numel() * t.element_size() for t in self._tensors() if t is not None)

    def pin_memory(self) -> Self:
        """All tensors in page-locked memory."""
        return self._map(lambda t: t.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the CUDA allocator that `stream` uses these tensors."""
        for tensor in self._tensors():
            if tensor is not None:
                tensor.record_stream(stream)

    @abstractmethod
    def _tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order of the constructor."""

    @abstractmethod
    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same bags with every tensor changed by `change`, which keeps shapes."""


class JaggedTensors(dict[str, "JaggedTensor"]):
    """Jagged tensors by name, as a sharded `EmbeddingCollection` returns them."""

    def wait(self) -> JaggedTensors:
        """Return itself; TorchRec's sharded modules give results to wait for."""
        return self


class JaggedTensor(TensorBundle):
    """B bags over one tensor of values.

    Args:
        values: (N,) or (N, D).
        lengths: (B,) integers; needed when `offsets` is None.
        offsets: (B + 1,) integers from 0; needed when `lengths` is None.
    Raises:
        InputError: neither lengths nor offsets are given, or they are not integers.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        no_list("values", values)
        if lengths is None and offsets is None:
            raise InputError("a JaggedTensor needs lengths or offsets; both are None.")
        offsets = whole_offsets(integer_sizes("offsets", offsets))
        self._values, self._weights, self._offsets = values, weights, offsets
        self._lengths = integer_sizes("lengths", lengths)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """No bags."""
        return JaggedTensor(
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def empty_like(jt: JaggedTensor, device: torch.device | str | None = None) -> JaggedTensor:
        """No bags, with the dtypes and device of `jt`.

        With `device`: uninitialised tensors of its shapes there, for a later copy.
        """
        if device is not None:
            return jt._map(lambda t: torch.empty_like(t, device=device))
        weights = None if jt._weights is None else jt._weights.new_empty(0)
        return JaggedTensor(jt.values().new_empty(0), weights, jt.lengths().new_empty(0))

    @staticmethod
    def from_dense(
        values: Sequence[Tensor], weights: Sequence[Tensor] | None = None
    ) -> JaggedTensor:
        """One bag per tensor of `values`; `weights` has the same shapes.

        Raises:
            InputError: `values` is an empty list, whose dtype nobody knows.
        """
        if not values:
            raise InputError(
                "from_dense needs at least one tensor; use JaggedTensor.empty() for no bags."
            )
        flat = torch.cat(list(values))
        flat_weights = None if weights is None else torch.cat(list(weights))
        lengths = [len(bag) for bag in values]
        on_device = torch.tensor(lengths, dtype=torch.int32, device=flat.device)
        return JaggedTensor(flat, flat_weights, on_device)

    @staticmethod
    def from_dense_lengths(
        values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> JaggedTensor:
        """The first lengths[b] values of each row b.

        Args:
            values: (B, L) or (B, L, D), padded at the end.
            lengths: (B,) integers in [0, L].
            weights: (B, L) or None.
        """
        # (B, L): whether a place lies within its bag
        mask = torch.arange(values.size(1), device=values.device) < lengths.unsqueeze(-1)
        return JaggedTensor(values[mask], None if weights is None else weights[mask], lengths)

    def weights(self) -> Tensor:
        """(N,); InputError when there are none."""
        if self._weights is None:
            raise InputError(
                "this JaggedTensor has no weights; ask weights_or_none() or construct it with "
                "weights."
            )
        return self._weights

    def lengths(self) -> Tensor:
        """(B,), computed from the offsets when not given."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = torch.diff(self._offsets)
        return self._lengths

    def offsets(self) -> Tensor:
        """(B + 1,), computed from the lengths when not given."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = ops.complete_cumsum(self._lengths)
        return self._offsets

    def to_dense(self) -> list[Tensor]:
        """B views of the values."""
        return bags_of(self._values, self.offsets())

    def to_dense_weights(self) -> list[Tensor] | None:
        """B views of the weights, or None."""
        return None if self._weights is None else bags_of(self._weights, self.offsets())

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """(B, L) or (B, L, D): bags cut or padded to L = `desired_length`.

        By default L is the longest bag, which takes one host sync.
        """
        return ops.jagged_to_padded_dense(
            self._values, self.offsets(), self._width(desired_length), padding_value
        )

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """(B, L) weights, as `to_padded_dense`, or None."""
        if self._weights is None:
            return None
        return ops.jagged_to_padded_dense(
            self._weights, self.offsets(), self._width(desired_length), padding_value
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        """All tensors on `device`."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def __str__(self) -> str:
        bags = [bag.tolist() for bag in self.to_dense()]
        weights = self.to_dense_weights()
        if weights is None:
            return f"JaggedTensor({{\n    {bags}\n}})\n"
        parts = [bag.tolist() for bag in weights]
        return f'JaggedTensor({{\n    "values": {bags},\n    "weights": {parts}\n}})\n'

    def __repr__(self) -> str:
        bags = self._lengths.numel() if self._lengths is not None else self.offsets().numel() - 1
        tensors = f"values={describe(self._values)}, weights={describe(self._weights)}"
        return f"JaggedTensor(bags={bags}, {tensors}, device='{self.device()}')"

    def _width(self, desired_length: int | None) -> int:
        if desired_length is not None:
            return desired_length
        return int(self.lengths().max()) if self.lengths().numel() else 0

    def _tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self._values, self._weights, self._lengths, self._offsets

    def _map(self, change: Callable[[Tensor], Tensor]) -> JaggedTensor:
        values, *others = self._tensors()
        return JaggedTensor(change(values), *(None if t is None else change(t) for t in others))
