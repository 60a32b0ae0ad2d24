"""The place of a wanted item among all items, whose rows lie on many ranks.

Each rank scores its slice of the items for the queries of all ranks, and counts those above the
wanted item; the counts are added. So no rank holds the whole table or a query's scores of all
items. THE RULE FOR TIES is pessimistic: an item with the same score as the wanted one stands before
it. Scores of the wanted item come from the same product as those of the others, so that equal rows
tie exactly. Places count from 0.

Cost: queries x items / ranks products on each rank, and two small exchanges.

    # Q queries of this rank, N of all ranks, K items of this rank's slice, D width
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.comm.differentiable import counts_by_rank, gather_rows, send_home
from rayrec.comm.exchange import Exchange, LocalExchange


class Places(NamedTuple):
    """Places of the wanted items, each (Q,) int64.

    Attributes:
        kept: among all items.
        masked: among the items that the query has not seen; a wanted item that it has seen stands
            behind them all.
    """

    kept: Tensor
    masked: Tensor


@torch.no_grad()
def rank_items(
    queries: Tensor,
    wanted: Tensor,
    seen: tuple[Tensor, Tensor],
    items: Tensor,
    biases: Tensor,
    first: int,
    known: Tensor,
    exchange: Exchange,
) -> Places:
    """Return the places of the wanted items; every rank calls it with queries of its own.

    Args:
        queries: (Q, D) float32.
        wanted: (Q,) ids.
        seen: ids that queries have seen, query after query, and (Q,) how many each has.
        items: (K, D) rows of this rank's slice, whose ids begin at `first`.
        biases: (K,) added to the scores of the items.
        known: (K,) bool, the items that may be found.
        exchange: the ranks that share the items.
    Raises:
        CommError: a peer is gone.
    """
    ids, lengths = seen
    counts = len(queries), len(ids)
    sizes, id_counts = counts_by_rank(counts, exchange, queries.device)
    all_queries = gather_rows(queries, sizes, exchange)
    all_wanted = gather_rows(wanted, sizes, exchange)
    all_lengths = gather_rows(lengths.long(), sizes, exchange)
    all_ids = gather_rows(ids, id_counts, exchange)
    scores = torch.addmm(biases, all_queries, items.t())
    local = all_wanted - first, (all_ids - first, all_lengths)
    above = torch.stack(_counts(scores, *local, known, exchange), 1)
    # the wanted item was counted as its own equal
    return Places(*(send_home(above, sizes, exchange).sum(0) - 1).unbind(1))


@torch.no_grad()
def rank_scores(
    scores: Tensor, wanted: Tensor, seen: tuple[Tensor, Tensor], known: Tensor
) -> Places:
    """Return the places of the wanted items in scores of all items, by the same rule.

    Args:
        scores: (Q, items), which are written over.
        others: see `rank_items`.
    """
    kept, masked = _counts(scores, wanted, seen, known, LocalExchange())
    return Places(kept - 1, masked - 1)


def _counts(
    scores: Tensor, wanted: Tensor, seen: tuple[Tensor, Tensor], known: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor]:
    """Count for each query the items of this slice that are not below the wanted one, (N,) each:
    of those that are known, and of those that the query has not seen.

    Args:
        wanted, seen: ids less the first of this slice.
    """
    ids, lengths = seen
    scores[:, ~known] = -torch.inf
    kept = _at_least(scores, wanted, exchange)
    query = torch.arange(len(scores), device=ids.device).repeat_interleave(lengths.long())
    here = (ids >= 0) & (ids < scores.shape[1])
    scores[query[here], ids[here]] = -torch.inf
    return kept, _at_least(scores, wanted, exchange)


def _at_least(scores: Tensor, wanted: Tensor, exchange: Exchange) -> Tensor:
    here = (wanted >= 0) & (wanted < scores.shape[1])
    own = scores.new_full((len(scores),), -torch.inf)
    own[here] = scores[here, wanted[here]]
    if exchange.world_size > 1:
        # one rank holds the wanted item; all others say that it is worth nothing
        own = torch.stack(exchange.all_gather(own, [len(own)] * exchange.world_size).wait()).amax(0)
    # a score that is no number counts as above: a model that has diverged finds nothing
    return (~(scores < own.unsqueeze(1))).sum(1)
