"""Public names of a package that load on first use.

So importing the package is quick, and needs neither torch nor Ray before one of its names does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: its `__name__`.
        home: each public name -> the module that it is loaded from.
    """

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        # Python asks only for names that the package does not have, so each is loaded once.
        setattr(sys.modules[package], name, value)
        return value

    return load
