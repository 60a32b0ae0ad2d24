"""Scores of a next-item model by full ranking, beside popularity and a Markov chain.

Every held-out row is a query: its history, and the item that is wanted. There are two protocols,
and figures of one say nothing of the other: items that the query has seen are kept in the list, or
masked. Ties are pessimistic (`rayrec.models.full_ranking`), for the baselines, too. Items that no
row holds are in no list. Rank 0 writes the place of every query into the run's folder, for a paired
comparison of two runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rayrec.next_item_recipe import CANDIDATES
from rayrec.runs.item_pairs import Pairs, markov_scores
from rayrec.runs.ranked_queries import PROTOCOLS, of_markov, write_places

if TYPE_CHECKING:
    from torch import Tensor

    from rayrec.data import Batch, RowDataset
    from rayrec.models import ItemPlaces, Lists, NextItem
    from rayrec.train.loop import RankTrainer

SCORES = 1 << 24  # of queries of all ranks with all items, that are in memory at a time
RANKERS = ("model", "popularity", "markov")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NextItemScorer:
    """Ranks all items for the held-out rows; called on all ranks together.

    Attributes:
        held_out: the rows.
        pairs: the counted pairs of the training rows.
        seen: sequence of the schema with all items that the user of a row has seen; None takes the
            history.
        ks: lengths of the lists.
    """

    held_out: RowDataset
    pairs: Pairs
    seen: str | None
    ks: tuple[int, ...]

    def __call__(self, trainer: RankTrainer) -> dict[str, float]:
        """Score the model and the baselines; return the scores by name, the same on every rank."""
        import torch

        from rayrec.train.window import gather_objects

        trainer.model.eval()
        model: NextItem = trainer.model.module.model  # type: ignore[assignment]
        calls: dict[tuple[str, str], list[Tensor]] = {}
        with torch.no_grad():
            for placed in self._placed(trainer, model):
                for ranker, places in zip(RANKERS, placed, strict=True):
                    for protocol in PROTOCOLS:
                        own = getattr(places, protocol)
                        calls.setdefault((ranker, protocol), []).append(own)
        scores: dict[str, float] = {}
        for (ranker, protocol), parts in calls.items():
            scores |= self._scores(f"{ranker} {protocol}", torch.cat(parts))
        told = {p: ("model", p) for p in PROTOCOLS}
        told |= {of_markov(p): ("markov", p) for p in PROTOCOLS}
        ranks = gather_objects(
            {name: [part.tolist() for part in calls[key]] for name, key in told.items()}
        )
        # the ranks' parts of a call stand in the order of the rows
        joined: dict[str, list[int]] = {
            name: [
                place
                for call in zip(*(one[name] for one in ranks), strict=True)
                for part in call
                for place in part
            ]
            for name in told
        }
        if trainer.rank == 0 and trainer.spec.run_path is not None:
            write_places(trainer.spec.run_path, joined)
        return {**scores, "queries": float(len(joined["kept"]))}

    def _placed(
        self, trainer: RankTrainer, model: NextItem
    ) -> Iterator[tuple[ItemPlaces, ItemPlaces, ItemPlaces]]:
        """Yield the places of this rank's queries by model, popularity and chain, call by call."""
        import torch

        from rayrec.data import ItemSlices
        from rayrec.data.candidates import with_bag
        from rayrec.models import Lists, rank_items, rank_scores
        from rayrec.models.next_item import item_ids

        device, rank, world = trainer.device, trainer.rank, trainer.world_size
        # in 2D groups the ranks of each group hold all items, and rank the queries of their own
        exchange, items = model.exchange, len(self.pairs.counts)
        share = exchange.rank, exchange.world_size
        known = self._known(model).to(device)
        counts = torch.from_numpy(self.pairs.counts).to(device).double()
        slices = ItemSlices(num_items=items)
        ids = torch.from_numpy(slices.ids(0, 0, *share)).to(device)
        first = int(ids[0]) if len(ids) else 0
        rows: Tensor | None = None
        for batch in self._batches(rank, world):
            batch = batch.to(device)
            # the rows of the slice are looked up with the first queries
            features = with_bag(batch.sparse_features, CANDIDATES, ids if rows is None else ids[:0])
            looked = model.look_up(features)
            rows = looked.candidates if rows is None else rows
            queries = model.queries(looked.history, batch)
            ones = item_ids(batch, model.item)
            wanted, seen = Lists(ones, torch.ones_like(ones)), self._seen(batch, model)
            found = rank_items(
                queries,
                wanted,
                seen,
                rows,
                model.biases(ids),
                first,
                known[first : first + len(ids)],
                exchange,
            )
            past = batch.sparse_features[model.history]
            histories = np.split(past.values().cpu().numpy(), past.offsets().cpu().numpy()[1:-1])
            chain = torch.from_numpy(markov_scores(self.pairs, histories[: len(ones)]))
            popular = counts.repeat(len(ones), 1)
            yield (
                found,
                rank_scores(popular, wanted, seen, known),
                rank_scores(chain.to(device), wanted, seen, known),
            )

    def _batches(self, rank: int, world: int) -> Iterator[Batch]:
        queries = max(1, min(1024, SCORES // len(self.pairs.counts)))
        # in the order of the rows, so that two runs can be compared query by query
        with self.held_out.loader(
            rank, world, queries, shuffle=False, ordered=True, threaded=False
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
        """Return the items that a training row or a held-out row holds, (N,) bool."""
        import torch

        followed = np.diff(self.pairs.ends) > 0
        known = torch.from_numpy(followed | (self.pairs.counts > 0))
        for batch in self._batches(0, 1):
            for feature in (model.history, model.item):
                known[batch.sparse_features[feature].values()] = True
        return known

    def _scores(self, name: str, places: Tensor) -> dict[str, float]:
        import torch

        from rayrec.metrics import RankingMetrics
        from rayrec.train.window import all_sum

        metrics = RankingMetrics(self.ks, places.device)
        depth = torch.arange(max(self.ks), device=places.device)
        # one item is wanted, so that the hit rate is the recall
        metrics.update_hits(places.unsqueeze(1) == depth, torch.ones_like(places))
        state = metrics.state()
        all_sum(state)
        total = RankingMetrics.from_state(state, self.ks).compute()
        scores = {f"{name} hr@{k}": value for k, value in total.recall.items()}
        scores |= {f"{name} ndcg@{k}": value for k, value in total.ndcg.items()}
        return {**scores, f"{name} mrr": total.mrr}
