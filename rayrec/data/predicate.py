"""The language of `where`: which rows of a data set are taken.

    where      = term, or terms joined by `and`, `or`, `not` and parentheses
    term       = COLUMN op LITERAL  |  COLUMN in (LITERAL, ...)  |  COLUMN not in (LITERAL, ...)
    op         = == = != < <= > >=
    COLUMN     = a name of letters, digits and _, or any name in `backquotes`
    LITERAL    = 'text' or "text" (a quote inside is doubled), a number, true, false

`not` binds closer than `and`, and `and` closer than `or`, as in Python; words are read in either
case. `parse_where` writes the text as Python whose names are the numbers of its columns and of its
literals (`c0 >= v0`), has `ast` parse that, and takes nothing but the nodes of the grammar; it
evaluates nothing. `str` of a predicate is its one canonical text.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import NoReturn

from rayrec.errors import ConfigError

Literal = str | int | float | bool
MAX_DEPTH = 150
EXAMPLE = "Write it like \"day >= '2026-11-01' and hour in (1, 2)\"."
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
      | (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
      | (?P<column>`[^`]+`)
      | (?P<word>[^\W\d]\w*)
      | (?P<op>==|!=|<=|>=|=|<|>|\(|\)|,)
    )""",
    re.VERBOSE,
)
_OPS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_JOINS, _VALUES = ("and", "or", "not", "in"), {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Term:
    """A column beside one literal, or beside several of which it must hold one (`in`)."""

    column: str
    op: str  # one of == != < <= > >= in
    values: tuple[Literal, ...]

    def __str__(self) -> str:
        texts = ", ".join(_text(value) for value in self.values)
        return f"{_name(self.column)} {self.op} {f'({texts})' if self.op == 'in' else texts}"


@dataclass(frozen=True, slots=True)
class Not:
    """The contrary of a predicate."""

    of: Predicate

    def __str__(self) -> str:
        return f"not ({self.of})"


@dataclass(frozen=True, slots=True)
class Junction:
    """Two or more predicates, of which all (`and`) or one (`or`) must hold."""

    word: str
    parts: tuple[Predicate, ...]

    def __str__(self) -> str:
        return f" {self.word} ".join(f"({part})" for part in self.parts)


# True or False for every row, or None, which is what SQL says of a null
Predicate = Term | Not | Junction | bool | None


def columns_of(predicate: Predicate) -> tuple[str, ...]:
    """The columns that a predicate asks for, each once, in the order of the text."""
    return tuple(dict.fromkeys(term.column for term in terms_of(predicate)))


def terms_of(predicate: Predicate) -> list[Term]:
    """The comparisons of a predicate, in the order of the text."""
    if isinstance(predicate, Term):
        return [predicate]
    if isinstance(predicate, Not):
        return terms_of(predicate.of)
    parts = predicate.parts if isinstance(predicate, Junction) else ()
    return [term for part in parts for term in terms_of(part)]


def parse_where(text: str) -> Predicate:
    """Parse a `where` text.

    Raises:
        ConfigError: names the place in the text and what does not belong there.
    """
    if not isinstance(text, str):
        raise ConfigError(f"where={text!r}; it must be a text. {EXAMPLE}")
    return _Parser(text).parse()


class _Parser:
    """One text as Python, and the predicate of its tree."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.columns: list[str] = []
        self.values: list[Literal] = []
        self.python = ""
        self.places: list[tuple[int, int]] = []  # of each token: in the Python, in the text

    def parse(self) -> Predicate:
        self._translate()
        try:
            tree = ast.parse(self.python, mode="eval").body
            return self._predicate(tree, 0)
        except SyntaxError as error:
            if "nested" not in str(error.msg):
                # Python gives no place in a text that ends too early
                at = (error.offset or len(self.python) + 1) - 1
                self._refuse(at, "something else is expected")
        except (RecursionError, MemoryError):
            pass
        self._refuse(0, f"no more than {MAX_DEPTH} levels are allowed")

    def _translate(self) -> None:
        """Write the text as Python; the literals of `in` become a list."""
        at, end, last, closing = 0, len(self.text.rstrip()), "", ")"
        while at < end:
            match = _TOKEN.match(self.text, at)
            if match is None:
                at += len(self.text[at:]) - len(self.text[at:].lstrip())
                raise _error(self.text, at, f"{self.text[at]!r} does not belong there")
            kind = str(match.lastgroup)
            word = self._python(kind, match.group(kind))
            if word == "(" and last == "in":
                word, closing = "[", "]"
            elif word == ")":
                word, closing = closing, ")"
            self.places.append((len(self.python), match.start(kind)))
            self.python += f"{word} "
            at, last = match.end(), word

    def _python(self, kind: str, token: str) -> str:
        if kind == "op":
            return "==" if token == "=" else token
        if kind == "word" and token.lower() in _JOINS:
            return token.lower()
        if kind == "column" or (kind == "word" and token.lower() not in _VALUES):
            self.columns.append(token.strip("`"))
            return f"c{len(self.columns) - 1}"
        self.values.append(_value(kind, token))
        return f"v{len(self.values) - 1}"

    def _predicate(self, node: ast.expr, depth: int) -> Predicate:
        if depth > MAX_DEPTH:
            raise RecursionError
        if isinstance(node, ast.BoolOp):
            word = "and" if isinstance(node.op, ast.And) else "or"
            return Junction(word, tuple(self._predicate(n, depth + 1) for n in node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return Not(self._predicate(node.operand, depth + 1))
        if not isinstance(node, ast.Compare) or len(node.ops) > 1:
            name = "chain of comparisons" if isinstance(node, ast.Compare) else _kind(node)
            signs = " ".join(_OPS.values())
            self._refuse(
                node.col_offset,
                f"a column, one of {signs}, 'in' or 'not in', and literals are expected, and this "
                f"is a {name}",
            )
        column = self.columns[self._number(node.left, "column", "the name of a column")]
        op, right = node.ops[0], node.comparators[0]
        if isinstance(op, ast.In | ast.NotIn):
            listed = right.elts if isinstance(right, ast.List) else []
            if not listed:
                self._refuse(right.col_offset, "literals in parentheses are expected")
            member = Term(column, "in", tuple(self._literal(n) for n in listed))
            return member if isinstance(op, ast.In) else Not(member)
        return Term(column, _OPS[type(op)], (self._literal(right),))

    def _literal(self, node: ast.expr) -> Literal:
        return self.values[
            self._number(node, "literal", "a 'text' in quotes, a number, true or false")
        ]

    def _number(self, node: ast.expr, kind: str, wanted: str) -> int:
        """The number of the column, or of the literal, for which a node stands."""
        if not isinstance(node, ast.Name) or _kind(node) != kind:
            self._refuse(node.col_offset, f"{wanted} is expected, and this is a {_kind(node)}")
        return int(node.id[1:])

    def _refuse(self, offset: int, problem: str) -> NoReturn:
        """Raise the error for a place in the Python."""
        at = len(self.text.rstrip())
        if offset < len(self.python):
            at = self.places[bisect_right(self.places, (offset, len(self.text))) - 1][1]
        raise _error(self.text, at, problem) from None


def _kind(node: ast.expr) -> str:
    """The node in the words of the language."""
    if isinstance(node, ast.Name):
        return "column" if node.id[0] == "c" else "literal"
    return type(node).__name__


def _value(kind: str, token: str) -> Literal:
    if kind == "word":
        return _VALUES[token.lower()]
    if kind == "text":
        return token[1:-1].replace(token[0] * 2, token[0])
    try:
        return int(token)
    except ValueError:
        return float(token)


def _error(text: str, at: int, problem: str) -> ConfigError:
    rest = repr(text[at : at + 20]) if at < len(text.rstrip()) else "its end"
    return ConfigError(f"where={text!r}: at {rest} (character {at + 1}) {problem}. {EXAMPLE}")


def _name(column: str) -> str:
    plain = re.fullmatch(r"[^\W\d]\w*", column) and column.lower() not in (*_JOINS, *_VALUES)
    return column if plain else f"`{column}`"


def _text(value: Literal) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)
