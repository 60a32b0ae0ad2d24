"""`ModelRecipe`: a click model as plain data that a checkpoint carries, to build it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rayrec.checks import MAX_LAYERS, MAX_SIZE, positive, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.hstu_config import HSTUConfig
from rayrec.layout.tables import MAX_FLOAT32, BaseEmbeddingConfig
from rayrec.spec.task import Task

if TYPE_CHECKING:
    from torch import nn

    from rayrec.data import FeatureSchema
    from rayrec.layout import EmbeddingConfig
    from rayrec.modules import EmbeddingBagCollection

SEVERAL_TASKS = ("mmoe", "ple")
MODELS = ("dlrm", "dcn", "din", "hstu_ranking", *SEVERAL_TASKS)
# fields that some models alone read
OPTIONS_OF = {
    "cross_layers": ("dcn",),
    "cross_rank": ("dcn",),
    "attention_layers": ("din",),
    "hstu": ("hstu_ranking",),
    "shared_experts": SEVERAL_TASKS,
    "expert_layers": SEVERAL_TASKS,
    "task_experts": ("ple",),
    "extraction_layers": ("ple",),
}
_LAYERS = ("dense_layers", "over_layers", "attention_layers", "expert_layers")
_NUMBERS = ("cross_layers", "cross_rank", "shared_experts", "task_experts", "extraction_layers")
OTHER_KINDS = ("two_tower", "next_item")  # what checkpoints of other models say in their extras
# The models multiply rows with each other, and a product of rows near zero has hardly a gradient.
INIT_BOUND = 0.5

Table = TypeVar("Table", bound=BaseEmbeddingConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecipe:
    """A click model as plain data; calling it builds the module, tables on the meta device.

    Attributes:
        model: "dlrm", "dcn", "din", "hstu_ranking", "mmoe" or "ple".
        schema: the JSON text of the feature schema.
        tasks: tasks of mmoe and ple, in the order of the schema's labels; none of other models.
        dense_layers: sizes of the dense MLP's layers but the last, which is as wide as the tables;
            of all of them for din, hstu_ranking, mmoe and ple.
        over_layers: sizes of the over MLP's layers before its one logit; of the layers of each
            task's tower before its outputs for mmoe and ple.
        cross_layers, cross_rank: depth and rank of dcn's cross network.
        attention_layers: sizes of the hidden layers of din's attention; none for dot products.
        hstu: encoder of hstu_ranking, and what it reads.
        shared_experts: number of experts of mmoe; of the shared ones in each layer of ple.
        expert_layers: sizes of the layers of every expert.
        task_experts: number of experts of each task alone, in each layer of ple.
        extraction_layers: number of ple's layers of experts.
        init_bound: the rows of tables start within +- this, where the schema gives a table no
            bounds; None takes the table's own, the root of 1 / num_embeddings.
    Raises:
        ConfigError: the model is not known, or does not predict the tasks, or a size or the bound
            is out of range.
    """

    model: str
    schema: str
    tasks: tuple[Task, ...] = ()
    dense_layers: tuple[int, ...] = (64,)
    over_layers: tuple[int, ...] = (64, 32)
    cross_layers: int = 2
    cross_rank: int = 16
    attention_layers: tuple[int, ...] = (80, 40)
    hstu: HSTUConfig = field(default_factory=HSTUConfig)
    shared_experts: int = 8
    expert_layers: tuple[int, ...] = (16,)
    task_experts: int = 4
    extraction_layers: int = 2
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
        for name in _NUMBERS:
            most = MAX_SIZE if name == "cross_rank" else MAX_LAYERS
            whole_number(name, getattr(self, name), 1, most)
        if not self.expert_layers:
            raise ConfigError("expert_layers is empty; an expert needs at least one layer.")
        if self.tasks and self.model not in SEVERAL_TASKS:
            raise ConfigError(
                f"model {self.model!r} has tasks={[task.name for task in self.tasks]}, which are "
                f"of {' and '.join(SEVERAL_TASKS)} alone; leave them out."
            )
        if self.init_bound is not None:
            positive("init_bound", self.init_bound, MAX_FLOAT32 / 2)

    def __call__(self) -> nn.Module:
        """Build the module with its loss.

        Raises:
            ConfigError: the schema or the tasks are not those of such a model.
        """
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
        if self.model in SEVERAL_TASKS:
            return self._of_tasks(collection, len(schema.dense))
        # The dense row interacts with the looked-up rows, so its MLP ends in their width.
        dense, over = [*self.dense_layers, tables[0].embedding_dim], [*self.over_layers, 1]
        if self.model == "dlrm":
            return DLRMTrain(DLRM(collection, len(schema.dense), dense, over))
        return DLRMTrain(
            DLRM_DCN(collection, len(schema.dense), dense, over, self.cross_layers, self.cross_rank)
        )

    def _din(self, schema: FeatureSchema) -> nn.Module:
        from rayrec.layout.schema_sequences import targets_of
        from rayrec.models import DIN, DLRMTrain
        from rayrec.modules import EmbeddingCollection

        sequences = [self._started(table) for table in schema.embedding_configs()]
        histories, beside = targets_of(schema)
        return DLRMTrain(
            DIN(
                EmbeddingCollection(sequences, device="meta"),
                histories,
                [*self.over_layers, 1],
                self._bags(schema),
                len(schema.dense),
                self.dense_layers,
                self.attention_layers,
                beside=beside,
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

    def _of_tasks(self, collection: EmbeddingBagCollection, dense_columns: int) -> nn.Module:
        from rayrec.models import PLE, MMoE, MultiTaskTrain

        self.check_tasks()
        outputs = [task.outputs for task in self.tasks]
        common = collection, outputs, dense_columns, self.dense_layers
        if self.model == "mmoe":
            model: nn.Module = MMoE(
                *common, self.shared_experts, self.expert_layers, self.over_layers
            )
        else:
            model = PLE(
                *common,
                self.task_experts,
                self.shared_experts,
                self.extraction_layers,
                self.expert_layers,
                self.over_layers,
            )
        return MultiTaskTrain(model, self.tasks)

    def check_tasks(self) -> None:
        """Check that a model of several tasks has them.

        Raises:
            ConfigError: it has fewer than two.
        """
        if self.model in SEVERAL_TASKS and len(self.tasks) < 2:
            raise ConfigError(
                f"model {self.model!r} predicts several tasks and has {len(self.tasks)}; name two "
                "or more, one for each label of the schema, or train dlrm."
            )

    def sequences(self) -> frozenset[str]:
        """Return the names of the schema's sequences that the model reads."""
        said = self.hstu
        named = (said.times, said.candidate_time) if self.model == "hstu_ranking" else ()
        return frozenset(name for name in named if name is not None)

    def layers(self) -> int:
        """Return a bound of the layers of the module, to check before it is built.

        Each layer has a weight, so there are at least as many dense tensors.
        """
        stacks = self.dense_layers, self.over_layers, self.attention_layers
        longest = max(*map(len, stacks), self.cross_layers, self.hstu.layers)
        if self.model not in SEVERAL_TASKS:
            return longest
        experts = self.shared_experts
        if self.model == "ple":
            experts = self.extraction_layers * (experts + self.task_experts * len(self.tasks))
        towers = len(self.tasks) * (len(self.over_layers) + 1)
        return max(longest, experts * len(self.expert_layers), towers)

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
                    f"{source} is of kind {kind!r}, which `rayrec train` trains and ranks; only "
                    "click models and next-item models are scored again, exported and served."
                )
        try:
            fields = dict(extras["recipe"])
            # JSON knows no tuples: they came back as lists, and two equal recipes must be equal.
            fields |= {name: tuple(fields[name]) for name in _LAYERS if name in fields}
            fields["hstu"] = HSTUConfig(**fields.get("hstu", {}))
            fields["tasks"] = tuple(Task(**one) for one in fields.get("tasks", ()))
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{source} does not say how to build its model ({error!r}); it was not written by "
                "`rayrec train`."
            ) from None
