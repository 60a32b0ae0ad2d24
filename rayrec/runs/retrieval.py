"""Two towers for retrieval: building them from plain data, and ranking all items on all ranks.

Truth is read from the files by every rank: which items a user has rows for in the training part
(those are left out of the lists) and which of the held-out rows have label 1. Vectors of all items
are made once, each rank a share, and summed into one matrix on every rank; users are shared out
likewise, and the sums of the metrics are added. Costs users x items scores and a matrix of all
items on every rank: for catalogs of some hundred thousand items, beyond which an index of nearest
neighbours takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec.errors import ConfigError, InputError

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from rayrec.layout import EmbeddingBagConfig
    from rayrec.metrics import RankingMetrics, RankingScores
    from rayrec.models import TwoTower
    from rayrec.runs.held_out import Truth
    from rayrec.sparse import KeyedJaggedTensor
    from rayrec.train.loop import RankTrainer

CHUNK = 1024  # users or items a rank embeds at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalPaths:
    """Paths of the data, and the facts that one pass over it gave.

    Attributes:
        train, held_out: paths of all rows.
        positives: path of the training rows with label 1.
        schema: the JSON text of the schema.
        log_q: per candidate id, log of its share of the positives.
    """

    train: str
    held_out: str
    positives: str
    schema: str
    log_q: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoTowerRecipe:
    """The model as plain data; calling it builds the module, tables on the meta device."""

    schema: str
    query: tuple[str, ...]
    candidate: tuple[str, ...]
    layers: tuple[int, ...]
    temperature: float
    log_q: tuple[float, ...] | None
    all_ranks: bool = False

    def __call__(self) -> nn.Module:
        """Build the module with its loss.

        Raises:
            ConfigError: the schema lacks a feature.
        """
        import torch

        from rayrec.data import FeatureSchema
        from rayrec.layout.schema_sequences import check_pooled
        from rayrec.models import TwoTower, TwoTowerTrain
        from rayrec.modules import EmbeddingBagCollection

        schema = FeatureSchema.from_json(self.schema, "the schema")
        check_pooled(schema, "two_tower")
        sides = self._sides(schema.embedding_bag_configs())
        weighted = schema.is_weighted
        query, candidate = (EmbeddingBagCollection(side, weighted, "meta") for side in sides)
        model = TwoTower(query, self.layers, candidate, self.query, self.candidate)
        # without a mask corrected scores tend to log p(item | user), popularity included; lists
        # are ranked by it
        log_q = None if self.log_q is None else torch.tensor(self.log_q)
        return TwoTowerTrain(
            model,
            self.temperature,
            self.candidate[0],
            log_q,
            mask_hits=log_q is None,
            all_ranks=self.all_ranks,
        )

    def check(self) -> None:
        """Check that the towers' features are in the schema.

        Raises:
            ConfigError: a feature is not, or a table serves both towers.
        """
        from rayrec.data import FeatureSchema
        from rayrec.layout.schema_sequences import check_pooled

        schema = FeatureSchema.from_json(self.schema, "the schema")
        check_pooled(schema, "two_tower")
        self._sides(schema.embedding_bag_configs())

    def _sides(self, tables: Sequence[EmbeddingBagConfig]) -> list[list[EmbeddingBagConfig]]:
        """Return the tables of the query tower and of the candidate tower."""
        known = {feature for table in tables for feature in table.feature_names}
        missing = [name for name in (*self.query, *self.candidate) if name not in known]
        if missing:
            raise ConfigError(
                f"the schema has no feature {missing[0]!r}; it has {sorted(known)}. Choose with "
                "[model] query and candidate."
            )
        sides = []
        for names in (self.query, self.candidate):
            sides.append([table for table in tables if set(table.feature_names) & set(names)])
        shared = {t.name for t in sides[0]} & {t.name for t in sides[1]}
        if shared:
            raise ConfigError(
                f"table {sorted(shared)[0]!r} serves both towers; give each tower tables of its "
                "own."
            )
        return sides


def write_positives(
    train: str, held_out: str, schema: str, candidate: str, folder: str
) -> RetrievalPaths:
    """Write the training rows with label 1 to `folder`, and count their candidates.

    Raises:
        InputError: a file cannot be read, a label is neither 0 nor 1, or none is 1.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rayrec.data import FeatureSchema
    from rayrec.runs.held_out import IdColumn, click_labels, read_rows

    parsed = FeatureSchema.from_json(schema, "the schema")
    rows = read_rows(train, list(parsed.columns()))
    positives = rows.filter(pa.array(click_labels(rows, parsed, train) == 1))
    if not positives.num_rows:
        raise InputError(
            f"{train} has {rows.num_rows} rows, none with {parsed.label}=1; there is nothing to "
            "learn to retrieve."
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Row groups of 4096 rows are the chunks that training shuffles.
    pq.write_table(positives, Path(folder) / "part-00000.parquet", row_group_size=4096)
    items = IdColumn(parsed, candidate)
    counts = np.bincount(items.ids(positives), minlength=items.size)
    # an item that no batch can hold needs no correction, only a finite one
    shares = np.maximum(counts, 0.5) / positives.num_rows
    return RetrievalPaths(
        train=train,
        held_out=held_out,
        positives=folder,
        schema=schema,
        log_q=tuple(np.log(shares).tolist()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalScorer:
    """Scores a trained model beside popularity; called on all ranks together.

    Attributes:
        paths: paths and facts of the data.
        query, candidate: features of the towers; the first of each are the ids of users and items.
        ks: cut-offs of the metrics.
    """

    paths: RetrievalPaths
    query: tuple[str, ...]
    candidate: tuple[str, ...]
    ks: tuple[int, ...]

    def truth(self) -> Truth:
        """Read the items of each user from the data.

        Raises:
            InputError: a file cannot be read, or no held-out row has label 1 and an item that is
                new to its user.
        """
        from rayrec.data import FeatureSchema
        from rayrec.runs.held_out import Truth

        schema = FeatureSchema.from_json(self.paths.schema, "the schema")
        truth = Truth.load(
            self.paths.train, self.paths.held_out, schema, self.query[0], self.candidate[0]
        )
        if not any(len(items) for items in truth.relevant):
            raise InputError(
                f"{self.paths.held_out} holds no row with {schema.label}=1 whose item is new to "
                "its user, so recall has no meaning. Hold out other rows."
            )
        return truth

    def __call__(self, trainer: RankTrainer) -> dict[str, float]:
        """Score the model and popularity; return the scores by name, the same on every rank."""
        truth = self.truth()
        model, popularity = compare(trainer, truth, self.ks)
        return {
            **{f"model {name}": value for name, value in _plain(model).items()},
            **{f"popularity {name}": value for name, value in _plain(popularity).items()},
            "queries": float(model.queries),
            "candidates": float(len(truth.item_ids)),
        }


def compare(
    trainer: RankTrainer, truth: Truth, ks: tuple[int, ...]
) -> tuple[RankingScores, RankingScores]:
    """Scores of lists by the model and by popularity; a collective, and the same on every rank."""
    import torch

    from rayrec.metrics import RankingMetrics
    from rayrec.runs.held_out import mark
    from rayrec.train.window import all_sum

    device, rank, world = trainer.device, trainer.rank, trainer.world_size
    towers: TwoTower = trainer.model.module.two_tower  # type: ignore[assignment]
    trainer.model.eval()
    # Ids that no row holds have no features, so they are in no list.
    known = torch.zeros(truth.size, dtype=torch.bool, device=device)
    known[torch.from_numpy(truth.item_ids).to(device)] = True
    popularity = torch.from_numpy(truth.counts).to(device).double()
    by_model, by_count = RankingMetrics(ks, device), RankingMetrics(ks, device)
    vectors: Tensor | None = None
    with torch.no_grad():
        for rows in _shares(truth.items.num_rows, rank, world):
            # All ranks call it together, also those whose range is empty.
            made = towers.candidate(_ids(truth.items, rows, truth.schema, device))
            vectors = made.new_zeros(truth.size, made.shape[1]) if vectors is None else vectors
            vectors[torch.from_numpy(truth.item_ids[rows.start : rows.stop]).to(device)] = made
        assert vectors is not None
        # Each row was filled by one rank and is 0 on all others, so the sum is exact.
        all_sum(vectors)
        for rows in _shares(truth.users.num_rows, rank, world):
            scores = towers.query(_ids(truth.users, rows, truth.schema, device)) @ vectors.t()
            relevant = mark(truth.relevant, rows, truth.size).to(device)
            # Items that a user has seen are no answer. The lists of popularity leave them out, too,
            # so that both are compared alike.
            allowed = known & ~mark(truth.seen, rows, truth.size).to(device)
            by_model.update(scores.masked_fill(~allowed, -torch.inf), relevant)
            counts = popularity.expand(len(rows), -1)
            by_count.update(counts.masked_fill(~allowed, -torch.inf), relevant)
    return _merged(by_model, ks), _merged(by_count, ks)


def _merged(metrics: RankingMetrics, ks: tuple[int, ...]) -> RankingScores:
    from rayrec.metrics import RankingMetrics
    from rayrec.train.window import all_sum

    # States are sums over users, so the sum over ranks is the state of all users.
    state = metrics.state()
    all_sum(state)
    return RankingMetrics.from_state(state, ks).compute()


def _shares(total: int, rank: int, world_size: int) -> list[range]:
    """Ranges of this rank's rows, one per call of a tower.

    Together the ranks cover 0 .. total - 1 once. A call is a collective, so every rank gets equally
    many ranges; some may be empty. A range has at most CHUNK rows, which bounds the memory.
    """
    shares = []
    for start in range(0, total, CHUNK * world_size):
        call = range(start, min(start + CHUNK * world_size, total))
        first, last = rank * len(call) // world_size, (rank + 1) * len(call) // world_size
        shares.append(call[first:last])
    return shares


def _ids(table: pa.Table, rows: range, schema: Any, device: Any) -> KeyedJaggedTensor:
    from rayrec.data.convert import to_batch

    return to_batch(table.slice(rows.start, len(rows)), schema).sparse_features.to(device)


def _plain(scores: RankingScores) -> dict[str, float]:
    plain = {f"recall@{k}": value for k, value in scores.recall.items()}
    plain |= {f"ndcg@{k}": value for k, value in scores.ndcg.items()}
    return {**plain, "mrr": scores.mrr}
