"""Packages that rayrec imports and a part may do without, on machines that lack them.

rayrec's checkpoints and readers are Arrow's, and most of the library imports their modules. Where
pyarrow is not importable, names stand in its place that can be looked up and do nothing; parts that
need pyarrow say that it is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "pyarrow"


class _Absent(ModuleType):
    """A package, or anything in it: has every name, and gives itself for every call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class _Finder(MetaPathFinder, Loader):
    """Finds the package and every module below it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.split(".")[0] != PACKAGE:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def stand_in_for_pyarrow() -> None:
    """Put the names there if the package is missing."""
    if importlib.util.find_spec(PACKAGE) is None:
        sys.modules.pop(PACKAGE, None)
        sys.meta_path.insert(0, _Finder())


def is_absent(package: str) -> bool:
    """Whether a package is missing, or only its names are there."""
    spec = importlib.util.find_spec(package)
    return spec is None or isinstance(spec.loader, _Finder)
