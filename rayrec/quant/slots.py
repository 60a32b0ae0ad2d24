"""`FeatureSlots`: the features of a collection in the order of its output, and their look-ups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from rayrec.errors import ConfigError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.modules import get_embedding_names_by_table
from rayrec.modules.names import check_module_names
from rayrec.quant.bags import BagReader
from rayrec.quant.lookup import Pooling, RowLookup
from rayrec.quant.tables import PackedTables


class FeatureSlots:
    """The features of tables, in the order of the output: the table and its number, per feature."""

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], packed: PackedTables) -> None:
        check_module_names(tables)
        sizes = [(table.name, table.num_embeddings, table.embedding_dim) for table in tables]
        if sizes != [(table.name, table.rows, table.width) for table in packed.tables]:
            raise ConfigError(
                f"the packed tables are {[t.name for t in packed.tables]} and the collection has "
                f"{[t.name for t in tables]}, in other sizes or another order; pack the tables of "
                "this collection."
            )
        pairs = [(n, f) for n, table in enumerate(tables) for f in table.feature_names]
        self.numbers = [number for number, _ in pairs]
        self.features = [feature for _, feature in pairs]
        self.names = list(chain.from_iterable(get_embedding_names_by_table(tables)))
        self.widths = [tables[number].embedding_dim for number in self.numbers]
        self._tables, self._packed = tables, packed
        found = {table.name: packed.ids_of(number) for number, table in enumerate(tables)}
        # of the dynamic tables, by name
        self.ids = {name: ids for name, ids in found.items() if ids is not None}

    def reader(self, slots: Sequence[int], is_weighted: bool) -> BagReader:
        """Make the reader that takes the bags of these slots' features from a batch."""
        tables = [self._tables[self.numbers[slot]] for slot in slots]
        limits = [(table.name, table.id_limit) for table in tables]
        return BagReader(limits, [self.features[slot] for slot in slots], is_weighted)

    def lookup(self, slots: Sequence[int], pooling: Pooling) -> RowLookup:
        """Make the look-up of the rows of these slots."""
        return RowLookup(self._packed, [self.numbers[slot] for slot in slots], pooling, self.ids)
