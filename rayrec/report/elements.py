"""The parts of all pages: the frame, sections, figures, tables and legends.

A page is one HTML file that needs nothing else: the style sheet and the scripts beside this file
go into it. Text of the user is escaped here, where an argument is called text; all other arguments
are HTML already. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path


def page(title: str, body: Iterable[str], script: str, rules: str = "") -> str:
    """Return a whole page.

    Args:
        title: text.
        body: the page's parts below its title; empty ones are left out.
        script: code that runs at the end of the page.
        rules: further rules for the style sheet.
    """
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title><style>{beside('page.css')}{rules}</style>",
        f"</head><body>\n<h1>{escape(title)}</h1>",
        *body,
        f"<script>{script}</script>",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


@cache
def beside(name: str) -> str:
    """Return the text of a file of this folder."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def section(title: str, *parts: str, note: str = "") -> str:
    """Return a section with a heading and a sentence below it."""
    return f"<section><h2>{title}</h2>{note and f'<p>{note}</p>'}{''.join(parts)}</section>"


def fold(text: str, *parts: str, kind: str = "") -> str:
    """Return a section that a click opens."""
    return f'<details class="{kind}"><summary>{escape(text)}</summary>{"".join(parts)}</details>'


def figure(text: str, drawing: str, kind: str = "") -> str:
    """Return a drawing with a caption."""
    return f'<figure class="{kind}"><figcaption>{escape(text)}</figcaption>{drawing}</figure>'


def grid(figures: Sequence[str]) -> str:
    """Return figures side by side, as many as fit."""
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def facts(named: Iterable[tuple[str, str]]) -> str:
    """Return a row of figures; every one is a name and its text."""
    cells = [f"<div><b>{escape(value)}</b><span>{name}</span></div>" for name, value in named]
    return f'<div class="facts">{"".join(cells)}</div>'


def legend(keys: Iterable[tuple[str, str]]) -> str:
    """Return a legend; every key is a class of the style sheet, which has the color, and a text."""
    spans = [f'<span><i class="{kind}"></i>{escape(text)}</span>' for kind, text in keys]
    return f'<div class="legend">{"".join(spans)}</div>'


def cell(text: str, kind: str = "", tag: str = "td") -> str:
    """Return a cell of a table, such as one of the kind number or failed."""
    style = f' class="{kind}"' if kind else ""
    return f"<{tag}{style}>{escape(text)}</{tag}>"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "plain") -> str:
    """Return a table of rows of cells, in a box of the class `kind`."""
    header = "".join(cell(head, tag="th") for head in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="{kind}"><table><thead><tr>{header}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def text_at(x: float, y: float, anchor: str, text: str) -> str:
    """Return text of a drawing, which begins, ends or has its middle at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
