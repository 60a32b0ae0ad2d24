"""The language of `where`: which rows of a data set are taken.

    where      = term, or terms joined by `and`, `or`, `not` and parentheses
    term       = COLUMN op LITERAL  |  COLUMN in (LITERAL, ...)  |  COLUMN not in (LITERAL, ...)
    op         = == = != < <= > >=
    COLUMN     = a name of letters, digits and _, or any name in `backquotes`
    LITERAL    = 'text' or "text" (a quote inside is doubled), a number, true, false

`parse_where` makes a tree of small values, which is all that the rest knows of the text; nothing is
evaluated as Python. `not` binds closer than `and`, and `and` closer than `or`. Words are read in
either case. `str` of a tree is its one canonical text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rayrec.errors import ConfigError

Literal = str | int | float | bool
MAX_DEPTH = 50
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
_OPS = {"==": "==", "=": "==", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_WORDS = {"and", "or", "not", "in", "true", "false"}


@dataclass(frozen=True, slots=True)
class Constant:
    """What is true or false of every row, or None where nothing can be said for a null."""

    value: bool | None


@dataclass(frozen=True, slots=True)
class Compare:
    """A column beside one literal; `op` is one of == != < <= > >=."""

    column: str
    op: str
    value: Literal

    def __str__(self) -> str:
        return f"{_name(self.column)} {self.op} {_text(self.value)}"


@dataclass(frozen=True, slots=True)
class Member:
    """Whether a column holds one of some literals."""

    column: str
    values: tuple[Literal, ...]

    def __str__(self) -> str:
        return f"{_name(self.column)} in ({', '.join(_text(value) for value in self.values)})"


@dataclass(frozen=True, slots=True)
class Not:
    """What holds where `of` does not."""

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


Predicate = Constant | Compare | Member | Not | Junction


def columns_of(predicate: Predicate) -> tuple[str, ...]:
    """The columns that a predicate asks for, each once, in the order of the text."""
    return tuple(dict.fromkeys(term.column for term in terms_of(predicate)))


def terms_of(predicate: Predicate) -> list[Compare | Member]:
    """The comparisons of a predicate, in the order of the text."""
    if isinstance(predicate, Compare | Member):
        return [predicate]
    if isinstance(predicate, Not):
        return terms_of(predicate.of)
    parts = predicate.parts if isinstance(predicate, Junction) else ()
    return [term for part in parts for term in terms_of(part)]


def parse_where(text: str) -> Predicate:
    """Parse a `where` text.

    Raises:
        ConfigError: names the place in the text and what was expected there.
    """
    if not isinstance(text, str):
        raise ConfigError(f"where={text!r}; it must be a text. {EXAMPLE}")
    parser = _Parser(text)
    predicate = parser.either(0)
    if parser.here.kind != "end":
        raise parser.wrong("'and', 'or' or the end")
    return predicate


class _Token(NamedTuple):
    kind: str  # text, number, column, word, op, end
    text: str
    start: int


class _Parser:
    """Recursive descent over the tokens of one text; `here` is the next token."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.at = text, _tokens(text), 0

    @property
    def here(self) -> _Token:
        return self.tokens[self.at]

    def wrong(self, expected: str) -> ConfigError:
        return _error(self.text, self.here.start, f"{expected} is expected")

    def take(self, *texts: str) -> str | None:
        """Go past the next token if it is one of these words or signs."""
        token = self.here
        said = token.text.lower() if token.kind == "word" else token.text
        if token.kind not in ("word", "op") or said not in texts:
            return None
        self.at += 1
        return said

    def either(self, depth: int) -> Predicate:
        return self._joined("or", depth)

    def _joined(self, word: str, depth: int) -> Predicate:
        parts: list[Predicate] = []
        while not parts or self.take(word):
            parts.append(self._joined("and", depth) if word == "or" else self._negated(depth))
        return parts[0] if len(parts) == 1 else Junction(word, tuple(parts))

    def _negated(self, depth: int) -> Predicate:
        if depth > MAX_DEPTH:
            raise _error(self.text, self.here.start, f"no more than {MAX_DEPTH} levels are allowed")
        if self.take("not"):
            return Not(self._negated(depth + 1))
        if self.take("("):
            inner = self.either(depth + 1)
            if not self.take(")"):
                raise self.wrong("')'")
            return inner
        return self._term()

    def _term(self) -> Predicate:
        token = self.here
        if token.kind != "column" and (token.kind != "word" or token.text.lower() in _WORDS):
            raise self.wrong("the name of a column")
        self.at += 1
        column = token.text.strip("`")
        if op := self.take(*_OPS):
            return Compare(column, _OPS[op], self._literal())
        negated = self.take("not") is not None
        if not self.take("in"):
            raise self.wrong("'in'" if negated else f"one of {' '.join(_OPS)}, 'in' or 'not in'")
        member = Member(column, self._literals())
        return Not(member) if negated else member

    def _literals(self) -> tuple[Literal, ...]:
        if not self.take("("):
            raise self.wrong("'('")
        values = [self._literal()]
        while self.take(","):
            if self.here.text == ")":  # a comma after the last one
                break
            values.append(self._literal())
        if not self.take(")"):
            raise self.wrong("',' or ')'")
        return tuple(values)

    def _literal(self) -> Literal:
        token = self.here
        if word := self.take("true", "false"):
            return word == "true"
        if token.kind not in ("text", "number"):
            raise self.wrong("a 'text' in quotes, a number, true or false")
        self.at += 1
        if token.kind == "text":
            quote = token.text[0]
            return token.text[1:-1].replace(quote * 2, quote)
        try:
            return int(token.text)
        except ValueError:
            return float(token.text)


def _tokens(text: str) -> list[_Token]:
    tokens, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise _error(text, at, f"{text[at]!r} does not belong there")
        kind = str(match.lastgroup)
        tokens.append(_Token(kind, match.group(kind), match.start(kind)))
        at = match.end()
    return [*tokens, _Token("end", "", end)]


def _error(text: str, at: int, problem: str) -> ConfigError:
    rest = repr(text[at : at + 20]) if at < len(text.rstrip()) else "its end"
    return ConfigError(f"where={text!r}: at {rest} (character {at + 1}) {problem}. {EXAMPLE}")


def _name(column: str) -> str:
    plain = re.fullmatch(r"[^\W\d]\w*", column) and column.lower() not in _WORDS
    return column if plain else f"`{column}`"


def _text(value: Literal) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def joined(word: str, parts: Sequence[Predicate]) -> Predicate:
    """The parts joined by `and` or `or`, with what is constant worked out.

    A null is neither true nor false: `and` with it is false where another part is false, and `or`
    is true where another part is true.
    """
    decides = word == "or"
    if any(part == Constant(decides) for part in parts):
        return Constant(decides)
    rest = tuple(part for part in parts if part != Constant(not decides))
    if not rest:
        return Constant(not decides)
    if all(part == Constant(None) for part in rest):
        return Constant(None)
    return rest[0] if len(rest) == 1 else Junction(word, rest)
