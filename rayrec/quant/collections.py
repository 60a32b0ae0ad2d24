"""`QuantEmbeddingBagCollection` and `QuantEmbeddingCollection`: lookups in packed tables, on CPU.

They take and give what the collections of `rayrec.modules` do, and nothing of them is trained. A
lookup is one call of FBGEMM's operator for all features with one kind of pooling.

    # B rows of the batch, F features, N ids of all features, D width of a table
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rayrec.errors import ConfigError
from rayrec.layout.tables import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    expand_inverse,
    get_embedding_names_by_table,
)
from rayrec.quant.bags import BagReader
from rayrec.quant.ids import PackedIds
from rayrec.quant.lookup import FeatureSlots, Pooling, RowLookup
from rayrec.quant.tables import PackedTables, pack_tables
from rayrec.quant.types import QuantType, Types, types_of
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

_MOST_KEPT = 64
_POOLING = {PoolingType.SUM: Pooling.SUM, PoolingType.MEAN: Pooling.MEAN}


class QuantEmbeddingBagCollection(nn.Module):
    """Pooled embeddings of many features, from packed tables.

    Args:
        tables: tables to look up; names are unique.
        packed: the same tables, in the same order.
        is_weighted: True if each id counts times its weight in the batch.
    Raises:
        ConfigError: the packed tables are not those of `tables`.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], packed: PackedTables, is_weighted: bool = False
    ) -> None:
        super().__init__()
        self._tables, self._is_weighted, self.packed = list(tables), is_weighted, packed
        slots = self._slots = FeatureSlots(self._tables, packed)
        by_pooling: dict[Pooling, list[int]] = {}
        for slot, number in enumerate(slots.numbers):
            by_pooling.setdefault(_POOLING[self._tables[number].pooling], []).append(slot)
        self._parts = [
            (*slots.part(own, pooling, is_weighted), own) for pooling, own in by_pooling.items()
        ]
        self._index = {name: slot for slot, name in enumerate(slots.names)}
        self._kept: dict[tuple[Pooling, tuple[int, ...]], tuple[BagReader, RowLookup]] = {}

    @classmethod
    def from_float(
        cls, collection: EmbeddingBagCollection, types: Types = QuantType.INT8
    ) -> QuantEmbeddingBagCollection:
        """Pack the tables of a reference collection.

        Args:
            types: one for all tables, or by table name; "*" names the rest.
        Raises:
            ConfigError: a type or table is not known, or a table is dynamic.
            InputError: a row cannot be packed; names table and row.
        """
        tables = collection.embedding_bag_configs()
        weights = [
            collection.get_parameter(f"embedding_bags.{table.name}.weight") for table in tables
        ]
        kinds = types_of([table.name for table in tables], types)
        return cls(tables, pack_tables(tables, weights, kinds), collection.is_weighted())

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag of every feature.

        Args:
            features: a batch of B rows on the CPU, with a key for every feature of the tables; more
                keys do no harm.
        Returns:
            (B, sum of D) float32: tables in order, the features of each in order.
        Raises:
            UnknownKeyError: the batch misses a feature.
            InputError: an id lies outside its table, or weights are missing.
            ShapeError: lengths, offsets and ids do not fit each other.
        """
        names, widths = self._slots.names, self._slots.widths
        if features.variable_stride_per_key():
            values = self._of_strides(features)
        elif len(self._parts) == 1:
            reader, lookup, _ = self._parts[0]
            values = lookup.pooled(reader.read(features))
        elif not self._parts:
            values = torch.empty(features.stride(), 0)
        else:
            columns: dict[int, Tensor] = {}
            for reader, lookup, slots in self._parts:
                pooled = lookup.pooled(reader.read(features))
                columns |= zip(slots, pooled.split(lookup.widths, dim=1), strict=True)
            values = torch.cat([columns[slot] for slot in range(len(names))], dim=1)
        return KeyedTensor(names, widths, values, index_per_key=self._index)

    def _of_strides(self, features: KeyedJaggedTensor) -> Tensor:
        """(B, sum of D) of keys that have different numbers of bags.

        Keys with one number of bags, and tables of one pooling, are looked up together.
        """
        bags_of = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        groups: dict[tuple[Pooling, int], list[int]] = {}
        for slot, feature in enumerate(self._slots.features):
            pooling = _POOLING[self._tables[self._slots.numbers[slot]].pooling]
            # for a missing key the reader raises the error
            groups.setdefault((pooling, bags_of.get(feature, 0)), []).append(slot)
        columns: dict[int, Tensor] = {}
        for (pooling, bags), slots in groups.items():
            reader, lookup = self._part(pooling, tuple(slots))
            pooled = lookup.pooled(reader.read(_keys_alone(features, reader.keys, bags)))
            columns |= zip(slots, pooled.split(lookup.widths, dim=1), strict=True)
        parts = [columns[slot] for slot in range(len(self._slots.names))]
        return torch.cat(expand_inverse(parts, self._slots.features, features), dim=1)

    def _part(self, pooling: Pooling, slots: tuple[int, ...]) -> tuple[BagReader, RowLookup]:
        """Return the reader and the look-up of some features; kept, since batches are alike."""
        if (pooling, slots) not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[pooling, slots] = self._slots.part(slots, pooling, self._is_weighted)
        return self._kept[pooling, slots]

    def output_widths(self) -> dict[str, int]:
        """Columns of every output, by name, in order."""
        return dict(zip(self._slots.names, self._slots.widths, strict=True))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._tables

    def is_weighted(self) -> bool:
        """Return True if ids count times their weights."""
        return self._is_weighted

    def ids(self) -> dict[str, PackedIds]:
        """Return the ids of the dynamic tables, by table."""
        return self._slots.ids

    def extra_repr(self) -> str:
        sizes = f"tables={len(self._tables)}, features={len(self._slots.features)}"
        return f"{sizes}, is_weighted={self._is_weighted}"


class QuantEmbeddingCollection(nn.Module):
    """Unpooled embeddings of many features, from packed tables of one width.

    Args:
        tables: tables to look up; names are unique, widths are equal.
        packed: the same tables, in the same order.
        need_indices: True makes the outputs carry the looked-up ids as their weights.
    Raises:
        ConfigError: the packed tables are not those of `tables`, or widths differ.
    """

    def __init__(
        self, tables: Sequence[EmbeddingConfig], packed: PackedTables, need_indices: bool = False
    ) -> None:
        super().__init__()
        self._tables, self._need_indices, self.packed = list(tables), need_indices, packed
        if len({table.embedding_dim for table in tables}) > 1:
            raise ConfigError(
                "all tables of a QuantEmbeddingCollection have one embedding_dim; make one "
                "collection per width."
            )
        slots = self._slots = FeatureSlots(self._tables, packed)
        # what the operator reads of a row must be alike, and odd INT4 rows have a column more
        by_width: dict[int, list[int]] = {}
        for slot, number in enumerate(slots.numbers):
            table = packed.tables[number]
            by_width.setdefault(table.kind.lookup_width(table.width), []).append(slot)
        self._parts = [(*slots.part(own, Pooling.NONE), own) for own in by_width.values()]

    @classmethod
    def from_float(
        cls, collection: EmbeddingCollection, types: Types = QuantType.INT8
    ) -> QuantEmbeddingCollection:
        """Pack the tables of a reference collection; as the pooled collection's method."""
        tables = collection.embedding_configs()
        weights = [collection.get_parameter(f"embeddings.{table.name}.weight") for table in tables]
        kinds = types_of([table.name for table in tables], types)
        return cls(tables, pack_tables(tables, weights, kinds), collection.need_indices())

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up every id of every feature.

        Args:
            features: a batch on the CPU, with a key for every feature of the tables; more keys do
                no harm.
        Returns:
            output name -> bags of (N, D) float32 rows, with the lengths of the feature; weights are
            the ids when need_indices.
        Raises:
            UnknownKeyError: the batch misses a feature.
            InputError: an id lies outside its table.
            ShapeError: lengths, offsets and ids do not fit each other.
        """
        outputs: dict[int, JaggedTensor] = {}
        for reader, lookup, slots in self._parts:
            bags = reader.read(_one_bag_each(features))
            rows = lookup.rows(bags).split(bags.counts())
            for slot, own in zip(slots, rows, strict=True):
                given = features[self._slots.features[slot]]
                ids = given.values() if self._need_indices else None
                outputs[slot] = JaggedTensor(own, ids, lengths=given.lengths())
        return {name: outputs[slot] for slot, name in enumerate(self._slots.names)}

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables, in order."""
        return self._tables

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table."""
        return get_embedding_names_by_table(self._tables)

    def embedding_dim(self) -> int:
        """The width of all tables; -1 when there are none."""
        return self._tables[0].embedding_dim if self._tables else -1

    def need_indices(self) -> bool:
        """Return True if the outputs carry the ids as their weights."""
        return self._need_indices

    def ids(self) -> dict[str, PackedIds]:
        """Return the ids of the dynamic tables, by table."""
        return self._slots.ids

    def extra_repr(self) -> str:
        sizes = f"tables={len(self._tables)}, features={len(self._slots.features)}"
        return f"{sizes}, need_indices={self._need_indices}"


def _one_bag_each(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch with all ids of a key as one bag, where keys have different numbers of bags."""
    if not features.variable_stride_per_key():
        return features
    ends = torch.tensor(features.offset_per_key())
    return KeyedJaggedTensor(features.keys(), features.values(), offsets=ends, stride=1)


def _keys_alone(features: KeyedJaggedTensor, keys: Sequence[str], bags: int) -> KeyedJaggedTensor:
    """The keys that have this number of bags, as a batch of so many rows."""
    names = list(dict.fromkeys(keys))
    parts = [features[name] for name in names]
    weights = None
    if features.weights_or_none() is not None:
        weights = torch.cat([part.weights() for part in parts])
    return KeyedJaggedTensor(
        names,
        torch.cat([part.values() for part in parts]),
        weights,
        lengths=torch.cat([part.lengths() for part in parts]),
        stride=bags,
    )
