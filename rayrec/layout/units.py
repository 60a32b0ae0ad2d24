"""Numbers for people in few characters, with decimal units. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence


def _scaled(value: float, units: Sequence[str]) -> str:
    index = 0
    # The limits are those of the rounded number: 999.6 would be shown as 1000, and 99.96 as 100.0.
    while abs(value) >= 999.5 and index < len(units) - 1:
        value, index = value / 1000, index + 1
    digits = 0 if index == 0 or abs(value) >= 99.95 else 1
    return f"{value:.{digits}f}{units[index]}"


def format_bytes(value: float) -> str:
    """1234567 -> "1.2 MB"; powers of 1000."""
    return _scaled(value, (" B", " kB", " MB", " GB", " TB", " PB"))


def format_count(value: float) -> str:
    """40000000 -> "40.0M"."""
    return _scaled(value, ("", "k", "M", "G", "T"))


def format_ms(seconds: float) -> str:
    """Seconds as milliseconds with three figures: 0.0123 -> "12.3"."""
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 9.9995 else f"{ms:.1f}" if ms < 999.95 else f"{ms:.0f}"


def format_ranks(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"; ascending."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def fit(text: str, width: int) -> str:
    """`text` cut to `width` characters; a cut is shown by two dots."""
    return text if len(text) <= width else text[: width - 2] + ".."


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns begin below each other; all rows have as many cells."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
