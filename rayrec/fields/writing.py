"""From dataclasses to the tables of a run file; `reading` gives the same values back.

None is left out where the field is None without the file, and is the word "none" elsewhere, since
TOML has no null. Fields that hold code are left out while they have their default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from rayrec.errors import ConfigError
from rayrec.fields import kinds
from rayrec.fields.kinds import NONE, TYPE


def table_of(value: Any, base: Any = None, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass as a table of plain data.

    Args:
        base: the value that a reader takes where the table says nothing, or None.
        leave_out: fields that are said elsewhere.
    Raises:
        ConfigError: a field holds what a run file cannot say.
    """
    kind = type(value)
    types, table = kinds.field_types(kind), dict[str, Any]()
    for field in dataclasses.fields(kind):
        name = field.name
        if name not in types or name in leave_out:
            continue
        default = getattr(base, name) if type(base) is kind else kinds.default_of(field)
        item = getattr(value, name)
        if item is None and default is None:
            continue
        if item is None:
            table[name] = NONE
        elif not (kinds.is_code(types[name]) and item == default):
            table[name] = _plain(item, types[name], default, f"{kind.__name__}.{name}")
    return table


def _plain(value: Any, kind: Any, base: Any, name: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        table = table_of(value, base)
        # A reader takes the class of the base, or the only one that there is.
        if type(value) is not type(base) and len(kinds.variants(kind)) > 1:
            return {TYPE: type(value).__name__, **table}
        return table
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        of_values = next(
            filter(None, map(kinds.mapping_types, kinds.alternatives(kind))), (str, Any)
        )
        return {key: _plain(one, of_values[1], None, name) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = next(filter(None, map(kinds.item_types, kinds.alternatives(kind))), (Any, ...))
        of_each = [items[0]] * len(value) if items[-1] is ... else list(items)
        return [_plain(one, of, None, name) for one, of in zip(value, of_each, strict=True)]
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, bool | int | float | str) or (
        value == NONE and kinds.takes_none(kind)
    ):
        raise ConfigError(f"{name}={value!r} cannot be said in a run file; use the Python API.")
    # A reader makes a float of it, and would write that otherwise.
    as_float = type(value) is int and float in kinds.alternatives(kind)
    return float(value) if as_float and int not in kinds.alternatives(kind) else value
