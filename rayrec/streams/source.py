"""`StreamSource`: the protocol of what a stream reads, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from rayrec.errors import ConfigError

Cursor = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Rows, a message or a file of a stream that are not trained on.

    Attributes:
        place: file, or partition and offset, and row.
        reason: one line.
        rows: number of rows that are known to be lost by it.
    """

    place: str
    reason: str
    rows: int = 0


class StreamRows(NamedTuple):
    """Rows of a source that follow each other.

    Attributes:
        rows: in the order in which they are trained on before shuffling; there may be none.
        cursor: JSON data; the place behind the rows.
        place: name of the rows in messages, such as their file.
        refused: what the source left out before or behind them.
        first: number of the first of them in their place.
    """

    rows: pa.Table | None
    cursor: Cursor
    place: str
    refused: tuple[Refusal, ...] = ()
    first: int = 0


class SourceLag(NamedTuple):
    """Distance of a cursor from the end of its source.

    Attributes:
        rows: rows that wait; None where the source cannot tell.
        seconds: age of the oldest of them; 0 where none waits, None where it cannot be told.
    """

    rows: int | None
    seconds: float | None


class StreamSource(Protocol):
    """Source of rows, which is read by one process at a time.

    Equal cursors give equal rows for as long as the source keeps them; a window, once it is cut,
    does not need the source any more.

    Attributes:
        name: what messages call the source.
    """

    name: str

    def start(self) -> Cursor:
        """Return the cursor of a run that begins."""

    def read(self, cursor: Cursor, most: int) -> StreamRows | None:
        """Return rows behind a cursor that are there by now; None where nothing is.

        Args:
            most: rows at most.
        Raises:
            InputError: the source cannot be read, or has lost what lies behind the cursor.
        """

    def lag(self, cursor: Cursor) -> SourceLag:
        """Return how far a cursor is behind."""

    def close(self) -> None:
        """Let go of what the source holds; it is not used any more."""
        return


def library(module: str, extra: str) -> Any:
    """Import a module of an extra of rayrec, and return it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise ConfigError(
            f"[data.stream.{extra}] needs {package}; pip install 'rayrec[{extra}]'."
        ) from error
