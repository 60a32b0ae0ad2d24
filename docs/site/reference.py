"""The pages of the reference: one for each public package, from the docstrings of its names.

The names are those of the imported packages, so a name that is added to `__all__` is on its page
with the next build. A name that several packages export is described on the page of the first of
them in `PACKAGES`, and the others lead there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import NamedTuple

# in the order of the navigation
PACKAGES = (
    "rayrec.driver",
    "rayrec.train",
    "rayrec.watch",
    "rayrec.data",
    "rayrec.layout",
    "rayrec.sparse",
    "rayrec.modules",
    "rayrec.models",
    "rayrec.distributed",
    "rayrec.planner",
    "rayrec.optim",
    "rayrec.metrics",
    "rayrec.checkpoint",
    "rayrec.quant",
    "rayrec.doctor",
    "rayrec.serve",
    "rayrec.serve.cluster",
    "rayrec.comm",
    "rayrec.comm.codec",
    "rayrec.errors",
)


class Entry(NamedTuple):
    """A public name.

    Attributes:
        name: as a user imports it.
        path: where its docstring lies; also the anchor on its page.
        summary: its first sentence.
        is_home: whether it is described on this package's page.
    """

    name: str
    path: str
    summary: str
    is_home: bool


def entries() -> dict[str, list[Entry]]:
    """Package -> its public names, each with the page that describes it."""
    homes: dict[str, str] = {}
    pages: dict[str, list[Entry]] = {}
    for package in PACKAGES:
        module = import_module(package)
        values = {name: getattr(module, name) for name in _names(package)}
        pages[package] = []
        for name, value in [*values.items(), *_bases(values)]:
            path = _path(package, name, value)
            is_home = homes.setdefault(path, package) == package
            if not any(entry.path == path for entry in pages[package]):
                pages[package].append(Entry(name, path, _summary(value), is_home))
    return pages


def page(package: str, names: list[Entry]) -> str:
    """The page of a package: a table of its names, then their docstrings."""
    lines = [f"# {package}", "", _first_sentence(import_module(package).__doc__), ""]
    lines += ["| name | is |", "|---|---|", *map(_row, names), ""]
    for entry in names:
        if entry.is_home:
            lines += [f"::: {entry.path}", ""]
    return "\n".join(lines)


def index(pages: dict[str, list[Entry]]) -> str:
    """The first page: all packages, and the names that `rayrec` itself exports."""
    lines = ["# Reference", "", "Every public name stands on the page of its package.", ""]
    lines += ["| package | holds |", "|---|---|"]
    for package in PACKAGES:
        text = _first_sentence(import_module(package).__doc__)
        lines.append(f"| [`{package}`]({file_of(package)}) | {text} |")
    lines += ["", "## rayrec", "", "These names can be imported from `rayrec` itself.", ""]
    lines += ["| name | is |", "|---|---|"]
    every = {entry.name: entry for names in pages.values() for entry in names if entry.is_home}
    lines += [_row(every[name]) for name in _names("rayrec")]
    return "\n".join(lines) + "\n"


def file_of(package: str) -> str:
    """The file of a package's page."""
    return f"{package}.md"


def _names(package: str) -> list[str]:
    """`__all__` of a package, or the classes and functions that a module without it makes."""
    module = import_module(package)
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = [name for name, value in vars(module).items() if _module(value) == package]
    return [name for name in own if not name.startswith("_")]


def _bases(values: dict[str, object]) -> Iterator[tuple[str, type]]:
    """Public classes of rayrec that exported classes inherit options from."""
    for value in values.values():
        for base in inspect.getmro(value)[1:] if inspect.isclass(value) else ():
            if _module(base).startswith("rayrec.") and not base.__name__.startswith("_"):
                yield base.__name__, base


def _module(value: object) -> str:
    """The module that defines a class or a function, or no text."""
    described = inspect.isclass(value) or inspect.isroutine(value)
    return value.__module__ if described else ""


def _path(package: str, name: str, value: object) -> str:
    # A constant has no module of its own, so it is found where it is exported.
    return f"{_module(value) or package}.{name}"


def _summary(value: object) -> str:
    return _first_sentence(inspect.getdoc(value)) if _module(value) else "a constant"


def _first_sentence(text: str | None) -> str:
    """The first sentence of a docstring, in one line."""
    paragraph = inspect.cleandoc(text or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]


def _row(entry: Entry) -> str:
    text = entry.summary.replace("|", "\\|")
    return f"| [`{entry.name}`][{entry.path}] | {text} |"
