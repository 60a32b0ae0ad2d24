"""`ModelRecipe`: a click model as plain data that a checkpoint carries, to build it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rayrec.checks import positive, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.spec.hstu import HSTUConfig

if TYPE_CHECKING:
    from torch import nn

    from rayrec.data import FeatureSchema
    from rayrec.layout import EmbeddingConfig
    from rayrec.modules import EmbeddingBagCollection

MODELS = ("dlrm", "dcn", "din", "hstu_ranking")
# fields that one model alone reads
OPTIONS_OF = {"cross_layers": "dcn", "cross_rank": "dcn", "attention_layers": "din"}
OPTIONS_OF |= {"hstu": "hstu_ranking"}
_LAYERS = ("dense_layers", "over_layers", "attention_layers")
OTHER_KINDS = ("two_tower", "next_item")  # what checkpoints of other models say in their extras
MAX_SIZE = 2**31 - 1  # of a layer
# The models multiply rows with each other, and a product of rows near zero has hardly a gradient.
INIT_BOUND = 0.5

Table = TypeVar("Table", bound=BaseEmbeddingConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecipe:
    """A click model as plain data; calling it builds the module, tables on the meta device.

    Attributes:
        model: "dlrm", "dcn", "din" or "hstu_ranking".
        schema: the JSON text of the feature schema.
        dense_layers: sizes of the dense MLP's layers but the last, which is as wide as the tables;
            of all of them for din and hstu_ranking.
        over_layers: sizes of the over MLP's layers before its one logit.
        cross_layers, cross_rank: depth and rank of dcn's cross network.
        attention_layers: sizes of the hidden layers of din's attention; none for dot products.
        hstu: encoder of hstu_ranking, and what it reads.
        init_bound: the rows of tables start within +- this, where the schema gives a table no
            bounds; None takes the table's own, the root of 1 / num_embeddings.
    Raises:
        ConfigError: the model is not known, or a size or the bound is out of range.
    """

    model: str
    schema: str
    dense_layers: tuple[int, ...] = (64,)
    over_layers: tuple[int, ...] = (64, 32)
    cross_layers: int = 2
    cross_rank: int = 16
    attention_layers: tuple[int, ...] = (80, 40)
    hstu: HSTUConfig = field(default_factory=HSTUConfig)
    init_bound: float | None = INIT_BOUND

    def __post_init__(self) -> None:
        check_fields(self)
        if self.model not in MODELS:
            raise ConfigError(
                f"model {self.model!r} is not known; choose one of {', '.join(MODELS)}."
            )
        for name in _LAYERS:
            for size in getattr(self, name):
                whole_number(f"{name} has the size", size, 1, MAX_SIZE)
        whole_number("cross_layers", self.cross_layers)
        whole_number("cross_rank", self.cross_rank)
        if self.init_bound is not None:
            positive("init_bound", self.init_bound)

    def __call__(self) -> nn.Module:
        """Build the module with its loss."""
        from rayrec.data import FeatureSchema
        from rayrec.layout.schema_sequences import check_pooled
        from rayrec.models import DLRM, DLRM_DCN, DLRMTrain
        from rayrec.modules import EmbeddingBagCollection

        schema = FeatureSchema.from_json(self.schema, "the recipe's schema")
        if self.model == "din":
            return self._din(schema)
        if self.model == "hstu_ranking":
            return self._hstu(schema)
        check_pooled(schema, self.model)
        tables = [self._started(table) for table in schema.embedding_bag_configs()]
        # On the meta device the tables take no memory; every rank makes only its own shards.
        collection = EmbeddingBagCollection(
            tables=tables, is_weighted=schema.is_weighted, device="meta"
        )
        # The dense row interacts with the looked-up rows, so its MLP ends in their width.
        dense, over = [*self.dense_layers, tables[0].embedding_dim], [*self.over_layers, 1]
        if self.model == "dlrm":
            return DLRMTrain(DLRM(collection, len(schema.dense), dense, over))
        return DLRMTrain(
            DLRM_DCN(collection, len(schema.dense), dense, over, self.cross_layers, self.cross_rank)
        )

    def _din(self, schema: FeatureSchema) -> nn.Module:
        from rayrec.layout.schema_sequences import candidates_of
        from rayrec.models import DIN, DLRMTrain
        from rayrec.modules import EmbeddingCollection

        sequences = [self._started(table) for table in schema.embedding_configs()]
        histories = candidates_of(schema)
        return DLRMTrain(
            DIN(
                EmbeddingCollection(sequences, device="meta"),
                histories,
                [*self.over_layers, 1],
                self._bags(schema),
                len(schema.dense),
                self.dense_layers,
                self.attention_layers,
            )
        )

    def _hstu(self, schema: FeatureSchema) -> nn.Module:
        from rayrec.layout.schema_sequences import aligned_histories
        from rayrec.models import DLRMTrain, HSTURanking
        from rayrec.modules import EmbeddingCollection

        said = self.hstu
        histories, longest = aligned_histories(schema, said.times, said.candidate_time)
        by_width: dict[int, list[EmbeddingConfig]] = {}
        for table in schema.embedding_configs():
            by_width.setdefault(table.embedding_dim, []).append(self._started(table))
        pooled = sum(len(table.feature_names) for table in schema.embedding_bag_configs())
        # context, history and candidate
        tokens = bool(schema.dense) + pooled + longest + 1
        return DLRMTrain(
            HSTURanking(
                [EmbeddingCollection(own, device="meta") for own in by_width.values()],
                histories,
                said.encoder(tokens),
                [*self.over_layers, 1],
                self._bags(schema),
                len(schema.dense),
                self.dense_layers,
                said.hidden,
                said.times,
                said.candidate_time,
            )
        )

    def _bags(self, schema: FeatureSchema) -> EmbeddingBagCollection | None:
        """The pooled tables beside those of sequences."""
        from rayrec.modules import EmbeddingBagCollection

        pooled = [self._started(table) for table in schema.embedding_bag_configs()]
        if not pooled:
            return None
        return EmbeddingBagCollection(pooled, is_weighted=schema.is_weighted, device="meta")

    def _started(self, table: Table) -> Table:
        """The table with the recipe's initial values, where it has none of its own."""
        said = table.weight_init_min, table.weight_init_max, table.init_fn
        if self.init_bound is None or any(one is not None for one in said):
            return table
        return replace(table, weight_init_min=-self.init_bound, weight_init_max=self.init_bound)

    def to_extras(self) -> dict[str, Any]:
        """JSON data for a checkpoint's extras."""
        return {"recipe": asdict(self)}

    @classmethod
    def from_extras(cls, extras: Mapping[str, Any], source: str) -> ModelRecipe:
        """Return the recipe that `to_extras` wrote into a checkpoint.

        Raises:
            ConfigError: the checkpoint is of a model of another kind, or was written by something
                else.
        """
        for kind in OTHER_KINDS:
            if kind in extras:
                raise ConfigError(
                    f"{source} is of kind {kind!r}, which `rayrec train` trains and ranks; click "
                    "models alone are exported, served and scored again."
                )
        try:
            fields = dict(extras["recipe"])
            # JSON knows no tuples: they came back as lists, and two equal recipes must be equal.
            fields |= {name: tuple(fields[name]) for name in _LAYERS if name in fields}
            fields["hstu"] = HSTUConfig(**fields.get("hstu", {}))
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{source} does not say how to build its model ({error!r}); it was not written by "
                "`rayrec train`."
            ) from None
