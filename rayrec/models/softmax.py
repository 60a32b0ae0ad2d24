"""Softmax losses over the items of a sharded table: of all items, and of a sample of them.

`FullSoftmax` leaves the table where it lies. Each rank looks up its slice of the items; the vectors
of all ranks' tokens are gathered, each rank takes the log of the sum of exponents over its slice,
and the parts are joined at home: log sum = log of the sum of the parts' exponents, which is exact.
So no rank ever holds the whole table, or the logits of more than a slice of it: they are made for
some tokens at a time, and once more in the backward pass. `SampledSoftmax` takes the same few items
on all ranks, and corrects each of them by the log of its chance to be drawn (logQ).

Both give the loss of each token; the score of its own item comes from a look-up of its own.

    # T tokens of this rank, N tokens of all ranks, K candidates on this rank, D width
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayrec.comm.differentiable import counts_by_rank, gather_rows, send_home
from rayrec.comm.exchange import Exchange
from rayrec.errors import ConfigError

CHUNK_LOGITS = 1 << 22  # logits that are in memory at a time
SAMPLED_LOGITS = 1 << 26  # of a sampled softmax, which keeps as many for the backward pass


class FullSoftmax(nn.Module):
    """Cross entropy over all items; the candidates of a rank are its slice of them.

    Args:
        num_items: number of the items; the slices of all ranks together must hold each once, see
            `rayrec.data.ItemSlices`.
    """

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.num_items = num_items

    def forward(
        self,
        tokens: Tensor,
        own_scores: Tensor,
        own_ids: Tensor,
        candidates: Tensor,
        biases: Tensor,
        candidate_ids: Tensor,
        exchange: Exchange,
    ) -> Tensor:
        """Return the loss of each token, (T,); every rank calls it, and runs its backward pass.

        Args:
            tokens: (T, D) float32, whose products with the items' rows are the scores.
            own_scores: (T,) scores of the items that are to be found.
            own_ids: (T,) ids of the same items.
            candidates: (K, D) rows of this rank's slice.
            biases: (K,) added to the scores of the candidates.
            candidate_ids: (K,) ids of the candidates.
            exchange: the ranks that share the items.
        Raises:
            ConfigError: the ranks that share the items do not hold all of them as candidates.
            CommError: a peer is gone.
        """
        counts = len(tokens), len(candidates)
        sizes, slices = counts_by_rank(counts, exchange, tokens.device)
        check_slices(slices, self.num_items)
        gathered = gather_rows(tokens, sizes, exchange)
        part: Tensor = _LogSum.apply(gathered, candidates, biases)
        return send_home(part, sizes, exchange).logsumexp(0) - own_scores


def check_slices(slices: Sequence[int], num_items: int) -> None:
    """Check that the candidates of some ranks are all items.

    Raises:
        ConfigError: they are more or fewer.
    """
    if sum(slices) != num_items:
        raise ConfigError(
            f"the {len(slices)} ranks that share the items have slices of {sum(slices)} of them as "
            f"candidates, and there are {num_items}. Slices are for all ranks of a run, so they do "
            "not go with sharding_group_size: leave that out, or train with a sampled softmax."
        )


class SampledSoftmax(nn.Module):
    """Cross entropy over the own item and a sample of items, the same on all ranks.

    Args:
        num_items: number of the items.
        log_q: (ids,) log of the chance of each id in a draw; None where all items have the same.
            It is no parameter and not saved.
        mask_hits: the own item is no negative of itself.
    Source: Bengio and Senecal 2008; the own item is no draw, and is not corrected.
    """

    def __init__(self, num_items: int, log_q: Tensor | None = None, mask_hits: bool = True) -> None:
        super().__init__()
        self.num_items, self.mask_hits = num_items, mask_hits
        self.log_q: Tensor | None
        self.register_buffer("log_q", log_q, persistent=False)

    def forward(
        self,
        tokens: Tensor,
        own_scores: Tensor,
        own_ids: Tensor,
        candidates: Tensor,
        biases: Tensor,
        candidate_ids: Tensor,
        exchange: Exchange,
    ) -> Tensor:
        """Return the loss of each token, (T,), as `FullSoftmax` does; nothing is sent."""
        of_tokens = tokens, own_scores, own_ids
        of_candidates = candidates, biases, candidate_ids
        parts = _chunks(len(tokens), len(candidates), SAMPLED_LOGITS)
        if len(parts) < 2:
            return self._losses(of_tokens, of_candidates)
        # logits are made once more in the backward pass
        again = partial(checkpoint, self._losses, use_reentrant=False, preserve_rng_state=False)
        losses = [again([one[rows] for one in of_tokens], of_candidates) for rows in parts]
        return torch.cat(losses)

    def _losses(self, of_tokens: Sequence[Tensor], of_candidates: Sequence[Tensor]) -> Tensor:
        tokens, own_scores, own_ids = of_tokens
        candidates, biases, candidate_ids = of_candidates
        scores = tokens @ candidates.t() + biases
        # a popular item is drawn often, and would be pushed down for it
        log_q: Tensor | float = -math.log(self.num_items)
        if self.log_q is not None:
            log_q = self.log_q[candidate_ids]
        scores = scores - log_q - math.log(max(1, len(candidate_ids)))
        if self.mask_hits:
            scores = scores.masked_fill(own_ids.unsqueeze(1) == candidate_ids, -torch.inf)
        together = torch.cat([own_scores.unsqueeze(1), scores], 1)
        return together.logsumexp(1) - own_scores


def items_of_ranks(
    own_ids: Tensor, own_rows: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the different items of the tokens of all ranks: ids, rows and shares of the tokens.

    Args:
        own_ids: (T,) ids of this rank's tokens.
        own_rows: (T, D) rows of the same items; differentiable.
        exchange: the ranks that share the items; all of them call it.
    """
    (sizes,) = counts_by_rank([len(own_ids)], exchange, own_rows.device)
    all_ids = gather_rows(own_ids, sizes, exchange)
    all_rows = gather_rows(own_rows, sizes, exchange)
    ids, numbers, counts = all_ids.unique(return_inverse=True, return_counts=True)
    places = torch.arange(len(all_ids), device=ids.device)
    first = torch.empty_like(ids).scatter_reduce_(0, numbers, places, "amin", include_self=False)
    return ids, all_rows.index_select(0, first), counts / max(1, len(all_ids))


class _LogSum(torch.autograd.Function):
    """Log of the sum of exponents over the candidates: (N, D), (K, D), (K,) -> (N,)."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, candidates: Tensor, biases: Tensor) -> Tensor:
        part = [
            torch.addmm(biases, tokens[rows], candidates.t()).logsumexp(1)
            for rows in _chunks(len(tokens), len(candidates), CHUNK_LOGITS)
        ]
        logs = torch.cat(part) if part else tokens.new_zeros(0)
        ctx.save_for_backward(tokens, candidates, biases, logs)
        return logs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, candidates, biases, logs = ctx.saved_tensors
        to_tokens, to_candidates = torch.zeros_like(tokens), torch.zeros_like(candidates)
        to_biases = torch.zeros_like(biases)
        for rows in _chunks(len(tokens), len(candidates), CHUNK_LOGITS):
            logits = torch.addmm(biases, tokens[rows], candidates.t())
            shares = (logits - logs[rows].unsqueeze(1)).exp_().mul_(grads[0][rows].unsqueeze(1))
            to_tokens[rows] = shares @ candidates
            to_candidates.addmm_(shares.t(), tokens[rows])
            to_biases += shares.sum(0)
        return to_tokens, to_candidates, to_biases


def _chunks(tokens: int, candidates: int, logits: int) -> list[slice]:
    step = max(1, logits // max(1, candidates))
    return [slice(start, start + step) for start in range(0, tokens, step)]
