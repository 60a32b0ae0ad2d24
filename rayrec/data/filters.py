"""`where` beside columns: checked against their types, worked out for a folder, made an expression.

A comparison with null is null, `not` of null is null, and a row is taken where the whole is true;
so a null matches nothing, not even `!=`. What folders say of a file (`day=2026-11-01`) is known
before the file is opened: `simplify` puts it in, and often nothing is left to ask of the rows.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.acero as acero
import pyarrow.compute as pc
from numpy.typing import NDArray

from rayrec.data.column_types import missing
from rayrec.data.predicate import Junction, Literal, Not, Predicate, Term
from rayrec.errors import InputError
from rayrec.storage import one_line

_OPERATORS: dict[str, Any] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def check_terms(terms: Sequence[Term], schema: pa.Schema, source: str) -> None:
    """Check that the columns of some comparisons exist and can be compared with their literals.

    Args:
        schema: the columns of a file and of its folders.
        source: the file's name, for messages.
    Raises:
        InputError: names the column, its type, the literal and the remedy.
    """
    for term in terms:
        if schema.get_field_index(term.column) < 0:
            raise InputError(f"where: {missing(term.column, schema, source)}")
        kind = schema.field(term.column).type
        for value in term.values:
            try:
                literal_of(value, kind)
            except (ValueError, OverflowError, pa.ArrowException) as error:
                cause = one_line(error).rstrip(".")
                raise InputError(
                    f"where: column {term.column!r} has type {kind} ({source}) and cannot be "
                    f"compared with {value!r}: {cause}."
                ) from error


def literal_of(value: Literal, kind: pa.DataType) -> pa.Scalar:
    """A literal as a scalar that columns of this type are compared with.

    Raises:
        ValueError, OverflowError, pa.ArrowException: they cannot be compared.
    """
    t = pa.types
    if t.is_dictionary(kind):
        kind = kind.value_type
    if t.is_null(kind):
        return pa.scalar(None, kind)
    if isinstance(value, str):
        if t.is_string(kind) or t.is_large_string(kind):
            return pa.scalar(value, kind)
        if t.is_date(kind) or t.is_timestamp(kind):
            return pa.scalar(value).cast(kind)
        raise ValueError("write a number" if _is_number(kind) else "it holds no texts")
    if isinstance(value, bool) or t.is_boolean(kind):
        if isinstance(value, bool) and t.is_boolean(kind):
            return pa.scalar(value)
        raise ValueError("true and false go with columns of type bool alone")
    if not _is_number(kind):
        raise ValueError("write a text in quotes" if _takes_text(kind) else "it holds no numbers")
    if t.is_integer(kind) and value == value // 1:
        with suppress(pa.ArrowException, OverflowError):
            return pa.scalar(int(value), kind)
    # a fraction, or a number that the column's type has not: compared as float64, which is exact
    # beside integers, since rounding them keeps their order and no fraction is above 2**52
    return pa.scalar(float(value))


def simplify(predicate: Predicate, known: Mapping[str, str | int | None]) -> Predicate:
    """Return a predicate with the columns that are known worked out.

    Args:
        known: column -> its value in all rows; literals are of its kind (`check_terms`).
    """
    if isinstance(predicate, Term) and predicate.column in known:
        value = known[predicate.column]
        if value is None:
            return None
        if predicate.op == "in":
            return value in predicate.values
        return bool(_OPERATORS[predicate.op](value, predicate.values[0]))
    if isinstance(predicate, Not):
        inner = simplify(predicate.of, known)
        if isinstance(inner, bool):
            return not inner
        return inner if inner is None else Not(inner)
    if isinstance(predicate, Junction):
        return _joined(predicate.word, [simplify(part, known) for part in predicate.parts])
    return predicate


def _joined(word: str, parts: Sequence[Predicate]) -> Predicate:
    """Join the parts; `and` is false where one part is, `or` is true where one part is."""
    decides = word == "or"
    if any(part is decides for part in parts):
        return decides
    rest = tuple(part for part in parts if not isinstance(part, bool))
    if not rest:
        return not decides
    if all(part is None for part in rest):
        return None
    return rest[0] if len(rest) == 1 else Junction(word, rest)


def compile_predicate(predicate: Predicate, schema: pa.Schema) -> pc.Expression:
    """The expression of pyarrow.compute for columns of these types; null where it is unknown."""
    if predicate is None or isinstance(predicate, bool):
        return pc.scalar(pa.scalar(predicate, pa.bool_()))
    if isinstance(predicate, Not):
        return ~compile_predicate(predicate.of, schema)
    if isinstance(predicate, Junction):
        parts = [compile_predicate(part, schema) for part in predicate.parts]
        return _tree(operator.and_ if predicate.word == "and" else operator.or_, parts)
    column, kind = predicate.column, schema.field(predicate.column).type
    if pa.types.is_null(kind):
        return pc.scalar(pa.scalar(None, pa.bool_()))
    literals = [literal_of(value, kind) for value in predicate.values]
    if predicate.op != "in" or len({literal.type for literal in literals}) > 1:
        compare = _OPERATORS.get(predicate.op, operator.eq)
        terms = [compare(_side(column, kind, value), pc.scalar(value)) for value in literals]
        return _tree(operator.or_, terms)
    field = _side(column, kind, literals[0])
    inside = field.isin(pa.array([literal.as_py() for literal in literals], literals[0].type))
    # `isin` calls a null False, whose `not` would take the row
    return pc.if_else(field.is_valid(), inside, pa.scalar(None, pa.bool_()))


def _side(column: str, kind: pa.DataType, literal: pa.Scalar) -> pc.Expression:
    """The column as it is compared with a literal."""
    field = pc.field(column)
    if pa.types.is_dictionary(kind):
        return field.cast(literal.type)
    same = literal.type == kind or not pa.types.is_float64(literal.type)
    return field if same else field.cast(literal.type, safe=False)


def _tree(join: Any, parts: list[pc.Expression]) -> pc.Expression:
    """The parts joined as a tree of little depth, since Arrow walks an expression recursively."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return cast("pc.Expression", join(_tree(join, parts[:middle]), _tree(join, parts[middle:])))


def mask_of(rows: pa.Table | pa.RecordBatch, expression: pc.Expression) -> NDArray[np.bool_]:
    """(B,) the rows for which an expression is true."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    project = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["taken"]))
    # one thread, so that the answers come in the order of the rows
    plan = acero.Declaration.from_sequence([source, project])
    taken = plan.to_table(use_threads=False)["taken"].fill_null(False)
    return cast("NDArray[np.bool_]", taken.to_numpy())


def _is_number(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_integer(kind) or t.is_floating(kind) or t.is_decimal(kind)


def _takes_text(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_string(kind) or t.is_large_string(kind) or t.is_date(kind) or t.is_timestamp(kind)
