"""Sums, copies and softmax over the rows of a jagged tensor, without padding, on any device.

A jagged tensor is T values and (B + 1) offsets: sequence b has the values [offsets[b],
offsets[b + 1]). The functions come in pairs that are each other's backward: to copy a row to each
of its values and to sum the values of a row; dot products with the row and the weighted sum. So all
of them may be differentiated any number of times. Cost: one pass over the values;
the host waits for nothing, and no tensor is larger than its inputs and outputs.

    # B sequences, T values of all of them, D columns
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.errors import InputError


class JaggedOffsets:
    """The places of T values in B sequences.

    Args:
        offsets: (B + 1,) integers from 0 to T.
        num_values: T, so that no host sync is needed.
    Attributes:
        offsets: the same, int64.
    Raises:
        InputError: offsets on the CPU that do not ascend from 0 to T, with which kernels would read
            and write beside the values.
    """

    def __init__(self, offsets: Tensor, num_values: int) -> None:
        self.offsets, self.num_values = offsets.long(), num_values
        # on a GPU the host would wait for them; while a program is traced there are no numbers
        traced = torch.compiler.is_compiling() or type(self.offsets) is not Tensor
        if self.offsets.device.type == "cpu" and not traced:
            own = self.offsets.numpy()  # small batches notice each call that is made here
            lengths = own[1:] - own[:-1] if own.ndim == 1 else own
            ends = own.ndim == 1 and own.size and own[0] == 0 and own[-1] == num_values
            if not ends or lengths.min(initial=0) < 0:
                raise InputError(
                    f"the offsets of {num_values} values are {own.tolist()[:20]}; they "
                    f"must ascend from 0 to {num_values}."
                )
            self.lengths = torch.from_numpy(lengths)

    @cached_property
    def lengths(self) -> Tensor:
        """(B,) int64: the number of values of each sequence."""
        return self.offsets.diff()

    @cached_property
    def row(self) -> Tensor:
        """(T,) int64: the sequence of each value."""
        numbers = torch.arange(self.offsets.numel() - 1, device=self.offsets.device)
        return torch.repeat_interleave(numbers, self.lengths, output_size=self.num_values)

    @cached_property
    def positions(self) -> Tensor:
        """(T,) int64: the number of values before each one in its sequence."""
        numbers = torch.arange(self.num_values, device=self.offsets.device)
        return numbers - self.offsets.index_select(0, self.row)


def expand_rows(rows: Tensor, sequences: JaggedOffsets) -> Tensor:
    """Copy (B,) or (B, D) rows to each value of their sequences: (T,) or (T, D)."""
    return _Expand.apply(rows, sequences)


def sum_rows(values: Tensor, sequences: JaggedOffsets) -> Tensor:
    """Sum (T,) or (T, D) values by sequence: (B,) or (B, D), 0 for a sequence without values."""
    return _Sum.apply(values, sequences)


def dots(rows: Tensor, values: Tensor, sequences: JaggedOffsets) -> Tensor:
    """Multiply each of (T, D) values with the (B, D) row of its sequence: (T,) dot products."""
    return _Dots.apply(rows, values, sequences)


def weighted_sum(weights: Tensor, values: Tensor, sequences: JaggedOffsets) -> Tensor:
    """Sum (T, D) values by sequence, each times its weight of (T,): (B, D)."""
    return _WeightedSum.apply(weights, values, sequences)


def softmax_rows(scores: Tensor, sequences: JaggedOffsets) -> Tensor:
    """Softmax of (T,) scores within each sequence."""
    return _Softmax.apply(scores, sequences)


def _sums(values: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """(T, D) -> (B, D)."""
    if not values.numel() or offsets.numel() < 2:
        return values.new_zeros(offsets.numel() - 1, values.shape[1])
    # a look-up of every value once is the quickest sum of neighbours that torch has
    numbers = torch.arange(len(values), device=values.device)
    return functional.embedding_bag(
        numbers,
        values.contiguous(),
        offsets,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=weights,
    )


def _scale(copies: Tensor, factors: Tensor) -> Tensor:
    """Multiply rows that were just copied, in their own memory where the type allows it."""
    if torch.result_type(copies, factors) != copies.dtype:
        return copies * factors
    return copies.mul_(factors)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sequences: JaggedOffsets) -> Tensor:
        ctx.sequences = sequences
        return rows.index_select(0, sequences.row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_rows(grad, ctx.sequences), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sequences: JaggedOffsets) -> Tensor:
        ctx.sequences = sequences
        if values.dim() == 1:
            return _sums(values.unsqueeze(1), sequences.offsets).squeeze(1)
        return _sums(values, sequences.offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return expand_rows(grad, ctx.sequences), None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, sequences: JaggedOffsets) -> Tensor:
        offsets, row = sequences.offsets, sequences.row
        # the largest score of a sequence keeps exp in range, and cancels in the result
        largest = torch.segment_reduce(scores, "max", offsets=offsets, axis=0)
        exp = (scores - largest.index_select(0, row)).exp_()
        sums = _sums(exp.unsqueeze(1), offsets).squeeze(1)
        weights = exp.div_(sums.index_select(0, row))
        ctx.sequences = sequences
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        own = weights * grad
        return own - weights * expand_rows(sum_rows(own, ctx.sequences), ctx.sequences), None


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, values: Tensor, sequences: JaggedOffsets) -> Tensor:
        ctx.sequences = sequences
        ctx.save_for_backward(rows, values)
        return _scale(rows.index_select(0, sequences.row), values).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, values = ctx.saved_tensors
        of_values = _scale(expand_rows(rows, ctx.sequences), grad.unsqueeze(1))
        return weighted_sum(grad, values, ctx.sequences), of_values, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, sequences: JaggedOffsets) -> Tensor:
        ctx.sequences = sequences
        ctx.save_for_backward(weights, values)
        return _sums(values, sequences.offsets, weights.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, values = ctx.saved_tensors
        of_values = _scale(expand_rows(grad, ctx.sequences), weights.unsqueeze(1))
        return dots(grad, values, ctx.sequences), of_values, None
