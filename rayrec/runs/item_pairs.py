"""The pairs of items that training rows hold, counted in one pass, and the baselines made of them.

A row is a history, oldest item first, and the item that follows it; every position of a history is
a pair of an item and the one after it. How often each item follows makes the list of popular items,
the negatives and the first biases; how often it follows which other makes a Markov chain: the
counts of what followed the last few items, the older ones with less weight.

    # Q queries, N items
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayrec.errors import InputError
from rayrec.layout.tables import refuse_dynamic
from rayrec.runs.held_out import IdColumn

if TYPE_CHECKING:
    from rayrec.data import Batch, FeatureSchema, RowDataset

READ_ROWS = 4096  # at a time
MARKOV_ITEMS, MARKOV_DECAY = 5, 0.7
POPULARITY = 1e-4  # what a count weighs beside one pair: it decides where there is none


class Pairs(NamedTuple):
    """The counted pairs of the training rows.

    Attributes:
        counts: (items,) int64, how often each item follows another.
        ends: (items + 1,) int64; the items that follow item i are at ends[i] .. ends[i + 1].
        following: ids of those items. times: how often each follows.
    """

    counts: NDArray[np.int64]
    ends: NDArray[np.int64]
    following: NDArray[np.int64]
    times: NDArray[np.int64]

    @classmethod
    def of_rows(
        cls, data: RowDataset, history: str, item: str, longest: int | None = None
    ) -> Pairs:
        """Count the pairs of all rows.

        Args:
            longest: items of a history that the encoder takes; None for any number.
        Raises:
            ConfigError, InputError: a row cannot be read, or has not one item.
            InputError: no row has a history, or one has a longer one.
        """
        import torch

        from rayrec.models.next_item import item_ids, next_places

        items = num_items(data.schema, item)
        found: NDArray[np.int64] = np.zeros(0, np.int64)
        times: NDArray[np.int64] = np.zeros(0, np.int64)
        for batch in _batches(data, history, longest):
            past, own = batch.sparse_features[history], item_ids(batch, item)
            ids = torch.cat([past.values(), own])
            following = ids[next_places(past.offsets(), past.values().numel())]
            # a pair as one number; both ids are below the number of items
            pairs = (past.values() * items + following).numpy()
            found, where = np.unique(np.concatenate([found, pairs]), return_inverse=True)
            weights = np.concatenate([times, np.ones(len(pairs), np.int64)])
            times = np.bincount(where, weights, len(found)).astype(np.int64)
        if not len(found):
            raise InputError(
                f"no row of {data.path!r} has an item in its history {history!r}; there is "
                "nothing to learn from."
            )
        before, after = np.divmod(found, items)
        return cls(
            counts=np.bincount(after, times, items).astype(np.int64),
            ends=np.searchsorted(before, np.arange(items + 1)),
            following=after,
            times=times,
        )


def check_lists(data: RowDataset, history: str, longest: int | None) -> None:
    """Check that no history of held-out rows is longer than the encoder takes.

    Raises:
        ConfigError, InputError: a list is too long, or a row cannot be read.
    Cost: the rows are read once where the schema does not say how long their lists are.
    """
    if _bound(data.schema, history, longest) is not None:
        for _ in _batches(data, history, longest):
            pass


def _bound(schema: FeatureSchema, history: str, longest: int | None) -> int | None:
    """Return the longest list that fits; None where the schema cuts them, or any fits."""
    (spec,) = (one for one in schema.features if one.name == history)
    return longest if spec.history is None and spec.most_recent is None else None


def _batches(data: RowDataset, history: str, longest: int | None) -> Iterator[Batch]:
    """Yield all rows; InputError names column, row and file of a list that is too long."""
    most = _bound(data.schema, history, longest)
    asked = most is not None
    with data.loader(0, 1, READ_ROWS, shuffle=False, threaded=False, with_rows=asked) as batches:
        for batch in batches:
            lengths, origin = batch.sparse_features[history].lengths(), batch.origin
            if most is not None and origin is not None and bool((lengths > most).any()):
                row = int(lengths.argmax())
                column = next(one.column for one in data.schema.features if one.name == history)
                raise InputError(
                    f"column {column!r} of {history!r} has a list of {int(lengths[row])} items in "
                    f"row {origin.row[row]} of {data.files[origin.file[row]].path!r}, and the "
                    f"model takes {most}. Raise its length, or cut the lists by "
                    f'"most_recent": {most} in the schema.'
                )
            yield batch


def num_items(schema: FeatureSchema, item: str) -> int:
    """Return the number of ids that items can have.

    Raises:
        ConfigError: the feature is not in the schema or is hashed, or its table is dynamic.
    """
    column = IdColumn(schema, item)
    why = "its items are numbered, for their biases and lists; number them and leave out 'dynamic'"
    refuse_dynamic(column.tables, why)
    return column.size


def markov_scores(pairs: Pairs, histories: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Return the scores of all items after some histories, (Q, N)."""
    scores = np.tile(pairs.counts * POPULARITY, (len(histories), 1))
    for row, history in zip(scores, histories, strict=True):
        for age, one in enumerate(history[::-1][:MARKOV_ITEMS]):
            span = slice(pairs.ends[one], pairs.ends[one + 1])
            # an item follows another once in the list of its followers
            row[pairs.following[span]] += pairs.times[span] * MARKOV_DECAY**age
    return scores
