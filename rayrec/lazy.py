"""Public names of a package that load on first use.

So importing the package is quick, and needs neither torch nor Ray before one of its names does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_names(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: its public names, and the modules in it.

    Args:
        package: its `__name__`.
        home: each public name -> the module that it is loaded from.
    """

    def load(name: str) -> Any:
        if name in home:
            value = getattr(import_module(home[name]), name)
        elif not name.startswith("_") and find_spec(f"{package}.{name}"):
            return import_module(f"{package}.{name}")  # which sets the attribute
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Python asks only for names that the package does not have, so each is loaded once.
        setattr(sys.modules[package], name, value)
        return value

    return load
