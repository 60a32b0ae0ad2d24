"""Two towers for retrieval as plain data, and the rows that they are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rayrec.errors import ConfigError, InputError

if TYPE_CHECKING:
    from torch import nn

    from rayrec.layout import EmbeddingBagConfig


class LogShares(NamedTuple):
    """How often candidates occur in the rows that make batches.

    Attributes:
        ids: those that do, ascending.
        logs: log of the share of each.
    """

    ids: tuple[int, ...]
    logs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalPaths:
    """Paths of the data, and the facts that one pass over it gave.

    Attributes:
        train, held_out: paths of all rows.
        positives: path of the training rows with label 1.
        schema: the JSON text of the schema.
        log_q: shares of the candidates of the positives.
    """

    train: str
    held_out: str
    positives: str
    schema: str
    log_q: LogShares


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoTowerRecipe:
    """The model as plain data; calling it builds the module, tables on the meta device."""

    schema: str
    query: tuple[str, ...]
    candidate: tuple[str, ...]
    layers: tuple[int, ...]
    temperature: float
    log_q: LogShares | None
    all_ranks: bool = False

    def __call__(self) -> nn.Module:
        """Build the module with its loss.

        Raises:
            ConfigError: see `sides`.
        """
        import torch

        from rayrec.models import TwoTower, TwoTowerTrain
        from rayrec.modules import EmbeddingBagCollection

        sides, weighted = self.sides()
        query, candidate = (EmbeddingBagCollection(side, weighted, "meta") for side in sides)
        model = TwoTower(query, self.layers, candidate, self.query, self.candidate)
        # without a mask corrected scores tend to log p(item | user), popularity included; lists
        # are ranked by it
        ids, log_q = None, None
        if self.log_q is not None:
            ids, log_q = torch.tensor(self.log_q.ids), torch.tensor(self.log_q.logs)
        return TwoTowerTrain(
            model,
            self.temperature,
            self.candidate[0],
            log_q,
            mask_hits=log_q is None,
            all_ranks=self.all_ranks,
            log_q_ids=ids,
        )

    def sides(self) -> tuple[list[list[EmbeddingBagConfig]], bool]:
        """Return the tables of the query tower and of the candidate tower, and whether ids have
        weights.

        Raises:
            ConfigError: a feature is not in the schema, or a table serves both towers.
        """
        from rayrec.data import FeatureSchema
        from rayrec.layout.schema_sequences import check_pooled

        schema = FeatureSchema.from_json(self.schema, "the schema")
        check_pooled(schema, "two_tower")
        tables = schema.embedding_bag_configs()
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
        return sides, schema.is_weighted


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
    items = IdColumn(parsed, candidate).ids(positives)
    ids, counts = np.unique(items, return_counts=True)
    logs = np.log(counts / positives.num_rows)
    return RetrievalPaths(
        train=train,
        held_out=held_out,
        positives=folder,
        schema=schema,
        log_q=LogShares(tuple(ids.tolist()), tuple(logs.tolist())),
    )
