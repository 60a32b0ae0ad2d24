"""The places of wanted items among all items, whose rows lie on many ranks.

Each rank scores its slice of the items for the queries of all ranks, and counts those above each
wanted item; the counts are added. So no rank holds the whole table or a query's scores of all
items. THE RULE FOR TIES is pessimistic: an item that is not wanted stands before a wanted one of
the same score. Wanted items of one query stand behind each other. Scores of wanted items come from
the same product as those of the others, so that equal rows tie exactly. Places count from 0.

Cost: queries x items / ranks products on each rank, and three small exchanges. `best_items` sends
the best items of each slice home in the same way; there a lower id stands first among equals.

    # Q queries of this rank, N of all ranks, P wanted items, K items of this rank's slice, D width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.comm.differentiable import counts_by_rank, gather_rows, send_home
from rayrec.comm.exchange import Exchange, LocalExchange

NOBODY = -1  # the id at the places of a list for which no item is left
CHUNK_SCORES = 1 << 24  # of wanted items beside all items of a slice, that are compared at a time


class Lists(NamedTuple):
    """Items of each query.

    Attributes:
        ids: items, query after query.
        lengths: (Q,) how many each query has.
    """

    ids: Tensor
    lengths: Tensor


class ItemPlaces(NamedTuple):
    """Places of the wanted items, each (P,) int64, in the order in which they were given.

    Attributes:
        kept: among all items.
        masked: among the items that the query has not seen.
    """

    kept: Tensor
    masked: Tensor


@torch.no_grad()
def rank_items(
    queries: Tensor,
    wanted: Lists,
    seen: Lists,
    items: Tensor,
    biases: Tensor,
    first: int,
    known: Tensor,
    exchange: Exchange,
) -> ItemPlaces:
    """Return the places of the wanted items; every rank calls it with queries of its own.

    A wanted item that is not known, or was seen, stands behind all items.

    Args:
        queries: (Q, D) float32.
        wanted, seen: different items of each query; the seen ones may repeat.
        items: (K, D) rows of this rank's slice, whose ids begin at `first`.
        biases: (K,) added to the scores of the items.
        known: (K,) bool, the items that may be found.
        exchange: the ranks that share the items.
    Raises:
        CommError: a peer is gone.
    """
    counts = len(queries), len(wanted.ids), len(seen.ids)
    sizes, wanted_counts, seen_counts = counts_by_rank(counts, exchange, queries.device)
    scores = torch.addmm(biases, gather_rows(queries, sizes, exchange), items.t())
    above, behind = _places(
        scores,
        _gathered(wanted, sizes, wanted_counts, first, exchange),
        _gathered(seen, sizes, seen_counts, first, exchange),
        known,
        exchange,
    )
    start = sum(wanted_counts[: exchange.rank])
    own = behind[start : start + len(wanted.ids)]
    return ItemPlaces(*(send_home(above, wanted_counts, exchange).sum(0) + own).unbind(1))


@torch.no_grad()
def rank_scores(scores: Tensor, wanted: Lists, seen: Lists, known: Tensor) -> ItemPlaces:
    """Return the places of the wanted items in scores of all items, by the same rule.

    Args:
        scores: (Q, items), which are written over.
        wanted, seen, known: as of `rank_items`.
    """
    above, behind = _places(scores, wanted, seen, known, LocalExchange())
    return ItemPlaces(*(above + behind).unbind(1))


@torch.no_grad()
def best_items(
    queries: Tensor,
    left_out: Sequence[Lists],
    items: Tensor,
    biases: Tensor,
    first: int,
    known: Tensor,
    k: int,
    exchange: Exchange,
) -> tuple[Tensor, Tensor]:
    """Return the ids and the scores of the best items of each query, both (Q, k), best first.

    Every rank calls it with queries of its own. Of equal scores the lower id stands first. Where no
    item is left, the id is NOBODY and the score -inf.

    Args:
        queries, items, biases, first, known, exchange: as of `rank_items`.
        left_out: items that are in no list of each query.
        k: length of the lists; that of all items at most.
    Raises:
        CommError: a peer is gone.
    """
    counts = len(queries), *(len(lists.ids) for lists in left_out)
    sizes, *counted = counts_by_rank(counts, exchange, queries.device)
    scores = torch.addmm(biases, gather_rows(queries, sizes, exchange), items.t())
    scores.masked_fill_(scores.isnan() | ~known, -torch.inf)
    for lists, own in zip(left_out, counted, strict=True):
        scores[_cells(_gathered(lists, sizes, own, first, exchange), scores)] = -torch.inf
    places, best = best_of(scores, k)
    found = (places + first).masked_fill(best == -torch.inf, NOBODY)
    # the slices stand in the order of their ids, and a stable sort keeps it among equals
    ids, scores = (torch.cat([*send_home(one, sizes, exchange)], 1) for one in (found, best))
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return ids.gather(1, order), scores.gather(1, order)


def best_of(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the columns and the values of the largest k scores of each row, both (Q, k).

    Of equal scores the lower column stands first. A row of fewer columns is filled up with -inf.
    """
    if scores.shape[1] < k:
        scores = functional.pad(scores, (0, k - scores.shape[1]), value=-torch.inf)
    columns, values = scores.new_empty(len(scores), k, dtype=torch.int64), scores[:, :k].clone()
    for number, row in enumerate(scores):
        # sorted by score, and where these are equal by column
        found = (row >= row.topk(k).values[-1]).nonzero().squeeze(1)
        order = row[found].argsort(descending=True, stable=True)[:k]
        columns[number], values[number] = found[order], row[found[order]]
    return columns, values


def _gathered(
    lists: Lists, queries: list[int], ids: list[int], first: int, exchange: Exchange
) -> Lists:
    """Return the lists of all ranks, with ids less `first`."""
    lengths = gather_rows(lists.lengths.long(), queries, exchange)
    return Lists(gather_rows(lists.ids, ids, exchange) - first, lengths)


def _places(
    scores: Tensor, wanted: Lists, seen: Lists, known: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor]:
    """Count for each wanted item the others of this slice that are not below it, and the wanted
    ones of its query that stand before it: (P, 2) each, kept and masked.

    Args:
        wanted, seen: ids less the first of this slice.
    """
    scores[:, ~known] = -torch.inf
    query, inside = _queries(wanted), (wanted.ids >= 0) & (wanted.ids < scores.shape[1])
    above, behind = [], []
    for masks in (False, True):
        if masks:
            scores[_cells(seen, scores)] = -torch.inf
        own = scores.new_full((len(query),), -torch.inf)
        own[inside] = scores[query[inside], wanted.ids[inside]]
        if exchange.world_size > 1:
            # one rank holds a wanted item; all others say that it is worth nothing
            parts = exchange.all_gather(own, [len(own)] * exchange.world_size).wait()
            own = torch.stack(parts).amax(0)
        others = scores.index_put((query[inside], wanted.ids[inside]), own.new_tensor(-torch.inf))
        above.append(_at_least(others, query, own))
        behind.append(_before(query, own))
    return torch.stack(above, 1), torch.stack(behind, 1)


def _queries(lists: Lists) -> Tensor:
    """Return the number of the query of each item."""
    numbers = torch.arange(len(lists.lengths), device=lists.ids.device)
    return numbers.repeat_interleave(lists.lengths.long())


def _cells(lists: Lists, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column of those items that have a column of the scores."""
    inside = (lists.ids >= 0) & (lists.ids < scores.shape[1])
    return _queries(lists)[inside], lists.ids[inside]


def _at_least(scores: Tensor, query: Tensor, own: Tensor) -> Tensor:
    counts = torch.zeros_like(query)
    step = max(1, CHUNK_SCORES // max(1, scores.shape[1]))
    for start in range(0, len(query), step):
        rows = slice(start, start + step)
        # a score that is no number counts as above: a model that has diverged finds nothing
        counts[rows] = (~(scores[query[rows]] < own[rows].unsqueeze(1))).sum(1)
    return counts


def _before(query: Tensor, own: Tensor) -> Tensor:
    """Count the wanted items of the same query with higher scores, equal ones in their order."""
    by_score = own.argsort(descending=True, stable=True)
    order = by_score[query[by_score].argsort(stable=True)]
    starts = torch.searchsorted(query, query)  # queries ascend
    place = torch.empty_like(query)
    place[order] = torch.arange(len(query), device=query.device)
    return place - starts
