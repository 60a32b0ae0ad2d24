"""Predictions of a next-item model by ranks: the score of each row's item, or its best items.

The best items are exact. Each rank scores its slice of the items for the queries of all ranks, and
sends its best ones home; no rank holds the table, or a query's scores of all items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrec.runs.next_item_scores import look_up, slice_of

if TYPE_CHECKING:
    from torch import Tensor

    from rayrec.data import Batch
    from rayrec.models import NextItem
    from rayrec.train.loop import RankTrainer

KIND = "ranking"  # of an output: scores that stay what they are


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemScores:
    """Scores of the item of each row."""

    @property
    def outputs(self) -> Sequence[tuple[str, str]]:
        """Name and kind of the one column."""
        return [("", KIND)]

    def __call__(self, trainer: RankTrainer) -> Callable[[Batch], Sequence[Tensor]]:
        """Return a function of a batch; all ranks call both together."""
        from rayrec.models.next_item import item_ids

        model: NextItem = trainer.model.module.model  # type: ignore[assignment]

        def scores(batch: Batch) -> Sequence[Tensor]:
            looked, items = look_up(model, batch), item_ids(batch, model.item)
            queries = model.queries(looked.history, batch)
            return [(queries * looked.item).sum(1) + model.biases(items)]

        return scores


@dataclass(frozen=True, kw_only=True, slots=True)
class BestItems:
    """The best items after the history of each row.

    Attributes:
        k: length of the lists.
        masked: leave out the items of the history and of `seen`.
        seen: sequence of the schema with all items that the user of a row has seen, or None.
    """

    k: int
    masked: bool = False
    seen: str | None = None

    @property
    def outputs(self) -> Sequence[tuple[str, str]]:
        """Name and kind of each column."""
        return [("item", KIND), ("score", KIND)]

    def __call__(self, trainer: RankTrainer) -> Callable[[Batch], Sequence[Tensor]]:
        """Return a function of a batch; all ranks call both together."""
        from rayrec.models import Lists, best_items

        model: NextItem = trainer.model.module.model  # type: ignore[assignment]
        own = slice_of(model, trainer.device)
        assert model.listed is not None, "a recipe lists the items that follow others"
        of_slice = own.rows, own.biases, own.first, own.part(model.listed)

        def lists(batch: Batch) -> Sequence[Tensor]:
            queries = model.queries(look_up(model, batch).history, batch)
            bags = [batch.sparse_features[model.history]] if self.masked else []
            if self.masked and self.seen is not None:
                bags.append(batch.sequences[self.seen])
            left_out = [Lists(bag.values(), bag.lengths()) for bag in bags]
            return best_items(queries, left_out, *of_slice, self.k, model.exchange)

        return lists
