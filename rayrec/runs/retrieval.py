"""Two towers for retrieval as plain data, and the rows that they are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rayrec.checks import MAX_SIZE, positive, whole_number
from rayrec.errors import ConfigError, InputError
from rayrec.fields.typed import check_fields

if TYPE_CHECKING:
    from torch import nn

    from rayrec.layout import EmbeddingBagConfig

TWO_TOWER: Literal["two_tower"] = "two_tower"


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoTowerModel:
    """Section `model` of a run that trains two towers.

    Attributes:
        model: "two_tower".
        query, candidate: features of either tower; the first of each are the ids of those who ask
            and of what is found.
        layers: sizes of either tower's layers; the last is the width of the vectors.
        temperature: divisor of the scores in training.
        log_q: correct scores for the popularity of the batch's candidates.
        all_ranks: the negatives of a row are the candidates of the global batch, so that any
            number of ranks trains as one; else those of the rank's part.
        ks: lengths of the lists whose recall is told.
    Raises:
        ConfigError: a name or a length is given twice, or a size is out of range.
    """

    model: Literal["two_tower"] = TWO_TOWER
    query: tuple[str, ...]
    candidate: tuple[str, ...]
    layers: tuple[int, ...] = (64, 32)
    temperature: float = 0.1
    log_q: bool = True
    all_ranks: bool = False
    ks: tuple[int, ...] = (10, 50)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("query", "candidate", "ks", "layers"):
            values = getattr(self, name)
            if not values:
                raise ConfigError(f"{name}=(); give at least one.")
            twice = [one for one in values if values.count(one) > 1]
            if twice and name != "layers":
                raise ConfigError(f"{name} has {twice[0]!r} twice; give it once.")
        for name in ("layers", "ks"):
            for size in getattr(self, name):
                whole_number(f"{name} has the number", size, 1, MAX_SIZE)
        positive("temperature", self.temperature)


class LogShares(NamedTuple):
    """Candidates of the rows that make batches, ascending, and the log of the share of each."""

    ids: tuple[int, ...]
    logs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoTowerRecipe:
    """The model as plain data; calling it builds the module, tables on the meta device.

    Attributes:
        schema: the JSON text of the schema.
        log_q: shares that correct the scores; None trains without.
    """

    schema: str
    model: TwoTowerModel
    log_q: LogShares | None = None

    def __call__(self) -> nn.Module:
        """Build the module with its loss.

        Raises:
            ConfigError: see `sides`.
        """
        import torch

        from rayrec.models import TwoTower, TwoTowerTrain
        from rayrec.modules import EmbeddingBagCollection

        said = self.model
        sides, weighted = self.sides()
        query, candidate = (EmbeddingBagCollection(side, weighted, "meta") for side in sides)
        model = TwoTower(query, said.layers, candidate, said.query, said.candidate)
        # without a mask corrected scores tend to log p(item | user), popularity included; lists
        # are ranked by it
        ids, log_q = None, None
        if self.log_q is not None:
            ids, log_q = torch.tensor(self.log_q.ids), torch.tensor(self.log_q.logs)
        return TwoTowerTrain(
            model,
            said.temperature,
            said.candidate[0],
            log_q,
            mask_hits=log_q is None,
            all_ranks=said.all_ranks,
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
        missing = [name for name in (*self.model.query, *self.model.candidate) if name not in known]
        if missing:
            raise ConfigError(
                f"the schema has no feature {missing[0]!r}; it has {sorted(known)}. Choose with "
                "[model] query and candidate."
            )
        sides = []
        for names in (self.model.query, self.model.candidate):
            sides.append([table for table in tables if set(table.feature_names) & set(names)])
        shared = {t.name for t in sides[0]} & {t.name for t in sides[1]}
        if shared:
            raise ConfigError(
                f"table {sorted(shared)[0]!r} serves both towers; give each tower tables of its "
                "own."
            )
        return sides, schema.is_weighted


def write_positives(train: str, schema: str, candidate: str, folder: str) -> LogShares:
    """Write the training rows with label 1 to `folder`, and count their candidates.

    Args:
        schema: the JSON text of the schema.
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
    return LogShares(tuple(ids.tolist()), tuple(logs.tolist()))
