"""Which of several dataclasses a table means, by its keys or by the key that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rayrec.fields import kinds
from rayrec.fields.kinds import TYPE
from rayrec.fields.misfit import Misfit, Notation, wrong


def chosen(
    classes: list[type], table: Mapping[str, Any], base: Any, notation: Notation
) -> tuple[type, Mapping[str, Any]]:
    """The class that a table means, and the table without the key that says so."""
    known = {one: set(kinds.field_types(one)) for one in classes}
    if not notation.lends:
        # the one that knows most of the keys, and of those one that needs no other
        return max(
            classes, key=lambda one: (len(known[one] & set(table)), _takes(one, table))
        ), table
    by_name = {one.__name__: one for one in classes}
    if TYPE in table and not any(TYPE in names for names in known.values()):
        name = table[TYPE]
        if not isinstance(name, str) or name not in by_name:
            raise wrong(name, f"one of {', '.join(by_name)}").at(TYPE)
        return by_name[name], {key: value for key, value in table.items() if key != TYPE}
    own = type(base) if type(base) in classes else None
    if len(classes) == 1 or (own is not None and set(table) <= known[own]):
        return own or classes[0], table
    fitting = [one for one in classes if _takes(one, table)]
    if len(fitting) == 1:
        return fitting[0], table
    if own is not None and not fitting:
        return own, table  # whose error names the key that is wrong
    says = f"needs {TYPE}, which says what it is: one of {', '.join(by_name)}."
    raise Misfit(says, "keys")


def _takes(kind: type, table: Mapping[str, Any]) -> bool:
    """Whether a class has all keys of a table, and needs no other."""
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.init and kinds.default_of(field) is dataclasses.MISSING
    }
    return needed <= set(table) <= set(kinds.field_types(kind))
