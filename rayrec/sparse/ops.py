"""The FBGEMM operators of the jagged containers, each beside the plain torch it must equal.

A wrapper chooses by the tensor's device: on CPU a gather of whole keys is fastest as torch.split +
torch.cat (10x faster than `permute_2D_sparse_data` at 26 keys of 2048 bags), on CUDA the one FBGEMM
kernel saves a launch per key. The `*_reference` functions are for tests and for reading; nothing
else calls them.

    # B bags per key, F keys, N ids, T keys after a permute (repeats allowed)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor


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


def complete_cumsum_reference(lengths_N: Tensor) -> Tensor:
    """`complete_cumsum` in plain torch."""
    return torch.cat([lengths_N.new_zeros(1), torch.cumsum(lengths_N, 0, dtype=lengths_N.dtype)])


def runs(indices: Sequence[int]) -> list[range]:
    """Split `indices` into maximal runs: [3, 4, 5, 1] -> [range(3, 6), range(1, 2)]."""
    found: list[range] = []
    for index in indices:
        if found and index == found[-1].stop:
            found[-1] = range(found[-1].start, index + 1)
        else:
            found.append(range(index, index + 1))
    return found


def gather_segments(tensor: Tensor, offsets: Sequence[int], indices: Sequence[int]) -> Tensor:
    """Concatenate segments of a tensor's first dimension in a new order.

    Args:
        tensor: (N, ...), cut into segments at `offsets`.
        offsets: host integers 0 .. N, one more than segments.
        indices: segments to take, in order; repeats allowed.
    Returns:
        (sum of the taken segments, ...). A view of `tensor` when the taken segments are one run,
        else a copy.
    Cost: one copy; a run of neighbouring segments is one slice.
    """
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


def permute_keys_reference(
    indices_T: Sequence[int],
    lengths_FB: Tensor,
    values_N: Tensor,
    weights_N: Tensor | None,
    total: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`permute_keys` in plain torch."""
    cuts = offsets_of(lengths_FB.sum(1).tolist())
    spans = [slice(*list(pairwise(cuts))[i]) for i in indices_T]
    values = torch.cat([values_N[span] for span in spans] or [values_N[:0]])
    weights = (
        None
        if weights_N is None
        else torch.cat([weights_N[span] for span in spans] or [weights_N[:0]])
    )
    assert values.numel() == total
    return lengths_FB[list(indices_T)], values, weights


def jagged_to_padded_dense(
    values: Tensor, offsets: Tensor, width: int, padding_value: float
) -> Tensor:
    """Bags as rows of a rectangle: longer ones are cut, shorter ones padded at the end.

    Args:
        values: (N,) or (N, D).
        offsets: (B + 1,) integers.
        width: columns of the result.
        padding_value: what fills the rest.
    Returns:
        (B, width) or (B, width, D), dtype of `values`; differentiable for floating values.
    """
    if width == 0 or offsets.numel() < 2:  # FBGEMM refuses an empty rectangle
        return values.new_empty((max(offsets.numel() - 1, 0), width, *values.shape[1:]))
    return torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [width], padding_value)


def jagged_to_padded_dense_reference(
    values: Tensor, offsets: Tensor, width: int, padding_value: float
) -> Tensor:
    """`jagged_to_padded_dense` in plain torch."""
    bounds = offsets.tolist()
    dense = values.new_full((len(bounds) - 1, width, *values.shape[1:]), padding_value)
    for row, (start, stop) in enumerate(pairwise(bounds)):
        taken = values[start:stop][:width]
        dense[row, : len(taken)] = taken
    return dense
