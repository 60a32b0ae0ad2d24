"""The FBGEMM operators of the jagged containers, each beside the plain torch it must equal.

On CPU a gather of whole keys is fastest as slices and torch.cat (10x faster than
`permute_2D_sparse_data` at 26 keys of 2048 bags); on CUDA the one FBGEMM kernel saves a launch per
key.

    # B bags per key, F keys, N ids, T keys after a permute (repeats allowed)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

# what FBGEMM pads; other types are padded by torch
_PADDED = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


def offsets_of(sizes: Iterable[int]) -> list[int]:
    """[0, s0, s0 + s1, ...] of host integers."""
    return [0, *accumulate(sizes)]


def to_device(
    values: Sequence[int], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """(N,) host integers on a device, int64 by default.

    `torch.tensor(values, device=...)` would wait until a GPU has done all it was given; this waits
    for nothing.
    """
    return torch.tensor(values, dtype=dtype or torch.int64).to(device, non_blocking=True)


def complete_cumsum(lengths_N: Tensor) -> Tensor:
    """Offsets of lengths: (N,) integers -> (N + 1,) of the same dtype and device, starting at 0."""
    return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths_N)


def runs(indices: Sequence[int]) -> list[range]:
    """Split `indices` into maximal runs: [3, 4, 5, 1] -> [range(3, 6), range(1, 2)]."""
    parts: list[range] = []
    for index in indices:
        if parts and index == parts[-1].stop:
            parts[-1] = range(parts[-1].start, index + 1)
        else:
            parts.append(range(index, index + 1))
    return parts


def gather_segments(tensor: Tensor, offsets: Sequence[int], indices: Sequence[int]) -> Tensor:
    """Concatenate segments of a tensor's first dimension in a new order.

    Args:
        tensor: (N, ...), cut into segments at `offsets`.
        offsets: host integers 0 .. N, one more than segments.
        indices: segments to take, in order; repeats allowed.
    Returns:
        (sum of the taken segments, ...). It is a view of `tensor` when the segments are one run,
        else one copy.
    """
    # one slice per run of neighbours; a single run needs no copy
    parts = [tensor[offsets[run.start] : offsets[run.stop]] for run in runs(indices)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else tensor[:0]


def permute_keys(
    indices_T: Sequence[int],
    lengths_FB: Tensor,
    values_N: Tensor,
    weights_N: Tensor | None,
    total: int,
    indices_tensor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gather whole keys of a key-major batch with one FBGEMM kernel; what CUDA uses.

    Args:
        indices_T: keys to take, in order; repeats allowed.
        lengths_FB: (F, B) bag lengths.
        values_N, weights_N: ids and optional weights.
        total: ids of the result, known on the host, so that no sync is needed.
        indices_tensor: `indices_T` on the device, int32, when the caller already has it.
    Returns:
        lengths (T, B), values (total,), weights (total,) or None.
    """
    if indices_tensor is None:
        indices_tensor = to_device(indices_T, lengths_FB.device, torch.int32)
    return torch.ops.fbgemm.permute_2D_sparse_data(
        indices_tensor, lengths_FB, values_N, weights_N, total
    )


def jagged_to_padded_dense(
    values: Tensor, offsets: Tensor, width: int, padding_value: float
) -> Tensor:
    """Bags as rows of a rectangle: longer ones are cut, shorter ones padded at the end.

    Args:
        values: (N,) or (N, D).
        offsets: (B + 1,) integers.
    Returns:
        (B, width) or (B, width, D), dtype of `values`; differentiable for floating values.
    """
    # FBGEMM refuses an empty rectangle
    if width == 0 or offsets.numel() < 2:
        return values.new_empty((max(offsets.numel() - 1, 0), width, *values.shape[1:]))
    if values.dtype in _PADDED:
        return torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [width], padding_value)
    # (B, width): the place of each value, and whether it lies within its bag
    steps = torch.arange(width, device=values.device)
    places, inside = offsets[:-1, None] + steps, steps < torch.diff(offsets).unsqueeze(1)
    padded = values.new_full((*places.shape, *values.shape[1:]), padding_value)
    padded[inside] = values[places[inside]]
    return padded
