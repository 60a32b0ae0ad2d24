"""`KeyFile`: the keys that are to be forgotten, and the ids by which tables know them.

A key file has one column for each kind of key, named like a feature, a column of the data, or a
table. It is read as training reads its data, so a key becomes the id that it was there: itself, its
bucket, or the hash of its text.

    # N ids
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import csv, parquet
from torch import Tensor

from rayrec.data import ArrowDataset, Feature, FeatureSchema, ParquetDataset, to_batch
from rayrec.data.column_types import plain_text
from rayrec.errors import ConfigError, InputError
from rayrec.layout.dynamic import DynamicConfig
from rayrec.layout.tables import BaseEmbeddingConfig, EmbeddingBagConfig
from rayrec.storage import one_line

_CSV = ".csv"


class StoredIds(NamedTuple):
    """Ids of one table that are to be forgotten.

    Attributes:
        ids: (N,) int64, ascending; row numbers where the table is not dynamic.
        shared: True if other keys may have the same ids, since buckets hold several.
    """

    ids: Tensor
    shared: bool


class TableSize(NamedTuple):
    """A stored table: its name, its rows, and whether it is dynamic."""

    name: str
    rows: int
    is_dynamic: bool


class KeyFile:
    """The keys of a CSV, Parquet or Arrow file.

    Raises:
        ConfigError: the file is of another kind.
        InputError: it cannot be read, or holds no key.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            table = plain_text(_read(path))
            twice = [one for one in table.column_names if table.column_names.count(one) > 1]
            if twice:
                raise InputError(f"{path} has several columns {twice[0]!r}; leave one of them.")
            self._columns = {name: table[name].drop_null().unique() for name in table.column_names}
        # names of columns are no text before they are asked for
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise InputError(
                f"the keys in {path} cannot be read: {one_line(error)}. Write one key a row, in "
                "columns of numbers or text."
            ) from None
        if not any(len(keys) for keys in self._columns.values()):
            raise InputError(f"{path} holds no key; write one a row, below the name of a feature.")

    def hashes(self, salt: str) -> dict[str, tuple[str, ...]]:
        """Return the sha256 of a salt and each key by column, sorted."""
        return {
            name: tuple(
                sorted(hashlib.sha256(f"{salt}{key}".encode()).hexdigest() for key in keys.tolist())
            )
            for name, keys in self._columns.items()
        }

    def ids(
        self, schemas: Sequence[FeatureSchema], tables: Collection[TableSize]
    ) -> Mapping[str, StoredIds]:
        """Return the ids of the keys by table.

        Args:
            schemas: schemas of what is stored.
            tables: stored tables, for columns that no schema knows.
        Raises:
            ConfigError: nothing stored has the name of a column, or two schemas read it
                differently.
            InputError: a key cannot be an id.
        """
        found = dict[str, StoredIds]()
        for name, keys in self._columns.items():
            for hash_buckets, table in self._readings(name, schemas, tables):
                ids = [_ids(pa.table({name: keys}), name, hash_buckets, table, self._path)]
                shared = hash_buckets is not None
                if table.name in found:
                    ids.append(found[table.name].ids)
                    shared |= found[table.name].shared
                found[table.name] = StoredIds(torch.cat(ids).unique(), shared)
        return found

    def of_features(self, schema: FeatureSchema) -> Iterator[tuple[Feature, pa.ChunkedArray]]:
        """Yield the features that read keys of the file, with the keys as they are in data.

        A key is one of all features that read it as the same id of the same table.
        """
        for name, keys in self._columns.items():
            ids = {
                (feature.hash_buckets, table.name)
                for feature, table in _uses(schema)
                if name in (feature.name, feature.column)
            }
            # a table of that name is another's, as in `ids`; by its table a key of buckets is the
            # number of one, which no data hold
            ids = ids or {
                (None, table.name)
                for feature, table in _uses(schema)
                if name == table.name and feature.hash_buckets is None
            }
            for feature in schema.features:
                own = {(feature.hash_buckets, t.name) for f, t in _uses(schema) if f is feature}
                if own & ids and len(keys):
                    yield feature, keys

    def unnamed(self, schemas: Sequence[FeatureSchema]) -> str | None:
        """Return a column by which no feature or table of schemas is named; None if all are."""
        named = {one for s in schemas for f in s.features for one in (f.name, f.column)}
        named |= {table.name for s in schemas for table in s.tables}
        return next((name for name in self._columns if name not in named), None)

    def _readings(
        self, name: str, schemas: Sequence[FeatureSchema], tables: Collection[TableSize]
    ) -> set[tuple[int | None, TableSize]]:
        """Return the buckets and the table of each feature that reads a column."""
        readings = [found for schema in schemas if (found := set(_features(name, schema)))]
        readings = readings or [{(None, table) for table in tables if table.name == name}]
        # a dynamic table may have had other rows, or been none, and then had some of its ids
        dynamic = {size.name for one in readings for _, size in one if size.is_dynamic}
        readings = [
            {
                (buckets, TableSize(size.name, 1, True) if size.name in dynamic else size)
                for buckets, size in one
            }
            for one in readings
        ]
        if any(other != readings[0] for other in readings):
            raise ConfigError(
                f"schemas in one folder read the column {name!r} differently; name the folder "
                "of one run."
            )
        if not readings[0]:
            of_data = {one for s in schemas for f in s.features for one in (f.name, f.column)}
            known = sorted(of_data | {table.name for table in tables})
            raise ConfigError(
                f"{self._path} has a column {name!r}, by which no table has rows; name columns as "
                f"one of {', '.join(known)}."
            )
        return readings[0]


def _read(path: str) -> pa.Table:
    suffix = Path(path).suffix
    if suffix == _CSV:
        return _read_csv(path)
    if suffix in ParquetDataset.SUFFIXES:
        return parquet.read_table(path)
    if suffix in ArrowDataset.SUFFIXES:
        with pa.OSFile(path) as file:
            return pa.ipc.open_file(file).read_all()
    kinds = ", ".join((_CSV, *ParquetDataset.SUFFIXES, *ArrowDataset.SUFFIXES))
    raise ConfigError(f"--keys {path} is of no known kind; its name has to end with {kinds}.")


def _read_csv(path: str) -> pa.Table:
    found = csv.read_csv(path)
    # what only looks like a date or a truth value is text
    types = pa.types
    texts = [f.name for f in found.schema if types.is_temporal(f.type) or f.type == pa.bool_()]
    if texts:
        options = csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string()))
        found = csv.read_csv(path, convert_options=options)
    for place, field in enumerate(found.schema):
        if types.is_string(field.type):
            # empty cells are those of a column that has fewer keys than another
            nothing = pa.scalar(None, field.type)
            keys = pc.if_else(pc.equal(found[place], ""), nothing, found[place])
            found = found.set_column(place, field, keys)
    return found


def _uses(schema: FeatureSchema) -> Iterator[tuple[Feature, BaseEmbeddingConfig]]:
    """Yield each feature with each table that it looks up."""
    for feature in schema.features:
        for table in schema.tables:
            if feature.name in table.feature_names:
                yield feature, table


def _features(name: str, schema: FeatureSchema) -> Iterator[tuple[int | None, TableSize]]:
    for feature, table in _uses(schema):
        if name in (feature.name, feature.column):
            size = TableSize(table.name, table.num_embeddings, table.dynamic is not None)
            yield feature.hash_buckets, size


def _ids(
    keys: pa.Table, name: str, hash_buckets: int | None, table: TableSize, source: str
) -> Tensor:
    """Return the ids of a column of keys in a table, by the reader of training data."""
    own = EmbeddingBagConfig(
        num_embeddings=table.rows,
        embedding_dim=1,
        name=table.name,
        feature_names=[name],
        dynamic=DynamicConfig() if table.is_dynamic else None,
    )
    feature = Feature(name=name, column=name, hash_buckets=hash_buckets)
    schema = FeatureSchema(label=f"label of {name}", features=(feature,), tables=(own,))
    return to_batch(keys, schema, source, with_labels=False).sparse_features[name].values()
