"""`QuantType`: how the rows of a served table are stored, and which table has which type.

Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from rayrec.errors import ConfigError

REST = "*"  # in a mapping of types: all tables that it does not name


class QuantType(Enum):
    """Storage of the rows of a served table.

    INT8 and INT4 rows begin with a float16 scale and a float16 bias, and a value is its code times
    the scale plus the bias. The values are FBGEMM's numbers of the types.
    """

    FP32 = 0
    FP16 = 1
    INT8 = 2
    INT4 = 3

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return {"FP32": 32, "FP16": 16, "INT8": 8, "INT4": 4}[self.name]

    @property
    def top_code(self) -> int:
        """The largest code of an integer type; 0 of a float type."""
        return (1 << self.bits) - 1 if self.bits <= 8 else 0

    def lookup_width(self, width: int) -> int:
        """Columns that the lookup reads of a row: an odd INT4 row has one more, which is unused."""
        return width + width % 2 if self is QuantType.INT4 else width

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` values."""
        return (4 if self.top_code else 0) + self.lookup_width(width) * self.bits // 8

    @classmethod
    def named(cls, name: QuantType | str) -> QuantType:
        """The type of a name in any case, such as "int8".

        Raises:
            ConfigError: there is no such type.
        """
        if isinstance(name, cls):
            return name
        if not isinstance(name, str) or name.upper() not in cls.__members__:
            known = ", ".join(kind.name.lower() for kind in cls)
            raise ConfigError(f"{name!r} is no type of served rows; choose one of {known}.")
        return cls[name.upper()]


Types = QuantType | str | Mapping[str, QuantType | str]


def types_of(tables: Iterable[str], types: Types) -> dict[str, QuantType]:
    """The type of every table.

    Args:
        tables: names of all tables.
        types: one type for all tables, or types by table name; the name "*" stands for the rest.
    Raises:
        ConfigError: a type or a table is not known, or a table has no type.
    """
    names = list(tables)
    if not isinstance(types, Mapping):
        return dict.fromkeys(names, QuantType.named(types))
    unknown = [name for name in types if name != REST and name not in names]
    if unknown:
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise ConfigError(f"there is no table {unknown[0]!r} to store; the tables are {shown}.")
    given = {name: QuantType.named(kind) for name, kind in types.items()}
    for name in names:
        if name not in given and REST not in given:
            raise ConfigError(
                f"table {name!r} has no type; name one for it, or one for {REST!r}, the rest."
            )
    return {name: given[name] if name in given else given[REST] for name in names}
