"""Scores of a next-item model: of the items that a row names, or the best of all items.

A history is encoded once, whatever the number of items. The best items are exact: a query is
multiplied with all rows of the table, which are unpacked some at a time. OF EQUAL SCORES the item
of the lower id stands first.

    # B rows of the batch, N items of the table, D width
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.data import Batch
from rayrec.models import NextItem
from rayrec.models.full_ranking import NOBODY, best_of
from rayrec.quant import mark_checked
from rayrec.sparse import JaggedTensor

CHUNK_SCORES = 1 << 24  # that are in memory at a time
CHUNK_ITEMS = 1 << 16  # whose rows are unpacked at a time


class Top(NamedTuple):
    """Request for the best items of each row.

    Attributes:
        k: length of a list.
        left_out: lists of the rows, of ids that are in no list.
    """

    k: int
    left_out: tuple[JaggedTensor, ...]


def item_scores(model: NextItem, batch: Batch) -> Tensor:
    """Return the scores of the items of all rows, row after row."""
    looked, items = model.look_up(batch.sparse_features), batch.sparse_features[model.item]
    queries = model.queries(looked.history, batch)
    own = queries.repeat_interleave(items.lengths().long(), dim=0)
    return (own * looked.item).sum(1) + model.biases(items.values())


def top_items(model: NextItem, batch: Batch, top: Top) -> tuple[Tensor, Tensor]:
    """Return the ids and the scores of the best k items of each row, both (B, k), best first."""
    queries = model.queries(model.look_up(batch.sparse_features).history, batch)
    items, rows = model.table.num_embeddings, batch.rows
    ids: list[Tensor] = []
    scores: list[Tensor] = []
    step = max(1, CHUNK_SCORES // items)
    for start in range(0, rows, step):
        part = _all_scores(model, queries[start : start + step])
        for lists in top.left_out:
            _leave_out(part, lists, start)
        for found, own in zip((ids, scores), best_of(part, top.k), strict=True):
            found.append(own)
    if not rows:
        return torch.empty(0, top.k, dtype=torch.int64), torch.empty(0, top.k)
    best = torch.cat(scores)
    return torch.cat(ids).masked_fill(best == -torch.inf, NOBODY), best


def _all_scores(model: NextItem, queries: Tensor) -> Tensor:
    """Return the scores of all items, (B, N); -inf of those that are in no list."""
    items = model.table.num_embeddings
    scores = queries.new_empty(len(queries), items)
    for start in range(0, items, CHUNK_ITEMS):
        ids = torch.arange(start, min(items, start + CHUNK_ITEMS))
        whole = model.of_items(ids)
        mark_checked(whole)
        rows = model.look_up(whole).item
        scores[:, ids] = torch.addmm(model.biases(ids), queries, rows.t())
    never = scores.isnan() if model.listed is None else scores.isnan() | ~model.listed
    return scores.masked_fill_(never, -torch.inf)


def _leave_out(scores: Tensor, lists: JaggedTensor, first: int) -> None:
    """Write -inf to the ids in the lists of the rows from `first` on."""
    offsets = lists.offsets()[first : first + len(scores) + 1].long()
    ids = lists.values()[offsets[0] : offsets[-1]].long()
    row = torch.arange(len(scores)).repeat_interleave(offsets.diff())
    known = (ids >= 0) & (ids < scores.shape[1])
    scores[row[known], ids[known]] = -torch.inf
