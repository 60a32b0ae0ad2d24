"""Scores of two towers: all items are ranked for the users with held-out items, on all ranks.

Truth is read from the files by every rank: which items a user has rows for in the training part
(those are left out of the lists) and which of the held-out rows have label 1. Each rank makes the
vectors of its slice of the items once, and scores them for the users of all ranks
(`rayrec.models.rank_items`); users are shared out likewise, and the sums of the metrics are added.
Costs users x items scores: for catalogs of some hundred thousand items, beyond which an index of
nearest neighbours takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rayrec.errors import InputError
from rayrec.runs.ranked_queries import ITEMS, WANTED, keep_places

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from rayrec.metrics import RankingMetrics
    from rayrec.models import Lists, TwoTower
    from rayrec.runs.held_out import IdArray, Truth
    from rayrec.sparse import KeyedJaggedTensor
    from rayrec.train.loop import RankTrainer

CHUNK = 1024  # users or items a rank embeds at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalScorer:
    """Scores a trained model beside popularity; called on all ranks together.

    Attributes:
        train, held_out: paths of all rows of either part.
        schema: the JSON text of the schema.
        user, item: features that hold the ids of users and items.
        ks: cut-offs of the metrics.
    """

    train: str
    held_out: str
    schema: str
    user: str
    item: str
    ks: tuple[int, ...]

    def truth(self) -> Truth:
        """Read the items of each user from the data.

        Raises:
            InputError: a file cannot be read, or no held-out row has label 1 and an item that is
                new to its user.
        """
        from rayrec.data import FeatureSchema
        from rayrec.runs.held_out import Truth

        schema = FeatureSchema.from_json(self.schema, "the schema")
        truth = Truth.load(self.train, self.held_out, schema, self.user, self.item)
        if not any(len(items) for items in truth.relevant):
            raise InputError(
                f"{self.held_out} holds no row with {schema.label}=1 whose item is new to "
                "its user, so recall has no meaning. Hold out other rows."
            )
        return truth

    def __call__(self, trainer: RankTrainer) -> dict[str, float]:
        """Score the model and popularity; return the scores by name, the same on every rank."""
        truth = self.truth()
        calls = compare(trainer, truth)
        keep_places(trainer, calls)
        scores: dict[str, float] = {}
        for ranker, name in (("model", "masked"), ("popularity", "popularity masked")):
            queries, found = ranking_scores(calls[name], calls[WANTED], self.ks)
            scores |= {f"{ranker} {score}": value for score, value in found.items()}
        return {**scores, "queries": float(queries), "candidates": float(len(truth.item_ids))}


def compare(trainer: RankTrainer, truth: Truth) -> dict[str, list[Tensor]]:
    """Rank the items for this rank's users by the model and by popularity; a collective.

    Returns:
        call by call, the places of the wanted items, by the model ("masked") and by popularity; and
        the number of wanted items of each user, and their ids.
    """
    import torch

    from rayrec.models import rank_items, rank_scores

    device, rank, world = trainer.device, trainer.rank, trainer.world_size
    towers: TwoTower = trainer.model.module.two_tower  # type: ignore[assignment]
    trainer.model.eval()
    # items are known by their places in `truth.items`; what no row holds is in no list
    items, exchange = truth.items.num_rows, towers.exchange
    counts = torch.from_numpy(truth.counts).to(device).double()
    known = torch.ones(items, dtype=torch.bool, device=device)
    by_model: list[Tensor] = []
    by_count: list[Tensor] = []
    numbers: list[Tensor] = []
    asked: list[Tensor] = []
    with torch.no_grad():
        # the ranks of a 2D group hold all items together, and rank the users of their own
        bounds = [items * r // exchange.world_size for r in range(exchange.world_size + 1)]
        first, stop = bounds[exchange.rank : exchange.rank + 2]
        # all ranks call it together, also those whose range is empty
        longest = max(b - a for a, b in pairwise(bounds))
        made = [
            towers.candidate(_ids(truth.items, rows, truth.schema, device))
            for rows in _parts(range(first, stop), longest)
        ]
        vectors = torch.cat(made)
        for rows in _shares(truth.users.num_rows, rank, world):
            queries = towers.query(_ids(truth.users, rows, truth.schema, device))
            # Items that a user has seen are no answer. The lists of popularity leave them out, too,
            # so that both are compared alike.
            wanted = places_of(truth.relevant, rows, truth, device)
            seen = places_of(truth.seen, rows, truth, device)
            zeros = vectors.new_zeros(len(vectors))
            mine = known[: len(vectors)]
            found = rank_items(queries, wanted, seen, vectors, zeros, first, mine, exchange)
            by_model.append(found.masked)
            numbers.append(wanted.lengths)
            asked.append(torch.from_numpy(truth.item_ids[wanted.ids.cpu().numpy()]))
            popular = rank_scores(counts.repeat(len(rows), 1), wanted, seen, known)
            by_count.append(popular.masked)
    return {"masked": by_model, "popularity masked": by_count, WANTED: numbers, ITEMS: asked}


def places_of(lists: Sequence[IdArray], rows: range, truth: Truth, device: Any) -> Lists:
    """Return the lists of some users, with the places of items in `truth.items`."""
    import numpy as np
    import torch

    from rayrec.models import Lists

    own = [lists[row] for row in rows]
    ids = np.searchsorted(truth.item_ids, np.concatenate([*own, np.zeros(0, np.int64)]))
    lengths = torch.tensor([len(one) for one in own], dtype=torch.int64)
    return Lists(torch.from_numpy(ids).to(device), lengths.to(device))


def add_places(metrics: RankingMetrics, places: Tensor, wanted: Tensor) -> None:
    """Count the wanted items of each query that are in its list.

    Args:
        places: of the wanted items, those of a query after those of the one before it.
        wanted: their number for each query.
    """
    import torch

    depth = max(metrics.ks)
    queries = torch.arange(len(wanted), device=places.device)
    row, listed = queries.repeat_interleave(wanted), places < depth
    hits = torch.zeros(len(queries), depth, dtype=torch.bool, device=places.device)
    hits[row[listed], places[listed]] = True
    metrics.update_hits(hits, wanted)


def ranking_scores(
    calls: Sequence[Tensor], wanted: Sequence[Tensor], ks: tuple[int, ...], recall: str = "recall"
) -> tuple[int, dict[str, float]]:
    """Return the number of queries of all ranks, and their scores by name; a collective.

    Args:
        calls, wanted: places and numbers of this rank's queries, call by call; see `add_places`.
        recall: name of the recall; where one item is wanted, it is the hit rate.
    """
    from rayrec.metrics import RankingMetrics
    from rayrec.train.window import all_sum

    metrics = RankingMetrics(ks, wanted[0].device)
    for places, numbers in zip(calls, wanted, strict=True):
        add_places(metrics, places, numbers)
    # States are sums over queries, so the sum over ranks is the state of all queries.
    state = metrics.state()
    all_sum(state)
    total = RankingMetrics.from_state(state, metrics.ks).compute()
    scores = {f"{recall}@{k}": value for k, value in total.recall.items()}
    scores |= {f"ndcg@{k}": value for k, value in total.ndcg.items()}
    return total.queries, {**scores, "mrr": total.mrr}


def by_ranker(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the scores of each ranker, such as "model", by their own names.

    The metrics are called "model recall@10" and the like; what is one word has no ranker.
    """
    scores: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        who, _, score = name.rpartition(" ")
        if who:
            scores.setdefault(who, {})[score] = value
    return scores


def _shares(total: int, rank: int, world_size: int) -> list[range]:
    """Ranges of this rank's rows, one per call of a tower.

    A call is a collective, so every rank gets equally many ranges; some may be empty.
    """
    shares = []
    for start in range(0, total, CHUNK * world_size):
        call = range(start, min(start + CHUNK * world_size, total))
        first, last = rank * len(call) // world_size, (rank + 1) * len(call) // world_size
        shares.append(call[first:last])
    return shares


def _parts(rows: range, longest: int) -> list[range]:
    """Ranges of at most CHUNK rows, as many as `longest` rows need; some may be empty."""
    starts = range(rows.start, rows.start + longest, CHUNK)
    return [range(min(start, rows.stop), min(start + CHUNK, rows.stop)) for start in starts]


def _ids(table: pa.Table, rows: range, schema: Any, device: Any) -> KeyedJaggedTensor:
    from rayrec.data.convert import to_batch

    return to_batch(table.slice(rows.start, len(rows)), schema).sparse_features.to(device)
