"""Cutting, permuting and joining of a `KeyedJaggedTensor`: the code behind its methods.

Split makes views. Permute of keys on CPU is slices and one torch.cat (`ops.gather_segments`), on
CUDA one FBGEMM kernel. All of them keep what the host already knows (lengths per key, strides,
inverse indices), so none adds a host sync to a synced batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rayrec.errors import InputError, ShapeError
from rayrec.sparse import ops

if TYPE_CHECKING:
    from rayrec.sparse.jagged import JaggedTensor
    from rayrec.sparse.key_index import InverseIndices
    from rayrec.sparse.kjt import KeyedJaggedTensor


def _inverse_of(kjt: KeyedJaggedTensor, indices: Sequence[int]) -> InverseIndices | None:
    """Inverse indices of the keys at `indices`."""
    inverse = kjt.inverse_indices_or_none()
    if inverse is None:
        return None
    names, rows = inverse
    wanted = [kjt.keys()[i] for i in indices]
    row_of = {name: row for row, name in enumerate(names)}
    missing = [name for name in wanted if name not in row_of]
    if missing:
        raise InputError(f"inverse indices have no row for key {missing[0]!r}; they name {names}.")
    order = [row_of[name] for name in wanted]
    return wanted, ops.gather_segments(rows, range(len(names) + 1), order)


def split(kjt: KeyedJaggedTensor, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
    """Consecutive groups of keys, as views; see `KeyedJaggedTensor.split`.

    Raises:
        ShapeError: the segments are negative or take more keys than there are.
    """
    if sum(segments) > len(kjt.keys()) or any(segment < 0 for segment in segments):
        raise ShapeError(f"cannot split {len(kjt.keys())} keys into groups of {list(segments)}.")
    ranks, weights = kjt._stride_per_key_per_rank, kjt.weights_or_none()
    groups, start = [], 0
    for segment in segments:
        stop = start + segment
        # a group of all keys is the batch itself, with all that it has cached
        if segment == len(kjt.keys()) and segment:
            groups.append(kjt)
            continue
        ids = slice(0, 0)
        # an empty group asks for no lengths per key, so it needs no host sync
        if segment:
            ids = slice(kjt.offset_per_key()[start], kjt.offset_per_key()[stop])
        bags = slice(kjt.lengths_offset_per_key()[start], kjt.lengths_offset_per_key()[stop])
        groups.append(
            type(kjt)(
                keys=kjt.keys()[start:stop],
                values=kjt.values()[ids],
                weights=None if weights is None else weights[ids],
                lengths=kjt.lengths().reshape(-1)[bags],
                stride=kjt.stride(),
                stride_per_key_per_rank=None if ranks is None else ranks[start:stop],
                length_per_key=kjt.length_per_key()[start:stop] if segment else [],
                inverse_indices=_inverse_of(kjt, range(start, stop)),
                time=kjt.time,
            )
        )
        start = stop
    return groups


def permute(
    kjt: KeyedJaggedTensor, indices: Sequence[int], indices_tensor: Tensor | None = None
) -> KeyedJaggedTensor:
    """Keys at `indices`; see `KeyedJaggedTensor.permute`.

    Raises:
        ShapeError: an index is out of range.
    """
    count = len(kjt.keys())
    if any(not 0 <= i < count for i in indices):
        raise ShapeError(f"permute asks for keys at {list(indices)}, but there are {count} keys.")
    sizes, strides, ranks = kjt.length_per_key(), kjt.stride_per_key(), kjt._stride_per_key_per_rank
    length_per_key = [sizes[i] for i in indices]
    weights = kjt.weights_or_none()
    lengths = kjt.lengths().reshape(-1)
    # the kernel needs one stride for all keys, and at least one key and one bag
    even = bool(indices) and not kjt.variable_stride_per_key() and kjt.stride() > 0
    if kjt.device().type == "cuda" and even:
        lengths_FB, total = lengths.view(count, -1), sum(length_per_key)
        lengths, values, weights = ops.permute_keys(
            indices, lengths_FB, kjt.values(), weights, total, indices_tensor
        )
        lengths = lengths.reshape(-1)
    else:
        lengths = ops.gather_segments(lengths, kjt.lengths_offset_per_key(), indices)
        values = ops.gather_segments(kjt.values(), kjt.offset_per_key(), indices)
        if weights is not None:
            weights = ops.gather_segments(weights, kjt.offset_per_key(), indices)
    return type(kjt)(
        keys=[kjt.keys()[i] for i in indices],
        values=values,
        weights=weights,
        lengths=lengths,
        stride=kjt.stride(),
        stride_per_key_per_rank=None if ranks is None else [ranks[i] for i in indices],
        stride_per_key=[strides[i] for i in indices],
        length_per_key=length_per_key,
        inverse_indices=_inverse_of(kjt, indices),
        time=kjt.time,
    )


def _all_or_none(what: str, have: Sequence[bool]) -> bool:
    if any(have) and not all(have):
        raise InputError(
            f"some of the parts have {what} and some have none (part {list(have).index(False)}); "
            f"give all of them {what}, or none."
        )
    return all(have)


def concat(cls: type[KeyedJaggedTensor], kjts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Keys one part after another; see `KeyedJaggedTensor.concat`."""
    if not kjts:
        raise InputError(
            "concat needs at least one KeyedJaggedTensor; use KeyedJaggedTensor.empty() for none."
        )
    weighted = _all_or_none("weights", [kjt.weights_or_none() is not None for kjt in kjts])
    # a part without keys has no say in the stride
    filled = [kjt for kjt in kjts if kjt.keys()] or [kjts[0]]
    variable = _all_or_none("a variable stride", [kjt.variable_stride_per_key() for kjt in filled])
    inverse = _all_or_none(
        "inverse indices", [kjt.inverse_indices_or_none() is not None for kjt in filled]
    )
    rows = [kjt.inverse_indices()[1].shape[-1] if inverse else kjt.stride() for kjt in filled]
    if len(set(rows)) > 1 and (inverse or not variable):
        raise ShapeError(
            f"concat of batches of different strides: {rows}; all must have the same number of "
            "rows."
        )
    strides = {kjt.stride() for kjt in filled}
    ranks = sizes = pair = None
    if variable:
        ranks = [row for kjt in filled for row in kjt.stride_per_key_per_rank()]
    # known on the host for all parts, else asking would cost a sync
    if all(kjt.length_per_key_or_none() is not None for kjt in filled):
        sizes = [size for kjt in filled for size in kjt.length_per_key()]
    if inverse:
        names = [key for kjt in filled for key in kjt.inverse_indices()[0]]
        pair = names, torch.cat([kjt.inverse_indices()[1] for kjt in filled])
    return cls(
        keys=list(chain.from_iterable(kjt.keys() for kjt in filled)),
        values=torch.cat([kjt.values() for kjt in filled]),
        weights=torch.cat([kjt.weights() for kjt in filled]) if weighted else None,
        lengths=torch.cat([kjt.lengths().reshape(-1) for kjt in filled]),
        stride=strides.pop() if len(strides) == 1 else None,
        stride_per_key_per_rank=ranks,
        length_per_key=sizes,
        inverse_indices=pair,
        time=max((kjt.time for kjt in kjts if kjt.time is not None), default=None),
    )


def from_jt_dict(
    cls: type[KeyedJaggedTensor], jt_dict: Mapping[str, JaggedTensor]
) -> KeyedJaggedTensor:
    """One key per entry; see `KeyedJaggedTensor.from_jt_dict`."""
    if not jt_dict:
        raise InputError("from_jt_dict got no entries; use KeyedJaggedTensor.empty() for no keys.")
    jts = list(jt_dict.values())
    weighted = _all_or_none("weights", [jt.weights_or_none() is not None for jt in jts])
    strides = [jt.lengths().numel() for jt in jts]
    even = len(set(strides)) == 1
    return cls(
        keys=list(jt_dict),
        values=torch.cat([jt.values() for jt in jts]),
        weights=torch.cat([jt.weights() for jt in jts]) if weighted else None,
        lengths=torch.cat([jt.lengths() for jt in jts]),
        stride=strides[0] if even else None,
        stride_per_key_per_rank=None if even else [[stride] for stride in strides],
    ).sync()
