"""Columns that folders spell: `day=2026-11-01/hour=5/part.parquet` has the columns day and hour.

Names and values are read by pyarrow.dataset's hive partitioning, from the folders below the data
set's root. A column whose values are all whole numbers is int64, any other is a string;
`__HIVE_DEFAULT_PARTITION__` is null. Nothing is opened for this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds

Value = str | int | None
_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True, slots=True)
class Partitions:
    """The columns that the folders of a data set spell; none where no folder is named `name=value`.

    Attributes:
        schema: names and types, in the order of the folders.
    """

    schema: pa.Schema

    @classmethod
    def of(cls, paths: Iterable[str]) -> Partitions:
        """The columns of some files.

        Args:
            paths: of the files, below the root of the data set.
        """
        seen: dict[str, set[str]] = {}
        for folder in {path.rpartition("/")[0] for path in paths}:
            for name, value in _pairs(folder):
                seen.setdefault(name, set()).add(value)
        fields = []
        for name, values in seen.items():
            whole = all(_INTEGER.fullmatch(value) for value in values - {_NULL})
            fields.append(pa.field(name, pa.int64() if whole else pa.string()))
        return cls(pa.schema(fields))

    def values(self, path: str) -> dict[str, Value]:
        """The values that the folders of one file spell, by column.

        A column that only other files' folders spell is left out.
        """
        if not self.schema.names:
            return {}
        told = ds.get_partition_keys(ds.HivePartitioning(self.schema).parse(path))
        return {name: told[name] for name in self.schema.names if name in told}


def _pairs(folder: str) -> list[tuple[str, str]]:
    pairs = []
    for part in folder.split("/"):
        name, sign, value = part.partition("=")
        if sign and name:
            pairs.append((name, unquote(value)))
    return pairs
