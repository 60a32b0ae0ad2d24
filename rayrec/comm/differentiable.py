"""Collectives that gradients go back through, for losses over what all ranks hold.

`gather_rows` gives every rank the rows of all, and `send_home` gives each rank what all have worked
out for its rows. The backward pass of either is the other way round: gradients of gathered rows go
to the rank that owns the row and are summed there, in the order of the ranks, so that results
repeat bit for bit. Ranks may have different numbers of rows, or none; all of them must call the
same functions in the same order, and run the backward pass.

Cost: one exchange forward and one backward, in float32; `gather_rows` has a small one before, of
the numbers of rows, which the host waits for.

    # W ranks, n rows of this rank, N rows of all ranks, D values of a row
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange


def counts_by_rank(
    counts: Sequence[int], exchange: Exchange, device: torch.device
) -> list[list[int]]:
    """Return for each count, such as a number of rows, those of all ranks."""
    if exchange.world_size == 1:
        return [[count] for count in counts]
    own = torch.tensor(counts, dtype=torch.int64, device=device)
    parts = exchange.all_gather(own, [len(counts)] * exchange.world_size).wait()
    found: list[list[int]] = torch.stack(parts).t().tolist()
    return found


def gather_rows(rows: Tensor, sizes: Sequence[int], exchange: Exchange) -> Tensor:
    """Give every rank the rows of all.

    Args:
        rows: (n, ...), of one type on all ranks.
        sizes: rows of each rank, as `counts_by_rank` tells.
    Returns:
        (N, ...), in the order of the ranks; differentiable where `rows` is.
    Raises:
        CommError: a peer is gone.
    """
    if exchange.world_size == 1:
        return rows
    gathered: Tensor = _Gather.apply(rows.contiguous(), tuple(sizes), exchange)
    return gathered


def send_home(values: Tensor, sizes: Sequence[int], exchange: Exchange) -> Tensor:
    """Send to each rank the values of its rows.

    Args:
        values: (N, ...), of the rows of all ranks in the order of `gather_rows`.
        sizes: rows of each rank.
    Returns:
        (W, n, ...): what each rank has sent for the rows of this one; differentiable.
    Raises:
        CommError: a peer is gone.
    """
    if exchange.world_size == 1:
        return values.unsqueeze(0)
    sent: Tensor = _Home.apply(values.contiguous(), tuple(sizes), exchange)
    return sent


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], exchange: Exchange) -> Tensor:
        ctx.sizes, ctx.exchange = sizes, exchange
        width = prod(rows.shape[1:])
        parts = exchange.all_gather(rows.view(-1), [size * width for size in sizes]).wait()
        return torch.cat(parts).view(-1, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        parts = _home(grads[0].contiguous(), ctx.sizes, ctx.exchange)
        return parts.sum(0), None, None


class _Home(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sizes: tuple[int, ...], exchange: Exchange) -> Tensor:
        ctx.sizes, ctx.exchange = sizes, exchange
        return _home(values, sizes, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # (W, n, ...): part r goes back to rank r, which sums nothing
        parts, sizes, exchange = grads[0].contiguous(), ctx.sizes, ctx.exchange
        width = prod(parts.shape[2:])
        own = sizes[exchange.rank] * width
        back = exchange.all_to_all(
            parts.view(-1), [own] * len(sizes), [size * width for size in sizes]
        )
        return back.wait().view(-1, *parts.shape[2:]), None, None


def _home(values: Tensor, sizes: Sequence[int], exchange: Exchange) -> Tensor:
    width, own = prod(values.shape[1:]), sizes[exchange.rank]
    home = exchange.all_to_all(
        values.view(-1), [size * width for size in sizes], [own * width] * len(sizes)
    )
    return home.wait().view(len(sizes), own, *values.shape[1:])
