"""The backward of `TorchLookup`: the rows that a step touched are updated, each once.

The transpose of an `embedding_bag` is one, too: after a stable sort of the ids, the gradient of a
touched row is the (weighted) sum of the gradients of the bags that hold it. So equal ids are summed
without an (ids, width) temporary. The touched rows are walked in blocks that fit a cache, and each
block is updated at once. The gradients of the ids' weights are computed here, too.
"""

# B bags per slot, S slots of one width, N their ids, U touched rows, D width

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.distributed.kernels.bands import Band, BandBags, bag_sums, put_rows
from rayrec.distributed.kernels.parts import RowShare, cut_rows, ids_per_slot
from rayrec.distributed.kernels.workers import Task, Workers
from rayrec.optim import SparseOptimizer
from rayrec.sparse.ops import complete_cumsum

# of touched rows updated at once: 512 KiB per temporary, or few launches
_BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}


class Update(NamedTuple):
    """Optimizer and learning rate of one step's update; `iteration` counts this step."""

    optimizer: SparseOptimizer
    learning_rate: float
    iteration: int


def update_tasks(
    band: Band,
    bags: BandBags,
    grad: Tensor,
    update: Update,
    slot_shards: Sequence[int],
    threads: int,
) -> list[Task]:
    """Return the tasks that update the rows of one band, one for each thread at most.

    Args:
        grad: (S * B, D), the gradients of the bags.
        slot_shards: by slot of the band, its shard; a row is updated by one thread alone.
    """
    if threads == 1:
        return [partial(_update_touched, band, bags, grad, update)]
    ids = ids_per_slot(bags.offsets, len(slot_shards))
    shares = cut_rows(ids, [band.width] * len(slot_shards), slot_shards, threads)
    return [partial(_update_touched, band, bags, grad, update, share) for share in shares]


def _update_touched(
    band: Band, bags: BandBags, grad: Tensor, update: Update, share: RowShare | None = None
) -> None:
    """Sum the gradients of equal ids and update each touched row of a share, or of all, once.

    `grad` is (S * B, D).
    """
    bags = bags if share is None else bags.part(share)
    # A stable sort keeps equal ids in their order, so that their sum repeats bit for bit.
    sorted_N, order_N = bags.rows_N.sort(stable=True)
    bag_N = bags.grad_row_N().index_select(0, order_N)
    weights_N = None if bags.weights_N is None else bags.weights_N.index_select(0, order_N)
    touched_U, counts_U = sorted_N.unique_consecutive(return_counts=True)
    # The ids of row touched_U[u] are sorted_N[starts[u] : starts[u + 1]].
    touched_U, starts = touched_U.long(), complete_cumsum(counts_U)
    step = max(1, _block_elements(grad.device) // band.width)
    cuts = list(range(0, touched_U.numel(), step))
    heads = starts[::step].tolist() if len(cuts) > 1 else [0]
    heads = [*heads[: len(cuts)], bag_N.numel()]
    starts = starts.to(bag_N.dtype)
    for i, first in enumerate(cuts):
        rows = touched_U[first : first + step]
        ids = slice(heads[i], heads[i + 1])
        # (rows of the block, D): the lookup transposed, with rows as bags and bags as rows
        sums = bag_sums(
            grad,
            bag_N[ids],
            starts[first : first + step + 1] - heads[i],
            None if weights_N is None else weights_N[ids],
        )
        weight = band.weight.index_select(0, rows).float()
        state = {name: tensor.index_select(0, rows) for name, tensor in band.state.items()}
        update.optimizer.update_rows(update.learning_rate, update.iteration, weight, sums, state)
        put_rows(band.weight, rows, weight.to(band.weight.dtype))
        for name, tensor in state.items():
            put_rows(band.state[name], rows, tensor)


def grad_of_weights(
    bands: Sequence[Band],
    bags: Sequence[BandBags],
    grads: Sequence[Tensor],
    weights: Tensor,
    workers: Workers,
) -> Tensor:
    """Return (N,): per id, the row that its weight scales, times the gradient of its bag."""
    of_weights = torch.empty_like(weights)
    for band, b, grad in zip(bands, bags, grads, strict=True):
        step = max(1, _block_elements(weights.device) // band.width)
        dots = weights.new_empty(b.rows_N.numel())

        def fill(
            dots: Tensor, rows: Tensor, bag: Tensor, band: Band = band, grad: Tensor = grad
        ) -> None:
            dots.copy_(torch.einsum("nd,nd->n", band.weight[rows].float(), grad[bag]))

        parts = zip(dots.split(step), b.rows_N.split(step), b.grad_row_N().split(step), strict=True)
        workers.run([partial(fill, *part) for part in parts])
        for span, part in zip(
            b.spans,
            dots.split([len(range(*s.indices(weights.numel()))) for s in b.spans]),
            strict=True,
        ):
            of_weights[span] = part
    return of_weights


def _block_elements(device: torch.device) -> int:
    return _BLOCK_ELEMENTS["cpu" if device.type == "cpu" else "cuda"]
