"""Next-item models as plain data: the items' table, the encoder, the loss and its candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rayrec.checks import MAX_LAYERS, MAX_SIZE, positive, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_sequences import schema_of_lists
from rayrec.layout.tables import MAX_FLOAT32

if TYPE_CHECKING:
    from torch import nn

    from rayrec.data.candidates import Candidates
    from rayrec.layout import EmbeddingConfig
    from rayrec.models import FullSoftmax, SampledSoftmax

CANDIDATES = "candidates"  # the feature of the loss, beside those of the schema
KIND = "next_item"  # of a checkpoint, by its extras

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
        loss: "sampled", "full" or "in_batch": a softmax over negatives, over all items, or over the
            items of all tokens of the batch.
        negatives: items of a sampled softmax, 512 unless given.
        proposal: how negatives are drawn: "popularity", "mixed" or "uniform"; unless given, sasrec
            has "mixed" and the others "popularity".
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
    loss: Literal["sampled", "full", "in_batch"] = "sampled"
    negatives: int | None = None
    proposal: Literal["popularity", "mixed", "uniform"] | None = None
    ks: tuple[int, ...] = (10,)
    init_bound: float = 0.035

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("length", "layers", "heads", "negatives"):
            if getattr(self, name) is not None:
                most = MAX_LAYERS if name == "layers" else MAX_SIZE
                whole_number(name, getattr(self, name), 1, most)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout}; it must be at least 0 and below 1.")
        positive("init_bound", self.init_bound, MAX_FLOAT32 / 2)
        if not self.ks or len(set(self.ks)) != len(self.ks):
            raise ConfigError(f"ks={self.ks}; give different lengths of lists, at least one.")
        for k in self.ks:
            whole_number("ks has the number", k, 1, MAX_SIZE)
        for names, whose, is_theirs in (
            (("times",), "hstu, and the model is " + repr(self.model), self.model == "hstu"),
            (("length", "heads"), "attention, and gru4rec has none", self.model != "gru4rec"),
            (
                ("negatives", "proposal"),
                f"a sampled loss, not {self.loss!r}",
                self.loss == "sampled",
            ),
        ):
            for name in names:
                if getattr(self, name) is not None and not is_theirs:
                    raise ConfigError(
                        f"{name}={getattr(self, name)!r} is for {whose}; leave it out."
                    )

    @property
    def longest(self) -> int | None:
        """The longest history that the encoder takes; None of one that takes any."""
        return None if self.model == "gru4rec" else self.length or 50

    def encoder(self, width: int) -> nn.Module:
        """Return the encoder of rows of some width.

        Raises:
            ConfigError: the heads do not divide the width.
        """
        from rayrec.modules import GRUEncoder, HSTUEncoder, SASRecEncoder

        if self.longest is None:
            return GRUEncoder(width, self.layers or 1, self.dropout)
        sizes = width, self.longest, self.layers or 2, self.heads or 2
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
        counts: (items,) how often each item follows another, see `Pairs`; None for a model that
            is not trained: its biases are 0, and it has no candidates for a loss.
    """

    schema: str
    model: NextItemModel
    counts: NDArray[np.int64] | None = None

    def __call__(self) -> nn.Module:
        """Build the module with its loss.

        Raises:
            ConfigError: history and item do not share one table.
        """
        import torch

        from rayrec.models import NextItem, NextItemTrain
        from rayrec.modules import EmbeddingCollection

        table, said = self.table(), self.model
        bias = torch.zeros(table.num_embeddings)
        listed = torch.ones(table.num_embeddings, dtype=torch.bool)
        if self.counts is not None:
            # an item that follows none is never wanted, and its score means nothing
            listed = torch.from_numpy(self.counts > 0)
            # half of the log of how often an item follows, centred
            logs = np.log(np.maximum(self.counts, 0.5))
            bias = torch.from_numpy(0.5 * (logs - logs.mean())).float()
        model = NextItem(
            EmbeddingCollection([table], device="meta"),
            self.model.encoder(table.embedding_dim),
            said.history,
            said.item,
            CANDIDATES if self._has_candidates else None,
            bias,
            said.times,
            listed,
        )
        return NextItemTrain(model, self._loss(table.num_embeddings))

    def sequences(self) -> frozenset[str]:
        """Return the names of the schema's sequences that the model reads."""
        named = self.model.times, self.model.seen
        return frozenset(name for name in named if name is not None)

    def layers(self) -> int:
        """Return a bound of the layers of the module, to check before it is built."""
        return self.model.layers or 0

    def table(self) -> EmbeddingConfig:
        """Return the table of the items.

        Raises:
            ConfigError: history and item do not share one table.
        """
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
        features = [*both, CANDIDATES] if self._has_candidates else [*both]
        table = replace(found[0], feature_names=features)
        bound = self.model.init_bound
        said = table.weight_init_min, table.weight_init_max, table.init_fn
        if any(one is not None for one in said):
            return table
        return replace(table, weight_init_min=-bound, weight_init_max=bound)

    @property
    def _has_candidates(self) -> bool:
        return self.counts is not None and self.model.loss != "in_batch"

    def candidates(self) -> Candidates | None:
        """Return what chooses the items that a batch in training is compared with; None where they
        are the batch's own.
        """
        from rayrec.data import ItemSlices, SharedNegatives

        assert self.counts is not None, "the model is trained"
        items = len(self.counts)
        if self.model.loss == "full":
            return ItemSlices(num_items=items)
        if not self._has_candidates:
            return None
        usual: Literal["mixed", "popularity"] = (
            "mixed" if self.model.model == "sasrec" else "popularity"
        )
        proposal = self.model.proposal or usual
        counts = None if proposal == "uniform" else self.counts
        return SharedNegatives(
            count=self.model.negatives or 512, num_items=items, proposal=proposal, counts=counts
        )

    def _loss(self, items: int) -> FullSoftmax | SampledSoftmax:
        import torch

        from rayrec.data import SharedNegatives
        from rayrec.models import FullSoftmax, SampledSoftmax

        if self.counts is None:
            return SampledSoftmax(items)  # of a model that is not trained
        chosen = self.candidates()
        if chosen is None:
            # the batch has an item as often as items of the data are to be found
            chosen = SharedNegatives(
                count=1, num_items=items, proposal="popularity", counts=self.counts
            )
        if isinstance(chosen, SharedNegatives):
            return SampledSoftmax(items, torch.from_numpy(chosen.log_q()))
        return FullSoftmax(items)

    def request_schema(self) -> FeatureSchema:
        """Return the schema of the rows that are served: lists of the model's history and of what
        lies beside it, cut to the most recent entries that the model was trained with, and items.
        """
        said = self.model
        whole = schema_of_lists(FeatureSchema.from_json(self.schema, "the schema"))
        by_name = {one.name: one for one in whole.features}
        history = replace(by_name[said.history], aligned_with=None)
        longest = said.longest
        if longest is not None and (history.most_recent or longest + 1) > longest:
            history = replace(history, most_recent=longest)
        sequences = []
        for one in whole.sequences:
            if one.name == said.times:
                cut, own = history.most_recent, said.history
                sequences.append(replace(one, most_recent=cut, aligned_with=own))
            elif one.name == said.seen:
                sequences.append(replace(one, aligned_with=None))
        return replace(
            whole,
            dense=(),
            features=(history, replace(by_name[said.item], aligned_with=None)),
            tables=(replace(self.table(), feature_names=[said.history, said.item]),),
            weight=None,
            groups=(),
            sequences=tuple(sequences),
            time=None,
        )

    def to_extras(self) -> dict[str, Any]:
        """Return JSON data for a checkpoint's extras, all but the counts."""
        return {KIND: {**asdict(self.model), "schema": self.schema}}

    @classmethod
    def from_extras(cls, extras: Mapping[str, Any], source: str) -> NextItemRecipe:
        """Return the recipe that `to_extras` wrote into a checkpoint, without counts.

        Raises:
            ConfigError: it was written by something else.
        """
        try:
            fields = dict(extras[KIND])
            return cls(schema=fields.pop("schema"), model=NextItemModel(**fields))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{source} does not say how to build its next-item model ({error!r}); it was not "
                "written by this `rayrec train`."
            ) from None
