"""Next-item models as plain data: the items' table, the encoder, the loss and its candidates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rayrec.checks import positive, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.recipe import MAX_SIZE

if TYPE_CHECKING:
    from torch import nn

    from rayrec.data import FeatureSchema
    from rayrec.data.candidates import Candidates
    from rayrec.layout import EmbeddingConfig
    from rayrec.models import FullSoftmax, SampledSoftmax

CANDIDATES = "candidates"  # the feature of the loss, beside those of the schema

Kind = Literal["sasrec", "hstu", "gru4rec"]
NEXT_ITEM: tuple[Kind, ...] = ("sasrec", "hstu", "gru4rec")


@dataclass(frozen=True, kw_only=True, slots=True)
class NextItemModel:
    """Section `model` of a run that trains a next-item model.

    Attributes:
        model: "sasrec", "hstu" or "gru4rec": the encoder.
        history, item: features of the schema that share the items' table.
        times: sequence of the schema with the time of each item of the history; hstu has a bias of
            time where it is given.
        seen: sequence of the schema with all items that the user of a held-out row has seen, where
            the history is only the last of them.
        length: the longest history, 50 unless given; gru4rec takes any.
        layers: of the encoder, 2 unless given, of gru4rec 1.
        heads: of attention, 2 unless given; gru4rec has none.
        dropout: share of the columns that are dropped.
        loss: "sampled" or "full": a softmax over negatives, or over all items.
        negatives: items of a sampled softmax, 512 unless given.
        proposal: how negatives are drawn: "popularity", unless given, or "uniform".
        ks: lengths of the lists that are scored.
        init_bound: rows start within +- this, where the schema gives the table no bounds.
    Raises:
        ConfigError: a size is out of range, or an option is not of this model.
    """

    model: Kind
    history: str = "history"
    item: str = "item"
    times: str | None = None
    seen: str | None = None
    length: int | None = None
    layers: int | None = None
    heads: int | None = None
    dropout: float = 0.3
    loss: Literal["sampled", "full"] = "sampled"
    negatives: int | None = None
    proposal: Literal["popularity", "uniform"] | None = None
    ks: tuple[int, ...] = (10,)
    init_bound: float = 0.035

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("length", "layers", "heads", "negatives"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1, MAX_SIZE)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout}; it must be at least 0 and below 1.")
        positive("init_bound", self.init_bound)
        if not self.ks or len(set(self.ks)) != len(self.ks):
            raise ConfigError(f"ks={self.ks}; give different lengths of lists, at least one.")
        for k in self.ks:
            whole_number("ks has the number", k, 1, MAX_SIZE)
        for names, whose, is_theirs in (
            (("times",), "hstu, and the model is " + repr(self.model), self.model == "hstu"),
            (("length", "heads"), "attention, and gru4rec has none", self.model != "gru4rec"),
            (("negatives", "proposal"), 'a sampled loss, and loss="full"', self.loss == "sampled"),
        ):
            for name in names:
                if getattr(self, name) is not None and not is_theirs:
                    raise ConfigError(
                        f"{name}={getattr(self, name)!r} is for {whose}; leave it out."
                    )

    def check(self, schema: FeatureSchema) -> None:
        """Check that a schema has what the model reads.

        Raises:
            ConfigError: names what is missing, or a list that is longer than all items.
        """
        from rayrec.runs.item_pairs import num_items

        known = schema.feature_names()
        if self.history not in known:
            raise ConfigError(
                f"the schema has no feature {self.history!r}; it has {sorted(known)}. Choose with "
                "[model] history and item."
            )
        items = num_items(schema, self.item)
        if max(self.ks) > items:
            raise ConfigError(
                f"ks has {max(self.ks)}, which is longer than a list of all {items} items."
            )
        sequences = [one.name for one in schema.sequences]
        for option in ("times", "seen"):
            name = getattr(self, option)
            if name is not None and name not in sequences:
                raise ConfigError(
                    f"{option}={name!r} is no sequence of the schema, which has {sequences}."
                )

        self._check_lengths(schema)

    def _check_lengths(self, schema: FeatureSchema) -> None:
        """Check that histories have the model's length, and their items a time each."""
        (history,) = (one for one in schema.features if one.name == self.history)
        longest = history.history or history.most_recent
        if self.length is not None and longest is not None and longest > self.length:
            raise ConfigError(
                f"length={self.length} is less than the {longest} items of {self.history!r}; raise "
                "it, or cut the history in the schema."
            )
        for times in (one for one in schema.sequences if one.name == self.times):
            linked = self.history == times.aligned_with or history.aligned_with == self.times
            if history.history != times.history or not (history.history or linked):
                raise ConfigError(
                    f"times={self.times!r} has not one number for each item of {self.history!r}; "
                    "name a sequence with the same history, or aligned_with it."
                )

    def run_options(self) -> dict[str, Any]:
        """Return options of a run that differ from those of other models, where none are said."""
        from rayrec.spec.schedule import ScheduleConfig
        from rayrec.train.optimizer_config import OptimizerConfig

        lr = 3e-3 if self.model == "gru4rec" else 2e-3
        fall = ScheduleConfig(decay="linear")
        return {
            "global_batch_size": 32,
            "sparse_optimizer": OptimizerConfig(name="adam", lr=lr, options={"beta2": 0.98}),
            "dense_optimizer": OptimizerConfig(name="adam", lr=lr, options={"betas": (0.9, 0.98)}),
            "sparse_schedule": fall,
            "dense_schedule": fall,
            "clip_norm": 5.0,
        }

    def encoder(self, width: int) -> nn.Module:
        """Return the encoder of rows of some width.

        Raises:
            ConfigError: the heads do not divide the width.
        """
        from rayrec.modules import GRUEncoder, HSTUEncoder, SASRecEncoder

        if self.model == "gru4rec":
            return GRUEncoder(width, self.layers or 1, self.dropout)
        sizes = width, self.length or 50, self.layers or 2, self.heads or 2
        if self.model == "hstu":
            buckets = 40 if self.times is not None else 0
            return HSTUEncoder(*sizes, self.dropout, time_buckets=buckets)
        return SASRecEncoder(*sizes, self.dropout)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NextItemRecipe:
    """The model as plain data; calling it builds the module, tables on the meta device.

    Attributes:
        schema: the JSON text of the schema.
        model: the model.
        counts: (items,) how often each item follows another, see `Pairs`.
    """

    schema: str
    model: NextItemModel
    counts: NDArray[np.int64]

    def __call__(self) -> nn.Module:
        """Build the module with its loss.

        Raises:
            ConfigError: history and item do not share one table.
        """
        import torch

        from rayrec.models import NextItem, NextItemTrain
        from rayrec.modules import EmbeddingCollection

        table, said = self.table(), self.model
        # half of the log of how often an item follows, centred
        logs = np.log(np.maximum(self.counts, 0.5))
        model = NextItem(
            EmbeddingCollection([table], device="meta"),
            self.model.encoder(table.embedding_dim),
            said.history,
            said.item,
            CANDIDATES,
            torch.from_numpy(0.5 * (logs - logs.mean())).float(),
            said.times,
        )
        return NextItemTrain(model, self._loss())

    def table(self) -> EmbeddingConfig:
        """Return the table of the items.

        Raises:
            ConfigError: history and item do not share one table.
        """
        from rayrec.data import FeatureSchema

        schema = FeatureSchema.from_json(self.schema, "the schema")
        both = history, item = self.model.history, self.model.item
        found = [t for t in schema.embedding_configs() if set(both) & set(t.feature_names)]
        if len(found) != 1 or not set(both) <= set(found[0].feature_names):
            raise ConfigError(
                f"history {history!r} and item {item!r} are to be features of one table of the "
                f"schema, of pooling none; such tables have "
                f"{[list(t.feature_names) for t in schema.embedding_configs()]}. Choose with "
                "[model] history and item."
            )
        if CANDIDATES in schema.feature_names():
            raise ConfigError(
                f"the schema has a feature {CANDIDATES!r}, which is the name of the items that the "
                "loss compares; give it another name."
            )
        table = replace(found[0], feature_names=[*both, CANDIDATES])
        bound = self.model.init_bound
        said = table.weight_init_min, table.weight_init_max, table.init_fn
        if any(one is not None for one in said):
            return table
        return replace(table, weight_init_min=-bound, weight_init_max=bound)

    def candidates(self) -> Candidates:
        """Return what chooses the items that a batch is compared with."""
        from rayrec.data import ItemSlices, SharedNegatives

        items = len(self.counts)
        if self.model.loss == "full":
            return ItemSlices(num_items=items)
        proposal = self.model.proposal or "popularity"
        counts = self.counts if proposal == "popularity" else None
        return SharedNegatives(
            count=self.model.negatives or 512, num_items=items, proposal=proposal, counts=counts
        )

    def _loss(self) -> FullSoftmax | SampledSoftmax:
        import torch

        from rayrec.data import SharedNegatives
        from rayrec.models import FullSoftmax, SampledSoftmax

        chosen = self.candidates()
        if isinstance(chosen, SharedNegatives):
            return SampledSoftmax(len(self.counts), torch.from_numpy(chosen.log_q()))
        return FullSoftmax(len(self.counts))
