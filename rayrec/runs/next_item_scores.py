"""Scores of a next-item model by full ranking, beside popularity and a Markov chain.

Every held-out row is a query: its history, and the item that is wanted. There are two protocols,
and figures of one say nothing of the other: items that the query has seen are kept in the list, or
masked. Ties are pessimistic (`rayrec.models.full_ranking`), for the baselines, too. Items that
follow no other in a training row, and that no held-out row holds, are in no list. The place of
every query is kept in the run's folder, for a paired comparison of two runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rayrec.runs.item_pairs import Pairs, markov_scores
from rayrec.runs.ranked_queries import ITEMS, PROTOCOLS, keep_places
from rayrec.runs.retrieval_scores import by_ranker, ranking_scores

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rayrec.data import Batch, RowDataset
    from rayrec.models import ItemPlaces, Lists, NextItem
    from rayrec.models.next_item import Looked
    from rayrec.train.loop import RankTrainer

SCORES = 1 << 24  # of queries of all ranks with all items, that are in memory at a time
MODEL, BASELINES = "model", ("popularity", "markov")
RANKERS = (MODEL, *BASELINES)


class ItemSlice(NamedTuple):
    """The K items that a rank scores, from id `first` on: rows (K, D) and biases (K,)."""

    first: int
    rows: Tensor
    biases: Tensor

    def part(self, of_items: Tensor) -> Tensor:
        """Return the slice's part of what is known of all items."""
        return of_items[self.first : self.first + len(self.biases)]


def slice_of(model: NextItem, device: torch.device) -> ItemSlice:
    """Look up this rank's slice of all items; all ranks call it together."""
    import torch

    from rayrec.data import ItemSlices

    # in 2D groups the ranks of each group hold all items, and rank the queries of their own
    share = model.exchange.rank, model.exchange.world_size
    found = ItemSlices(num_items=model.table.num_embeddings).ids(0, 0, *share)
    ids = torch.from_numpy(found).to(device)
    rows = model.look_up(model.of_items(ids)).item
    return ItemSlice(int(found[0]) if len(found) else 0, rows, model.biases(ids))


def look_up(model: NextItem, batch: Batch) -> Looked:
    """Return the rows of a batch, also where it has no candidates or no items; all ranks call it
    together.
    """
    from rayrec.data.candidates import with_bag

    features = batch.sparse_features
    for name in (model.item, model.candidates):
        if name is not None and name not in features.keys():  # noqa: SIM118
            features = with_bag(features, name, features.values()[:0])
    return model.look_up(features)


def queries_at_a_time(items: int) -> int:
    """Return how many queries of all ranks are scored together with all items."""
    return max(1, min(1024, SCORES // items))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NextItemScorer:
    """Ranks all items for the held-out rows; called on all ranks together.

    Attributes:
        held_out: the rows.
        pairs: the counted pairs of the training rows; None where they are not at hand, and then
            there are no baselines.
        seen: sequence of the schema with all items that the user of a row has seen; None takes the
            history.
        ks: lengths of the lists.
    """

    held_out: RowDataset
    pairs: Pairs | None
    seen: str | None
    ks: tuple[int, ...]

    def __call__(self, trainer: RankTrainer) -> dict[str, float]:
        """Score the model and the baselines; return the scores by name, the same on every rank."""
        import torch

        trainer.model.eval()
        model: NextItem = trainer.model.module.model  # type: ignore[assignment]
        # by ranker and protocol, such as "model masked": places of the queries, call by call
        calls: dict[str, list[Tensor]] = {}
        items: list[Tensor] = []
        with torch.no_grad():
            for wanted, placed in self._placed(trainer, model):
                items.append(wanted)
                for ranker, places in placed.items():
                    for protocol in PROTOCOLS:
                        own = getattr(places, protocol)
                        calls.setdefault(f"{ranker} {protocol}", []).append(own)
        scores: dict[str, float] = {}
        for name, parts in calls.items():
            ones = [torch.ones_like(places) for places in parts]
            _, found = ranking_scores(parts, ones, self.ks, "hr")
            scores |= {f"{name} {score}": value for score, value in found.items()}
        kept = {name.removeprefix(f"{MODEL} "): parts for name, parts in calls.items()}
        joined = keep_places(trainer, {**kept, ITEMS: items})
        return {**scores, "queries": float(len(joined["kept"]))}

    def _placed(
        self, trainer: RankTrainer, model: NextItem
    ) -> Iterator[tuple[Tensor, dict[str, ItemPlaces]]]:
        """Yield the items of this rank's queries and their places by each ranker, call by call."""
        import torch

        from rayrec.models import Lists, rank_items, rank_scores
        from rayrec.models.next_item import item_ids

        device, items = trainer.device, model.table.num_embeddings
        known = self._known(model).to(device)
        own = slice_of(model, device)
        for batch in self._batches(trainer.rank, trainer.world_size, items):
            batch = batch.to(device)
            queries = model.queries(look_up(model, batch).history, batch)
            ones = item_ids(batch, model.item)
            wanted, seen = Lists(ones, torch.ones_like(ones)), self._seen(batch, model)
            of_slice = own.rows, own.biases, own.first, own.part(known)
            placed = {MODEL: rank_items(queries, wanted, seen, *of_slice, model.exchange)}
            for name, scores in self._baselines(batch, model):
                placed[name] = rank_scores(scores.to(device), wanted, seen, known)
            yield ones, placed

    def _baselines(self, batch: Batch, model: NextItem) -> Iterator[tuple[str, Tensor]]:
        """Yield the baselines with their scores of all items for each query."""
        import torch

        if self.pairs is None:
            return
        past = batch.sparse_features[model.history]
        histories = np.split(past.values().cpu().numpy(), past.offsets().cpu().numpy()[1:-1])
        counts = torch.from_numpy(self.pairs.counts).double()
        chain = torch.from_numpy(markov_scores(self.pairs, histories[: batch.rows]))
        yield from zip(BASELINES, (counts.repeat(batch.rows, 1), chain), strict=True)

    def _batches(self, rank: int, world: int, items: int) -> Iterator[Batch]:
        # in the order of the rows, so that two runs can be compared query by query
        with self.held_out.loader(
            *(rank, world, queries_at_a_time(items)), shuffle=False, ordered=True, threaded=False
        ) as batches:
            yield from batches

    def _seen(self, batch: Batch, model: NextItem) -> Lists:
        """Return the items that each query has seen."""
        from rayrec.models import Lists

        bags = batch.sparse_features[model.history]
        if self.seen is not None:
            bags = batch.sequences[self.seen]
        return Lists(bags.values(), bags.lengths())

    def _known(self, model: NextItem) -> Tensor:
        """Return the items that may be found, (N,) bool."""
        items = model.table.num_embeddings
        assert model.listed is not None, "a recipe lists the items that follow others"
        known = model.listed.cpu().clone()
        for batch in self._batches(0, 1, items):
            for feature in (model.history, model.item):
                known[batch.sparse_features[feature].values()] = True
        return known


def score_lines(metrics: Mapping[str, float]) -> list[str]:
    """Return the scores for people, a line for each protocol and ranker."""
    scores, lines = by_ranker(metrics), []
    for protocol in PROTOCOLS:
        for ranker in RANKERS:
            shown = scores.get(f"{ranker} {protocol}", {})
            if shown:
                values = "  ".join(f"{score} {value:.4f}" for score, value in shown.items())
                lines.append(f"seen {protocol}, {ranker}: {values}")
    return [*lines, f"{int(metrics.get('queries', 0))} queries"] if scores else []
