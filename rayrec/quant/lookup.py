"""`RowLookup`: the features of some tables in one call of FBGEMM's integer lookup operator; and
`FeatureSlots`: the features of a collection in the order of its output.

The operator is called directly: the module that FBGEMM wraps around it costs three times the
operator for one row of 26 features. It reads beyond the ids where offsets are wrong, and finds a
bad id only sometimes, so `FeatureBags` checks both before, in a few calls of numpy.

    # B rows of the batch, F features, N ids of all features, C columns of all features
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import chain

import torch
from torch import Tensor

from rayrec.errors import ConfigError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.modules import get_embedding_names_by_table
from rayrec.modules.names import check_module_names
from rayrec.quant.bags import BagReader, FeatureBags
from rayrec.quant.ids import PackedIds
from rayrec.quant.tables import PackedTables
from rayrec.sparse.ops import offsets_of

_HOST = 3  # FBGEMM's number of a table in the memory of the host
_FLOAT32 = 0  # FBGEMM's number of float32 results


class Pooling(IntEnum):
    """FBGEMM's numbers of the ways to pool a bag."""

    SUM = 0
    MEAN = 1
    NONE = 2


class RowLookup:
    """Looks up features that are pooled alike.

    Args:
        packed: the tables.
        numbers: number of the table that each feature reads; ascending.
        pooling: pooling of all features.
        ids: ids of the dynamic tables, by name.
    """

    def __init__(
        self,
        packed: PackedTables,
        numbers: Sequence[int],
        pooling: Pooling,
        ids: Mapping[str, PackedIds],
    ) -> None:
        tables = [packed.tables[number] for number in numbers]
        names = enumerate(table.name for table in tables)
        self._ids = [(slot, ids[name]) for slot, name in names if name in ids]
        self.widths = [table.width for table in tables]
        read = [table.kind.lookup_width(table.width) for table in tables]
        cuts = offsets_of(read)
        self._operator = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default
        self._arguments = (
            packed.data,
            torch.empty(0, dtype=torch.uint8),
            torch.full((len(tables),), _HOST, dtype=torch.int32),
            torch.tensor([table.start for table in tables]),
            torch.tensor([table.kind.value for table in tables], dtype=torch.uint8),
            torch.tensor(cuts, dtype=torch.int32),
            cuts[-1],
            *[max(read)] * 5,
        )
        self._pooling = int(pooling)
        factors = [2.0**-table.power for table in tables]
        spans = list(zip(cuts[:-1], read, factors, strict=True))
        self._scaled = [span for span in spans if span[2] != 1.0]
        self._factors = torch.tensor(factors) if self._scaled else None
        self._columns: Tensor | None = None
        # an odd INT4 row has a column too much, which is left out
        if read != self.widths:
            parts = [torch.arange(w) + c for w, c in zip(self.widths, cuts[:-1], strict=True)]
            self._columns = torch.cat(parts)

    def pooled(self, bags: FeatureBags) -> Tensor:
        """(B, C) float32 of the features' checked bags."""
        ids, offsets = self._rows_of(bags), bags.offsets
        out = self._operator(*self._arguments, ids, offsets, self._pooling, bags.weights, _FLOAT32)
        for start, width, factor in self._scaled:
            out.narrow(1, start, width).mul_(factor)
        return out if self._columns is None else out.index_select(1, self._columns)

    def rows(self, bags: FeatureBags) -> Tensor:
        """(N, width) float32, a row per checked id; the features have one width."""
        ids = self._rows_of(bags)
        out = self._operator(*self._arguments, ids, bags.offsets, self._pooling, None, _FLOAT32)
        if self._factors is not None:
            counts = torch.tensor(bags.counts())
            out *= self._factors.repeat_interleave(counts).unsqueeze(1)
        return out[:, : self.widths[0]]

    def _rows_of(self, bags: FeatureBags) -> Tensor:
        """(N,) rows of the bags' ids, which are the ids themselves in most tables."""
        if not self._ids:
            return bags.ids
        rows, ends = bags.ids.long().clone(), offsets_of(bags.counts())
        for slot, ids in self._ids:
            own = rows[ends[slot] : ends[slot + 1]]
            own.copy_(ids.find(own))
        return rows


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

    def part(
        self, slots: Sequence[int], pooling: Pooling, is_weighted: bool = False
    ) -> tuple[BagReader, RowLookup]:
        """Make the reader of these slots' features in a batch, and the look-up of their rows."""
        numbers = [self.numbers[slot] for slot in slots]
        limits = [(self._tables[number].name, self._tables[number].id_limit) for number in numbers]
        reader = BagReader(limits, [self.features[slot] for slot in slots], is_weighted)
        return reader, RowLookup(self._packed, numbers, pooling, self.ids)
